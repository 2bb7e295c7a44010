"""Find the sections of answers that are not trained on (see `sections`).

    <think>\\n\\n</think>\\n\\n │ It is 4.<|im_end|>      empty_reasoning: mask leaves out the first section
    <think>\\nWhy\\n</think>\\n\\n │ It is 4.<|im_end|>   train_parts: {reasoning: false} does so, too

Empty blocks of reasoning are found by their markers, at the start of an answer. The texts of other sections are found
with marks (see `marks`), which takes another rendering.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from packcorpus.tasks.conversations.model import Conversation, Message
from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.templates.adjust import CLOSES, OPENS, reasoning_of, without_reasoning
from packcorpus.tasks.templates.jinja.rendering import Job, Rendering
from packcorpus.tasks.templates.jinja.splitting import TokenBoundary
from packcorpus.tasks.templates.jinja.turns.answers import MOST_OF_MARKER
from packcorpus.tasks.templates.jinja.turns.locate import Located
from packcorpus.tasks.templates.jinja.turns.marks import Range, marked_messages, new_mark, without_marks
from packcorpus.tasks.templates.sections import CROSSED, Sections, splits

# The channels of Gemma and of gpt-oss.
_CHANNEL_OPENS, _CHANNEL_CLOSES = r"<\|channel>thought|<\|channel\|>analysis<\|message\|>", r"<channel\|>|<\|end\|>"
# Empty blocks of reasoning: whole, or the rest after a prompt with their start.
_WHOLE = re.compile(rf"\s*(?:(?:{OPENS})\s*(?:{CLOSES})|(?:{_CHANNEL_OPENS})\s*(?:{_CHANNEL_CLOSES}))\s*")
_RESTS = (
    (re.compile(rf"(?:{OPENS})\s*\Z"), re.compile(rf"\s*(?:{CLOSES})\s*")),
    (re.compile(rf"(?:{_CHANNEL_OPENS})\s*\Z"), re.compile(rf"\s*(?:{_CHANNEL_CLOSES})\s*")),
)
_CLOSE = re.compile(f"{CLOSES}|{_CHANNEL_CLOSES}")
# Markup that closes a call before the content that follows it.
_END_OF_CALL = re.compile(r"(?:</[\w:]+>|<\w+\|>|<\|call\|>)(?=\s*\Z)")
# Markup that closes a content.
_END_OF_CONTENT = re.compile(r"\s*(?:<\|(?:end|END_\w+)\|>|</[\w:]+>)")


def empty_block(text: str, start: int, stop: int) -> str:
    """Return the empty block of reasoning at the start of an answer, with white space."""
    if whole := _WHOLE.match(text, start, stop):
        return whole[0]
    for opened, rest in _RESTS:
        if (match := rest.match(text, start, stop)) and opened.search(text, max(0, start - MOST_OF_MARKER), start):
            return match[0]
    return ""


def starts_with_block(content: str) -> bool:
    """Return whether a content starts with an empty block, or with its end."""
    return any(form.match(content) for form in (_WHOLE, *(rest for _, rest in _RESTS)))


class Cuts:
    """The choice of sections for one template and encoder."""

    def __init__(self, name: str, encoder: Encoder, boundary: TokenBoundary, sections: Sections):
        self._name, self._encoder, self._boundary, self._sections = name, encoder, boundary, sections

    def left_out(
        self,
        samples: Sequence[Located],
        conversation: Conversation,
        job: Job,
        render: Callable[[Job], Rendering],
        private: str,
    ) -> list[list[Range]]:
        """Return the ranges of each sample that are not trained on, in ascending order.

        `render` renders the conversation as `job`. Raises Reject if sections cannot be separated.
        """
        flags = {
            k: self._flags(conversation.messages[k], empty_block(sample.text, *place))
            for sample in samples
            for k, place in sample.answers
        }
        mixed = [k for k, each in flags.items() if len({each[name] for name in each if name != "block"}) > 1]
        places = self._places(samples, mixed, job, render) if mixed else {}
        return [
            [cut for k, place in s.answers for cut in self._cuts(s.text, k, place, flags[k], places, private)]
            for s in samples
        ]

    def _flags(self, message: Message, block: str) -> dict[str, bool]:
        """Return whether each section of an answer is trained on.

        The sections are in the order in which templates write them.
        """
        content = without_reasoning(message).content.strip() or message.context.strip()
        chosen = self._sections
        sections = {
            "block": (block, chosen.reasoning and chosen.empty),
            "reasoning": (reasoning_of(message), chosen.reasoning),
            "content": (content, chosen.content),
            "calls": (message.tool_calls, chosen.calls),
        }
        return {name: flag for name, (is_written, flag) in sections.items() if is_written}

    def _places(
        self, samples: Sequence[Located], mixed: Sequence[int], job: Job, render: Callable[[Job], Rendering]
    ) -> dict[tuple[int, str], Range]:
        """Return where the sections of some answers are written, without markup."""
        mark = new_mark("".join(sample.text for sample in samples))
        places: dict[tuple[int, str], Range] = {}
        messages, texts = marked_messages(job.messages, mark, mixed)
        try:
            rendering = render(job._replace(messages=messages))
        except (Reject, DataError):  # the template refuses the marks
            return places
        rendered = [sample.text for sample in rendering.samples] or [rendering.text]
        for sample, with_marks in zip(samples, rendered, strict=False):
            bare, numbers = without_marks(with_marks, mark)
            if bare != sample.text:
                continue
            written = [(texts[n], texts[n].range_in(bare, place)) for n in numbers for place in numbers[n]]
            for k, (start, stop) in sample.answers:
                for marked, place in written:
                    if marked.k == k and place and start <= place[0] <= place[1] <= stop:
                        first, last = places.get((k, marked.section), place)
                        places[k, marked.section] = min(first, place[0]), max(last, place[1])
        return places

    def _cuts(
        self,
        text: str,
        k: int,
        place: Range,
        flags: dict[str, bool],
        places: dict[tuple[int, str], Range],
        private: str,
    ) -> Iterator[Range]:
        begin, stop = place
        content, calls = places.get((k, "content")), places.get((k, "calls"))
        if content and calls and calls[1] <= content[0]:
            flags = {name: flag for name, flag in flags.items() if name != "content"} | {"content": flags["content"]}
        for one, other in pairwise(flags):
            if flags[one] != flags[other]:
                edge = self._edge(text, k, place, one, other, places, private)
                if not flags[one]:
                    yield begin, edge
                begin = edge
        if flags and not flags[[*flags][-1]]:
            yield begin, stop

    def _edge(
        self,
        text: str,
        k: int,
        place: Range,
        one: str,
        other: str,
        places: dict[tuple[int, str], Range],
        private: str,
    ) -> int:
        """Return where a section ends and the next one begins.

        White space between them belongs to the first one, unless a token crosses from there into the next one.
        """
        if one == "block":
            block = empty_block(text, *place)
            low, high = place[0] + len(block.rstrip()), place[0] + len(block)
        else:
            last, first = places.get((k, one), (0, 0))[1], places.get((k, other), (0, 0))[0]
            closes: list[re.Match[str] | None] = []
            if 0 < last <= first:
                if one == "content":
                    closes = [_END_OF_CONTENT.match(text, last, first)]
                elif one == "calls":
                    closes = [_END_OF_CALL.search(text, last, first)]
                else:
                    closes = [pattern.search(text, last, first) for pattern in (_CLOSE, self._encoder.control_pattern)]
            low = min([close.end() for close in closes if close], default=last if one == "content" and closes else 0)
            if not low:
                raise Reject(
                    "parts_not_separate",
                    f"messages[{k}]: train_parts cannot separate its {one} from its {other}: the template "
                    f"{self._name} does not write both as they are, or no marker between them",
                )
            between = text[low:first]
            high = low + len(between) - len(between.lstrip())
        for edge in range(high, low - 1, -1):
            if self._splits(text[place[0] : edge], text[edge : place[1]], private):
                return edge
        one = {"block": "empty block of reasoning"}.get(one, one)
        raise Reject("parts_not_separate", f"messages[{k}]: {CROSSED}: between its {one} and its {other}")

    def _splits(self, left: str, right: str, private: str) -> bool:
        controls = self._encoder.control_pattern
        left = left[max((match.end() for match in controls.finditer(left)), default=0) :].replace(private, "")
        first = controls.search(right)
        right = (right[: first.start()] if first else right).replace(private, "")
        if self._encoder.leading_space == "none":  # the last characters can be part of a token across the edge
            return self._boundary.splits(left[-32:], right)
        return splits(self._encoder, left, right)


def without(ranges: Sequence[Range], left_out: Sequence[Range]) -> list[Range]:
    """Return ranges without the ranges that are left out, all in ascending order.

    An empty range keeps the edge of a range whose start or end is left out: texts beside it are encoded apart, as they
    are with its label.
    """
    kept = []
    for start, stop in ranges:
        place = start
        for first, last in left_out:
            if first < stop and last > start:
                kept.append((place, first))
                place = last
        kept.append((place, stop))
    return kept
