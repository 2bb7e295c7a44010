"""Check that a rendering has each trained turn in its place, and all texts.

    located? ─▶ in {% generation %} blocks? ─▶ content, reasoning, and calls written? ─▶ every text of every message?

    a template without a place for the role `tool`:    user, call, result 52, answer "52."  ─▶  the result is missing
    a template that cuts contents:                     user, answer "It is 52."  ─▶  ▓It is ▓   the answer is incomplete

Each check raises Reject. If the first conversations of a corpus all fail alike for a reason in
OF_TEMPLATE (tokenization/checks.py), it is the template, and the run stops. A context that is left out is as bad as an
incomplete answer: the model would learn an answer after a prompt that does not have its source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, product
from typing import Any, NamedTuple

import orjson

from packcorpus.tasks.conversations.answers import REASONING_KEYS
from packcorpus.tasks.conversations.model import DEVELOPER, Conversation, Message
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.core.printable import shown
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.templates.adjust import ReasoningForm, reasoning_of, without_reasoning
from packcorpus.tasks.templates.jinja.control_strings import escaped
from packcorpus.tasks.templates.jinja.expected_forms import ExpectedForms
from packcorpus.tasks.templates.jinja.rendering import Rendering
from packcorpus.tasks.templates.jinja.turns.locate import Located
from packcorpus.tasks.templates.jinja.turns.marks import (
    REASONING_START,
    Range,
    Text,
    contents_of,
    marked_texts,
    new_mark,
    with_marks,
    without_marks,
)
from packcorpus.tasks.templates.placeholders import GAP, JSON_GAP

# A text of so many characters is not found by chance.
LONG = 16


class Checked(NamedTuple):
    """The text of a sample, which has the messages before index `end`.

    `ranges` are the ranges of the text that may hold a trained message, by its index.
    """

    text: str
    end: int
    ranges: Mapping[int, Sequence[Range]]


# Returns the samples of messages and tools, or an empty list if the template refuses them. The flag asks for `ranges`.
Render = Callable[[Sequence[Any], Any, bool], list[Checked]]


class Checks:
    """Checks for the renderings of one template with some options.

    The private character of control strings is left out of errors. With `as_rendered`, reasoning may be left out of
    trained turns, and `unreasoned` lists them.
    """

    def __init__(self, name: str, encoder: Encoder, forms: ExpectedForms, as_rendered: bool = False):
        self._name, self._controls, self.forms, self._as_rendered = name, encoder.control_pattern, forms, as_rendered

    def require_located(
        self, rendering: Rendering, conversation: Conversation, private: str, every: bool = False
    ) -> None:
        """Check that every turn was located. `every` means that all are trained on."""
        if rendering.lost is None:
            return
        k, problem = rendering.lost
        role = conversation.messages[k].role
        if role != "assistant" and not every:
            raise Reject(
                "flag_not_followed",
                f"messages[{k}] ({role}) has a flag that adds it to the trained turns, but the template {self._name} "
                f"does not separate it: {problem}",
            )
        start = "the rendering of the messages before it" if every else "its prompt"
        raise Reject(
            "turn_not_located",
            f"messages[{k}] ({role}) cannot be located, because its rendering by the template {self._name} does not "
            f"continue {start}: {problem.replace(escaped(private), '')}",
        )

    def ranges_of(
        self, sample: Located, conversation: Conversation, marks: Sequence[Range] | None, private: str
    ) -> list[Range]:
        """Return the trained ranges of a located sample, in order and without overlap.

        `marks` are the {% generation %} blocks of the whole rendering; None if the template has none.
        """
        text, ranges, turn, turns, _, flagged, *_ = sample
        for k, (start, stop) in zip(turns, ranges, strict=not flagged):
            if turn is None and marks is not None:
                self._require_marked(text, k, (start, stop), marks, private)
            self.require_written(conversation.messages[k], k, text[start:stop], private)
        ordered: list[Range] = []
        for start, stop in sorted((*map(tuple, ranges), *map(tuple, flagged))):
            ordered.append((max(start, ordered[-1][1]) if ordered else start, stop))
        return ordered

    def _require_marked(self, text: str, k: int, located: Range, marks: Sequence[Range], private: str) -> None:
        """Check that blocks hold what the model writes in a turn.

        White space and the control token at the end may be outside. A block may begin in the prompt, and end after the
        turn; this text is not trained on.
        """
        start, stop = located
        left_out, place = [], start
        for first, last in marks:
            if first < stop and last > start:
                left_out.append(text[place : max(first, place)])
                place = max(last, place)
        end = next((match.start() for match in self._controls.finditer(text, place, stop) if match.end() == stop), stop)
        left_out.append(text[place:end])
        if missing := next((part for part in left_out if part.strip()), None):
            raise Reject(
                "turn_not_located",
                f"messages[{k}] cannot be located, because the model writes {shown(missing.replace(private, ''))} "
                f"after its prompt, and no {{% generation %}} block of the template {self._name} has this text; mark "
                "all that the model writes, or remove the marks",
            )

    def require_written(self, message: Message, k: int, answer: str, private: str) -> None:
        """Check that the template wrote a turn, its reasoning, and its calls.

        A text that the template never writes may be in the answer by chance, so finding it is not enough.
        """
        start = answer.lstrip()
        has_text = (start and not self._controls.match(start)) or self._controls.sub("", answer).strip()
        if message.content.strip() and not has_text:
            raise Reject(
                "answer_not_written", f"messages[{k}] has content, but the template {self._name} does not write it"
            )
        if not reasoning_of(message) and not message.tool_calls:
            return
        answer = JSON_GAP.sub("\0\\1\0", answer.replace(private, ""))
        never = self.forms.reasoning is ReasoningForm.NONE and bool(message.reasoning)
        never = never and not (message.tool_calls and self.forms.reasons_before_calls)
        self.require_reasoning(message, k, answer, never)
        for n, call in enumerate(message.tool_calls):
            if self.forms.calls is None or not is_written(call.name, answer):
                if n and self.forms.calls is not None:
                    raise self._only_first_calls(k, n, len(message.tool_calls))
                what = "tool calls" if self.forms.calls is None else "this call, although it writes others"
                raise Reject(
                    "calls_not_written",
                    f"messages[{k}] calls {call.name!r}, but the template {self._name} does not write {what}; use a "
                    "template that does",
                )

    def _only_first_calls(self, k: int, written: int, count: int) -> Reject:
        first = "the first" if written == 1 else f"the first {written:,}"
        return Reject(
            "calls_not_written",
            f"messages[{k}] has {count:,} parallel calls, but the template {self._name} writes only {first} of them; "
            "give each call a message of its own, followed by its result, or use a template that writes parallel calls",
        )

    def require_reasoning(self, message: Message, k: int, answer: str, never: bool = False) -> None:
        """Check that a text has the reasoning of a message, if it is ever written."""
        if never or not has_reasoning(message, answer):
            if self.forms.written_reasoning and self._as_rendered:
                return
            if self.forms.written_reasoning:
                raise Reject(
                    "reasoning_left_out",
                    f"messages[{k}] has reasoning, but the template {self._name} does not write it here, although it "
                    "writes reasoning elsewhere; remove it, set `train: false` in the message, or `reasoning: drop`",
                )
            raise Reject(
                "reasoning_not_written",
                f"messages[{k}] has reasoning, but the template {self._name} does not write it; set `reasoning: drop`, "
                "or use a template that writes reasoning",
            )

    def require_texts(
        self, samples: Sequence[Checked], messages: Sequence[Any], tools: Any, private: str, render: Render
    ) -> list[int]:
        """Raise Reject if a sample lacks a text, or a trained turn has it in part only.

        Returns the indexes of the messages whose reasoning is in none of the samples.

        If all texts are long, they are searched in each sample, in their order. A short text, or one beside reasoning,
        could be found by chance, so other conversations are rendered once more with marks in their texts. Each sample
        is checked, for a template may write a message in some prompts only. Earlier reasoning is counted and not
        required, because many templates leave it out of the history at inference, too. The ids of calls and results
        only connect them, and are not required either.

        A text of a trained turn is whole if it stands around its mark, as text or as JSON, within the turn. A template
        may change texts in other ways, such as to upper case. Such a text is marked at both ends, and the turn must
        have both marks with all letters and digits between them.
        """
        if not tools and all(_has_long_texts_in_order(sample, messages) for sample in samples):
            return []
        trained = {k for sample in samples for k in sample.ranges}
        texts: list[Text] = []
        others: list[Text] = []  # keys and numbers, which cannot be marked
        mark = new_mark("".join(sample.text for sample in samples))

        def marked(required: Text) -> str:
            core = required.text.strip()
            if not core or (required.is_reasoning and self._as_rendered and required.k in trained):
                return required.text
            texts.append(required)
            return with_marks(required.text, [(len(core) // 2, f"{mark}{len(texts) - 1}-")])

        rendered = render(*marked_texts(messages, tools, marked, others.append), False)
        are_alike = len(rendered) == len(samples)
        unsure: set[Text] = set()
        reasoned: set[int] = set()  # whose reasoning is in a sample
        for n, sample in enumerate(samples):
            bare, places = without_marks(rendered[n].text, mark, re.IGNORECASE) if are_alike else ("", {})
            for number, required in enumerate(texts):
                ranges = sample.ranges.get(required.k)
                if required.k >= sample.end:
                    continue
                is_there = number in places if are_alike else is_written(required.text.strip(), sample.text)
                if required.is_reasoning and ranges is None:
                    reasoned |= {required.k} if is_there else set()
                    continue
                if not is_there:
                    raise self._missing(required, messages, private)
                if ranges is not None and not (
                    bare == sample.text and _is_whole(required, bare, places[number], ranges)
                ):
                    unsure.add(required)
            for required in others:
                if required.k < sample.end and not is_written(required.text, _text_for(required, sample)):
                    raise self._missing(required, messages, private, is_written(required.text, sample.text))
        if unsure:
            self._require_ends(samples, unsure, messages, tools, private, render)
        end = max(sample.end for sample in samples)
        earlier = {required.k for required in texts if required.is_reasoning and required.k < end} - trained
        return sorted(earlier - reasoned)

    def _require_ends(
        self,
        samples: Sequence[Checked],
        unsure: Collection[Text],
        messages: Sequence[Any],
        tools: Any,
        private: str,
        render: Render,
    ) -> None:
        """Raise Reject if some texts are not within their turns from one end to the other."""
        mark = new_mark("".join(sample.text for sample in samples))
        texts: list[Text] = []

        def marked(required: Text) -> str:
            if required not in unsure:
                return required.text
            texts.append(required)
            n = 2 * len(texts)
            return with_marks(required.text, [(0, f"{mark}{n}-"), (len(required.text.strip()), f"{mark}{n + 1}-")])

        rendered = [
            (other, *without_marks(other.text, mark, re.IGNORECASE))
            for other in render(*marked_texts(messages, tools, marked, lambda _: None), True)
        ]
        for n, required in enumerate(texts, 1):
            sample = next(sample for sample in samples if required.k in sample.ranges)
            of_turn = next((turn for turn in rendered if required.k in turn[0].ranges), None)
            if of_turn is None:  # the template refuses the marks
                is_whole = is_written(required.text.strip(), _text_for(required, sample))
            else:
                other, bare, places = of_turn
                ranges = sample.ranges[required.k]
                if bare != sample.text:
                    bare, places = without_marks(_text_for(required, other), mark, re.IGNORECASE)
                    ranges = [(0, len(bare))]
                is_whole = any(
                    _within(start, stop, ranges) and _has_letters(bare[start:stop], required.text)
                    for start, stop in product(places.get(2 * n, ()), places.get(2 * n + 1, ()))
                )
            if not is_whole:
                raise self._missing(required, messages, private, True)

    def _missing(self, required: Text, messages: Sequence[Any], private: str, is_cut: bool = False) -> Reject:
        text = shown(required.text.replace(private, ""))
        if required.k < 0:
            return Reject(
                "tools_not_written",
                f"{required.place} has {text}, but the template {self._name} does not write it; use a "
                "template that writes tools, or set `ignore: [tools]` if the tools are not needed",
            )
        role = messages[required.k]["role"]
        of_call = re.search(r"\.tool_calls\[(\d+)\]$", required.place)
        if of_call and int(of_call[1]) and not is_cut:  # the calls before it are written
            return self._only_first_calls(required.k, int(of_call[1]), len(messages[required.k]["tool_calls"]))
        if is_cut or required.is_reasoning:
            return Reject(
                "answer_not_written",
                f"{required.place} ({role}) has {'the reasoning ' * required.is_reasoning}{text}, but the template "
                f"{self._name} does not write all of it where this turn is trained on; use a template that does, or "
                "set `train: false` in the message",
            )
        left_out = {"system": "system", DEVELOPER: "system", "tool": "tool"}.get(role)
        drop = f", or set `drop_roles: [{left_out}]` if they are not needed" if left_out else ""
        return Reject(
            "message_not_written",
            f"{required.place} ({role}) has {text}, but the template {self._name} does not write it; use a template "
            f"that writes such messages{drop}",
        )


def has_reasoning(message: Message, answer: str) -> bool:
    """Return whether a text has all the reasoning of a message."""
    reasoning = reasoning_of(message)
    if not reasoning:
        return True
    answer = JSON_GAP.sub("\0\\1\0", answer)
    # The content may have the same words as the reasoning.
    content = without_reasoning(message).content.strip()
    head, found, tail = answer.rpartition(content) if content else (answer, "", "")
    others = [head + "\0" + tail, answer.replace(content, "\0", 1)] if found else [answer]
    return any(is_written(reasoning, other) for other in others)


def is_written(value: str, answer: str) -> bool:
    """Return whether an answer contains a value or its JSON. White space is ignored."""
    if value in answer:
        return True
    written = "".join(answer.split())
    forms = (value, *(json.dumps(value, ensure_ascii=flag)[1:-1] for flag in (False, True)))
    return any("".join(form.split()) in written for form in forms)


def has_gaps(text: str, messages: Sequence[Any], tools: Any) -> bool:
    """Return whether placeholders have a gap for each text."""
    required = [(each["content"], [call["function"] for call in each.get("tool_calls") or ()]) for each in messages]
    numbers = set(re.findall(r"\\u0000(\d+)\\u0000", orjson.dumps((required, tools)).decode()))
    return numbers <= {gap[1] for gap in GAP.finditer(text)}


def _has_long_texts_in_order(sample: Checked, messages: Sequence[Any]) -> bool:
    """Return whether all texts are long and written in their order.

    Those of trained turns must be within their turns. Reasoning often quotes a result, and may be left out, so texts
    beside reasoning could be found in it.
    """
    messages = messages[: sample.end]
    for message in messages:
        if any(message.get(key) for key in REASONING_KEYS) or any(map(REASONING_START.match, contents_of(message))):
            return False
    texts: list[Text] = []

    def noted(required: Text) -> str:
        texts.append(required)
        return required.text

    marked_texts(messages, None, noted, texts.append)
    place = 0
    for required in texts:
        if core := required.text.strip():
            ranges = sample.ranges.get(required.k)
            place = max([place, *(start for start, _ in (ranges or ())[:1])])
            start = sample.text.find(core, place) if len(core) >= LONG else -1
            place = start + len(core)
            if start < 0 or (ranges is not None and not _within(start, place, ranges)):
                return False
    return True


def _is_whole(required: Text, text: str, places: Sequence[int], ranges: Sequence[Range]) -> bool:
    """Return whether a text, or its JSON, stands around one of its marks in a range."""
    core = required.text.strip()
    for form in chain([core], (json.dumps(core, ensure_ascii=flag)[1:-1] for flag in (False, True))):
        for place, (start, stop) in product(places, ranges):
            if form in text[max(start, place - len(form)) : min(stop, place + len(form))]:
                return True
    return False


def _within(start: int, stop: int, ranges: Sequence[Range]) -> bool:
    return any(first <= start and stop <= last for first, last in ranges)


def _has_letters(written: str, text: str) -> bool:
    """Return whether the ASCII letters and digits of a text are written.

    No way of writing a text escapes them. They must be in their order, in upper or lower case.
    """
    rest = iter(written.lower())
    return all(letter.lower() in rest for letter in re.findall("[A-Za-z0-9]", text))


def _text_for(required: Text, sample: Checked) -> str:
    """Return the trained turn that must hold a text, or else its sample."""
    ranges = sample.ranges.get(required.k)
    return sample.text if ranges is None else "\0".join(sample.text[start:stop] for start, stop in ranges)
