"""Locate the turns of a conversation in its one rendering, verbatim.

    at inference   <|im_start|>assistant\\n ▓<think>\\nWhy\\n</think>\\n\\nIt is 4.<|im_end|>▓
    as rendered    <|im_start|>assistant\\n ▓It is 4.<|im_end|>▓\\n<|im_start|>user …

A turn that stands after its prompt, as the model writes it, is found like that. Templates write other turns differently
once more turns follow. Then marks show where the texts of the turn are (see `marks`). The turn begins after its header,
which is the end of its prompt, perhaps without a block of reasoning. It ends like the turn that the model writes, or
with the end token that the template writes in the history. If anything else surrounds its texts, it is not located.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from packcorpus.tasks.templates.adjust import CLOSES, OPENS
from packcorpus.tasks.templates.jinja.turns.answers import Answers, Failed, NotLocated, Render, common_start
from packcorpus.tasks.templates.jinja.turns.marks import (
    Range,
    contents_of,
    marked_messages,
    new_mark,
    reasoning_in,
    without_marks,
)
from packcorpus.tasks.templates.placeholders import GAP

# Reasoning that a prompt opens, or an empty block of it. The history may lack both.
_BLOCK = re.compile(rf"\s*(?:(?:{OPENS})?\s*(?:{CLOSES})|<\|channel>thought\s*<channel\|>)\s*")
_OPENED = re.compile(rf"(?:(?:{OPENS})(?:\s*(?:{CLOSES}))?|<\|channel>thought\s*<channel\|>)\s*\Z")


# The prompts of so many turns are rendered to count those that differ.
FEW_PROMPTS = 32


class _Form(NamedTuple):
    """What surrounds the texts of a turn.

    `header` and `head` precede its texts, and `controls` are the control tokens after them. `changed` is true if the
    model writes such a turn differently.
    """

    header: str
    head: str
    controls: list[str]
    changed: bool


# The ranges of the texts of a message by their numbers within it; None for a text that is not written as it is.
_Texts = dict[int, Range | None]


class OneRendering:
    """The turns of `whole`, the rendering of all messages.

    `ends` matches a control token, and `pairs` has the prompts and the answers of turns at inference. `kinds` has a
    value for each message that is equal for messages of one kind. If `every` is true, the prompt of each turn is
    rendered, instead of those of the first and the last turn of each kind. Raises NotLocated. `changed` is the number
    of located turns that the model writes differently.
    """

    def __init__(
        self,
        render: Render,
        messages: Sequence[Any],
        whole: str,
        ends: re.Pattern[str],
        pairs: Answers,
        kinds: Sequence[object],
        every: bool,
    ):
        self._render, self._messages, self._whole, self._ends, self._pairs = render, messages, whole, ends, pairs
        self._every, self.changed = every, 0
        users = [k for k, message in enumerate(messages) if message["role"] == "user"]
        self._rounds = [sum(user < k for user in users) for k in range(len(messages))]
        # Templates that strip texts in the history change only those with outer white space.
        bare = [tuple(text == text.strip() for text in _values(message)) for message in messages]
        self._kinds = [(kind, bare[k], self._rounds[k] == len(users)) for k, kind in enumerate(kinds)]
        self._texts = self._texts_of(messages, whole)

    def ranges_of(self, turns: Sequence[int]) -> dict[int, Range]:
        """Return the range of each turn. A turn of which nothing is written has none."""
        compared = {*turns}
        if not self._every:
            first, last = ({self._kinds[k]: k for k in order} for order in (reversed(turns), turns))
            compared = {*first.values(), *last.values()}
        ranges, forms = dict[int, Range](), dict[object, _Form]()
        for k in sorted(turns, key=lambda k: k not in compared):
            form = forms.get(self._kinds[k])
            place = None if k in compared else self._place_of(k, form)
            if place is None:
                place, form = self._pairs.range_in(self._whole, k), None
            if place is None and self._texts[k]:
                place, form = self._compare(k)
                forms[self._kinds[k]] = form
            if place:
                ranges[k] = place
                self.changed += form is not None and form.changed
        ordered = dict(sorted(ranges.items()))
        for (_, place), (k, following) in pairwise(ordered.items()):
            if place[1] > following[0]:
                raise self._problem(k)
        return ordered

    def unlike(self, turns: Sequence[int]) -> int:
        """Return the number of turns that do not stand after their prompts.

        Within a round, once a turn is written differently, it is so in the prompts of all turns after it. So a binary
        search finds the first of many turns.
        """
        if self._every or len(turns) <= FEW_PROMPTS:
            return sum(map(self._is_unlike, turns))
        count = 0
        for _, group in groupby(turns, lambda k: self._rounds[k]):
            low, high = 0, len(of_round := [*group])
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if self._is_unlike(of_round[middle]) else (middle + 1, high)
            count += len(of_round) - low
        return count

    def _is_unlike(self, k: int) -> bool:
        return not self._whole.startswith(self._render(list(self._messages[:k]), True))

    def _texts_of(self, messages: Sequence[Any], text: str) -> list[_Texts]:
        """Return where the texts of messages are in their rendering."""
        found: list[_Texts] = [{} for _ in messages]
        if "\0" in text:  # placeholders, each of which is unique
            gaps = {gap[1]: gap.span() for gap in reversed([*GAP.finditer(text)])}
            for k, message in enumerate(messages):
                values = [GAP.search(value) for value in _values(message)]
                found[k] = {n: gaps[gap[1]] for n, gap in enumerate(values) if gap and gap[1] in gaps}
            return found
        mark = new_mark(text)
        marked, texts = marked_messages(messages, mark, range(len(messages)))
        bare, places = without_marks(self._render(marked, False), mark)
        numbers = [0] * len(messages)
        for number, each in enumerate(texts):
            if number in places:
                ranges = [each.range_in(bare, place) if bare == text else None for place in places[number]]
                found[each.k][numbers[each.k]] = ranges[0]  # a result may repeat the name of its call
            numbers[each.k] += 1
        return found

    def _edges(self, k: int) -> tuple[int, Range]:
        """Return the number of the first text of a turn, and the range of all its texts."""
        ranges = [place for place in self._texts[k].values() if place]
        if len(ranges) < len(self._texts[k]):
            raise self._problem(k)
        first = min(ranges)
        number = next(n for n, place in self._texts[k].items() if place == first)
        return number, (first[0], max(stop for _, stop in ranges))

    def _compare(self, k: int) -> tuple[Range, _Form]:
        """Return the range of a turn and its form, compared with those at inference."""
        number, (first, last) = self._edges(k)
        prompt, answer = self._pairs.of(k)
        messages = list(self._messages[: k + 1])
        alone = self._render(messages, False)
        texts = self._texts_of(messages, alone)[k]
        places = [place for place in texts.values() if place]
        if texts.get(number) is None or len(places) < len(texts):
            raise self._problem(k)
        end = max(stop for _, stop in places)
        tail = next(tail for tail in self._tails(alone[end:]) if answer.endswith(tail))
        # The text of the answer before the first text that is written here.
        before = answer[: len(answer) - len(tail) - end + texts[number][0]]  # type: ignore[index]
        header, head = self._head(k, prompt, before, alone, answer, first)
        stop, controls = self._tail(k, tail, messages, header, last)
        written = self._whole[first - len(head) : stop]
        changed = not written.startswith(answer) and not answer.startswith(written)
        return (first - len(head), stop), _Form(header, head, controls, changed)

    def _tails(self, tail: str) -> Iterator[str]:
        """Yield the text after the texts of a turn, and parts through a control token."""
        yield tail
        yield from (tail[: match.end()] for match in reversed([*self._ends.finditer(tail)]))
        yield ""

    def _head(self, k: int, prompt: str, before: str, alone: str, answer: str, first: int) -> tuple[str, str]:
        """Return the header of a turn, and what is between it and the first text."""
        texts = [place for of_message in self._texts[:k] for place in of_message.values() if place]
        region = self._whole[max((stop for _, stop in texts if stop <= first), default=0) : first]
        history = self._render(list(self._messages[:k]), False) if k else ""
        header = prompt.removeprefix(history) if history and prompt.startswith(history) else ""
        start = alone.rfind(answer)
        headers = [header if self._ends.search(header) else self._from_last_control(prompt), header]
        headers += [_OPENED.sub("", each) for each in headers]
        headers += [self._from_last_control(alone[:start])] * (start > 0 and not alone.startswith(prompt))
        # Without a control token, the header could be part of the arguments of a call, which are not marked.
        may_be_text = bool(k) and not self._messages[k - 1].get("tool_calls")
        for header in headers:
            place = region.rfind(header)
            if place < 0 or not header or not (may_be_text or self._ends.search(header)):
                continue
            head = region[place + len(header) :]
            if _is_part(_without_block(head), _without_block(before)):
                return header, head
        raise self._problem(k)

    def _from_last_control(self, text: str) -> str:
        last = [*self._ends.finditer(text)][-1:]
        return text[last[0].start() :] if last else ""

    def _tail(self, k: int, tail: str, messages: list[Any], header: str, last: int) -> tuple[int, list[str]]:
        """Return the end of a turn, and the control tokens after its texts.

        `last` is the end of its texts, and `tail` is the text that follows them at inference.
        """
        if tail.strip():  # the template may strip the text in the history only
            last, tail = last + len(self._whole[last:]) - len(self._whole[last:].lstrip()), tail.lstrip()
        stops = [match.end() for match in self._ends.finditer(tail)]
        has_end = bool(stops) and stops[-1] == len(tail)
        if self._whole.startswith(tail, last):
            stop = last + len(tail)
            if not has_end and (following := self._ends.match(self._whole, stop)):
                stop = following.end()  # for the model, the turn ends with the token that begins the next turn
            return stop, self._controls(last, stop)
        if not has_end:
            raise self._problem(k)
        for stop in stops:  # some templates write further tokens at the end of a conversation only
            if not self._ends.sub("", tail[stop:]).strip() and self._whole.startswith(tail[:stop], last):
                return last + stop, self._controls(last, last + stop)
        # The template writes another end token in the history, or none.
        end = [*self._ends.finditer(tail)][-1]
        stop = last + end.start()
        if not self._whole.startswith(tail[: end.start()], last):
            raise self._problem(k)
        own = self._in_history(messages, header)
        controls = [*self._ends.finditer(own)][-1:]
        if controls and own.endswith(tail[: end.start()] + controls[0][0]):
            if not self._whole.startswith(controls[0][0], stop):
                raise self._problem(k)
            stop += len(controls[0][0])
        return stop, self._controls(last, stop)

    def _in_history(self, messages: list[Any], header: str) -> str:
        """Return messages as rendered before a prompt, through their last control token."""
        try:
            text = self._render(messages, True)
        except Failed:
            return ""
        place = text.rfind(header)
        text = text[:place] if place >= 0 else ""
        last = [*self._ends.finditer(text)][-1:]
        return text[: last[0].end()] if last and not text[last[0].end() :].strip() else text

    def _controls(self, start: int, stop: int) -> list[str]:
        return [match[0] for match in self._ends.finditer(self._whole, start, stop)]

    def _place_of(self, k: int, form: _Form | None) -> Range | None:
        """Return the range of a turn that has a known form."""
        if form is None or not form.controls or not self._texts[k] or None in self._texts[k].values():
            return None
        _, (first, stop) = self._edges(k)
        start = first - len(form.head)
        if not self._whole.startswith(form.header + form.head, start - len(form.header)):
            return None
        for control in form.controls:
            match = self._ends.search(self._whole, stop)
            if match is None or match[0] != control:
                return None
            stop = match.end()
        return start, stop

    def _problem(self, k: int) -> NotLocated:
        return NotLocated(k, "its text in the rendering of the whole conversation has other text around it")


def _without_block(text: str) -> str:
    return _BLOCK.sub("", text).strip()


def _is_part(head: str, before: str) -> bool:
    """Return whether a head is the start and the end of another one.

    The reasoning is between them.
    """
    same = common_start(head, before)
    return before.endswith(head[same:])


def _values(message: Any) -> list[str]:
    """Return the texts of a message that are marked."""
    calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    return [*reasoning_in(message), *contents_of(message), *calls]
