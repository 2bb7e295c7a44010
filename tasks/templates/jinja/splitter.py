"""Cut rendered texts into spans at control tokens and edges of trained ranges.

    <|im_start|>user\\n2+2?<|im_end|>\\n   ──▶   control token, text, control token, text

The samples of a conversation start with the same text, which is cut only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from math import inf
from typing import NamedTuple

from tasks.encoders.encoder import Encoder
from tasks.templates.jinja.breaker import escaped
from tasks.templates.jinja.turns.answers import common_start
from tasks.templates.spans import TEXT, Span

Ranges = Sequence[tuple[int, int]]


class _Cut(NamedTuple):
    """The spans of a text and their ends.

    `edge` is the start of the first trained range.
    """

    text: str
    edge: float
    spans: list[Span]
    ends: list[int]


class Splitter:
    """Cut texts that were rendered for the tokenizer of an encoder."""

    def __init__(self, encoder: Encoder):
        self._encoder = encoder
        controls = encoder.controls.items()
        self.controls = {
            (string, flag): Span(string, token, flag, "") for string, token in controls for flag in (False, True)
        }
        # The text after a control string decides whether it is part of a longer control string, or absorbs white space.
        self._ahead = max(map(len, encoder.controls), default=0)
        self._is_local = not encoder.strips_left and not encoder.strips_right and 1 not in map(len, encoder.controls)

    def split(self, text: str, ranges: Ranges, breaker: str) -> list[Span]:
        """Return the spans of a text without the breaker.

        The `ranges` of the text are trained on. Texts beside an empty range are encoded apart.
        """
        [spans] = self.split_all([(text, ranges)], breaker)
        return spans

    def split_all(self, texts: Iterable[tuple[str, Ranges]], breaker: str) -> Iterator[list[Span]]:
        """Yield the spans of each text of a conversation, as `split` does."""
        last: _Cut | None = None
        for text, ranges in texts:
            edge = ranges[0][0] if ranges else inf
            spans, ends = self._common(last, text, edge) if last and self._is_local else ([], [])
            self._cut(text, ranges, breaker, spans, ends)
            last = _Cut(text, edge, spans, ends)
            yield spans

    def _cut(self, text: str, ranges: Ranges, breaker: str, spans: list[Span], ends: list[int]) -> None:
        """Add the spans of the rest of a text, and their ends."""
        edges = [*chain(*ranges), inf]  # ascending: text after an odd number of edges is trained on
        joints = {stop for (_, stop), (start, _) in pairwise(ranges) if start == stop}
        joints |= {start for start, stop in ranges if start == stop}
        breakers = [form for form in (breaker, escaped(breaker)) if form in text]
        end = ends[-1] if ends else 0
        passed = 0  # number of edges
        for (start, stop), string, place in chain(self.controls_in(text, breaker, end), [((len(text),) * 2, "", inf)]):
            while end < start:
                while edges[passed] <= end:
                    passed += 1
                cut = int(min(edges[passed], start))
                piece = text[end:cut]
                for form in breakers:
                    piece = piece.replace(form, "")
                if piece:
                    spans.append(Span(piece, TEXT, passed % 2 == 1, "", alone=end in joints))
                    ends.append(cut)
                end = cut
            if string:
                while edges[passed] <= place:
                    passed += 1
                spans.append(self.controls[string, passed % 2 == 1])
                ends.append(stop)
            end = stop

    def _common(self, last: _Cut, text: str, edge: float) -> tuple[list[Span], list[int]]:
        """Return the spans that a text and the last text start with, and their ends."""
        same = min(common_start(text, last.text) - self._ahead, edge, last.edge)
        count = len(last.ends)
        while count and not (last.ends[count - 1] <= same and last.spans[count - 1].token != TEXT):
            count -= 1
        return last.spans[:count], last.ends[:count]

    def controls_in(self, text: str, breaker: str, start: int = 0) -> Iterable[tuple[tuple[int, int], str, int]]:
        """Return the control strings that the template wrote.

        Each item has the range of the string with the white space that it absorbs, the string, and its start.
        """
        if self._is_local:
            return [
                (match.span(), match[0], match.start()) for match in self._encoder.control_pattern.finditer(text, start)
            ]
        return self._with_space(text, breaker, start)

    def _with_space(self, text: str, breaker: str, start: int) -> Iterator[tuple[tuple[int, int], str, int]]:
        controls = self._encoder.controls
        for match in self._encoder.written_pattern.finditer(text, start):
            written, (first, stop) = match.group(), match.span()
            string = written if written in controls else written.strip()
            if len(string) > 1 or text[stop : stop + 2] != breaker * 2:
                yield (first, stop), string, first + written.index(string)
