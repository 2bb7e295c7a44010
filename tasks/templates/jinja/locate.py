"""Locate the trained turns of a conversation in what its model reads and writes at inference.

    prompt of turn k  = the rendering of messages[:k] with the generation prompt    what the model reads
    answer of turn k  = what the rendering of messages[:k+1] adds to that prompt    what the model writes

    together  [prompt 1 ▓answer 1▓ … prompt 2 ▓answer 2▓]       one sample, if the whole rendering contains them all
    apart     [prompt 1 ▓answer 1▓] [prompt 2 … ▓answer 2▓]     one sample per turn, each after exactly its prompt

Many templates render a turn differently once another one follows: they leave reasoning out of the history, or write an
end token only at the very end. Then together would train on a text that the model never sees.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from tasks.core.printable import shown

Range = tuple[int, int]
Turns = Literal["auto", "together", "apart"]
Render = Callable[[list[Any], bool], str]  # messages, generation prompt

# The markers around reasoning: <think>, <seed:think>, <mm:think>, [THINK], <|START_THINKING|>, and the like.
_OPENS = r"<(?P<tag>[\w:]*think(?:ing)?)>|(?P<mistral>\[THINK\])|(?P<cohere><\|START_THINKING\|>)"
_CLOSES = r"</[\w:]*think(?:ing)?>|\[/THINK\]|<\|END_THINKING\|>"
_OPEN = re.compile(rf"\s*(?:{_OPENS})\s*")
_CLOSE = re.compile(rf"\s*(?:{_CLOSES})")
MARKER = re.compile(rf"\s*(?:{_OPENS}|{_CLOSES})")
_EMPTY_BLOCK = re.compile(rf"\s*(?:(?:{_OPENS})?\s*(?:{_CLOSES})|<\|channel>thought\s*<channel\|>)\s*")
# A prompt that ends like this leaves the model no room to reason.
_CLOSED = re.compile(rf"(?:{_CLOSES}|<channel\|>)\s*\Z")
# The start of a marker, in which the renderings of two turns may part.
_MARKUP = re.compile(r"<[^<>\n]{0,60}\Z|\[[A-Z_/]{0,40}\Z")
# More characters than such a start has.
MOST_OF_MARKER = 80


class Located(NamedTuple):
    """A sample: a text, the ranges of it that are trained on, and the turn, or None for the whole conversation.

    `plain`: the rendering of every trained turn starts with its prompt, so that nothing of the answer mattered for it.
    """

    text: str
    ranges: list[Range]
    turn: int | None
    plain: bool = True


class NotLocated(Exception):
    """Turn `turn` cannot be located: `problem` says how its two renderings differ."""

    def __init__(self, turn: int, problem: str):
        super().__init__(turn, problem)
        self.turn, self.problem = turn, problem


def locate(
    render: Render,
    messages: Sequence[Any],
    whole: str,
    trained: Sequence[int],
    turns: Turns,
    ends: re.Pattern[str],
    eos: str = "",
) -> list[Located]:
    """Return the samples of a conversation.

    `whole` is its rendering, `trained` are the numbers of the trained turns, `ends` matches a control token, and `eos`
    is the one at which a model stops. Raises NotLocated.
    """
    pairs, plain = [], True
    for k in trained:
        prompt = render(list(messages[:k]), True)
        alone = whole if k + 1 == len(messages) else render(list(messages[: k + 1]), False)
        base = partial(render, list(messages[:k]), False)
        plain = plain and alone.startswith(prompt)
        answer = _until(eos, answer_of(k, messages[k], prompt, base, alone, ends))
        pairs.append((k, prompt, answer))
    if turns != "apart":
        found = [_range_in(whole, prompt, answer, ends) for _, prompt, answer in pairs]
        different = next((n for n, place in enumerate(found) if place is None), None)
        if different is None:
            return [Located(whole, [place for place in found if place], None, plain)]
        if turns == "together":
            k, prompt, answer = pairs[different]
            raise NotLocated(k, f"{_difference(whole, prompt + answer)}, once more turns follow; set turns: auto")
    return [
        Located(prompt + answer, [(len(prompt), len(prompt) + len(answer))], k, plain) for k, prompt, answer in pairs
    ]


def prefix_ranges(render: Render, messages: Sequence[Any], whole: str, turns: Sequence[int]) -> list[Range]:
    """Return the ranges of turns with everything that the template writes for them. Raises NotLocated.

    The rendering of the messages before a turn must be a prefix of the one through it, and this one of the whole.
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


def answer_of(turn: int, message: Any, prompt: str, base: Callable[[], str], alone: str, ends: re.Pattern[str]) -> str:
    """Return what the model writes after `prompt`, from the rendering `alone` that ends with this turn.

    `base` renders the prompt without the generation prompt. White space after the last control token is not part of the
    answer. Raises NotLocated.
    """
    if alone.startswith(prompt):
        answer = alone[len(prompt) :]
    else:
        written = _after_other_text(message, prompt, base, alone, ends)
        if written is None:
            closed = "; the prompt closes the reasoning: set `reasoning: drop`, or an option that lets the model reason"
            raise NotLocated(turn, _difference(alone, prompt) + closed * _is_closed(message, prompt))
        answer = written
    last = max((match.end() for match in ends.finditer(answer)), default=0)
    return answer[:last] if last and not answer[last:].strip() else answer


