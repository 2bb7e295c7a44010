"""Locate the trained turns of a conversation in its rendered text.

    prompt of turn k  = the rendering of messages[:k] with the generation prompt            the model reads it
    answer of turn k  = the text that the rendering of messages[:k+1] adds to the prompt    the model writes it

    together  [prompt 1 ▓answer 1▓ … ▓answer 2▓ … ▓answer 3▓]                 one sample, the whole rendering
    auto      [prompt 1 ▓answer 1▓ … ▓answer 2▓] [prompt 3 … ▓answer 3▓]      the fewest samples
    apart     [prompt 1 ▓answer 1▓] [prompt 2 … ▓answer 2▓] [prompt 3 … ▓answer 3▓]      one sample per turn

Messages that no model writes, such as user messages, are trained on if the data says so (see `flagged`). They are part
of the sample of the next answer, or of a last sample if no answer follows.

Many templates render a turn differently once another turn follows: they leave reasoning out of the history, or write an
end token only at the end of the conversation. In this case, `together` would train on a text that the model never sees.
A sample ends with a turn after exactly its prompt. It also trains on earlier turns if its text starts with their
prompts and continues with what the model writes (see `cover`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from tasks.templates.jinja.turns.answers import Answers, Render, difference
from tasks.templates.jinja.turns.cover import Cover
from tasks.templates.jinja.turns.flagged import NotLocated, Range, flagged_ranges

Turns = Literal["auto", "together", "apart"]


class Located(NamedTuple):
    """A sample as text, with the ranges of its trained answers.

    `turns` are the messages that these ranges hold, and `turn` is the message with which the sample ends; it is None if
    the sample is the whole conversation. `plain` is true if the rendering of each trained turn starts with the turn's
    prompt. In this case, the content of the answer did not matter for locating it. `flagged` are the ranges of messages
    that no model writes and that are trained on because of a flag.
    """

    text: str
    ranges: list[Range]
    turn: int | None
    turns: Sequence[int]
    plain: bool = True
    flagged: Sequence[Range] = ()


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
    `every` is true, the prompt of each turn is rendered, instead of one of each kind (see `cover`). Raises NotLocated
    if a turn cannot be located.
    """
    answers = [k for k in trained if messages[k]["role"] == "assistant"]
    others = [k for k in trained if k not in answers]
    pairs = Answers(render, messages, whole, ends, eos)
    cover = Cover(render, messages, ends, pairs.range_in, every)
    if turns != "apart" and not last:
        ranges = cover.ranges_of(whole, answers, len(messages), False)
        if ranges is not None:
            flagged = flagged_ranges(lambda found: render(found, False), messages, whole, others, ranges, ends)
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
        ranges = [*cover.places(text, group[:-1], group[-1]), (len(prompt), len(text))]
        before = [other for other in others if (rest[-1] if rest else -1) < other < group[-1]]
        flagged = flagged_ranges(
            lambda found: render(found, True), messages[: group[-1]], prompt, before, ranges[:-1], ends
        )
        samples.insert(0, Located(text, ranges, group[-1], group, flagged=flagged))
    final = answers[-1] if answers else -1
    if after := [other for other in others if other > final]:  # no answer follows
        part = messages[: after[-1] + 1]
        text = render(list(part), False)
        flagged = flagged_ranges(lambda found: render(found, False), part, text, after, [], ends)
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


def is_written(value: str, answer: str) -> bool:
    """Return whether an answer contains a value as text or as JSON.

    White space is ignored.
    """
    if value in answer:
        return True
    written = "".join(answer.split())
    forms = (value, *(json.dumps(value, ensure_ascii=flag)[1:-1] for flag in (False, True)))
    return any("".join(form.split()) in written for form in forms)
