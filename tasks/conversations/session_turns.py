"""Collect the messages of a session from its records.

    ask("user", "2+2?")  answer("m1") think("…") say("4")  …  ─▶  Message("user", "2+2?"), Message("assistant", "4", …)

Agents write one answer in several records, and neighboring messages of the user in several, too. Here, both become one
message, as in the request to the model; a line break separates their texts. A result follows its call. Whatever is not
part of the conversation is counted by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from packcorpus.tasks.conversations.model import Message, Record, ToolCall
from packcorpus.tasks.conversations.values import json_of, parsed, text_of
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.core.printable import kind, shown

# Names of what is left out, as counts show them.
OTHER_BRANCH = "(other branch)"
BEFORE_SUMMARY = "(before a summary)"
SIDECHAIN = "(other agent)"
NO_ANSWER = "(answer without text and calls)"
FAILED_ANSWER = "(failed answer)"
UNANSWERED = "(after the last answer)"
NO_CALL = "(result without a call)"
HIDDEN_REASONING = "(reasoning without text)"
REORDERED = "(part moved before calls)"


class Turns:
    """The messages of a session, and counts of what is left out."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.left_out: Counter[str] = Counter()
        self.tools: list[str] = []
        self._answers: dict[str, Message] = {}  # by the agent's id of an answer
        self._called: set[str] = set()  # ids of calls

    def ask(self, role: str, text: str) -> None:
        if text:
            _add(self.messages, Message(role, text))

    def answer(self, number: str = "") -> Message:
        """Return the answer that the next parts belong to.

        It is the answer with this number, or without a number the last message if that is an answer.
        """
        if number in self._answers:
            return self._answers[number]
        last = self.messages[-1] if self.messages else None
        if number or last is None or last.role != "assistant":
            last = Message("assistant", "")
            self.messages.append(last)
        if number:
            self._answers[number] = last
        return last

    def think(self, answer: Message, text: str) -> None:
        if not text.strip():
            self.left_out[HIDDEN_REASONING] += 1
            return
        if answer.content or answer.tool_calls:
            self.left_out[REORDERED] += 1
        answer.reasoning = f"{answer.reasoning}\n{text}" if answer.reasoning else text

    def say(self, answer: Message, text: str) -> None:
        if not text:
            return
        if answer.tool_calls:
            self.left_out[REORDERED] += 1
        answer.content = f"{answer.content}\n{text}" if answer.content else text

    def call(self, answer: Message, name: object, arguments: object, call_id: object, where: str) -> None:
        """Add a call to an answer; `arguments` is an object, or its JSON text."""
        if not isinstance(name, str) or not name:
            raise Reject("bad_tool_call", f"{where}.name: expected a string, found {kind(name)}")
        if isinstance(arguments, str):
            text = text_of(arguments, f"{where}.arguments") or "{}"
            parsed(text, f"{where}.arguments", "bad_tool_call")
        elif arguments is None or isinstance(arguments, dict):
            text = json_of(arguments or {}, f"{where}.arguments", "bad_tool_call")
        else:
            raise Reject("bad_tool_call", f"{where}.arguments: expected an object, found {kind(arguments)}")
        number = text_of(call_id, f"{where}.id") if call_id is not None else None
        answer.tool_calls += (ToolCall(text_of(name, f"{where}.name"), text, number),)
        if number is not None:
            self._called.add(number)

    def add_answer(self, number: str, content: object, where: str, known: Sequence[str], arguments: str) -> None:
        """Add the parts of an answer.

        `known` are the types that they may have; the last is that of a call, whose arguments are under `arguments`.
        """
        answer = self.answer(number)
        for name, part, place in parts_of(content, where):
            if name not in known:
                raise refuse_part(part, place, known)
            if name == "text":
                self.say(answer, said(part, "text", place))
            elif name == known[-1]:
                self.call(answer, part.get("name"), part.get(arguments), part.get("id"), place)
            else:
                self.think(answer, said(part, "thinking", place) if name == "thinking" else "")

    def result(self, call_id: object, text: str, where: str, name: str | None = None) -> None:
        """Add the result of a call; `name` is that of the tool, if the record has it."""
        if not isinstance(call_id, str):
            raise Reject("bad_tool_call", f"{where}: the id of its call: expected a string, found {kind(call_id)}")
        if call_id not in self._called:
            self.left_out[NO_CALL] += 1
            return
        self.messages.append(Message("tool", text, name=name, tool_call_id=text_of(call_id, where)))

    def finished(self) -> tuple[Message, ...]:
        """Return the messages up to the last answer.

        Raises Reject if the session has no answer.
        """
        kept: list[Message] = []
        for message in self.messages:
            if message.role == "assistant" and not (message.content or message.tool_calls):
                self.left_out[NO_ANSWER] += 1
            else:
                _add(kept, message)
        while kept and kept[-1].role != "assistant":
            kept.pop()
            self.left_out[UNANSWERED] += 1
        if not kept:
            raise Reject("empty", "the session has no answer of the model; remove it")
        return tuple(kept)


def _add(messages: list[Message], message: Message) -> None:
    """Add a message, or add its text to the last message if both are requests."""
    last = messages[-1] if messages else None
    if last is not None and last.role == message.role and message.role in ("system", "user"):
        messages[-1] = replace(last, content=f"{last.content}\n{message.content}")
    else:
        messages.append(message)


def place_of(index: int) -> str:
    return f"record {index + 1}"  # in a file, the number of its line


def type_of(record: Record) -> str:
    found = record.get("type")
    return found if isinstance(found, str) and found else "(no type)"


def parts_of(content: object, where: str) -> Iterator[tuple[str, dict[str, object], str]]:
    """Yield the type, the part, and the place of each content part.

    A string is one part of text, and null has no parts.
    """
    if content is None:
        return
    if isinstance(content, str):
        yield "text", {"text": content}, where
        return
    if not isinstance(content, list):
        raise Reject("bad_content", f"{where}: expected a string or a list of parts, found {kind(content)}")
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise Reject("bad_content", f"{place}: expected a part with a type, found {kind(part)}")
        yield str(part.get("type")), part, place


def said(part: dict[str, object], key: str, where: str) -> str:
    """Return the text of a part; null counts as an empty text."""
    value = part.get(key)
    return "" if value is None else text_of(value, f"{where}.{key}")


def refuse_part(part: dict[str, object], where: str, known: Sequence[str]) -> Reject:
    names = f"{', '.join(known[:-1])}, and {known[-1]}" if len(known) > 1 else known[0]
    return Reject("bad_content", f"{where}.type is {shown(part.get('type'))}; only {names} parts can be packed")


def joined_text(content: object, where: str, known: Sequence[str] = ("text",)) -> str:
    """Return the texts of content parts, separated by line breaks."""
    texts = []
    for name, part, place in parts_of(content, where):
        if name not in known:
            raise refuse_part(part, place, known)
        texts.append(said(part, "text", place))
    return "\n".join(filter(None, texts))
