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
    """The edges of trained turns that later prompts of their sample contain.

    `reached` is true if a token crosses each of them when all values are words. In this case, each turn is a separate
    sample. `are_mixed` is true if tokens cross some of them only.
    """

    def __init__(self, heads: Sequence[Head], boundary: TokenBoundary):
        self._boundary = boundary
        splits = [self._splits(head, lambda _: "a") for head in heads]
        self.reached = not all(splits)
        self.are_mixed = self.reached and any(splits)
        self._heads = [head for head in heads if "\0" in head.tail + head.written]

    def are_usual(self, values: Sequence[str]) -> bool:
        """Return whether these values lead to the same division into samples as words."""
        if not self._heads:
            return True
        if any(values[int(gap[1])][0].isspace() for head in self._heads for gap in GAP.finditer(head.written)):
            return False
        return all(self._splits(head, values.__getitem__) != self.reached for head in self._heads)

    def _splits(self, head: Head, value: Callable[[int], str]) -> bool:
        return self._boundary.splits(self._boundary.tail(_filled(head.tail, value)), _filled(head.written, value))


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
