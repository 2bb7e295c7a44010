"""Find where a template writes the texts of messages, with marks in the texts.

    {"role": "assistant", "content": "It is 3."}  ─mark─▶  "It i▮s 3."  ─render─▶  …It i▮s 3.…  ─▶  70 to 78

A mark at the start or the end of a text would change what templates test and strip, so it is in the middle. The marked
rendering must be equal to the other one, apart from the marks. Otherwise, nothing is found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import count
from typing import Any, Literal, NamedTuple

import orjson

from packcorpus.tasks.conversations.answers import REASONING_KEYS
from packcorpus.tasks.templates.adjust import INLINE, MARKER

# Keys of a schema whose strings are not content: templates translate or omit them.
_TYPES = ("type", "format", "required", "$schema", "strict", "additionalProperties")

# Reasoning at the start of a content, which templates may leave out of the history.
REASONING_START = re.compile(r".*(?:</[\w:]*think(?:ing)?>|\[/THINK\])\s*", re.DOTALL)

# The usual ways to write arguments as text.
_DUMPS: tuple[Callable[[Any], str], ...] = (
    lambda value: orjson.dumps(value).decode(),
    json.dumps,
    partial(json.dumps, ensure_ascii=False),
)

Range = tuple[int, int]

Section = Literal["reasoning", "content", "calls"]


class MarkedText(NamedTuple):
    """A marked text of message `k`: its content, its reasoning, or the name of a call.

    The mark is `offset` characters after its start.
    """

    k: int
    section: Section
    text: str
    offset: int

    def range_in(self, rendered: str, place: int) -> Range | None:
        """Return the range of the text at a mark; None if it is not written as it is."""
        start = place - self.offset
        is_written = start >= 0 and rendered.startswith(self.text, start)
        return (start, start + len(self.text)) if is_written else None


def contents_of(message: Any) -> list[str]:
    """Return the content of a message, or those of its parts."""
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part.get("text") or "" for part in content]


def reasoning_in(message: Any) -> list[str]:
    """Return the reasoning of a message, once for each field that has it."""
    return [message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)]


def new_mark(text: str) -> str:
    """Return the start of marks, which a text does not have. A number and `-` follow.

    Marks are ASCII, so that no way of writing a text escapes them.
    """
    return next(mark for mark in map("-mark{}-".format, count()) if mark not in text)


def places_of(
    text: str, messages: Sequence[Any], render: Callable[[list[Any]], str], roles: Collection[str]
) -> dict[int, Range]:
    """Return where the texts of each message with one of these roles start and end.

    `text` starts with the rendering of `messages`. Only texts that are written as they are, without white space around
    them, are found. The result is empty if marks change the rendering.
    """
    mark = new_mark(text)
    marked, texts = marked_messages(messages, mark, [k for k, m in enumerate(messages) if m["role"] in roles])
    rendered, places = without_marks(render(marked), mark)
    if not text.startswith(rendered):
        return {}
    found: dict[int, Range] = {}
    for number, (place, *_) in places.items():
        if written := texts[number].range_in(rendered, place):
            first, last = found.get(texts[number].k, written)
            found[texts[number].k] = min(first, written[0]), max(last, written[1])
    return found


def without_marks(text: str, mark: str, flags: re.RegexFlag = re.NOFLAG) -> tuple[str, dict[int, list[int]]]:
    """Return a text without its marks, and the places of the marks by their numbers."""
    pieces = re.split(rf"{mark}(\d+)-", text, flags=flags)
    places: dict[int, list[int]] = {}
    place = 0
    for piece, number in zip(pieces[::2], pieces[1::2], strict=False):
        place += len(piece)
        places.setdefault(int(number), []).append(place)
    return "".join(pieces[::2]), places


def marked_messages(messages: Sequence[Any], mark: str, which: Collection[int]) -> tuple[list[Any], list[MarkedText]]:
    """Return messages with marks in those at the indices `which`, and their texts."""
    texts: list[MarkedText] = []

    def marked(k: int, section: Section, text: str) -> str:
        core = text.strip()
        if not core:
            return text
        offset = len(core) // 2
        texts.append(MarkedText(k, section, core, offset))
        place = text.index(core) + offset
        return f"{text[:place]}{mark}{len(texts) - 1}-{text[place:]}"

    def of_content(k: int, text: str) -> str:
        found = INLINE.match(text) if messages[k]["role"] == "assistant" else None
        if not found or not found[1].strip():
            return marked(k, "content", text)
        reasoning, content = marked(k, "reasoning", found[1]), marked(k, "content", text[found.end() :])
        return text[: found.start(1)] + reasoning + text[found.end(1) : found.end()] + content

    found = []
    for k, message in enumerate(messages):
        if k in which:
            message = dict(message)
            for key in REASONING_KEYS:
                if isinstance(message.get(key), str):
                    message[key] = marked(k, "reasoning", message[key])
            content = message.get("content")
            if isinstance(content, str):
                message["content"] = of_content(k, content)
            elif content:
                message["content"] = [{**part, "text": of_content(k, part["text"])} for part in content]
            if message.get("tool_calls"):
                message["tool_calls"] = [
                    {**call, "function": {**call["function"], "name": marked(k, "calls", call["function"]["name"])}}
                    for call in message["tool_calls"]
                ]
        found.append(message)
    return found, texts


class Text(NamedTuple):
    """A text that must be written.

    `place` says where the conversation has it. `k` is the index of the message, or -1 for a tool. Reasoning is only
    required in trained turns.
    """

    text: str
    place: str
    k: int
    is_reasoning: bool = False


def with_marks(text: str, marks: Sequence[tuple[int, str]]) -> str:
    """Return a text with marks at ascending offsets after its outer white space."""
    first = len(text) - len(text.lstrip())
    pieces, place = [], 0
    for offset, mark in marks:
        pieces += [text[place : first + offset], mark]
        place = first + offset
    return "".join(pieces) + text[place:]


def marked_texts(
    messages: Sequence[Any], tools: Any, mark: Callable[[Text], str], note: Callable[[Text], object]
) -> tuple[list[Any], Any]:
    """Return messages and tools with all texts passed through `mark`.

    They are passed in the usual order. Keys and numbers are passed to `note`.
    """

    def content(text: str, role: str, place: str, k: int) -> str:
        reasoning = REASONING_START.match(text) if role == "assistant" else None
        pieces, start = [], 0
        for marker in MARKER.finditer(text, 0, reasoning.end() if reasoning else 0):
            pieces += [mark(Text(text[start : marker.start()], place, k, True)), marker[0]]
            start = marker.end()
        return "".join(pieces) + mark(Text(text[start:], place, k))

    def arguments(value: Any, place: str, k: int) -> Any:
        if isinstance(value, str):
            return mark(Text(value, place, k))
        if isinstance(value, list):
            return [arguments(item, place, k) for item in value]
        if isinstance(value, dict):
            for key in filter(str.strip, value):
                note(Text(key, place, k))
            return {key: arguments(item, place, k) for key, item in value.items()}
        # Templates write `true` and `null` in several ways, and numbers with an exponent, too.
        if isinstance(value, int | float) and not isinstance(value, bool) and "e" not in repr(value):
            note(Text(repr(value), place, k))
        return value

    def text_arguments(text: str, place: str, k: int) -> str:
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            return mark(Text(text, place, k))
        dumps = next((dumps for dumps in _DUMPS if dumps(value) == text), _DUMPS[0])
        return dumps(arguments(value, place, k))

    def schema(value: Any, place: str) -> Any:
        if isinstance(value, str):
            return mark(Text(value, place, -1))
        if isinstance(value, list):
            return [schema(item, place) for item in value]
        if not isinstance(value, dict):
            return value
        if isinstance(properties := value.get("properties"), dict):
            for key in filter(str.strip, properties):
                note(Text(key, place, -1))
        return {
            key: item if key in _TYPES and not isinstance(item, dict) else schema(item, place)
            for key, item in value.items()
        }

    marked = []
    for k, message in enumerate(map(dict, messages)):
        place, role = f"messages[{k}]", message["role"]
        if fields := [key for key in REASONING_KEYS if message.get(key)]:  # all have the same text
            message |= dict.fromkeys(fields, mark(Text(message[fields[0]], place, k, True)))
        if isinstance(message.get("content"), str):
            message["content"] = content(message["content"], role, place, k)
        elif message.get("content"):
            message["content"] = [
                {**part, "text": content(part["text"], role, place, k)} if part.get("text") else part
                for part in message["content"]
            ]
        if message.get("tool_calls"):
            calls = []
            for n, call in enumerate(message["tool_calls"]):
                function, at = call["function"], f"{place}.tool_calls[{n}]"
                name, form = mark(Text(function["name"], at, k)), function["arguments"]
                form = text_arguments(form, at, k) if isinstance(form, str) else arguments(form, at, k)
                calls.append({**call, "function": {**function, "name": name, "arguments": form}})
            message["tool_calls"] = calls
        marked.append(message)
    return marked, tools and [schema(tool, f"tools[{n}]") for n, tool in enumerate(tools)]
