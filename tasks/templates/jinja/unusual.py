"""Find the contents that must not be filled into the rendering of placeholders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tasks.templates.jinja.locate import MARKER

# What a marker around reasoning starts with.
_FIRST = "<["


class Unusual:
    """Contents that a template treats differently, by what `Trace` recorded.

    `heads` are the contents that a later prompt has after a text, with the end of that text: `splits` decides whether a
    token could reach from one into the other. `strips`: the template strips white space around some contents. `inline`:
    reasoning in a content is given to it in another form, or matters where a turn is located.
    """

    def __init__(
        self,
        tests: list[list[str]],
        heads: list[tuple[int, str]],
        splits: Callable[[str, str], bool],
        strips: bool,
        inline: bool,
    ):
        self._inline = inline
        self._strips = strips
        needles, starts, ends, _ = tests
        self._needles = needles
        self._starts, self._ends = frozenset(starts), frozenset(ends)
        self._heads, self._splits = tuple(heads), splits

    def __call__(self, contents: Sequence[str]) -> bool:
        """Return whether one of the contents, none of which is blank, is unusual."""
        for needle in self._needles:
            for content in contents:
                if needle in content:
                    return True
        if self._inline and any(
            (content[0] in _FIRST or content[0].isspace()) and MARKER.match(content) for content in contents
        ):
            return True
        if self._strips and any(content[0].isspace() or content[-1].isspace() for content in contents):
            return True
        if self._starts and any(content[0] in self._starts for content in contents):
            return True
        if self._ends and any(content[-1] in self._ends for content in contents):
            return True
        return any(
            contents[number][0].isspace() or not self._splits(tail, contents[number]) for number, tail in self._heads
        )
