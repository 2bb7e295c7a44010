"""Remember the texts that pieces write, and request unknown pieces.

    [3, {"call": {"arguments": ␀7␀}}, {}]                     a piece of placeholders
    [3, {"call": {"arguments": {"city": "Oslo"}}}, {}]        as JSON, with this conversation's values, if they are new
        ─sandbox─▶ "<parameter=city>Oslo</parameter>"         the text that it writes, cut at its control tokens

Control strings in the values are broken (see `breaker`), so the template wrote every intact control string in a piece.
A piece that may start or end with part of a control string is not used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson

from tasks.encoders.encoder import Encoder
from tasks.templates.jinja.breaker import Breaker, escaped
from tasks.templates.jinja.composed.pieces import Expected, State
from tasks.templates.jinja.neutral import Neutral
from tasks.templates.jinja.sandbox.requests import Pieces
from tasks.templates.jinja.splitter import Splitter

# In JSON, a placeholder for an object or a text.
_PLACEHOLDER = re.compile(r'\{"\\u0000(\d+)\\u0000":0\}|\\u0000(\d+)\\u0000')

# The maximum number of characters in all remembered pieces.
MOST_REMEMBERED = 4 << 20

# The text that a piece writes, and the values that it sets; None if the piece fails.
_Answer = tuple[str, State] | None


class PieceForm:
    """A piece of all conversations with one shape.

    `writes` and `sets` are its expected results (see `Expected`).
    """

    def __init__(self, expected: Expected, objects: frozenset[int]):
        piece, self.writes, self.sets = expected
        self.parts: list[str] = []
        self.numbers: list[int] = []
        json, end = orjson.dumps(piece).decode(), 0
        for found in _PLACEHOLDER.finditer(json):
            self.parts.append(json[end : found.start()])
            self.numbers.append(int(found[1] or found[2]))
            end = found.end()
        self.parts.append(json[end:])
        self._form = "\0".join(self.parts)
        self._objects = objects

    def key(self, values: Sequence[str]) -> tuple[str, ...]:
        """Return a key for this piece with these values."""
        return (self._form, *(values[number] for number in self.numbers))

    def filled(self, values: Mapping[int, str]) -> orjson.Fragment:
        """Return the piece as JSON with these JSON values."""
        found = [self.parts[0]]
        for number, part in zip(self.numbers, self.parts[1:], strict=True):
            found += [values[number] if number in self._objects else values[number][1:-1], part]
        return orjson.Fragment("".join(found))


@dataclass(slots=True)
class Written:
    """The text that a piece writes, and the values that it sets.

    Control strings from the values of the conversation are broken.
    """

    text: str
    state: State
    cut_at_controls: Callable[[str], str]
    _known: dict[tuple[str, str, str], str] = field(default_factory=dict)

    def is_as_expected(self, form: PieceForm) -> bool:
        """Return whether the piece writes and sets texts where it did for placeholders."""
        if "\0" in self.text or bool(self.text.strip()) != form.writes:
            return False
        pairs = zip(self.state, form.sets, strict=True)
        return all(
            isinstance(value, str) and value.strip() and "\0" not in value
            if kind is None
            else (type(value), value) == (type(kind), kind)
            for value, kind in pairs
        )

    def cut(self, place: str, left: str, right: str) -> str:
        """Return the written text, or a text that the piece sets, cut at control strings.

        `place` is the index of a text that the piece sets, or "". The result has NUL around its control strings, and no
        control string is broken. White space is stripped on the left and right if `left` and `right` are not empty.
        """
        key = place, left, right
        if key not in self._known:
            text = self.state[int(place)] if place else self.text
            text = text.lstrip() if left else text
            self._known[key] = self.cut_at_controls(text.rstrip() if right else text)
        return self._known[key]


class KnownPieces:
    """Remembered results of the pieces of one template."""

    def __init__(self, encoder: Encoder, breaker: Breaker, neutral: Neutral, splitter: Splitter):
        self._encoder, self._breaker, self._neutral, self._splitter = encoder, breaker, neutral, splitter
        self._eos = encoder.control_strings.get(encoder.eos_id, "")
        self._known: dict[tuple[str, ...], Written | None] = {}
        self._remembered = 0

    def written(
        self, forms: Sequence[PieceForm], values: Sequence[str], objects: frozenset[int]
    ) -> Generator[Pieces, Any, list[Written | None]]:
        """Return the results of pieces with these values.

        A result is None if the piece fails, or if it must not be used in a composition.
        """
        keys = [form.key(values) for form in forms]
        new = {key: form for key, form in zip(keys, forms, strict=True) if key not in self._known}
        if not new:
            return [self._known[key] for key in keys]
        numbers = list(dict.fromkeys(number for form in new.values() for number in form.numbers))
        json = "\n".join([_as_json(values[number], number in objects) for number in numbers])
        answers, breaker = yield from self._answers(list(new.values()), numbers, json)
        own = yield from self._own(list(new.values()), numbers, json, answers)
        found = {
            key: Written(answer[0], answer[1], partial(self._cut, breaker)) if answer and is_own else None
            for key, answer, is_own in zip(new, answers, own, strict=True)
        }
        written = [found[key] if key in found else self._known[key] for key in keys]
        self._remembered += sum(sum(map(len, key)) + len(each.text if each else "") for key, each in found.items())
        if self._remembered > MOST_REMEMBERED:
            self._known, self._remembered = {}, 0
        self._known |= found
        return written

    def _answers(
        self, forms: Sequence[PieceForm], numbers: Sequence[int], json: str
    ) -> Generator[Pieces, Any, tuple[list[_Answer], str]]:
        """Return the results of pieces, and the character that breaks control strings.

        `json` has one line for each value.
        """
        broken, breaker = self._breaker.broken_json(json)
        values = dict(zip(numbers, broken.split("\n"), strict=True))
        return (yield Pieces([form.filled(values) for form in forms], len(broken))), breaker

    def _own(
        self, forms: Sequence[PieceForm], numbers: Sequence[int], json: str, answers: Sequence[_Answer]
    ) -> Generator[Pieces, Any, list[bool]]:
        """Return whether pieces are whole and the template wrote their control strings."""
        found = [answer is not None and self._is_whole(*answer) for answer in answers]
        controls = [*map(self._controls_of, answers)]
        if not any(controls):
            return found
        neutral = self._neutral.of_json(json)
        pairs = zip(numbers, json.split("\n"), neutral.split("\n"), strict=True)
        changed = {number for number, value, other in pairs if value != other}
        doubtful = [
            place for place, form in enumerate(forms) if controls[place] and not changed.isdisjoint(form.numbers)
        ]
        if doubtful:
            others, _ = yield from self._answers([forms[place] for place in doubtful], numbers, neutral)
            for place, other in zip(doubtful, others, strict=True):
                found[place] = found[place] and self._controls_of(other) == controls[place]
        return found

    def _is_whole(self, text: str, state: State) -> bool:
        """Return whether a piece has no EOS token and no partial control string at an end."""
        texts = [text, *(each for each in state if isinstance(each, str))]
        return not (self._eos and self._eos in text) and not any(map(self._breaker.may_join, texts))

    def _controls_of(self, answer: _Answer) -> list[str]:
        return self._encoder.control_pattern.findall(answer[0]) if answer else []

    def _cut(self, breaker: str, text: str) -> str:
        """Return a text with NUL around its control strings, and without the breaker."""
        text = self._splitter.marked(text, breaker)
        return text.replace(breaker, "").replace(escaped(breaker), "")


def _as_json(value: str, is_object: bool) -> str:
    return orjson.dumps(orjson.loads(value) if is_object else value).decode()
