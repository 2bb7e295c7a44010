"""Check that a template writes all texts, and those of trained turns in them.

    a template without a place for the role `tool`:    user, call, result 52, answer "52."  ─▶  the result is missing
    a template that cuts contents:                     user, answer "It is 52."  ─▶  ▓It is ▓   the answer is incomplete

A context that is left out is as bad as an incomplete answer: the model would learn an answer after a prompt that does
not have its source.

If all texts are long, they are searched in each sample, in their order. A short text, or one beside reasoning, could be
found by chance, so other conversations are rendered once more with marks in their texts. Each sample is checked, for
a template may write a message in some prompts only. Earlier reasoning is not required, because many templates leave it
out of the history at inference, too. The ids of calls and results only connect them, and are not required either.

A text of a trained turn is whole if it stands around its mark, as text or as JSON, within the turn. A template may
change texts in other ways, such as to upper case. Such a text is marked at both ends, and the turn must have both marks
with all letters and digits between them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from typing import Any, NamedTuple

import orjson

from tasks.conversations.answers import REASONING_KEYS
from tasks.conversations.model import DEVELOPER
from tasks.core.errors import Reject
from tasks.core.printable import shown
from tasks.templates.jinja.turns.answers import MARKER
from tasks.templates.jinja.turns.flagged import Range
from tasks.templates.jinja.turns.locate import is_written
from tasks.templates.jinja.turns.marks import new_mark
from tasks.templates.placeholders import GAP


class Checked(NamedTuple):
    """The text of a sample, which has the messages before index `end`.

    `ranges` are the ranges of the text that may hold a trained message, by its index.
    """

    text: str
    end: int
    ranges: Mapping[int, Sequence[Range]]


# Returns the samples of messages and tools, or an empty list if the template refuses them. The flag asks for `ranges`.
Render = Callable[[Sequence[Any], Any, bool], list[Checked]]

# A text of so many characters is not found by chance.
LONG = 16

# Keys of a schema whose strings are not content: templates translate or omit them.
_TYPES = ("type", "format", "required", "$schema", "strict", "additionalProperties")

# Reasoning at the start of a content, which templates may leave out of the history.
_REASONING = re.compile(r".*(?:</[\w:]*think(?:ing)?>|\[/THINK\])\s*", re.DOTALL)

# The usual ways to write arguments as text.
_DUMPS: tuple[Callable[[Any], str], ...] = (
    lambda value: orjson.dumps(value).decode(),
    json.dumps,
    partial(json.dumps, ensure_ascii=False),
)

_LETTERS = re.compile("[A-Za-z0-9]")  # no way of writing a text escapes them

_PLACEHOLDER = re.compile(r"\\u0000(\d+)\\u0000")  # in JSON


class _Text(NamedTuple):
    """A text that must be written.

    `place` says where the conversation has it. `k` is the index of the message, or -1 for a tool. Reasoning is only
    required in trained turns.
    """

    text: str
    place: str
    k: int
    is_reasoning: bool = False


class Context:
    """Check the renderings of one template, whose name is for errors."""

    def __init__(self, name: str):
        self._name = name

    def require(
        self, samples: Sequence[Checked], messages: Sequence[Any], tools: Any, breaker: str, render: Render
    ) -> None:
        """Raise Reject if a sample or a trained turn lacks a text.

        `breaker` is left out of errors.
        """
        if not tools and all(_has_long_texts_in_order(sample, messages) for sample in samples):
            return
        trained = {k for sample in samples for k in sample.ranges}
        texts: list[_Text] = []
        others: list[_Text] = []  # keys and numbers, which cannot be marked
        mark = new_mark("".join(sample.text for sample in samples))

        def marked(found: _Text) -> str:
            core = found.text.strip()
            if not core or (found.is_reasoning and found.k not in trained):
                return found.text
            texts.append(found)
            return _with_marks(found.text, [(len(core) // 2, f"{mark}{len(texts) - 1}-")])

        rendered = render(*_marked(messages, tools, marked, others.append), False)
        are_alike = len(rendered) == len(samples)
        unsure: set[_Text] = set()
        for n, sample in enumerate(samples):
            bare, places = _without_marks(rendered[n].text, mark) if are_alike else ("", {})
            for number, found in enumerate(texts):
                ranges = sample.ranges.get(found.k)
                if found.k >= sample.end or (found.is_reasoning and ranges is None):
                    continue
                if not (number in places if are_alike else is_written(found.text.strip(), sample.text)):
                    raise self._missing(found, messages, breaker)
                if ranges is None or (bare == sample.text and _is_whole(found, bare, places[number], ranges)):
                    continue
                unsure.add(found)
            for found in others:
                if found.k < sample.end and not is_written(found.text, _text_for(found, sample)):
                    raise self._missing(found, messages, breaker, is_written(found.text, sample.text))
        if unsure:
            self._require_ends(samples, unsure, messages, tools, breaker, render)

    def _require_ends(
        self,
        samples: Sequence[Checked],
        unsure: Collection[_Text],
        messages: Sequence[Any],
        tools: Any,
        breaker: str,
        render: Render,
    ) -> None:
        """Raise Reject if some texts are not within their turns from one end to the other."""
        mark = new_mark("".join(sample.text for sample in samples))
        texts: list[_Text] = []

        def marked(found: _Text) -> str:
            if found not in unsure:
                return found.text
            texts.append(found)
            n = 2 * len(texts)
            return _with_marks(found.text, [(0, f"{mark}{n}-"), (len(found.text.strip()), f"{mark}{n + 1}-")])

        rendered = [
            (other, *_without_marks(other.text, mark))
            for other in render(*_marked(messages, tools, marked, lambda _: None), True)
        ]
        for n, found in enumerate(texts, 1):
            sample = next(sample for sample in samples if found.k in sample.ranges)
            turn = next((another for another in rendered if found.k in another[0].ranges), None)
            if turn is None:  # the template refuses the marks
                is_whole = is_written(found.text.strip(), _text_for(found, sample))
            else:
                other, bare, places = turn
                ranges = sample.ranges[found.k]
                if bare != sample.text:
                    bare, places = _without_marks(_text_for(found, other), mark)
                    ranges = [(0, len(bare))]
                pairs = product(places.get(2 * n, ()), places.get(2 * n + 1, ()))
                is_whole = any(
                    _within(*pair, ranges) and _has_letters(bare[slice(*pair)], found.text) for pair in pairs
                )
            if not is_whole:
                raise self._missing(found, messages, breaker, True)

    def _missing(self, found: _Text, messages: Sequence[Any], breaker: str, is_cut: bool = False) -> Reject:
        text = shown(found.text.replace(breaker, ""))
        if found.k < 0:
            return Reject(
                "tools_not_written",
                f"{found.place} has {text}, but the template {self._name} does not write it; use a "
                "template that writes tools, or set `ignore: [tools]` if the tools are not needed",
            )
        role = messages[found.k]["role"]
        if is_cut or found.is_reasoning:
            return Reject(
                "answer_not_written",
                f"{found.place} ({role}) has {'the reasoning ' * found.is_reasoning}{text}, but the template "
                f"{self._name} does not write all of it where this turn is trained on; use a template that does, or "
                "set `train: false` in the message",
            )
        left_out = {"system": "system", DEVELOPER: "system", "tool": "tool"}.get(role)
        drop = f", or set `drop_roles: [{left_out}]` if they are not needed" if left_out else ""
        return Reject(
            "message_not_written",
            f"{found.place} ({role}) has {text}, but the template {self._name} does not write it; use a template that "
            f"writes such messages{drop}",
        )


def has_gaps(text: str, messages: Sequence[Any], tools: Any) -> bool:
    """Return whether placeholders have a gap for each text."""
    required = [(each["content"], [call["function"] for call in each.get("tool_calls") or ()]) for each in messages]
    numbers = set(_PLACEHOLDER.findall(orjson.dumps((required, tools)).decode()))
    return numbers <= {gap[1] for gap in GAP.finditer(text)}


def _has_long_texts_in_order(sample: Checked, messages: Sequence[Any]) -> bool:
    """Return whether all texts are long and written in their order.

    Those of trained turns must be within their turns. Reasoning often quotes a result, and may be left out, so texts
    beside reasoning could be found in it.
    """
    messages = messages[: sample.end]
    if any(map(_has_reasoning, messages)):
        return False
    place = 0
    for found in _texts(messages):
        core = found.text.strip()
        ranges = sample.ranges.get(found.k)
        place = max([place, *(start for start, _ in (ranges or ())[:1])])
        start = sample.text.find(core, place) if len(core) >= LONG else -1
        place = start + len(core)
        if start < 0 or (ranges is not None and not _within(start, place, ranges)):
            return False
    return True


def _is_whole(found: _Text, text: str, places: Sequence[int], ranges: Sequence[Range]) -> bool:
    """Return whether a text stands around one of its marks within a range.

    It may be written as JSON.
    """
    core = found.text.strip()
    for form in chain([core], (json.dumps(core, ensure_ascii=flag)[1:-1] for flag in (False, True))):
        for place, (start, stop) in product(places, ranges):
            if form in text[max(start, place - len(form)) : min(stop, place + len(form))]:
                return True
    return False


def _within(start: int, stop: int, ranges: Sequence[Range]) -> bool:
    return any(first <= start and stop <= last for first, last in ranges)


def _has_letters(written: str, text: str) -> bool:
    """Return whether the ASCII letters and digits of a text are written.

    They must be in their order, in upper or lower case.
    """
    rest = iter(written.lower())
    return all(letter.lower() in rest for letter in _LETTERS.findall(text))


def _text_for(found: _Text, sample: Checked) -> str:
    """Return the part of a sample that may hold a text.

    This is its turn if that is trained on, or else the sample.
    """
    ranges = sample.ranges.get(found.k)
    return sample.text if ranges is None else "\0".join(sample.text[start:stop] for start, stop in ranges)


def _with_marks(text: str, marks: Sequence[tuple[int, str]]) -> str:
    """Return a text with marks at some offsets, in ascending order.

    White space at its start does not count.
    """
    first = len(text) - len(text.lstrip())
    pieces, place = [], 0
    for offset, mark in marks:
        pieces += [text[place : first + offset], mark]
        place = first + offset
    return "".join(pieces) + text[place:]


def _without_marks(text: str, mark: str) -> tuple[str, dict[int, list[int]]]:
    """Return a text without its marks, and the places of the marks by their numbers."""
    pieces = re.split(rf"(?i){mark}(\d+)-", text)
    places: dict[int, list[int]] = {}
    place = 0
    for piece, number in zip(pieces[::2], pieces[1::2], strict=False):
        place += len(piece)
        places.setdefault(int(number), []).append(place)
    return "".join(pieces[::2]), places


def _has_reasoning(message: Any) -> bool:
    content = message["content"] or ""
    texts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
    return any(message.get(key) for key in REASONING_KEYS) or any(map(_REASONING.match, texts))


def _texts(messages: Sequence[Any]) -> Iterator[_Text]:
    """Yield the texts of messages in the usual order."""
    found: list[_Text] = []

    def noted(text: _Text) -> str:
        if text.text.strip():
            found.append(text)
        return text.text

    _marked(messages, None, noted, found.append)
    yield from found


def _marked(
    messages: Sequence[Any],
    tools: Any,
    mark: Callable[[_Text], str],
    note: Callable[[_Text], object],
) -> tuple[list[Any], Any]:
    """Return messages and tools with all texts passed through `mark`.

    Keys and numbers are passed to `note`.
    """
    marked = [_marked_message(message, k, mark, note) for k, message in enumerate(messages)]
    found = tools and [_marked_tool(tool, f"tools[{n}]", mark, note) for n, tool in enumerate(tools)]
    return marked, found


def _marked_message(message: Any, k: int, mark: Callable[[_Text], str], note: Callable[[_Text], object]) -> Any:
    message = dict(message)
    place = f"messages[{k}]"
    fields = [key for key in REASONING_KEYS if message.get(key)]  # all have the same text
    if fields:
        message |= dict.fromkeys(fields, mark(_Text(message[fields[0]], place, k, True)))
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = _marked_content(content, message["role"], place, k, mark)
    elif content:
        message["content"] = [
            {**part, "text": _marked_content(part["text"], message["role"], place, k, mark)}
            if part.get("text")
            else part
            for part in content
        ]
    if message.get("tool_calls"):
        message["tool_calls"] = [
            _marked_call(call, f"{place}.tool_calls[{n}]", k, mark, note)
            for n, call in enumerate(message["tool_calls"])
        ]
    return message


def _marked_content(content: str, role: str, place: str, k: int, mark: Callable[[_Text], str]) -> str:
    reasoning = _REASONING.match(content) if role == "assistant" else None
    pieces, start = [], 0
    for marker in MARKER.finditer(content, 0, reasoning.end() if reasoning else 0):
        pieces += [mark(_Text(content[start : marker.start()], place, k, True)), marker[0]]
        start = marker.end()
    return "".join(pieces) + mark(_Text(content[start:], place, k))


def _marked_call(call: Any, place: str, k: int, mark: Callable[[_Text], str], note: Callable[[_Text], object]) -> Any:
    function = dict(call["function"])
    function["name"] = mark(_Text(function["name"], place, k))
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            value = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            function["arguments"] = mark(_Text(arguments, place, k))
        else:
            dumps = next((dumps for dumps in _DUMPS if dumps(value) == arguments), _DUMPS[0])
            function["arguments"] = dumps(_marked_value(value, place, k, mark, note))
    else:
        function["arguments"] = _marked_value(arguments, place, k, mark, note)
    return {**call, "function": function}


def _marked_value(value: Any, place: str, k: int, mark: Callable[[_Text], str], note: Callable[[_Text], object]) -> Any:
    """Return arguments with their strings marked."""
    if isinstance(value, str):
        return mark(_Text(value, place, k))
    if isinstance(value, list):
        return [_marked_value(item, place, k, mark, note) for item in value]
    if isinstance(value, dict):
        for key in filter(str.strip, value):
            note(_Text(key, place, k))
        return {key: _marked_value(item, place, k, mark, note) for key, item in value.items()}
    # Templates write `true` and `null` in several ways, and numbers with an exponent, too.
    if isinstance(value, int | float) and not isinstance(value, bool) and "e" not in repr(value):
        note(_Text(repr(value), place, k))
    return value


def _marked_tool(value: Any, place: str, mark: Callable[[_Text], str], note: Callable[[_Text], object]) -> Any:
    """Return a tool, or a part of its schema, with its strings marked."""
    if isinstance(value, str):
        return mark(_Text(value, place, -1))
    if isinstance(value, list):
        return [_marked_tool(item, place, mark, note) for item in value]
    if not isinstance(value, dict):
        return value
    for name, properties in value.items():
        if name == "properties" and isinstance(properties, dict):
            for key in filter(str.strip, properties):
                note(_Text(key, place, -1))
    return {
        key: item if key in _TYPES and not isinstance(item, dict) else _marked_tool(item, place, mark, note)
        for key, item in value.items()
    }
