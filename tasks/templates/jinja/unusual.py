"""Find the contents that must not be filled into the rendering of placeholders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tasks.templates.jinja.token_boundary import TokenBoundary
from tasks.templates.jinja.turns.answers import MARKER
from tasks.templates.placeholders import GAP, has_outer_space

# First characters of the markers around reasoning.
_FIRST = "<["


class Head(NamedTuple):
    """The start or the end of a trained turn.

    `tail` is the text before this edge, after the last control token. `written` is the text after it, through the first
    control token. Both may have gaps.
    """

    tail: str
    written: str


class Edges:
    """The edges of trained turns in a conversation that is one sample.

    `reached` is true if a token crosses an edge when all values are words. In this case, each turn is a separate
    sample.
    """

    def __init__(self, heads: Sequence[Head], boundary: TokenBoundary):
        self._boundary = boundary
        fixed = [head for head in heads if "\0" not in head.tail + head.written]
        always = not self._keep_apart(fixed, lambda _: "a")
        self.reached = always or not self._keep_apart(heads, lambda _: "a")
        self._heads = [] if always else [head for head in heads if head not in fixed]

    def are_usual(self, values: Sequence[str]) -> bool:
        """Return whether these values lead to the same division into samples as words."""
        if not self._heads:
            return True
        if any(values[int(gap[1])][0].isspace() for head in self._heads for gap in GAP.finditer(head.written)):
            return False
        return self.reached != self._keep_apart(self._heads, values.__getitem__)

    def _keep_apart(self, heads: Sequence[Head], value: Callable[[int], str]) -> bool:
        return all(
            self._boundary.splits(self._boundary.tail(_filled(head.tail, value)), _filled(head.written, value))
            for head in heads
        )


def _filled(text: str, value: Callable[[int], str]) -> str:
    return GAP.sub(lambda gap: value(int(gap[1])), text) if "\0" in text else text


class Unusual:
    """Test for contents that a template may treat differently from placeholders.

    `tests` are recorded by a `Trace`. `strips` is true if the template strips white space around some contents.
    `inline` is true if the template gets reasoning in a content in another form, or if such reasoning matters for
    locating turns. `edges` has the edges of turns, or is None if they are checked later.
    """

    def __init__(
        self,
        tests: list[list[str]],
        edges: Edges | None,
        strips: bool,
        inline: bool,
    ):
        self._inline = inline
        self._strips = strips
        needles, starts, ends, _ = tests
        self._needles = needles
        self._starts, self._ends = frozenset(starts), frozenset(ends)
        self._edges = edges

    def __call__(self, contents: Sequence[str]) -> bool:
        """Return whether one of these nonblank contents is unusual."""
        joined = "\0".join(contents)  # no needle contains NUL
        if any(needle in joined for needle in self._needles):
            return True
        if self._inline and any(
            (content[0] in _FIRST or content[0].isspace()) and MARKER.match(content) for content in contents
        ):
            return True
        if self._strips and has_outer_space(contents):
            return True
        if self._starts and any(content[0] in self._starts for content in contents):
            return True
        if self._ends and any(content[-1] in self._ends for content in contents):
            return True
        return self._edges is not None and not self._edges.are_usual(contents)
