"""Locate the trained turns of a conversation in its rendered text.

    prompt of turn k  = the rendering of messages[:k] with the generation prompt            the model reads it
    answer of turn k  = the text that the rendering of messages[:k+1] adds to the prompt    the model writes it

    together  [prompt 1 ▓answer 1▓ … ▓answer 2▓ … ▓answer 3▓]                 one sample, the whole rendering
    auto      [prompt 1 ▓answer 1▓ … ▓answer 2▓] [prompt 3 … ▓answer 3▓]      the fewest samples
    apart     [prompt 1 ▓answer 1▓] [prompt 2 … ▓answer 2▓] [prompt 3 … ▓answer 3▓]      one sample per turn
    as_rendered  like together, but with each answer as it is there, even if it differs from inference

Many templates render a turn differently once another turn follows: they leave reasoning out of the history, or write an
end token only at the end of the conversation. In this case, `together` would train on a text that the model never sees.
A sample ends with a turn after exactly its prompt. It also trains on earlier turns if its text starts with their
prompts and continues with what the model writes (see `Cover`).

Messages that no model writes, such as user messages, are trained on if the data says so (see `flagged_ranges`). They
are part of the sample of the next answer, or of a last sample if no answer follows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import count, islice, pairwise
from typing import Any, Literal, NamedTuple

from packcorpus.tasks.conversations.answers import REASONING_KEYS
from packcorpus.tasks.templates.jinja.turns.answers import Answers, NotLocated, Render, difference
from packcorpus.tasks.templates.jinja.turns.marks import Range, contents_of, places_of
from packcorpus.tasks.templates.jinja.turns.one_rendering import OneRendering

Turns = Literal["auto", "together", "apart", "as_rendered"]

# Each of so few turns is rendered.
FEW = 3

# Markers in texts that templates look for. Texts with different ones are of different kinds.
_MARKERS = re.compile(r"</?[\w:]*(?:think|tool)\w*>|\[/?(?:THINK|TOOL)\w*\]|<\|\w*(?:channel|THINK|tool)\w*\|>")


class Located(NamedTuple):
    """A sample as text, with the ranges of its trained answers.

    `turns` are the messages that these ranges hold, and `turn` is the message with which the sample ends; it is None if
    the sample is the whole conversation. `plain` is true if the rendering of each trained turn starts with the turn's
    prompt. In this case, the content of the answer did not matter for locating it. `flagged` are the ranges of messages
    that no model writes and that are trained on because of a flag. `unlike` is the number of turns that do not stand
    after their prompts, and `changed` of those that are not as the model writes them.
    """

    text: str
    ranges: list[Range]
    turn: int | None
    turns: Sequence[int]
    plain: bool = True
    flagged: Sequence[Range] = ()
    unlike: int = 0
    changed: int = 0

    @property
    def answers(self) -> list[tuple[int, Range]]:
        """Return the trained answers by their messages, with their ranges."""
        return [*zip(self.turns, self.ranges, strict=False)]


def locate(
    render: Render,
    messages: Sequence[Any],
    whole: str,
    trained: Sequence[int],
    turns: Turns,
    ends: re.Pattern[str],
    eos: str = "",
    last: Sequence[int] = (),
    every: bool = True,
) -> list[Located]:
    """Return the samples of a conversation.

    `whole` is the rendering of the conversation, and `trained` has the indices of the trained turns. `ends` matches a
    control token, and `eos` is the control token at which a model stops. A sample ends after each turn of `last`. If
    `every` is true, the prompt of each turn is rendered, instead of one of each kind (see `Cover`). Raises NotLocated
    if a turn cannot be located.
    """
    answers = [k for k in trained if messages[k]["role"] == "assistant"]
    others = [k for k in trained if k not in answers]
    pairs = Answers(render, messages, whole, ends, eos)
    cover = Cover(render, messages, ends, pairs.range_in, every)
    if turns == "as_rendered":
        rendering = OneRendering(render, messages, whole, ends, pairs, cover.kinds, every)
        places = rendering.ranges_of(answers)
        of_answers = [*places.values()]
        flagged = flagged_ranges(lambda marked: render(marked, False), messages, whole, others, of_answers, ends)
        differs = rendering.unlike(answers), rendering.changed + len(answers) - len(places)
        return [Located(whole, of_answers, None, [*places], pairs.are_plain, flagged, *differs)]
    if turns != "apart" and not last:
        ranges = cover.ranges_of(whole, answers, len(messages), False)
        if ranges is not None:
            flagged = flagged_ranges(lambda marked: render(marked, False), messages, whole, others, ranges, ends)
            return [Located(whole, ranges, None, answers, pairs.are_plain, flagged)]
        if turns == "together":
            raise pairs.difference(answers)
    samples: list[Located] = []
    rest = answers
    while rest:
        prompt, answer = pairs.of(rest[-1])
        text = prompt + answer
        first = len(rest) - 1 if turns == "apart" else cover.first_of(text, rest)
        first = max([first, *(n for n, k in enumerate(rest[:-1], 1) if k in last)])
        group, rest = rest[first:], rest[:first]
        ranges = [*(cover.ranges_of(text, group[:-1], group[-1], True) or ()), (len(prompt), len(text))]
        before = [other for other in others if (rest[-1] if rest else -1) < other < group[-1]]
        flagged = flagged_ranges(
            lambda marked: render(marked, True), messages[: group[-1]], prompt, before, ranges[:-1], ends
        )
        samples.insert(0, Located(text, ranges, group[-1], group, flagged=flagged))
    final = answers[-1] if answers else -1
    if after := [other for other in others if other > final]:  # no answer follows
        part = messages[: after[-1] + 1]
        text = render(list(part), False)
        flagged = flagged_ranges(lambda marked: render(marked, False), part, text, after, [], ends)
        samples.append(Located(text[: flagged[-1][1]], [], after[-1], [], flagged=flagged))
    return [sample._replace(plain=pairs.are_plain) for sample in samples]


def prefix_ranges(render: Render, messages: Sequence[Any], whole: str, turns: Sequence[int]) -> list[Range]:
    """Return the ranges of turns, with all text that the template writes for them.

    The rendering of the messages before a turn must be a prefix of the rendering through the turn, and the rendering
    through the turn must be a prefix of `whole`. Otherwise, raises NotLocated.
    """
    ranges = []
    for k in turns:
        before = render(list(messages[:k]), False) if k else ""
        through = render(list(messages[: k + 1]), False) if k + 1 < len(messages) else whole
        if not through.startswith(before):
            raise NotLocated(k, difference(through, before))
        if not whole.startswith(through):
            raise NotLocated(k, difference(whole, through))
        ranges.append((len(before), len(through)))
    return ranges


class Cover:
    """The turns that one rendering trains on, each after exactly its own prompt.

        R = prompt of turn k + answer of turn k
        R trains on an earlier turn j too if it starts with the prompt of j and continues with the answer of j

            user 1, call, result, call, result, answer, user 2, call, result, answer
            └────────── R of turn 5 ─────────────────┘          three turns
            └────────── R of turn 9, without the reasoning of 1, 3, and 5 ─────────┘  two turns

    Which turns a rendering holds changes only where the template changes its mind, usually at a user message. So the
    longest group of turns before k is a sample, and the rest is divided in the same way, which takes the fewest
    samples.

    Two renderings for each turn would make the time grow with the square of the number of turns. Turns of one kind
    (what they and the messages beside them consist of) are written alike, so the first and the last one of each kind
    are rendered, and the others are found in R: marks in the texts of turns show where each turn is. If something does
    not fit, each turn is rendered. The judge of the engines renders each turn of the conversations that it compares.

    `range_in` returns the range of a turn in a text, or None if its prompt or its answer differs there. If `every` is
    true, all turns are compared.
    """

    def __init__(
        self,
        render: Render,
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
        known = self._compared(text, turns)
        if known is None:
            return None
        if len(known) < len(turns):
            texts = places_of(text, self._messages[:count], lambda marked: self._render(marked, prompt), ("assistant",))
            forms = {self.kinds[k]: _form(text, known[k], texts.get(k), self._ends) for k in known}
            for k in turns:
                if k not in known:
                    place = _place_of(text, texts.get(k), forms[self.kinds[k]]) or self._range_in(text, k)
                    if place is None:
                        return None
                    known[k] = place
        places = [known[k] for k in turns]
        if any(place[1] > following[0] for place, following in pairwise(places)):
            return [place for k in turns if (place := self._range_in(text, k))]
        return places

    def first_of(self, text: str, turns: Sequence[int]) -> int:
        """Return the index of the first of the last turns that a text, up to them, holds."""
        last = len(turns) - 1
        if self._every:
            while last and self._range_in(text, turns[last - 1]):
                last -= 1
            return last
        if self._compared(text, turns[:-1]) is not None:
            return 0
        starts = [
            n
            for n, (turn, following) in enumerate(pairwise(turns), 1)
            if any(message["role"] == "user" for message in self._messages[turn + 1 : following])
        ]
        first = last
        for start in [*reversed(starts), 0]:
            if not self._range_in(text, turns[first - 1]):
                return first
            if self._compared(text, turns[start:-1]) is None:
                low, high = start + 1, first  # the template changes its mind within these turns
                while low < high:
                    middle = (low + high) // 2
                    low, high = (middle + 1, high) if self._compared(text, turns[middle:-1]) is None else (low, middle)
                return low
            first = start
        return first

    def _compared(self, text: str, turns: Sequence[int]) -> dict[int, Range] | None:
        """Return the ranges of the first and the last turn, in all and of each kind.

        Returns None if the text does not hold one of them.
        """
        if not self._every and len(turns) > FEW:
            first = {self.kinds[k]: k for k in reversed(turns)}
            last = {self.kinds[k]: k for k in turns}
            turns = sorted({turns[0], turns[-1], *first.values(), *last.values()})
        ranges = {}
        for k in turns:
            place = self._range_in(text, k)
            if place is None:
                return None
            ranges[k] = place
        return ranges

    @cached_property
    def kinds(self) -> list[object]:
        """Return a value for each message that is equal for messages of one kind."""
        parts: list[object] = []
        for message in self._messages:
            contents = [text for text in contents_of(message) if text.strip()]
            reasoning = [text for key in REASONING_KEYS if (text := message.get(key) or "").strip()]
            markers = sorted({marker for text in (*contents, *reasoning) for marker in _MARKERS.findall(text)})
            calls = min(len(message.get("tool_calls") or ()), 2)
            others = len(contents) + len(reasoning) - bool(contents)
            parts.append((message["role"], bool(contents), others, calls, *markers))
        roles = [*(message["role"] for message in self._messages[1:]), ""]
        return [*zip([(), *parts], parts, roles, strict=False)]


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
    """Return the form of a turn at a known place, if control tokens show it."""
    start, stop = place
    if texts is None or not start <= texts[0] <= texts[1] <= stop:
        return None
    controls = [match.start() for match in ends.finditer(text, max(0, start - 200), start)]
    last = next((match[0] for match in ends.finditer(text, texts[1], stop) if match.end() == stop), None)
    if not controls or last is None:
        return None
    return _Form(text[controls[-1] : start], text[start : texts[0]], last, text.count(last, texts[1], stop))


def _place_of(text: str, texts: Range | None, form: _Form | None) -> Range | None:
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


def flagged_ranges(
    render: Callable[[list[Any]], str],
    messages: Sequence[Any],
    text: str,
    turns: Sequence[int],
    answers: Sequence[Range],
    ends: re.Pattern[str],
) -> list[Range]:
    """Return the ranges of messages that a flag in the data adds, in ascending order.

        … <|im_start|>▓user\\nWhat is 6 × 7?<|im_end|>▓\\n<|im_start|>assistant\\n42.<|im_end|>     with "train": true

    No model writes such a message. Its range is the text between two control tokens, with the second one. A label
    within a text would cut the text in two, and the tokens would differ from those of the prompt that the model reads
    at inference.

    `text` is the rendering of `messages`, and `turns` has the indices of those to locate. `ends` matches a control
    token. An answer in `answers` also ends a range. Raises NotLocated if the template does not write a message in one
    place, or writes it in one text with another message that is not trained on.
    """
    if not turns:
        return []
    controls = [match.span() for match in ends.finditer(text)]
    mark, other_mark = islice((mark for mark in map("m-a-r-k-{}-".format, count()) if mark not in text), 2)
    ranges = set()
    for k in turns:
        marked = [_with(message, mark) if n == k else message for n, message in enumerate(messages)]
        before, *rest = render(marked).split(mark)
        if len(rest) != 1 or before + rest[0] != text:
            raise NotLocated(k, "the template does not write its content in one place")
        place = len(before)
        start = max([0, *(stop for _, stop in (*controls, *answers) if stop <= place)])
        stop = min([len(text), *(stop for first, stop in controls if first >= place)])
        stop = min([stop, *(first for first, _ in answers if first >= place)])
        ranges.add((start, stop))
        part = text[start:place] + mark + text[place:stop]
        for other in range(len(messages)):
            if other not in turns and part not in render(
                [_with(message, other_mark) if n == other else message for n, message in enumerate(marked)]
            ):
                raise NotLocated(k, f"the template writes it in one text with messages[{other}]")
    return sorted(ranges)


def _with(message: Any, mark: str) -> Any:
    """Return a message with a mark in its content, reasoning, and names of calls.

    The mark is in the middle of a content, or a further part of it. Nothing is added to an empty content.
    """
    content, marked = message.get("content"), {**message}
    if isinstance(content, str) and content:
        marked["content"] = content[: len(content) // 2] + mark + content[len(content) // 2 :]
    elif content:
        marked["content"] = [*content, {"type": "text", "text": mark}]
    marked |= {key: mark for key in REASONING_KEYS if message.get(key)}
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [{**call, "function": {**call["function"], "name": mark}} for call in calls]
    return marked
