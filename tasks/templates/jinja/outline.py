"""Find the contents that must not be filled into the rendering of placeholders.

A template may treat them differently from placeholders: they pass a test that it makes, or their tokens cross an edge
of a turn (see `traced`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from packcorpus.tasks.templates.adjust import MARKER
from packcorpus.tasks.templates.jinja.rendering import Rendering
from packcorpus.tasks.templates.jinja.splitting import TokenBoundary
from packcorpus.tasks.templates.placeholders import GAP, has_outer_space


def edges_of(rendering: Rendering, every: bool = False) -> Iterator[tuple[int, str, str]]:
    """Yield the edges of trained turns in later prompts, or of `every` one.

    An edge is the start or the end of a turn: the number of the turn, the text before the edge, and the text after it.
    """
    for text, ranges, _, turns, *_ in rendering.samples:
        last = [(len(text), len(text))] * every
        for k, ((start, stop), (following, _)) in zip(turns, pairwise([*ranges, *last]), strict=False):
            yield k, text[:start], text[start:stop]
            yield k, text[start:stop], text[stop:following]


class Edge(NamedTuple):
    """The start or the end of a trained turn, with gaps for values.

    `tail` is the text before it, after the last control token. `written` is the text after it, through the first
    control token.
    """

    tail: str
    written: str


class Edges:
    """The edges of trained turns that later prompts of their sample contain.

    `reached` is true if a token crosses each of them when all values are words. In this case, each turn is a separate
    sample. `are_mixed` is true if tokens cross some of them only.
    """

    def __init__(self, edges: Sequence[Edge], boundary: TokenBoundary):
        self._boundary = boundary
        splits = [self._splits(edge, lambda _: "a") for edge in edges]
        self.reached = not all(splits)
        self.are_mixed = self.reached and any(splits)
        self._edges = [edge for edge in edges if "\0" in edge.tail + edge.written]

    def are_usual(self, values: Sequence[str]) -> bool:
        """Return whether these values lead to the same division into samples as words."""
        if any(values[int(gap[1])][0].isspace() for edge in self._edges for gap in GAP.finditer(edge.written)):
            return False
        return all(self._splits(edge, values.__getitem__) != self.reached for edge in self._edges)

    def _splits(self, edge: Edge, value: Callable[[int], str]) -> bool:
        tail, written = (GAP.sub(lambda gap: value(int(gap[1])), text) if "\0" in text else text for text in edge)
        return self._boundary.splits(self._boundary.tail(tail), written)


def traced_edges(rendering: Rendering, private: str, boundary: TokenBoundary, every: bool) -> list[Edge] | None:
    """Return the edges of placeholders; None if one of them has a value as JSON.

    `every` is that of `edges_of`.
    """
    controls, edges = boundary.encoder.control_pattern, []
    for _, before, after in edges_of(rendering, every):
        ends = [match.end() for match in controls.finditer(before)]
        first = controls.search(after)
        tail = before[ends[-1] if ends else 0 :].replace(private, "")
        text = (after[: first.end()] if first else after).replace(private, "")
        gap = GAP.search(text)
        written = text[: gap.start()] if gap else text
        if gap and not boundary.is_complete(written):
            written += gap.group()
        if any(gap[2] for part in (tail, written) for gap in GAP.finditer(part)):
            return None
        if tail and written:
            edges.append(Edge(tail, written))
    return edges


class MustRender:
    """Test for contents that a template may treat differently from placeholders.

    `tests` are recorded by a `Trace`. `strips` is true if the template strips white space around some contents.
    `inline` is true if the template gets reasoning in a content in another form, or if such reasoning matters for
    locating turns.
    """

    def __init__(self, tests: list[list[str]], edges: Edges, strips: bool, inline: bool):
        self._needles, starts, ends, _ = tests
        self._starts, self._ends = frozenset(starts), frozenset(ends)
        self._edges, self._strips, self._inline = edges, strips, inline

    def __call__(self, contents: Sequence[str]) -> bool:
        """Return whether a conversation with these nonblank contents must be rendered."""
        joined = "\0".join(contents)  # no needle contains NUL
        return bool(
            any(needle in joined for needle in self._needles)
            # the first characters of the markers around reasoning
            or (self._inline and any((c[0] in "<[" or c[0].isspace()) and MARKER.match(c) for c in contents))
            or (self._strips and has_outer_space(contents))
            or (self._starts and any(content[0] in self._starts for content in contents))
            or (self._ends and any(content[-1] in self._ends for content in contents))
            or not self._edges.are_usual(contents)
        )
