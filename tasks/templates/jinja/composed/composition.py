"""Compose the samples of a conversation from placeholders, values, and pieces.

    samples of placeholders   <|im_start|> "assistant\\n<function=␀5␀>␀p0␀</function>" <|im_end|>   once for each shape
    its values, and pieces    "get_weather"    "<parameter=city>Oslo</parameter>"                 of this conversation

If a template reads arguments and tools key by key, whole conversations cannot be filled in, because they rarely have
the same arguments and tools (see `frames`). But they often have the same shape: roles, and which messages have calls.
The turns and control tokens of the placeholders are known, and so are the turns and control tokens of the conversation.
Its values are filled in unchanged, and no text is searched for control tokens again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from tasks.templates.jinja.composed.known_pieces import PieceForm, Written
from tasks.templates.jinja.composed.pieces import Expected
from tasks.templates.jinja.locate import is_written, part_at_once
from tasks.templates.jinja.sandbox import limits
from tasks.templates.jinja.traced import ANY_GAP, GAP_OF_PIECE
from tasks.templates.jinja.unusual import Head, Unusual
from tasks.templates.placeholders import GAP, as_json, can_be_filled
from tasks.templates.spans import TEXT, Sample, Span

# Longer conversations are rendered, because a rendering may exceed its limit: broken control strings make it a few
# times as long.
MOST_CHARACTERS = limits.MOST_CHARACTERS // 32

# Literals and gaps, alternating.
_Parts = tuple[str, ...]


class Outlined(NamedTuple):
    """Samples of placeholders with gaps for pieces.

    `heads` are the starts of trained turns that later prompts contain.
    """

    samples: list[Sample]
    heads: list[Head]
    unusual: Unusual
    formats: list[list[Any]]  # of JSON
    pieces: Sequence[Expected]
    later: list[tuple[str, str]]  # placeholders, and the turn that must have their values
    parting: Sequence[tuple[str, str]]  # gaps or texts that must start differently


class Composition:
    """The samples of all conversations with one shape.

    `objects` are the indices of the values that are JSON.
    """

    def __init__(self, outlined: Outlined, objects: frozenset[int], controls: Mapping[tuple[str, bool], Span]):
        """Raise ValueError if conversations of this shape cannot be composed."""
        samples, heads, self._unusual, self._formats, pieces, later, self._parting = outlined
        self.objects, self._controls = objects, controls
        self.pieces = [PieceForm(expected, objects) for expected in pieces]
        self._texts: dict[tuple[_Parts, bool], int] = {}  # texts with gaps, and whether they are trained on
        self._samples = [(self._runs_of(spans), turn) for spans, turn in samples]
        self._heads = [(_cut(tail), _cut(written)) for tail, written in heads]
        self._needed = {(int(GAP.findall(value)[0][0]), _cut(turn)) for value, turn in later}
        gaps = {gap for parts in (*(parts for parts, _ in self._texts), *chain(*self._heads)) for gap in parts[1::2]}
        gaps |= {each for each in chain(*self._parting) if ANY_GAP.fullmatch(each)}
        self._gaps_of_values = [(gap, int(found[1]), found[2]) for gap in gaps if (found := GAP.fullmatch(gap))]
        self._gaps_of_pieces = [
            (gap, int(found[1]), found.groups("")[1:]) for gap in gaps if (found := GAP_OF_PIECE.fullmatch(gap))
        ]
        self._length = sum(len(span.text) for spans, _ in samples for span in spans)
        self._times = max(chain(*(Counter(runs[1::2]).values() for runs, _ in self._samples)), default=0)
        self.size = sum(len(runs) for runs, _ in self._samples) + sum(len(parts) for parts, _ in self._texts)

    def _runs_of(self, spans: Sequence[Span]) -> list[list[Span] | int]:
        """Return runs of spans without gaps and indices of texts with gaps, alternating."""
        runs: list[list[Span] | int] = [[]]
        for span in spans:
            if "\0" in span.text:
                parts = _cut(span.text)
                runs += [self._texts.setdefault((parts, span.trained), len(self._texts)), []]
            else:
                runs[-1].append(span)  # type: ignore[union-attr]
        return runs

    def written(self, values: Sequence[str]) -> dict[str, str] | None:
        """Return the text for each gap of a value; None if a value cannot be filled in."""
        if not can_be_filled(values, self.objects, self._unusual):
            return None
        written = {}
        for gap, number, form in self._gaps_of_values:
            is_object = number in self.objects
            written[gap] = as_json(values[number], is_object, self._formats[int(form)]) if form else values[number]
        return written

    def add_pieces(self, values: Sequence[str], written: dict[str, str], pieces: Sequence[Written | None]) -> bool:
        """Add the text for each gap of a piece.

        Return False if the conversation must be rendered: a piece does not write and set texts where it did for the
        placeholders, it starts with the same text as another rendering in the same place, or the pieces of a turn do
        not write the values that they should.
        """
        for form, piece in zip(self.pieces, pieces, strict=True):
            if piece is None or not piece.is_as_expected(form):
                return False
        for gap, number, place in self._gaps_of_pieces:
            written[gap] = pieces[number].cut(*place)  # type: ignore[union-attr]
        parting = ([_plain(written.get(each, each)) for each in pair] for pair in self._parting)
        if not all(part_at_once(*texts) for texts in parting):
            return False
        return all(is_written(values[number], _plain(_filled(turn, written))) for number, turn in self._needed)

    def heads(self, written: Mapping[str, str]) -> list[Head]:
        """Return the starts of the trained turns that later prompts contain."""
        found = [(_filled(tail, written), _filled(after, written)) for tail, after in self._heads]
        return [Head(tail.rpartition("\0")[2], _plain(after)) for tail, after in found]

    def samples(self, written: Mapping[str, str]) -> list[Sample] | None:
        """Return the samples with their gaps filled; None if they are too long."""
        filled = [_filled(parts, written) for parts, _ in self._texts]
        if self._length + self._times * sum(map(len, filled)) > MOST_CHARACTERS:
            return None
        texts = [self._spans_of(text, trained) for text, (_, trained) in zip(filled, self._texts, strict=True)]
        found = []
        for runs, turn in self._samples:
            spans: list[Span] = []
            for run in runs:
                spans += texts[run] if isinstance(run, int) else run
            found.append(Sample(spans, turn))
        return found

    def _spans_of(self, text: str, trained: bool) -> list[Span]:
        """Return the spans of a text with NUL around its control strings."""
        if "\0" not in text:
            return [Span(text, TEXT, trained, "")]
        parts = text.split("\0")
        return [
            self._controls[part, trained] if number % 2 else Span(part, TEXT, trained, "")
            for number, part in enumerate(parts)
            if part
        ]


def _cut(text: str) -> _Parts:
    """Return the literals and gaps of a text, alternating.

    Raises ValueError if the text has an incomplete gap, because a turn starts or ends within a value.
    """
    parts = []
    end = 0
    for gap in ANY_GAP.finditer(text):
        parts += [text[end : gap.start()], gap.group()]
        end = gap.end()
    parts.append(text[end:])
    if any("\0" in part for part in parts[::2]):
        raise ValueError(f"{text!r} has a part of a gap")
    return tuple(parts)


def _plain(filled: str) -> str:
    return filled.replace("\0", "")


def _filled(parts: _Parts, written: Mapping[str, str]) -> str:
    found = list(parts)
    found[1::2] = map(written.__getitem__, parts[1::2])
    return "".join(found)
