"""Cut rendered texts into spans at control tokens and edges of trained ranges.

    <|im_start|>user\\n2+2?<|im_end|>\\n   ──▶   control token, text, control token, text

The samples of a conversation start with the same text, which is cut only once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from math import inf

from tasks.encoders.encoder import Encoder
from tasks.templates.jinja.breaker import escaped
from tasks.templates.jinja.locate import common_start
from tasks.templates.spans import TEXT, Span

Ranges = Sequence[tuple[int, int]]


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
        self._control = re.compile(f"({encoder.control_pattern.pattern})")
        self._last: tuple[str, str, float, list[Span], list[int]] = ("", "", 0, [], [])

    def split(self, text: str, ranges: Ranges, breaker: str) -> list[Span]:
        """Return the spans of a text without the breaker.

        The `ranges` of the text are trained on.
        """
        edges = [*chain(*ranges), inf]  # ascending: text after an odd number of edges is trained on
        breakers = [form for form in (breaker, escaped(breaker)) if form in text]
        spans, ends = self._known(text, edges[0], breaker)
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
                    spans.append(Span(piece, TEXT, passed % 2 == 1, ""))
                    ends.append(cut)
                end = cut
            if string:
                while edges[passed] <= place:
                    passed += 1
                spans.append(self.controls[string, passed % 2 == 1])
                ends.append(stop)
            end = stop
        self._last = text, breaker, edges[0], spans, ends
        return spans

    def _known(self, text: str, edge: float, breaker: str) -> tuple[list[Span], list[int]]:
        """Return the spans that a text and the last text start with, and their ends."""
        other, its_breaker, its_edge, spans, ends = self._last
        if not self._is_local or breaker != its_breaker or not ends:
            return [], []
        same = min(common_start(text, other) - self._ahead, edge, its_edge)
        count = len(ends)
        while count and not (ends[count - 1] <= same and spans[count - 1].token != TEXT):
            count -= 1
        return spans[:count], ends[:count]

    def marked(self, text: str, breaker: str) -> str:
        """Return a text with NUL around the control strings that the template wrote."""
        if self._is_local:
            return "\0".join(self._control.split(text))
        parts, end = [], 0
        for (start, stop), string, _ in self.controls_in(text, breaker):
            parts += [text[end:start], string]
            end = stop
        return "\0".join([*parts, text[end:]])

    def controls_in(self, text: str, breaker: str, start: int = 0) -> Iterator[tuple[tuple[int, int], str, int]]:
        """Yield the control strings that the template wrote.

        Each item has the range of the string with the white space that it absorbs, the string, and its start.
        """
        controls = self._encoder.controls
        for match in self._encoder.written_pattern.finditer(text, start):
            written, (first, stop) = match.group(), match.span()
            string = written if written in controls else written.strip()
            if len(string) > 1 or text[stop : stop + 2] != breaker * 2:
                yield (first, stop), string, first + written.index(string)
