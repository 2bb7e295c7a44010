"""Mistral, version 3: `[INST] request [/INST] answer`.

Tools, calls, and results have separate places. The rules come from mistral-common, which uses them for Mistral 7B 0.3,
Mixtral 8x22B, Codestral 22B, and, without the spaces, Nemo:

    <s>[INST] 2+2?[/INST] 4</s>[AVAILABLE_TOOLS] [{…}][/AVAILABLE_TOOLS][INST] Be brief.\\n\\nWeather in Ulm?[/INST]
    [TOOL_CALLS] [{"name": …, "arguments": {…}}]</s>

The system message and the tools are part of the last request. The model does not write the IDs of its calls, but the
history has them. A turn may therefore be written differently once more turns follow. In this case, each trained turn is
a separate sample.
"""

from __future__ import annotations

from collections.abc import Sequence

from packcorpus.tasks.conversations.model import Message, full_text
from packcorpus.tasks.templates.families.hermes import json_string, spaced, value_or_string
from packcorpus.tasks.templates.writer import ContentTest, Family, Turns, Writer


def write(w: Writer, turns: Turns) -> None:
    w.bos()
    system = [turn for turn in turns if _is_system(turn[0])]
    others = [turn for turn in turns if turn[0].role != "system"]
    last = max((index for index, (message, _) in enumerate(others) if message.role == "user"), default=-1)
    if last < 0 and (system or w.tools):
        _write_request(w, system, with_tools=True)
    request: list[tuple[Message, bool]] = []
    for index, (message, trained) in enumerate(others):
        if message.role == "user":
            request.append((message, trained))
            if index + 1 == len(others) or others[index + 1][0].role != "user":
                is_last = index == last
                _write_request(w, [*system * is_last, *request], with_tools=is_last)
                request = []
            continue
        w.turn(message.role, trained)
        if message.role == "tool":
            _write_result(w, message)
        else:
            _write_answer(w, message, with_ids=index + 1 < len(others))


def _write_request(w: Writer, messages: Turns, with_tools: bool) -> None:
    gap = _gap(w)
    w.turn("user", any(trained for _, trained in messages))
    if with_tools and w.tools:
        w.mark("[AVAILABLE_TOOLS]", start=True)
        w.frame(f"{gap}[{', '.join(map(spaced, w.tools))}]")
        w.mark("[/AVAILABLE_TOOLS]")
    w.mark("[INST]", start=True)
    for message, trained in messages:
        if text := full_text(message):
            w.turn(message.role, trained)
            w.frame(gap)
            w.say(text)
            gap = "\n\n"
    w.mark("[/INST]")


def _write_answer(w: Writer, message: Message, with_ids: bool) -> None:
    gap = _gap(w)
    if text := full_text(message).rstrip(" "):
        w.say(f"{gap}{text}")
    if message.tool_calls:
        calls = []
        for call in message.tool_calls:
            key = f', "id": {json_string(call.id)}' if with_ids and call.id else ""
            arguments = spaced(call.arguments or "{}")
            calls.append(f'{{"name": {json_string(call.name)}, "arguments": {arguments}{key}}}')
        w.calls()
        w.own_mark("[TOOL_CALLS]")
        w.say(f"{gap}[{', '.join(calls)}]")
    w.eos()


def _write_result(w: Writer, message: Message) -> None:
    w.mark("[TOOL_RESULTS]")
    call = f', "call_id": {json_string(message.tool_call_id)}' if message.tool_call_id else ""
    w.say(f'{_gap(w)}{{"content": {value_or_string(full_text(message) or "{}")}{call}}}')
    w.mark("[/TOOL_RESULTS]")


def _gap(w: Writer) -> str:
    """Return the space that SentencePiece adds; byte-level tokenizers add none."""
    return "" if w.encoder.leading_space == "none" else " "


def _differs_later(turns: Turns, tools: Sequence[str]) -> int | None:
    system = [index for index, (message, _) in enumerate(turns) if _is_system(message)] or [len(turns), -1]
    user = max((index for index, (message, _) in enumerate(turns) if message.role == "user"), default=-1)
    last = max((index for index, (message, _) in enumerate(turns) if message.role != "system"), default=-1)
    for index, (message, trained) in enumerate(turns):
        has_ids = index < last and any(call.id for call in message.tool_calls)
        # A later request gets the system message and the tools. If there is none, the last request gets a later system
        # message.
        moves = tools or system[0] < index if index < user else system[-1] > index
        if trained and message.role == "assistant" and (has_ids or moves):
            return index
    return None


def _is_system(message: Message) -> bool:
    return message.role == "system" and bool(full_text(message))


def _must_render(roles: Sequence[str]) -> ContentTest | None:
    return (lambda contents: any(content.endswith(" ") for content in contents)) if "assistant" in roles else None


MARKERS = (
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
TEMPLATE = Family("mistral", MARKERS, write, writes_tools=True, must_render=_must_render, differs_later=_differs_later)
