"""Find the turns that one rendering trains on, each after exactly its own prompt.

    R = prompt of turn k + answer of turn k
    R trains on an earlier turn j too if it starts with the prompt of j and continues with the answer of j

        user 1, call, result, call, result, answer, user 2, call, result, answer
        └────────── R of turn 5 ─────────────────┘          three turns
        └────────── R of turn 9, without the reasoning of 1, 3, and 5 ─────────┘  two turns

Which turns a rendering holds changes only where the template changes its mind, usually at a user message. So the
longest group of turns before k is a sample, and the rest is divided in the same way, which takes the fewest samples.

Two renderings for each turn would make the time grow with the square of the number of turns. Turns of one kind (what
they and the messages beside them consist of) are written alike, so the first and the last one of each kind are
rendered, and the others are found in R: marks in the texts of turns show where each turn is. If something does not fit,
each turn is rendered. The judge of the engines renders each turn of the conversations that it compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from tasks.conversations.answers import REASONING_KEYS
from tasks.templates.jinja.turns.flagged import Range
from tasks.templates.jinja.turns.marks import places_of

# Each of so few turns is rendered.
FEW = 3

# Markers in texts that templates look for. Texts with different ones are of different kinds.
_MARKERS = re.compile(r"</?[\w:]*(?:think|tool)\w*>|\[/?(?:THINK|TOOL)\w*\]|<\|\w*(?:channel|THINK|tool)\w*\|>")


class Cover:
    """The turns of a conversation that renderings hold.

    `range_in` returns the range of a turn in a text, or None if its prompt or its answer differs there. If `every` is
    true, all turns are compared.
    """

    def __init__(
        self,
        render: Callable[[list[Any], bool], str],
        messages: Sequence[Any],
        ends: re.Pattern[str],
        range_in: Callable[[str, int], Range | None],
        every: bool,
    ):
        self._render, self._messages, self._ends = render, messages, ends
        self._range_in, self._every = range_in, every

    def ranges_of(self, text: str, turns: Sequence[int], count: int, prompt: bool) -> list[Range] | None:
        """Return the ranges of turns in a text; None if it does not hold all of them.

        The text is, or starts with, the rendering of the first `count` messages, and `prompt` adds the generation
        prompt.
        """
        known = self._known(text, turns)
        return None if known is None else self._places(text, turns, known, count, prompt)

    def places(self, text: str, turns: Sequence[int], k: int) -> list[Range]:
        """Return the ranges of turns that a text holds.

        It is known to hold them, and ends with turn `k`.
        """
        return self.ranges_of(text, turns, k, True) or []

    def first_of(self, text: str, turns: Sequence[int]) -> int:
        """Return the index of the first of the last turns that a text holds.

        The text ends with the last one.
        """
        last = len(turns) - 1
        if self._every:
            while last and self._range_in(text, turns[last - 1]):
                last -= 1
            return last
        if self._known(text, turns[:-1]) is not None:
            return 0
        starts = [n for n, (one, other) in enumerate(pairwise(turns), 1) if self._has_user(one + 1, other)]
        first = last
        for start in [*reversed(starts), 0]:
            if not self._range_in(text, turns[first - 1]):
                return first
            if self._known(text, turns[start:-1]) is None:
                low, high = start + 1, first  # the template changes its mind within these turns
                while low < high:
                    middle = (low + high) // 2
                    low, high = (middle + 1, high) if self._known(text, turns[middle:-1]) is None else (low, middle)
                return low
            first = start
        return first

    def _has_user(self, first: int, last: int) -> bool:
        return any(message["role"] == "user" for message in self._messages[first:last])

    def _known(self, text: str, turns: Sequence[int]) -> dict[int, Range] | None:
        """Return the ranges of the turns that are compared.

        Returns None if the text does not hold one of them.
        """
        found = {}
        for k in self._compared(turns):
            place = self._range_in(text, k)
            if place is None:
                return None
            found[k] = place
        return found

    def _compared(self, turns: Sequence[int]) -> list[int]:
        """Return the first and the last turn, in all and of each kind."""
        if self._every or len(turns) <= FEW:
            return [*turns]
        first = {self._kinds[k]: k for k in reversed(turns)}
        last = {self._kinds[k]: k for k in turns}
        return sorted({turns[0], turns[-1], *first.values(), *last.values()})

    @cached_property
    def _kinds(self) -> list[object]:
        """Return a value for each message that is equal for messages of one kind."""
        of_each = [_parts_of(message) for message in self._messages]
        roles = [*(message["role"] for message in self._messages[1:]), ""]
        return [*zip([(), *of_each], of_each, roles, strict=False)]

    def _places(
        self, text: str, turns: Sequence[int], known: dict[int, Range], count: int, prompt: bool
    ) -> list[Range] | None:
        """Return the ranges of turns, of which some are known."""
        unknown = [k for k in turns if k not in known]
        if unknown:
            texts = places_of(text, self._messages[:count], lambda found: self._render(found, prompt), ("assistant",))
            forms = {self._kinds[k]: _form(text, known[k], texts.get(k), self._ends) for k in known}
            for k in unknown:
                place = _place(text, texts.get(k), forms[self._kinds[k]]) or self._range_in(text, k)
                if place is None:
                    return None
                known[k] = place
        places = [known[k] for k in turns]
        if any(one[1] > other[0] for one, other in pairwise(places)):
            return [place for k in turns if (place := self._range_in(text, k))]
        return places


class _Form(NamedTuple):
    """What surrounds the texts of a turn.

    `before` is written between its prompt, which ends with `prompt`, and its first text. Its answer ends with the
    control token `end`, which occurs `times` times after its last text.
    """

    prompt: str
    before: str
    end: str
    times: int


def _form(text: str, place: Range, texts: Range | None, ends: re.Pattern[str]) -> _Form | None:
    """Return the form of a turn at a known place.

    Returns None if control tokens do not show it.
    """
    start, stop = place
    if texts is None or not start <= texts[0] <= texts[1] <= stop:
        return None
    controls = [match.start() for match in ends.finditer(text, max(0, start - 200), start)]
    last = next((match[0] for match in ends.finditer(text, texts[1], stop) if match.end() == stop), None)
    if not controls or last is None:
        return None
    return _Form(text[controls[-1] : start], text[start : texts[0]], last, text.count(last, texts[1], stop))


def _place(text: str, texts: Range | None, form: _Form | None) -> Range | None:
    """Return the place of a turn with a form; None if the text around it differs."""
    if texts is None or form is None:
        return None
    start, stop = texts[0] - len(form.before), texts[1]
    if not text.startswith(form.prompt + form.before, start - len(form.prompt)):
        return None
    for _ in range(form.times):
        stop = text.find(form.end, stop) + len(form.end)
        if stop < len(form.end):
            return None
    return start, stop


def _parts_of(message: Any) -> object:
    """Return what a message consists of, without its texts."""
    texts = [text for text in _texts_of(message) if text.strip()]
    markers = sorted({marker for text in texts for marker in _MARKERS.findall(text)})
    calls = message.get("tool_calls") or ()
    has_content = any(text.strip() for text in _contents_of(message))
    return message["role"], has_content, len(texts) - has_content, min(len(calls), 2), *markers


def _contents_of(message: Any) -> list[str]:
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part.get("text") or "" for part in content]


def _texts_of(message: Any) -> list[str]:
    return [*_contents_of(message), *(message.get(key) or "" for key in REASONING_KEYS)]