def _until(eos: str, answer: str) -> str:
    """Return an answer up to its EOS token: some templates write the start of the next turn after every turn."""
    stop = answer.find(eos) if eos else -1
    return answer[: stop + len(eos)] if stop >= 0 and answer[:stop].strip() else answer


def _after_other_text(
    message: Any, prompt: str, base: Callable[[], str], alone: str, ends: re.Pattern[str]
) -> str | None:
    """Return the answer of a turn whose rendering does not start with its prompt; None if it cannot be determined."""
    same = _common(prompt, alone)
    rest, written = prompt[same:], alone[same:]
    reasoning = _reasoning(message)
    if not rest.strip():
        return written
    if _is_closed(message, prompt):
        return None
    if reasoning:
        # The prompt introduces the reasoning, unless this is a content that starts with the same words.
        start = written.lstrip()
        if start.startswith(reasoning) and _content(message) in start[len(reasoning) :]:
            return written
    elif _EMPTY_BLOCK.fullmatch(rest):
        return None if _OPEN.match(written) else written
    if opened := _OPEN.fullmatch(rest):
        if _CLOSE.match(written):
            return None if reasoning else written
        # The prompt opens the reasoning, and the template leaves it out of the turn. The model writes it all the same.
        close = "[/THINK]" if opened["mistral"] else "<|END_THINKING|>" if opened["cohere"] else f"</{opened['tag']}>"
        return f"{reasoning}\n{close}\n\n{written.lstrip()}"
    before = base()
    header = prompt.removeprefix(before) if before and prompt.startswith(before) else ""
    is_bare = not ends.sub("", rest).strip() and (header == rest or prompt == before)
    if is_bare and _starts_with_turn(message, written, ends):
        return written  # it continues the turn before it, without the header, or the end of that turn, in the prompt
    # An earlier message is written differently if it is the last one: then the answer follows the generation prompt,
    # or the last control token if there is none.
    if not header and (last := list(ends.finditer(prompt))) and last[-1].end() == len(prompt):
        header = last[-1].group()
    if ends.search(header) and alone.count(header) == prompt.count(header):
        return alone[alone.rindex(header) + len(header) :]
    return None


def _is_closed(message: Any, prompt: str) -> bool:
    """Return whether a turn has reasoning, and its prompt has closed the reasoning already."""
    return bool(_reasoning(message) and _CLOSED.search(prompt))


def _starts_with_turn(message: Any, written: str, ends: re.Pattern[str]) -> bool:
    """Return whether a text starts with the content of a turn, or with its first call after at most one marker."""
    content = _content(message)
    if content and written.lstrip().startswith(content):
        return True
    calls = message.get("tool_calls") or ()
    lead, found, _ = written.partition(calls[0]["function"]["name"]) if calls else ("", "", "")
    return bool(found) and len(ends.findall(lead)) <= 1 and not _reasoning(message)


def _range_in(whole: str, prompt: str, answer: str, ends: re.Pattern[str]) -> Range | None:
    """Return the range of an answer in the rendering of the whole conversation; None if it is not the same there."""
    if not whole.startswith(prompt):
        return None
    start = len(prompt)
    stops = [match.end() for match in ends.finditer(answer)]
    if whole.startswith(answer, start):
        stop = start + len(answer)
        # A turn without an end token of its own ends, for the model, with the token that begins the next turn.
        following = None if answer and stops and stops[-1] == len(answer) else ends.match(whole, stop)
        return start, following.end() if following else stop
    # Tokens that are written at the very end of a conversation only, after the turn's own end token.
    for before, stop in zip([0, *stops], stops, strict=False):
        only_ends = not ends.sub("", answer[stop:]).strip()
        if only_ends and whole.startswith(answer[:stop], start) and (before or answer[before:stop].strip()):
            return start, start + stop
    return None


def is_written(value: str, answer: str) -> bool:
    """Return whether a value is in an answer, as text or as JSON, whatever white space there is."""
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
    """Return the length of the common start of two texts, which does not end within a marker."""
    same = common_start(one, other)
    cut = _MARKUP.search(one, max(0, same - MOST_OF_MARKER), same)
    return cut.start() if cut else same


def part_at_once(one: str, other: str) -> bool:
    """Return whether two texts part at their start, or within a marker there, which counts as the same."""
    return common_start(one, other) < min(len(one), len(other)) and _common(one, other) == 0


def common_start(one: str, other: str) -> int:
    """Return the length of the common start of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _difference(one: str, other: str) -> str:
    """Describe where the rendering `one` leaves the text that it should start with, `other`."""
    same = _common(one, other)
    start = max(0, same - 20)
    before, expected, found = one[start:same], other[same : same + 40], one[same : same + 40]
    return f"after {shown(before)}, {shown(expected)} is expected, but {shown(found)} follows"
