"""Conversation → spans: what the model reads, cut where control tokens stand and where training begins and ends.

    Conversation + which turns are trained ──Template.spans──▶ [Span(text, token, trained, role), …]

A span is a control token, written by the template and by id, or text. Labels come from the spans and from nothing
else. What a message says only ever becomes text.

The seven built-in templates are functions of a few lines that write to a `_Writer`. A marker that the tokenizer has
as a control token becomes that token; one that it lacks is written as text and listed in `Template.markers_as_text`.

Where a space belongs. SentencePiece puts a space before every string that it encodes; in use it sees other strings
than here. So no encoder adds one, and the rules are: before a conversation that begins with text, one; behind a
control token, one where the template says `start=True` (llama2, alpaca and plain, whose text follows BOS as one
string) or writes it (mistral); elsewhere none. A Hugging Face tokenizer follows its own rule, always.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import orjson

from tasks.conversations.model import Conversation, Message, full_text
from tasks.encoders.encoder import Encoder
from tasks.templates.spans import TEXT, Span, TrainOn

# In the digest of every built-in template: raise it when the spans of any of them change.
VERSION = 1


def call_text(message: Message) -> list[str]:
    """The message's tool calls, each as a JSON object with name and arguments."""
    return [f'{{"name": {_json(call.name)}, "arguments": {call.arguments or "{}"}}}' for call in message.tool_calls]


def _json(text: str) -> str:
    return orjson.dumps(text).decode()


class _Writer:
    """Collects spans. `headers_too` (train_on: all): what frames a turn is trained with it."""

    def __init__(self, encoder: Encoder, headers_too: bool):
        self.encoder = encoder
        self.headers_too = headers_too
        self.spans: list[Span] = []
        self.role = ""
        self.trained = False

    def turn(self, role: str, trained: bool) -> None:
        """What follows belongs to a turn of `role`."""
        self.role = role
        self.trained = trained

    def mark(self, marker: str, start: bool = False) -> None:
        """A marker that is part of the frame, not of what the turn says."""
        self._mark(marker, self.trained and self.headers_too, start)

    def own_mark(self, marker: str) -> None:
        """A marker that belongs to the turn, such as the one that ends it: trained where the turn is."""
        self._mark(marker, self.trained)

    def bos(self) -> None:
        """BOS, where the tokenizer has one and writes it itself."""
        if self.encoder.adds_bos and self.encoder.bos_id is not None:
            self._token(self.encoder.bos_id, False)

    def eos(self) -> None:
        """EOS as a stop token: trained where the turn is."""
        self._token(self.encoder.eos_id, self.trained)

    def frame(self, text: str, start: bool = False) -> None:
        """Text that the template adds."""
        self._text(text, self.trained and self.headers_too, start)

    def say(self, text: str, start: bool = False) -> None:
        """Text that belongs to the turn."""
        self._text(text, self.trained, start)

    def calls(self, message: Message) -> None:
        """Tool calls in the form that most open models use, one <tool_call> element each."""
        gap = "\n" if message.content else ""
        for call in call_text(message):
            self.say(gap)
            self.own_mark("<tool_call>")
            self.say(f"\n{call}\n")
            self.own_mark("</tool_call>")
            gap = "\n"

    def _mark(self, marker: str, trained: bool, start: bool = False) -> None:
        token = self.encoder.controls.get(marker)
        if token is None:
            self._text(marker, trained, start)
        else:
            self.spans.append(Span(marker, token, trained, self.role))

    def _token(self, token: int, trained: bool) -> None:
        self.spans.append(Span(self.encoder.control_strings.get(token, ""), token, trained, self.role))

    def _text(self, text: str, trained: bool, start: bool = False) -> None:
        if text:
            self.spans.append(Span(text, TEXT, trained, self.role, start))


def tools_text(tools: Sequence[str]) -> str:
    """How a built-in template without a place of its own for tools describes them to the model."""
    return "Tools that can be called, one JSON schema a line:\n" + "\n".join(tools) if tools else ""


