"""Compose the rendering of a conversation of the rendering of placeholders, its values, and pieces.

    rendering of placeholders   <|im_start|>assistant\n<function=␀5␀>␀p0␀</function><|im_end|>    once for each shape
    its values, and pieces      "get_weather"      "<parameter=city>Oslo</parameter>"            of this conversation

Conversations that are read key by key rarely have the same arguments and tools, so that they cannot be filled in whole
(see `frames`). Their shapes are the same all the same: roles, and which of them have calls. The turns of the
placeholders were located, so the turns of the conversation are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import orjson

from tasks.templates.jinja.composed.pieces import Expected, Piece, State
from tasks.templates.jinja.locate import Located, Range
from tasks.templates.jinja.sandbox.requests import Rendering
from tasks.templates.jinja.traced import GAP_OF_PIECE
from tasks.templates.jinja.unusual import Unusual
from tasks.templates.placeholders import GAP, as_json, can_be_filled, with_values

_ANY_GAP = re.compile(f"{GAP.pattern}|{GAP_OF_PIECE.pattern}")


class _Text:
    """A text with gaps."""

    def __init__(self, text: str, edges: Sequence[int]):
        """`edges` are places in the text to find once it is filled. Raises ValueError if one is in a gap."""
        self.parts = [""]
        self.gaps: list[str] = []
        end = 0
        starts: list[int] = []
        for gap in _ANY_GAP.finditer(text):
            self.parts[-1] = text[end : gap.start()]
            self.parts += ["", ""]
            self.gaps.append(gap.group())
            starts.append(gap.start())
            end = gap.end()
        self.parts[-1] = text[end:]
        lengths = [0, *accumulate(map(len, self.gaps))]
        self._edges: list[tuple[int, int]] = []  # characters outside gaps, and gaps, before an edge
        for edge in edges:
            before = sum(start < edge for start in starts)
            literal = edge - lengths[before]
            if before and edge < starts[before - 1] + len(self.gaps[before - 1]):
                raise ValueError("a turn begins or ends within a value")
            self._edges.append((literal, before))

    def filled(self, written: Mapping[str, str]) -> tuple[str, list[Range]]:
        """Return the text with what is written for each gap, and the ranges between its edges."""
        parts = self.parts.copy()
        parts[1::2] = map(written.__getitem__, self.gaps)
        lengths = [0, *accumulate(map(len, parts[1::2]))]
        edges = [literal + lengths[before] for literal, before in self._edges]
        return "".join(parts), list(zip(edges[::2], edges[1::2], strict=True))


class Composition:
    """The renderings of all conversations of a shape. Raises ValueError if they cannot be composed."""

    def __init__(self, rendering: Rendering, unusual: Unusual, objects: frozenset[int]):
        assert rendering.unusual is not None
        self._unusual, self.objects, self._formats = unusual, objects, rendering.unusual[4]
        self._pieces = rendering.pieces
        self._rendering = rendering
        self._whole = _Text(rendering.text, [edge for each in rendering.marks for edge in each])
        self._samples = [
            _Text(text, [edge for each in ranges for edge in each]) for text, ranges, *_ in rendering.samples
        ]
        self._gaps = {gap for text in (self._whole, *self._samples) for gap in text.gaps}
        self.size = sum(len(text.parts) for text in (self._whole, *self._samples))

    def written(self, values: Sequence[str]) -> dict[str, str] | None:
        """Return what is written of each value, by its gap; None if the conversation is to be rendered."""
        if not can_be_filled(values, self.objects, self._unusual):
            return None
        written = {}
        for gap in self._gaps:
            if (found := GAP.fullmatch(gap)) is None:
                continue
            number, form = int(found[1]), found[2]
            is_object = number in self.objects
            written[gap] = as_json(values[number], is_object, self._formats[int(form)]) if form else values[number]
        return written

    def pieces(self, values: Sequence[str]) -> list[Piece]:
        """Return the pieces of a conversation with these values."""
        seen = objects_of(values, self.objects)
        return [with_values(piece, seen) for piece, *_ in self._pieces]

    def rendered(self, written: dict[str, str], pieces: Sequence[tuple[str, State] | None]) -> Rendering | None:
        """Return the rendering with what was written; None if it is not what the conversation is rendered as.

        What pieces write is added to `written`.
        """
        if not all(map(_is_as_expected, pieces, self._pieces)):
            return None
        for gap in self._gaps:
            if piece := GAP_OF_PIECE.fullmatch(gap):
                text, state = pieces[int(piece[1])]  # type: ignore[misc]
                text = state[int(piece[2])] if piece[2] else text
                text = text.lstrip() if piece[3] else text
                written[gap] = text.rstrip() if piece[4] else text
        whole, marks = self._whole.filled(written)
        samples = []
        for cut, (_, _, turn, plain) in zip(self._samples, self._rendering.samples, strict=True):
            text, ranges = cut.filled(written)
            samples.append(Located(text, ranges, turn, plain))
        return Rendering(whole, marks, samples, None, self._rendering.unprompted)


def objects_of(values: Sequence[str], objects: frozenset[int]) -> list[Any]:
    """Return values with objects instead of their JSON."""
    return [orjson.loads(value) if number in objects else value for number, value in enumerate(values)]


def _is_as_expected(found: tuple[str, State] | None, expected: Expected) -> bool:
    """Return whether a piece writes and sets something where it did when the placeholders were rendered."""
    if found is None or "\0" in found[0] or bool(found[0].strip()) != expected[1]:
        return False
    pairs = list(zip(found[1], expected[2], strict=True))
    return all(
        isinstance(value, str) and value.strip() and "\0" not in value
        if kind is None
        else (type(value), value) == (type(kind), kind)
        for value, kind in pairs
    )
