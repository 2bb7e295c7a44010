"""Locate the trained turns of a conversation in its rendered text.

    prompt of turn k  = the rendering of messages[:k] with the generation prompt            the model reads it
    answer of turn k  = the text that the rendering of messages[:k+1] adds to the prompt    the model writes it

    together  [prompt 1 ▓answer 1▓ … prompt 2 ▓answer 2▓]       one sample, if the whole rendering contains them all
    apart     [prompt 1 ▓answer 1▓] [prompt 2 … ▓answer 2▓]     one sample per turn, each after exactly its prompt

Messages that no model writes, such as user messages, are trained on if the data says so (see `flagged`). They are part
of the sample of the next answer, or of a last sample if no answer follows.

Many templates render a turn differently once another turn follows: they leave reasoning out of the history, or write an
end token only at the end of the conversation. In this case, `together` would train on a text that the model never sees.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from tasks.core.printable import shown
from tasks.templates.jinja.flagged import NotLocated, Range, flagged_ranges

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
# Upper bound for the length of such a start.
MOST_OF_MARKER = 80


class Located(NamedTuple):
    """A sample as text, with the ranges of its trained answers.

    `turn` is None if the sample is the whole conversation. `plain` is true if the rendering of each trained turn starts
    with the turn's prompt. In this case, the content of the answer did not matter for locating it. `flagged` are the
    ranges of messages that no model writes and that are trained on because of a flag.
    """

    text: str
    ranges: list[Range]
    turn: int | None
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
) -> list[Located]:
    """Return the samples of a conversation.

    `whole` is the rendering of the conversation, and `trained` has the indices of the trained turns. `ends` matches a
    control token, and `eos` is the control token at which a model stops. Raises NotLocated if a turn cannot be located.
    """
    pairs, plain = [], True
    answers = [k for k in trained if messages[k]["role"] == "assistant"]
    others = [k for k in trained if k not in answers]
    for k in answers:
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
            ranges = [place for place in found if place]
            flagged = flagged_ranges(lambda found: render(found, False), messages, whole, others, ranges, ends)
            return [Located(whole, ranges, None, plain, flagged)]
        if turns == "together":
            k, prompt, answer = pairs[different]
            raise NotLocated(k, f"{_difference(whole, prompt + answer)}, once more turns follow; set turns: auto")
    samples, last = [], -1
    for k, prompt, answer in pairs:
        before = [other for other in others if last < other < k]
        flagged = flagged_ranges(lambda found: render(found, True), messages[:k], prompt, before, [], ends)
        samples.append(Located(prompt + answer, [(len(prompt), len(prompt) + len(answer))], k, plain, flagged))
        last = k
    if after := [other for other in others if other > last]:  # no answer follows
        rest = messages[: after[-1] + 1]
        text = render(list(rest), False)
        flagged = flagged_ranges(lambda found: render(found, False), rest, text, after, [], ends)
        samples.append(Located(text[: flagged[-1][1]], [], after[-1], plain, flagged))
    return samples


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


def answer_of(turn: int, message: Any, prompt: str, base: Callable[[], str], alone: str, ends: re.Pattern[str]) -> str:
    """Return the text that the model writes after `prompt`.

    `alone` is the rendering that ends with this turn. `base` renders the messages before the turn without a generation
    prompt. White space after the last control token is not part of the answer. Raises NotLocated if the answer cannot
    be determined.
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
    """Return an answer up to its EOS token.

    Some templates write the start of the next turn after every turn.
    """
    stop = answer.find(eos) if eos else -1
    return answer[: stop + len(eos)] if stop >= 0 and answer[:stop].strip() else answer


def _after_other_text(
    message: Any, prompt: str, base: Callable[[], str], alone: str, ends: re.Pattern[str]
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
    if ends.search(header) and alone.count(header) == prompt.count(header):
        return alone[alone.rindex(header) + len(header) :]
    return None


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
