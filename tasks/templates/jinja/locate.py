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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from tasks.core.printable import shown
from tasks.templates.jinja.cover import Cover
from tasks.templates.jinja.flagged import NotLocated, Range, flagged_ranges
from tasks.templates.jinja.marks import places_of

Turns = Literal["auto", "together", "apart"]
Render = Callable[[list[Any], bool], str]  # messages, generation prompt

# The markers around reasoning: <think>, <seed:think>, <mm:think>, [THINK], <|START_THINKING|>, and the like.
_OPENS = r"<(?P<tag>[\w:]*think(?:ing)?)>|(?P<mistral>\[THINK\])|(?P<cohere><\|START_THINKING\|>)"
_CLOSES = r"</[\w:]*think(?:ing)?>|\[/THINK\]|<\|END_THINKING\|>"
_OPEN = re.compile(rf"\s*(?:{_OPENS})\s*")
_CLOSE = re.compile(rf"\s*(?:{_CLOSES})")
MARKER = re.compile(rf"\s*(?:{_OPENS}|{_CLOSES})")
_EMPTY_BLOCK = re.compile(rf"\s*(?:(?:{_OPENS})?\s*(?:{_CLOSES})|<\|channel>thought\s*<channel\|>)\s*")
# A prompt with this end leaves the model no room to reason.
_CLOSED = re.compile(rf"(?:{_CLOSES}|<channel\|>)\s*\Z")
# The start of a marker. Two renderings may diverge within it.
_MARKUP = re.compile(r"<[^<>\n]{0,60}\Z|\[[A-Z_/]{0,40}\Z")
_ROLES = ("system", "user", "assistant", "tool")

# Upper bound for the length of such a start.
MOST_OF_MARKER = 80


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
    every: bool = True,
) -> list[Located]:
    """Return the samples of a conversation.

    `whole` is the rendering of the conversation, and `trained` has the indices of the trained turns. `ends` matches a
    control token, and `eos` is the control token at which a model stops. If `every` is true, the prompt of each turn is
    rendered, instead of one of each kind (see `cover`). Raises NotLocated if a turn cannot be located.
    """
    answers = [k for k in trained if messages[k]["role"] == "assistant"]
    others = [k for k in trained if k not in answers]
    pairs = _Pairs(render, messages, whole, ends, eos)
    cover = Cover(render, messages, ends, pairs.range_in, every)
    if turns != "apart":
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
        group, rest = rest[first:], rest[:first]
        ranges = [*cover.places(text, group[:-1], group[-1]), (len(prompt), len(text))]
        before = [other for other in others if (rest[-1] if rest else -1) < other < group[-1]]
        flagged = flagged_ranges(
            lambda found: render(found, True), messages[: group[-1]], prompt, before, ranges[:-1], ends
        )
        samples.insert(0, Located(text, ranges, group[-1], group, flagged=flagged))
    last = answers[-1] if answers else -1
    if after := [other for other in others if other > last]:  # no answer follows
        part = messages[: after[-1] + 1]
        text = render(list(part), False)
        flagged = flagged_ranges(lambda found: render(found, False), part, text, after, [], ends)
        samples.append(Located(text[: flagged[-1][1]], [], after[-1], [], flagged=flagged))
    return [sample._replace(plain=pairs.are_plain) for sample in samples]


