"""The published rules of each model family, independent of the code under test.

    messages, tools ──RULES──▶ pieces of text, each with the turns that it belongs to
                    ─samples─▶ [[(text, trained on), …], …]

`messages` are in OpenAI's form, which `records` describes. Sources: the chat templates of Qwen2.5 (ChatML), Llama 2,
Llama 3, and Zephyr; mistral-common (version 3); and Stanford Alpaca, with the line break after "### Response:" that
its successors have. Families without a rule for tools write them as Qwen2.5 does. If no family publishes a rule for
an order of roles, docs/reference/formats.md applies. `train_on` follows docs/concepts/labels.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

Messages = list[dict[str, Any]]
Tools = list[Any]
Sample = list[tuple[str, bool | str]]
Turn = tuple[tuple[int, ...], str, str]  # owners (as in Piece), role, text


class Piece(NamedTuple):
    """A part of the written text.

    `owners` are the indexes of its messages. A header introduces them; all other text is their content.
    """

    text: str
    owners: tuple[int, ...] = ()
    header: bool = False


def mark(marker: str) -> str:
    """Return a marker of the template, which no content can forge.

    Content never has a NUL.
    """
    return f"\0{marker}\0"


BOS, EOS = mark("BOS"), mark("EOS")
# In use, the text after this marker is a separate string, to which SentencePiece adds a space.
STRING = mark("STRING")

IM_START, IM_END = mark("<|im_start|>"), mark("<|im_end|>")
INST, INST_END, CALLS = mark("[INST]"), mark("[/INST]"), mark("[TOOL_CALLS]")
AVAILABLE, AVAILABLE_END = mark("[AVAILABLE_TOOLS]"), mark("[/AVAILABLE_TOOLS]")
RESULTS, RESULTS_END = mark("[TOOL_RESULTS]"), mark("[/TOOL_RESULTS]")


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def said(message: dict[str, Any]) -> str:
    """Return the content of a message and its context (Alpaca's input), if any."""
    return "\n\n".join(filter(None, (message["content"], message.get("context"))))


# -- what is trained on -----------------------------------------------------------------------------------------------


def trained_turns(messages: Messages, train_on: str = "assistant") -> list[bool]:
    """Return which turns are trained on: never empty ones; a flag decides."""
    roles = [message["role"] for message in messages]
    kinds = ("system", "user", "assistant", "tool", "text") if train_on == "all" else ("assistant", "text")
    last = max((k for k, role in enumerate(roles) if role in kinds), default=-1)
    first = 0
    if train_on == "last":
        first = last
    if train_on == "rounds":  # what follows the last user message that has an answer
        first = max((k for k, role in enumerate(roles[: last + 1]) if role == "user"), default=0)
    return [
        bool(said(message).strip() or message.get("tool_calls"))
        and message.get("train", message["role"] in kinds and k >= first)
        for k, message in enumerate(messages)
    ]


def flagged(pieces: Sequence[Piece], messages: Messages, trained: Sequence[bool], headers_too: bool) -> Sample:
    """Return the texts of pieces, each with its trained flag.

    If a flag adds turns that no model writes, the flags are names instead, which `tokens.whole_texts` reads.
    """
    if headers_too or not any(flag and m["role"] not in ANSWERS for flag, m in zip(trained, messages, strict=False)):
        return [
            (text, any(trained[owner] for owner in owners) and (headers_too or not header))
            for text, owners, header in pieces
        ]
    names = {(True, True): "answer", (True, False): "other answer", (False, True): "added", (False, False): "content"}
    found: Sample = []
    for text, owners, header in pieces:
        owner = owners[0] if owners else None  # tools without a system message have no owner
        kind = (False, False) if owner is None else (messages[owner]["role"] in ANSWERS, trained[owner])
        found.append((text, "around" if header else names[kind]))
    return found


ANSWERS = ("assistant", "text")


def samples(
    template: str, messages: Messages, tools: Tools, train_on: str = "assistant", adds_space: bool = True
) -> list[Sample]:
    """Return one sample, or one sample per trained turn.

    There is one per turn if the template changes an earlier turn of the assistant once later turns follow.
    """
    rule = plain if messages[0]["role"] == "text" else RULES[template]
    trained = trained_turns(messages, train_on)
    whole = rule(messages, tools, adds_space)
    starts = {k: rule(messages[: k + 1], tools, adds_space) for k, flag in enumerate(trained) if flag}
    written = [joined(start) for k, start in starts.items() if messages[k]["role"] == "assistant"]
    if train_on == "all" or all(joined(whole).startswith(start) for start in written):
        return [flagged(whole, messages, trained, train_on == "all")]
    # Turns that a flag adds belong to the sample of the next answer, or to a last sample.
    answers = [k for k in starts if messages[k]["role"] == "assistant"]
    ends = sorted({*answers, *[max(starts)]})
    before = [-1, *ends]
    return [
        flagged(starts[end], messages, [trained[k] and k > last for k in range(end + 1)], False)
        for last, end in zip(before, ends, strict=False)
    ]


def readable(sample: Sample, bos: str, eos: str) -> Sample:
    """Return a sample with the text of its markers, and with neighbors joined.

    Neighbors are joined if both are trained on, or neither.
    """
    names = {"BOS": bos, "EOS": eos, "STRING": ""}
    parts = [
        (names.get(part, part) if number % 2 else part, trained)
        for text, trained in sample
        for number, part in enumerate(text.split("\0"))
    ]
    runs = groupby((part for part in parts if part[0]), key=lambda part: part[1])
    return [("".join(text for text, _ in run), trained) for trained, run in runs]


def joined(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


# -- tools, as Qwen2.5 writes them ------------------------------------------------------------------------------------


def described(tools: Tools) -> str:
    before = "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    before += "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    after = "</tools>\n\nFor each function call, return a json object with function name and arguments within "
    after += "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    after += '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    marked = [re.sub("</?tools>|</?tool_call>", lambda found: mark(found[0]), text) for text in (before, after)]
    return marked[0] + "".join(dumped(tool) + "\n" for tool in tools) + marked[1]


def with_calls(text: str, message: dict[str, Any]) -> str:
    for call in message.get("tool_calls", []):
        called = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        text += "\n" * bool(text) + f"{mark('<tool_call>')}\n{dumped(called)}\n{mark('</tool_call>')}"
    return text


def result(text: str) -> str:
    return f"{mark('<tool_response>')}\n{text}\n{mark('</tool_response>')}"


def hermes(messages: Messages, tools: Tools, clean: Callable[[str], str] = str) -> list[Turn]:
    """Return the turns with tools and calls in their texts.

    Without a system message, the tools become a separate system turn.
    """
    turns: list[Turn] = []
    if tools and messages[0]["role"] != "system":
        turns.append(((), "system", described(tools)))
    for k, message in enumerate(messages):
        text = clean(said(message))
        if k == 0 and tools and message["role"] == "system":
            text += "\n\n" + described(tools)
        turns.append(((k,), message["role"], with_calls(text, message)))
    return turns


# -- families ---------------------------------------------------------------------------------------------------------


def chatml(messages: Messages, tools: Tools, _: bool = True) -> list[Piece]:
    pieces: list[Piece] = []
    turns = hermes(messages, tools)
    for number, (owners, role, text) in enumerate(turns):
        before, after = (turns[at][1] if 0 <= at < len(turns) else "" for at in (number - 1, number + 1))
        if before:
            pieces.append(Piece("\n", turns[number - 1][0], True))
        # Consecutive results are one turn of the user.
        if not before == role == "tool":
            pieces.append(Piece(f"{IM_START}{'user' if role == 'tool' else role}\n", owners, True))
        pieces.append(Piece(result(text) if role == "tool" else text, owners))
        if not role == after == "tool":
            pieces.append(Piece(IM_END, owners))
    return pieces


def llama2(messages: Messages, tools: Tools, _: bool = True) -> list[Piece]:
    """Write requests and answers; each pair follows BOS, as in Meta's code."""
    turns = hermes(messages, tools)
    pieces: list[Piece] = []
    request: list[Turn] = []
    for owners, role, text in [*turns, ((), "end", "")]:
        if role not in ("assistant", "end"):
            request.append((owners, role, text))
            continue
        if request or role == "assistant":
            pieces.append(Piece(BOS))
        if request:
            everyone = tuple(owner for each, _, _ in request for owner in each)
            pieces.append(Piece(f"{STRING}[INST] ", everyone, True))
            pieces += _request_of_llama2(request)
            pieces.append(Piece(" [/INST]", request[-1][0], True))
            request = []
        if role == "assistant":
            message = messages[owners[0]]
            pieces.append(Piece(f" {with_calls(said(message).strip(), message)} {EOS}", owners))
    return pieces


def _request_of_llama2(request: Sequence[Turn]) -> list[Piece]:
    pieces: list[Piece] = []
    before = ""
    for owners, role, text in request:
        if role != "system":
            text = text.rstrip() if before == "system" else text.strip()
        before = role
        written = [Piece(text, owners)] if text else []
        if role == "tool":
            written = [Piece(result(text), owners)]
        if role == "system":
            written = [Piece("<<SYS>>\n", owners, True), Piece(text, owners), Piece("\n<</SYS>>", owners, True)]
        if pieces and written:
            pieces.append(Piece("\n\n", owners, True))
        pieces += written
    return pieces


def llama3(messages: Messages, tools: Tools, _: bool = True) -> list[Piece]:
    pieces = [Piece(mark("<|begin_of_text|>"), (), True)]
    for owners, role, text in hermes(messages, tools, str.strip):
        name = "ipython" if role == "tool" else role
        header = f"{mark('<|start_header_id|>')}{name}{mark('<|end_header_id|>')}\n\n"
        pieces += [Piece(header, owners, True), Piece(text + mark("<|eot_id|>"), owners)]
    return pieces


def zephyr(messages: Messages, tools: Tools, _: bool = True) -> list[Piece]:
    pieces: list[Piece] = []
    for owners, role, text in hermes(messages, tools):
        if pieces:
            pieces.append(Piece("\n", pieces[-1].owners, True))
        pieces += [Piece(f"{mark(f'<|{role}|>')}\n", owners, True), Piece(text + EOS, owners)]
    return pieces


def alpaca(messages: Messages, tools: Tools, _: bool = True) -> list[Piece]:
    """Write sections under headings, after Alpaca's preamble or the system message.

    A later system message has no heading.
    """
    has_system = messages[0]["role"] == "system" and bool(messages[0]["content"].strip())
    has_input = bool(next((message.get("context") for message in messages if message["role"] == "user"), ""))
    first = messages[0]["content"] if has_system else "Below is an instruction that describes a task"
    if not has_system:
        first += ", paired with an input that provides further context" * has_input
        first += ". Write a response that appropriately completes the request."
    owners = (0,) if has_system else ()
    pieces = [Piece(BOS), Piece(STRING + first, owners, not has_system)]
    if tools:
        pieces.append(Piece("\n\n" + described(tools), owners))
    headings = {
        "user": "### Instruction:\n",
        "assistant": "### Response:\n",
        "tool": "### Tool result:\n",
        "system": "",
    }
    for k, message in enumerate(messages):
        role = message["role"]
        if k == 0 and role == "system":
            continue
        pieces.append(Piece("\n\n" + headings[role], (k,), True))
        pieces.append(Piece(message["content"], (k,)))
        if message.get("context"):
            pieces += [Piece("\n\n### Input:\n", (k,), True), Piece(message["context"], (k,))]
        called = with_calls(message["content"], message)[len(message["content"]) :]
        pieces.append(Piece(called + EOS * (role == "assistant"), (k,)))
    return pieces


def plain(messages: Messages, tools: Tools, _: bool = True) -> list[Piece]:
    """Write contents one after another, with EOS after each answer.

    This is a rule of this project.
    """
    pieces = [Piece(BOS), Piece(STRING)]
    for owners, role, text in hermes(messages, tools):
        pieces.append(Piece(text + EOS * (role == "assistant"), owners))
    return pieces


# -- Mistral ----------------------------------------------------------------------------------------------------------


def mistral(messages: Messages, tools: Tools, adds_space: bool = True) -> list[Piece]:
    """Write requests and answers; the last request has the system and the tools.

    SentencePiece adds a space to each string.
    """
    space = " " * adds_space
    system = [(k, m["content"]) for k, m in enumerate(messages) if m["role"] == "system" and m["content"]]
    others = [(k, m) for k, m in enumerate(messages) if m["role"] != "system"]
    users = [k for k, m in others if m["role"] == "user"]
    pieces = [Piece(BOS)]
    if not users and (system or tools):
        pieces += _request_of_mistral(system, tools, space)
    for role, group in groupby(others, key=lambda each: each[1]["role"]):
        turns = list(group)
        if role == "user":
            is_last = turns[-1][0] == users[-1]
            request = [(k, said(message)) for k, message in turns]
            pieces += _request_of_mistral(system * is_last + request, tools * is_last, space)
            continue
        for k, message in turns:
            if role == "tool":
                value: dict[str, Any] = {"content": _value(message["content"] or "{}")}
                if message.get("tool_call_id"):
                    value["call_id"] = message["tool_call_id"]
                pieces.append(Piece(RESULTS, (k,), True))
                pieces += [Piece(space + dumped(value), (k,)), Piece(RESULTS_END, (k,), True)]
                continue
            content = message["content"].rstrip(" ")
            text = space + content if content else ""
            if message.get("tool_calls"):
                # The model does not write ids; the program that runs it adds them to the history.
                is_history = k != others[-1][0]
                calls = [
                    {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
                    | ({"id": call["id"]} if is_history and call.get("id") else {})
                    for call in message["tool_calls"]
                ]
                text += f"{CALLS}{space}{dumped(calls)}"
            pieces.append(Piece(text + EOS, (k,)))
    return pieces


def _request_of_mistral(contents: Sequence[tuple[int, str]], tools: Tools, space: str) -> list[Piece]:
    everyone = tuple(k for k, _ in contents)
    pieces = []
    if tools:
        pieces.append(Piece(f"{STRING}{AVAILABLE}{space}{dumped(tools)}{AVAILABLE_END}", everyone, True))
    pieces.append(Piece(STRING + INST, everyone, True))
    written = [(k, text) for k, text in contents if text]
    for number, (k, text) in enumerate(written):
        pieces += [Piece("\n\n" if number else space, (k,), True), Piece(text, (k,))]
    # The end of a request belongs to its last message.
    pieces.append(Piece(INST_END, written[-1][:1] if written else everyone, True))
    return pieces


def _value(content: str) -> Any:
    """Return the value of JSON content, or other content as text.

    mistral-common does this with Python's parser.
    """
    try:
        found = json.loads(content, object_pairs_hook=_unique, parse_constant=_refuse)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
        return found
    except (ValueError, RecursionError):
        return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


def _refuse(name: str) -> None:
    raise ValueError(name)


RULES: dict[str, Callable[[Messages, Tools, bool], list[Piece]]] = {
    "chatml": chatml,
    "llama2": llama2,
    "llama3": llama3,
    "zephyr": zephyr,
    "alpaca": alpaca,
    "plain": plain,
    "mistral": mistral,
}