def _with_tools(conversation: Conversation, trained: Sequence[bool]) -> list[tuple[Message, bool]]:
    """The turns, the tools told in the system message (one is put in front where there is none)."""
    turns = list(zip(conversation.messages, trained, strict=True))
    if not conversation.tools:
        return turns
    told = tools_text(conversation.tools)
    if turns and turns[0][0].role == "system":
        first, flag = turns[0]
        return [(Message("system", f"{full_text(first)}\n\n{told}"), flag), *turns[1:]]
    return [(Message("system", told), False), *turns]


Turns = Sequence[tuple[Message, bool]]


def _chatml(w: _Writer, turns: Turns) -> None:
    # The line end stands between turns, not behind the last one: what follows the stop token there is EOS.
    for index, (message, trained) in enumerate(turns):
        if index:
            w.frame("\n")
        w.turn(message.role, trained)
        w.mark("<|im_start|>")
        w.frame(f"{message.role}\n")
        w.say(full_text(message))
        w.calls(message)
        w.own_mark("<|im_end|>")


def _llama3(w: _Writer, turns: Turns) -> None:
    w.mark("<|begin_of_text|>")
    for message, trained in turns:
        w.turn(message.role, trained)
        w.mark("<|start_header_id|>")
        w.frame("ipython" if message.role == "tool" else message.role)
        w.mark("<|end_header_id|>")
        w.frame("\n\n")
        w.say(full_text(message).strip())
        w.calls(message)
        w.own_mark("<|eot_id|>")


def _zephyr(w: _Writer, turns: Turns) -> None:
    for index, (message, trained) in enumerate(turns):
        if index:
            w.frame("\n")
        w.turn(message.role, trained)
        w.mark(f"<|{message.role}|>")
        w.frame("\n")
        w.say(full_text(message))
        w.calls(message)
        w.eos()


def _alpaca(w: _Writer, turns: Turns) -> None:
    w.bos()
    gap = ""
    if not turns or turns[0][0].role != "system":
        w.frame("Below is a task. Write a response that fulfils it.", start=True)
        gap = "\n\n"
    titles = {"user": "### Instruction:\n", "assistant": "### Response:\n", "tool": "### Tool result:\n", "system": ""}
    for message, trained in turns:
        w.turn(message.role, trained)
        w.frame(gap + titles[message.role], start=not gap)
        w.say(message.content, start=not gap)
        if message.context:
            w.frame("\n\n### Input:\n" if message.role == "user" else "\n\n")
            w.say(message.context)
        w.calls(message)
        if message.role == "assistant":
            w.eos()
        gap = "\n\n"


def _plain(w: _Writer, turns: Turns) -> None:
    w.bos()
    for index, (message, trained) in enumerate(turns):
        w.turn(message.role, trained)
        w.say(full_text(message), start=index == 0)
        w.calls(message)
        if message.role == "assistant":
            w.eos()


def _requests(turns: Turns) -> list[tuple[list[tuple[Message, bool]], tuple[Message, bool] | None]]:
    """Turns as (all that is said up to an answer, the answer), for templates that know requests and answers only."""
    pairs: list[tuple[list[tuple[Message, bool]], tuple[Message, bool] | None]] = []
    said: list[tuple[Message, bool]] = []
    for turn in turns:
        if turn[0].role == "assistant":
            pairs.append((said, turn))
            said = []
        else:
            said.append(turn)
    return [*pairs, (said, None)] if said else pairs


def _llama2(w: _Writer, turns: Turns) -> None:
    for said, answer in _requests(turns):
        w.turn("user", any(flag for _, flag in said))
        w.bos()
        if said:
            w.frame("[INST] ", start=True)
            for index, (message, trained) in enumerate(said):
                w.turn(message.role, trained)
                if index and said[index - 1][0].role != "system":
                    w.frame("\n\n")
                text = full_text(message).strip()
                if message.role == "system":
                    w.frame("<<SYS>>\n")
                    w.say(text)
                    w.frame("\n<</SYS>>\n\n")
                elif message.role == "tool":
                    w.say(f"<tool_response>\n{text}\n</tool_response>")
                else:
                    w.say(text)
            w.frame(" [/INST]")
        if answer:
            w.turn("assistant", answer[1])
            w.say(f" {full_text(answer[0]).strip()}")
            w.calls(answer[0])
            w.say(" ")
            w.eos()