class _Pairs:
    """The prompts and the answers of turns, each rendered once.

    `are_plain` is true if each of these renderings starts with the prompt.
    """

    def __init__(self, render: Render, messages: Sequence[Any], whole: str, ends: re.Pattern[str], eos: str):
        self._render, self._messages, self._whole, self._ends, self._eos = render, messages, whole, ends, eos
        self._known: dict[int, tuple[str, str]] = {}
        self.are_plain = True

    def of(self, k: int) -> tuple[str, str]:
        """Return the prompt of a turn and the answer.

        Raises NotLocated.
        """
        if k not in self._known:
            messages = self._messages
            prompt = self._render(list(messages[:k]), True)
            is_last = k + 1 == len(messages)
            alone = self._whole if is_last else self._render(list(messages[: k + 1]), False)
            base = partial(self._render, list(messages[:k]), False)
            places = partial(places_of, alone, messages[: k + 1], lambda found: self._render(found, False), _ROLES)
            self.are_plain = self.are_plain and alone.startswith(prompt)
            answer = answer_of(k, messages[k], prompt, base, alone, self._ends, places)
            self._known[k] = prompt, _until(self._eos, answer)
        return self._known[k]

    def range_in(self, text: str, k: int) -> Range | None:
        """Return the range of a turn in a text; None if its prompt or its answer differs there."""
        return _range_in(text, *self.of(k), self._ends)

    def difference(self, answers: Sequence[int]) -> NotLocated:
        """Return the error that names the first turn which the whole rendering does not hold."""
        k = next(k for k in answers if self.range_in(self._whole, k) is None)
        difference = _difference(self._whole, "".join(self.of(k)))
        return NotLocated(k, f"{difference}, once more turns follow; set turns: auto")


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
            raise NotLocated(k, _difference(through, before))
        if not whole.startswith(through):
            raise NotLocated(k, _difference(whole, through))
        ranges.append((len(before), len(through)))
    return ranges


def answer_of(
    turn: int,
    message: Any,
    prompt: str,
    base: Callable[[], str],
    alone: str,
    ends: re.Pattern[str],
    places: Callable[[], dict[int, Range]] = dict,
) -> str:
    """Return the text that the model writes after `prompt`.

    `alone` is the rendering that ends with this turn. `base` renders the messages before the turn without a generation
    prompt. `places` returns where it writes the texts of each message. White space after the last control token is not
    part of the answer. Raises NotLocated if the answer cannot be determined.
    """
    if alone.startswith(prompt):
        answer = alone[len(prompt) :]
    else:
        written = _after_other_text(turn, message, prompt, base, alone, ends, places)
        if written is None:
            closed = "; the prompt closes the reasoning: set `reasoning: drop`, or an option that lets the model reason"
            raise NotLocated(turn, _difference(alone, prompt) + closed * _is_closed(message, prompt))
        answer = written
    last = max((match.end() for match in ends.finditer(answer)), default=0)
    return answer[:last] if last and not answer[last:].strip() else answer


def _until(eos: str, answer: str) -> str:
    """Return an answer up to its EOS token.

    Some templates write the start of the next turn after every turn.
    """
    stop = answer.find(eos) if eos else -1
    return answer[: stop + len(eos)] if stop >= 0 and answer[:stop].strip() else answer


def _after_other_text(
    turn: int,
    message: Any,
    prompt: str,
    base: Callable[[], str],
    alone: str,
    ends: re.Pattern[str],
    places: Callable[[], dict[int, Range]],
) -> str | None:
    """Return the answer of a turn whose rendering does not start with its prompt.

    Return None if the answer cannot be determined.
    """
    same = _common(prompt, alone)
    rest, written = prompt[same:], alone[same:]
    reasoning = _reasoning(message)
    if not rest.strip():
        return written
    if _is_closed(message, prompt):
        return None
    if reasoning:
        # The prompt introduces the reasoning. The second test rules out a content that starts with the same words.
        start = written.lstrip()
        if start.startswith(reasoning) and _content(message) in start[len(reasoning) :]:
            return written
    elif _EMPTY_BLOCK.fullmatch(rest):
        return None if _OPEN.match(written) else written
    if opened := _OPEN.fullmatch(rest):
        if _CLOSE.match(written):
            return None if reasoning else written
        # The prompt opens the reasoning, and the template leaves it out of the turn. The model still writes it.
        close = "[/THINK]" if opened["mistral"] else "<|END_THINKING|>" if opened["cohere"] else f"</{opened['tag']}>"
        return f"{reasoning}\n{close}\n\n{written.lstrip()}"
    before = base()
    header = prompt.removeprefix(before) if before and prompt.startswith(before) else ""
    is_bare = not ends.sub("", rest).strip() and (header == rest or prompt == before)
    if is_bare and _starts_with_turn(message, written, ends):
        return written  # it continues the previous turn: only the prompt has the header, or the end of that turn
    # The template writes an earlier message differently if it is the last message. The answer then follows the
    # generation prompt, or the last control token if there is no generation prompt.
    if not header and (last := list(ends.finditer(prompt))) and last[-1].end() == len(prompt):
        header = last[-1].group()
    if not ends.search(header):
        return None
    if alone.count(header) == prompt.count(header):
        return alone[alone.rindex(header) + len(header) :]
    found = places()  # the number of turns differs: reasoning of earlier turns may be turns of their own
    first = alone.rfind(header, 0, found[turn][0]) + len(header) if turn in found else 0
    is_own = first >= len(header) and all(last <= first for k, (_, last) in found.items() if k != turn)
    return alone[first:] if is_own else None


