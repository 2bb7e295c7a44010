"""Find what the model reads before a turn and what it writes in it.

    prompt  = the rendering of messages[:k] with the generation prompt
    alone   = the rendering of messages[:k+1]
    answer  = the text that `alone` adds to the prompt

Often, `alone` does not start with the prompt: a prompt opens reasoning that is left out of the history, or the template
writes an earlier message differently if it is the last one. What belongs to the turn is then decided by comparison with
other renderings: with marks in the texts of messages, without the turn, or with other reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from packcorpus.tasks.conversations.answers import REASONING_KEYS
from packcorpus.tasks.conversations.model import OPENAI_ROLES
from packcorpus.tasks.core.printable import shown
from packcorpus.tasks.templates.adjust import CLOSES, OPENS
from packcorpus.tasks.templates.jinja.turns.marks import Range, contents_of, places_of

Render = Callable[[list[Any], bool], str]  # messages, generation prompt

_OPEN = re.compile(rf"\s*(?:{OPENS})\s*")
_CLOSE = re.compile(rf"\s*(?:{CLOSES})")
_EMPTY_BLOCK = re.compile(rf"\s*(?:(?:{OPENS})?\s*(?:{CLOSES})|<\|channel>thought\s*<channel\|>)\s*")
# A prompt with this end leaves the model no room to reason.
_CLOSED = re.compile(rf"(?:{CLOSES}|<channel\|>)\s*\Z")
# The start of a marker. Two renderings may diverge within it.
_MARKUP = re.compile(r"<[^<>\n]{0,60}\Z|\[[A-Z_/]{0,40}\Z")
# Upper bound for the length of such a start.
MOST_OF_MARKER = 80

_CLOSED_REASONING = (
    "; the prompt closes the reasoning, so set `reasoning: drop`, or an option that lets the model reason"
)

# Reasoning that no conversation has.
_OTHER = "r-e-a-s-o-n-i-n-g"


class NotLocated(Exception):
    """Turn `turn` cannot be located; `problem` describes why."""

    def __init__(self, turn: int, problem: str):
        super().__init__(turn, problem)
        self.turn, self.problem = turn, problem


class Failed(Exception):
    """The template refuses a conversation, or fails on it."""


class Answers:
    """The prompts and the answers of turns, each rendered once.

    `whole` is the rendering of all messages. `ends` matches a control token, and `eos` is the control token at which a
    model stops. `are_plain` is true if each rendering that ends with a turn starts with the prompt of the turn.
    """

    def __init__(self, render: Render, messages: Sequence[Any], whole: str, ends: re.Pattern[str], eos: str):
        self._render, self._messages, self._whole, self._ends, self._eos = render, messages, whole, ends, eos
        self._known: dict[int, tuple[str, str]] = {}
        self.are_plain = True

    def of(self, k: int) -> tuple[str, str]:
        """Return the prompt of a turn and the answer. Raises NotLocated."""
        if k not in self._known:
            turn = _Turn(self._render, list(self._messages[: k + 1]), self._whole, self._ends, self._eos)
            if k + 1 < len(self._messages):
                turn.alone = self._render(turn.messages, False)
            self.are_plain = self.are_plain and turn.alone.startswith(turn.prompt)
            self._known[k] = turn.prompt, turn.answer()
        return self._known[k]

    def range_in(self, text: str, k: int) -> Range | None:
        """Return the range of a turn in a text; None if its prompt or answer differs."""
        prompt, answer = self.of(k)
        if not text.startswith(prompt):
            return None
        start = len(prompt)
        stops = [match.end() for match in self._ends.finditer(answer)]
        if text.startswith(answer, start):
            stop = start + len(answer)
            # For the model, a turn without its own end token ends with the token that begins the next turn.
            following = None if answer and stops and stops[-1] == len(answer) else self._ends.match(text, stop)
            return start, following.end() if following else stop
        # Some templates write further tokens after a turn's own end token, but only at the end of a conversation.
        for before, stop in zip([0, *stops], stops, strict=False):
            only_ends = not self._ends.sub("", answer[stop:]).strip()
            if only_ends and text.startswith(answer[:stop], start) and (before or answer[before:stop].strip()):
                return start, start + stop
        return None

    def difference(self, answers: Sequence[int]) -> NotLocated:
        """Return the error for the first turn that the whole rendering lacks."""
        k = next(k for k in answers if self.range_in(self._whole, k) is None)
        problem = difference(self._whole, "".join(self.of(k)))
        return NotLocated(k, f"{problem}, once more turns follow; set turns: auto")


class _Turn:
    """The last of some messages, with the rendering of them all (`alone`)."""

    def __init__(self, render: Render, messages: list[Any], alone: str, ends: re.Pattern[str], eos: str):
        self._render, self.messages, self.alone, self._ends, self._eos = render, messages, alone, ends, eos
        self.prompt = render(messages[:-1], True)
        self._reasoning = str(messages[-1].get("reasoning_content") or "").strip()
        self._content = "".join(contents_of(messages[-1])).strip()
        self._names = [call["function"]["name"] for call in messages[-1].get("tool_calls") or ()]

    @property
    def _is_closed(self) -> bool:
        """Return whether the turn has reasoning, but its prompt closes the reasoning."""
        return bool(self._reasoning and _CLOSED.search(self.prompt))

    def answer(self) -> str:
        """Return the text that the model writes after the prompt.

        White space after the last control token is not part of it. Raises NotLocated if it cannot be determined.
        """
        is_plain = self.alone.startswith(self.prompt)
        answer = self.alone[len(self.prompt) :] if is_plain else self._after_other_text()
        if answer is None:
            problem = difference(self.alone, self.prompt)
            raise NotLocated(len(self.messages) - 1, problem + _CLOSED_REASONING * self._is_closed)
        answer = self._until_eos(answer)
        last = max((match.end() for match in self._ends.finditer(answer)), default=0)
        return answer[:last] if last and not answer[last:].strip() else answer

    def _until_eos(self, answer: str) -> str:
        """Cut the start of the next turn, which some templates write after every turn."""
        stop = answer.find(self._eos) + len(self._eos) if self._eos else 0
        if stop < len(self._eos) or not answer[stop:].strip():
            return answer
        may_follow = any(text and text in answer[stop:] for text in (self._reasoning, self._content, *self._names))
        last = self._places.get(len(self.messages) - 1) if may_follow else None
        if last and self.alone.endswith(answer):
            stop = answer.find(self._eos, last[1] - (len(self.alone) - len(answer))) + len(self._eos)
        is_whole = stop >= len(self._eos) and answer[: stop - len(self._eos)].strip()
        return answer[:stop] if is_whole else answer

    @cached_property
    def _places(self) -> dict[int, Range]:
        return places_of(self.alone, self.messages, lambda marked: self._render(marked, False), OPENAI_ROLES)

    def _after_other_text(self) -> str | None:
        """Return the answer to a prompt with which the rendering does not start."""
        same = _common(self.prompt, self.alone)
        rest, written = self.prompt[same:], self.alone[same:]
        if not rest.strip():
            return written
        if self._is_closed:
            return None
        if self._reasoning:
            # The prompt introduces the reasoning. The second test rules out a content that starts with the same words.
            start = written.lstrip()
            if start.startswith(self._reasoning) and self._content in start[len(self._reasoning) :]:
                return written
        elif _EMPTY_BLOCK.fullmatch(rest):
            return None if _OPEN.match(written) else written
        if opened := _OPEN.fullmatch(rest):
            if _CLOSE.match(written):
                return None if self._reasoning else written
            return self._with_reasoning(opened, written)
        return self._after_header(rest, written)

    def _with_reasoning(self, opened: re.Match[str], written: str) -> str:
        """Return the answer to a prompt that opens reasoning.

        The template leaves this reasoning out of the turn. The model still writes it. A rendering with other reasoning
        shows how.
        """
        close = "[/THINK]" if opened["mistral"] else "<|END_THINKING|>" if opened["cohere"] else f"</{opened['tag']}>"
        field = dict.fromkeys(REASONING_KEYS, _OTHER)
        inline = {"content": f"{opened[0].strip()}\n{_OTHER}\n{close}\n\n{self._content}"}
        for more in (field, inline):
            try:
                other = self._render([*self.messages[:-1], self.messages[-1] | more], False)
            except Failed:
                continue
            if other.startswith(self.prompt) and other.count(_OTHER) == 1 and other.endswith(written.lstrip()):
                return other[len(self.prompt) :].replace(_OTHER, self._reasoning)
        return f"{self._reasoning}\n{close}\n\n{written.lstrip()}"

    def _after_header(self, rest: str, written: str) -> str | None:
        """Return the text after the header of the turn; None if it has none."""
        before = self._render(self.messages[:-1], False)
        header = self.prompt.removeprefix(before) if before and self.prompt.startswith(before) else ""
        is_bare = not self._ends.sub("", rest).strip() and (header == rest or self.prompt == before)
        lead, name, _ = written.partition(self._names[0]) if any(self._names[:1]) else ("", "", "")
        # At most one control token may precede the name of a call. A turn with reasoning cannot start with a call.
        is_call = name and len(self._ends.findall(lead)) <= 1 and not self._reasoning
        if is_bare and (is_call or (self._content and written.lstrip().startswith(self._content))):
            return written  # it continues the previous turn: only the prompt has the header, or the end of that turn
        # The template writes an earlier message differently if it is the last message. The answer then follows the
        # generation prompt, or the last control token if there is no generation prompt.
        if not header and (last := list(self._ends.finditer(self.prompt))) and last[-1].end() == len(self.prompt):
            header = last[-1].group()
        if not self._ends.search(header):
            return None
        if self.alone.count(header) == self.prompt.count(header):
            return self.alone[self.alone.rindex(header) + len(header) :]
        # Earlier reasoning may have headers of its own, which the template leaves out.
        turn = len(self.messages) - 1
        place = self.alone.rfind(header, 0, self._places[turn][0]) if turn in self._places else -1
        start = place + len(header)
        is_own = place >= 0 and all(stop <= start for k, (_, stop) in self._places.items() if k != turn)
        return self.alone[start:] if is_own else None


def _common(one: str, other: str) -> int:
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


def difference(one: str, other: str) -> str:
    """Describe where `one` diverges from `other`, the text that it should start with."""
    same = _common(one, other)
    start = max(0, same - 20)
    before, expected, written = one[start:same], other[same : same + 40], one[same : same + 40]
    return f"after {shown(before)}, {shown(expected)} is expected, but {shown(written)} follows"