def _mistral(w: _Writer, conversation: Conversation, turns: Turns) -> None:
    w.bos()
    if conversation.tools:
        w.mark("[AVAILABLE_TOOLS]", start=True)
        w.frame(f" [{', '.join(conversation.tools)}]")
        w.mark("[/AVAILABLE_TOOLS]")
    for said, answer in _requests(turns):
        results = [turn for turn in said if turn[0].role == "tool"]
        for message, trained in results:
            w.turn("tool", trained)
            w.mark("[TOOL_RESULTS]")
            call = f', "call_id": {_json(message.tool_call_id)}' if message.tool_call_id else ""
            w.say(f' {{"content": {_json(full_text(message))}{call}}}')
            w.mark("[/TOOL_RESULTS]")
        spoken = [turn for turn in said if turn[0].role != "tool"]
        if spoken:
            w.turn("user", any(flag for _, flag in spoken))
            w.mark("[INST]", start=True)
            for index, (message, trained) in enumerate(spoken):
                w.turn(message.role, trained)
                w.frame("\n\n" if index else " ")
                w.say(full_text(message))
            w.mark("[/INST]")
        if answer:
            message, trained = answer
            w.turn("assistant", trained)
            if message.content:
                w.say(f" {full_text(message)}")
            if message.tool_calls:
                ids = [f', "id": {_json(call.id)}' if call.id else "" for call in message.tool_calls]
                objects = [text[:-1] + key + "}" for text, key in zip(call_text(message), ids, strict=True)]
                w.own_mark("[TOOL_CALLS]")
                w.say(f" [{', '.join(objects)}]")
            w.eos()


_ONE_BY_ONE: dict[str, Callable[[_Writer, Turns], None]] = {
    "chatml": _chatml,
    "llama2": _llama2,
    "llama3": _llama3,
    "zephyr": _zephyr,
    "alpaca": _alpaca,
    "plain": _plain,
}


BUILT_IN = (*_ONE_BY_ONE, "mistral")


# Every marker that a template may write; what a tokenizer lacks of them is written as text.
_CALLS = ("<tool_call>", "</tool_call>")


MARKERS: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>", *_CALLS),
    "llama2": _CALLS,
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", *_CALLS),
    "mistral": (
        *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
    "zephyr": ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", *_CALLS),
    "alpaca": _CALLS,
    "plain": _CALLS,
}


class BuiltIn:
    """A built-in template, bound to a tokenizer.

    What it writes around the content of a message follows from the roles and from what is trained on alone, unless
    there are tools, calls of tools or their results, or a message that is blank or has a context (see `segments`).
    """

    def __init__(self, name: str, encoder: Encoder, train_on: TrainOn):
        self.name = name
        self.markers_as_text = tuple(m for m in MARKERS[name] if m not in encoder.controls)
        self._encoder = encoder
        self._headers_too = train_on == "all"

    def spans(self, conversation: Conversation, trained: Sequence[bool]) -> list[Span]:
        writer = _Writer(self._encoder, self._headers_too)
        if conversation.messages[0].role == "text":
            return plain_text(conversation, trained, self._encoder)
        if self.name == "mistral":
            _mistral(writer, conversation, list(zip(conversation.messages, trained, strict=True)))
        else:
            _ONE_BY_ONE[self.name](writer, _with_tools(conversation, trained))
        return writer.spans


def plain_text(conversation: Conversation, trained: Sequence[bool], encoder: Encoder) -> list[Span]:
    """A conversation of the format `text`, which no template frames."""
    writer = _Writer(encoder, headers_too=False)
    _plain(writer, list(zip(conversation.messages, trained, strict=True)))
    return writer.spans


def built_in_sha256(name: str) -> str:
    return hashlib.sha256(f"built-in {name} {VERSION}".encode()).hexdigest()