def _is_closed(message: Any, prompt: str) -> bool:
    """Return whether a turn has reasoning, but its prompt closes the reasoning."""
    return bool(_reasoning(message) and _CLOSED.search(prompt))


def _starts_with_turn(message: Any, written: str, ends: re.Pattern[str]) -> bool:
    """Return whether a text starts with the content or the first call of a turn.

    At most one control token may precede the name of the call. A turn with reasoning cannot start with a call.
    """
    content = _content(message)
    if content and written.lstrip().startswith(content):
        return True
    calls = message.get("tool_calls") or ()
    lead, found, _ = written.partition(calls[0]["function"]["name"]) if calls else ("", "", "")
    return bool(found) and len(ends.findall(lead)) <= 1 and not _reasoning(message)


def _range_in(whole: str, prompt: str, answer: str, ends: re.Pattern[str]) -> Range | None:
    """Return the range of an answer in the rendering of the whole conversation.

    Return None if the prompt or the answer differs there.
    """
    if not whole.startswith(prompt):
        return None
    start = len(prompt)
    stops = [match.end() for match in ends.finditer(answer)]
    if whole.startswith(answer, start):
        stop = start + len(answer)
        # For the model, a turn without its own end token ends with the token that begins the next turn.
        following = None if answer and stops and stops[-1] == len(answer) else ends.match(whole, stop)
        return start, following.end() if following else stop
    # Some templates write further tokens after a turn's own end token, but only at the end of a conversation.
    for before, stop in zip([0, *stops], stops, strict=False):
        only_ends = not ends.sub("", answer[stop:]).strip()
        if only_ends and whole.startswith(answer[:stop], start) and (before or answer[before:stop].strip()):
            return start, start + stop
    return None


def is_written(value: str, answer: str) -> bool:
    """Return whether an answer contains a value as text or as JSON.

    White space is ignored.
    """
    if value in answer:
        return True
    written = "".join(answer.split())
    forms = (value, *(json.dumps(value, ensure_ascii=flag)[1:-1] for flag in (False, True)))
    return any("".join(form.split()) in written for form in forms)


def _content(message: Any) -> str:
    content = message.get("content") or ""
    return str(content if isinstance(content, str) else "".join(part["text"] for part in content)).strip()


def _reasoning(message: Any) -> str:
    return str(message.get("reasoning_content") or "").strip()


def _common(one: str, other: str) -> int:
    """Return the length of the common start of two texts, less an unfinished marker."""
    same = common_start(one, other)
    cut = _MARKUP.search(one, max(0, same - MOST_OF_MARKER), same)
    return cut.start() if cut else same


def common_start(one: str, other: str) -> int:
    """Return the length of the common start of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _difference(one: str, other: str) -> str:
    """Describe where `one` diverges from `other`, the text that it should start with."""
    same = _common(one, other)
    start = max(0, same - 20)
    before, expected, found = one[start:same], other[same : same + 40], one[same : same + 40]
    return f"after {shown(before)}, {shown(expected)} is expected, but {shown(found)} follows"
