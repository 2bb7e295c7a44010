"""Convert a conversation to spans with a Jinja chat template.

The template is the tokenizer's own, or a file.

    messages ─break─▶ messages whose control strings are broken ─render─▶ texts ─split─▶ control tokens and text
                                                                  └─locate─▶ which characters are trained on

Templates are rendered in the environment that they are written for, so the model sees the same text at inference. This
module adds two things:

- Content stays content (see `breaker`): any control string that is intact after rendering was written by the template.
- Trained turns are located (see `locate`): each follows exactly the prompt that the model sees at inference. If the
  template has `{% generation %}` marks, they are used and must agree. If a turn cannot be located, the run fails and
  names the turn, because a guess could silently produce wrong labels.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from itertools import chain
from typing import Any

import orjson

from tasks.conversations.model import Conversation, Message
from tasks.conversations.openai import in_parts
from tasks.core.errors import DataError, PackError, Reject, UsageError
from tasks.encoders.encoder import Encoder
from tasks.templates.adjust import NO_CHANGE, Adjust
from tasks.templates.built_in import plain_text
from tasks.templates.jinja.breaker import Breaker, Broken, escaped
from tasks.templates.jinja.composed.composer import Composer, Composing
from tasks.templates.jinja.composed.composition import Outlined
from tasks.templates.jinja.composed.known_pieces import KnownPieces
from tasks.templates.jinja.expected_forms import ExpectedForms
from tasks.templates.jinja.locate import is_written
from tasks.templates.jinja.neutral import Neutral
from tasks.templates.jinja.sandbox.lockstep import Steps, results_of
from tasks.templates.jinja.sandbox.renderer import Renderer
from tasks.templates.jinja.sandbox.requests import Job, Rendering
from tasks.templates.jinja.splitter import Splitter
from tasks.templates.jinja.token_boundary import TokenBoundary
from tasks.templates.jinja.traced import GAP_OF_PIECE
from tasks.templates.jinja.unusual import Edges, Head, Unusual
from tasks.templates.placeholders import GAP, is_placeholder
from tasks.templates.reasoning import (
    ReasoningForm,
    reasoning_of,
    separated,
    without_reasoning,
)
from tasks.templates.spans import (
    TEXT,
    Outline,
    Rendered,
    Sample,
    Span,
    Template,
    ToRender,
    TrainOn,
    Turns,
    has_flagged,
)

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

# A gap for a value that is written as JSON.
_JSON_GAP = re.compile("\0(\\d+):\\d+\0")

# The maximum number of conversations whose control tokens are remembered for comparison.
MOST_KNOWN = 1024

Ranges = list[tuple[int, int]]


class JinjaTemplate(Template):
    """A Jinja chat template bound to a tokenizer.

    `today` is the date that the template sees, as YYYY-MM-DD. `options` are further variables, such as enable_thinking.
    """

    markers_as_text: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        source: str,
        encoder: Encoder,
        train_on: TrainOn,
        today: str,
        turns: Turns = "auto",
        options: Mapping[str, Any] | None = None,
        adjust: Adjust = NO_CHANGE,
    ):
        self.name = name
        self.adjust = adjust
        self.encoder = encoder
        self._all = train_on == "all"
        self._turns = turns
        self._marked = _GENERATION.search(source) is not None
        try:
            date = datetime.fromisoformat(today)
        except ValueError as error:
            raise UsageError("bad_setting", f"template_date: {today}: {error}") from None
        special = {
            key: encoder.control_strings.get(token, "")
            for key, token in zip(
                ("bos_token", "eos_token", "pad_token"), (encoder.bos_id, encoder.eos_id, encoder.pad_id), strict=True
            )
            if token is not None
        }
        self._boundary = TokenBoundary(encoder)
        self._breaker = Breaker(encoder, source)
        self._neutral = Neutral(encoder)
        self._splitter = Splitter(encoder)
        self._known_controls: dict[tuple[Any, ...], list[list[str]]] = {}
        ends = encoder.control_pattern.pattern
        self._renderer = Renderer(name, source, special | dict(options or {}), date, ends)
        self._forms = ExpectedForms(source, self._renderer)

    def spans(self, conversation: Conversation, trained: Sequence[bool]) -> list[Span]:
        """Return the spans of a conversation that is one sample.

        Raises the errors of `samples`.
        """
        [sample] = self.samples(conversation, trained)
        return sample.spans

    def samples(self, conversation: Conversation, trained: Sequence[bool]) -> list[Sample]:
        """Render a conversation and split each of its samples into spans.

        `trained` is true for each message that is trained on. Raises Reject if the conversation cannot be rendered, and
        DataError if the template cannot be used.
        """
        [found] = self.all_samples([ToRender(conversation, trained)])
        assert found is not None, "nothing was expected"
        if isinstance(found, list):
            return found
        raise found

    def all_samples(self, conversations: Sequence[ToRender]) -> Iterator[list[Sample] | Reject | PackError | None]:
        """Yield the samples of each conversation, or the error that `samples` raises.

        The result is None if the conversation has the expected samples. Many conversations are rendered at once.
        """
        return results_of([self._steps(*each) for each in conversations], self._renderer)

    def _steps(self, conversation: Conversation, trained: Sequence[bool], expected: Sequence[Rendered] | None) -> Steps:
        """Yield jobs and pieces, receive the results, and return the samples.

        Returns None if the samples are as expected.
        """
        if conversation.messages[0].role == "text":
            return [Sample(plain_text(conversation, trained, self.encoder))]
        conversation, trained, added = self.adjust.of(conversation, trained)
        if any(message.tool_calls and message.reasoning for message in conversation.messages):
            _ = self._forms.reasons_before_calls  # tried now, because the renderer is busy later
        composed = (yield from self._composed(conversation, trained)) if expected is None else None
        if composed and not composed.is_compared:
            return _of_data(composed.samples, added)
        try:
            samples = yield from self._rendered(conversation, trained, expected and _with_added(expected, added))
        except (Reject, DataError) as error:
            raise type(error)(error.reason, _with_own_numbers(error.message, added)) from None
        if samples is None:
            return None
        if composed and composed.samples != samples:
            raise AssertionError(f"{samples} are composed as {composed.samples}")
        return _of_data(samples, added)

    def _composed(self, conversation: Conversation, trained: Sequence[bool]) -> Composing:
        """Return the samples of a conversation, or None if they cannot be composed.

        See `composer`.
        """
        apart = None if self._all or has_flagged(conversation, trained) else self._separate(conversation)
        if apart is None or (self._forms.calls and self._forms.calls[1]):
            return None
        return (yield from self._composer.compose(apart, trained))

    def _rendered(
        self, conversation: Conversation, trained: Sequence[bool], expected: Sequence[Rendered] | None
    ) -> Steps:
        """Return the samples of a conversation that is rendered as a whole.

        Returns None if the samples are as expected.
        """
        broken = self._broken(conversation)
        breaker = broken.breaker
        turns = [k for k, flag in enumerate(trained) if flag != self._all]
        method = "others" if self._all else self._turns
        job = self._filled(Job([], None, self._marked and not self._all, turns, method), broken)
        rendering = yield job
        if method == "auto" and not self._is_read_alike(rendering, breaker):
            job = job._replace(method="apart")
            rendering = yield job
        if expected is not None and self._is_expected(rendering, expected, broken):
            return None
        turns, trained = _prompted(rendering, turns, trained)
        if rendering.lost:
            yield from self._require_own_controls(self._controls_of(rendering, breaker), job, conversation)
        marked = None if self._all else self._marked_turns(rendering, conversation, trained)
        if self._all:
            self._require_located(rendering, conversation, "the rendering of the messages before it", breaker)
            text = rendering.text.replace(breaker, "")
            for k, message in enumerate(conversation.messages):
                self._require_reasoning(message, k, text)
            samples = [Sample(self._splitter.split(rendering.text, self._without(rendering), breaker))]
        elif rendering.lost and marked and len(marked) == len(turns) and self._turns != "apart":
            samples = [Sample(self._splitter.split(rendering.text, marked, breaker))]
        else:
            self._require_located(rendering, conversation, "its prompt", breaker)
            samples = self._samples_of(rendering, conversation, turns, marked, breaker)
        controls = [[span.text for span in sample.spans if span.token != TEXT] for sample in samples]
        if not samples or samples[0].turn is not None:
            controls.insert(0, [string for _, string, _ in self._splitter.controls_in(rendering.text, breaker)])
        yield from self._require_own_controls(controls, job, conversation)
        return samples

    def _is_expected(self, rendering: Rendering, expected: Sequence[Rendered], broken: Broken) -> bool:
        """Return whether a rendering has the expected samples.

        If no text has a control string, the expected text is enough. Otherwise, the control strings that are not broken
        must be the expected control tokens.
        """
        breaker = broken.breaker
        if len(rendering.samples) != len(expected):
            return False
        for (text, ranges, turn, *_), sample in zip(rendering.samples, expected, strict=True):
            if turn != sample.turn or text.replace(breaker, "") != sample.text:
                return False
            place_of = partial(_place_without, [match.start() for match in re.finditer(breaker, text)])
            if _touching_joined([(place_of(start), place_of(stop)) for start, stop in ranges]) != sample.ranges:
                return False
            if broken.is_intact:
                continue
            controls = self._splitter.controls_in(text, breaker)
            if [(place_of(place), string) for _, string, place in controls] != sample.controls:
                return False
        return True

    def _filled(self, job: Job, broken: Broken) -> Job:
        """Return a job with messages and tools in the form that the template expects."""
        messages = [*map(in_parts, broken.messages)] if self._forms.reads_parts else broken.messages
        return job._replace(messages=messages, tools=broken.tools)

    @cached_property
    def _composer(self) -> Composer:
        pieces = KnownPieces(self.encoder, self._breaker, self._neutral, self._splitter)
        return Composer(self.encoder, self._splitter.controls, pieces, self._boundary, self._turns, self._outlined)

    def _require_own_controls(
        self, found: list[list[str]], job: Job, conversation: Conversation
    ) -> Generator[Job, Rendering, None]:
        """Check that the template wrote every control token itself.

        Raises Reject if the template turned a text of the conversation into a control token (see `neutral`). `found`
        has the control strings of the whole rendering, and of each sample that is not the whole conversation. Comparing
        them with an earlier conversation of the same structure is nearly always enough.
        """
        alike = (
            job.method,
            len(conversation.tools),
            *((m.role, not m.content, not m.reasoning, len(m.tool_calls)) for m in conversation.messages),
            *job.turns,
        )
        if self._known_controls.get(alike) == found:
            return
        expected = found
        if not self._neutral.has(job.messages, job.tools):
            broken = self._broken(conversation, self._neutral.of)
            neutral_job = self._filled(job, broken)
            if neutral_job != job:  # otherwise, no text has a character of a control string
                neutral = yield neutral_job
                expected = self._controls_of(neutral, broken.breaker)
        if len(self._known_controls) < MOST_KNOWN:
            self._known_controls.setdefault(alike, expected)
        # There may be one sample for these texts, and several samples for neutral texts.
        pairs = zip(found, expected, strict=True) if len(found) == len(expected) else [(found[0], expected[0])]
        for forged in chain(*(Counter(one) - Counter(other) for one, other in pairs)):
            raise Reject(
                "forged_token",
                f"the template {self.name} turns a text of this conversation into the control token {forged!r}",
            )

    def _controls_of(self, rendering: Rendering, breaker: str) -> list[list[str]]:
        """Return the control strings of a whole rendering and of each sample of one turn."""
        texts = [rendering.text, *(sample.text for sample in rendering.samples if sample.turn is not None)]
        return [[string for _, string, _ in self._splitter.controls_in(text, breaker)] for text in texts]

    def _samples_of(
        self,
        rendering: Rendering,
        conversation: Conversation,
        turns: Sequence[int],
        marked: Ranges | None,
        breaker: str,
        later: list[tuple[str, str]] | None = None,
    ) -> list[Sample]:
        """Check the located samples and return them as spans.

        `later` is passed to `_require_written`.
        """
        texts = []
        answers = [k for k in turns if conversation.messages[k].role == "assistant"]
        for text, ranges, turn, _, flagged in rendering.samples:
            if turn is None and marked is not None:
                self._require_agreement(ranges, marked, answers)
                ranges = marked
            for k, (start, stop) in zip(answers if turn is None else [turn], ranges, strict=not flagged):
                self._require_written(conversation.messages[k], k, text[start:stop], breaker, later)
            texts.append((text, _in_order([*ranges, *flagged])))
        numbers = [sample.turn for sample in rendering.samples]
        return list(map(Sample, self._splitter.split_all(texts, breaker), numbers))

    def separate(self, conversation: Conversation) -> Conversation | None:
        """Return a conversation with its reasoning where this template reads it.

        Return None if the conversation must be rendered.
        """
        return separated(conversation) if self.adjust.drop_reasoning else self._separate(conversation)

    def _separate(self, conversation: Conversation) -> Conversation | None:
        if self._forms.reasoning is ReasoningForm.FIELD:
            return separated(conversation)
        return None if any(message.reasoning for message in conversation.messages) else conversation

    def outline(self, conversation: Conversation, trained: Sequence[bool]) -> Outline | None:
        """Return the samples of a conversation of placeholders.

        If the template does more with the placeholders than write and test them, the samples are a guess. Return None
        if they cannot be guessed.
        """
        if self._all or conversation.messages[0].role == "text" or has_flagged(conversation, trained):
            return None
        return self._traced_outline(conversation, trained) or self._guess(conversation, trained)

    def _traced_outline(self, conversation: Conversation, trained: Sequence[bool]) -> Outline | None:
        conversation, trained, added = self.adjust.of(conversation, trained)
        if self._forms.calls and self._forms.calls[1]:  # the template reads arguments as text
            calls = [call for message in conversation.messages for call in message.tool_calls]
            if not all(is_placeholder(call.arguments) for call in calls):
                return None
        turns = [k for k, flag in enumerate(trained) if flag]
        broken = self._broken(conversation)
        breaker = broken.breaker
        rendering, strips = self._traced(broken, turns, self._turns)
        heads = self._heads(rendering, breaker) if self._turns == "auto" else []
        edges = Edges(heads or [], self._boundary)
        if edges.reached:  # like `samples`
            rendering, strips = self._traced(broken, turns, "apart")
        if (
            heads is None
            or (found := self._samples_of_placeholders(rendering, conversation, turns, trained, broken)) is None
        ):
            return None
        samples, (*tests, formats), inline = found
        return Outline(_of_data(samples, added), Unusual(tests, edges, strips, inline), formats)

    def _guess(self, conversation: Conversation, trained: Sequence[bool]) -> Outline | None:
        """Return the samples of placeholders that are rendered like any other text.

        If the template uses values in a way that cannot be traced, such as `content[:1000]`, this is right for most
        conversations.
        """
        if self._marked or conversation.tools or any(message.tool_calls for message in conversation.messages):
            return None
        conversation, trained, added = self.adjust.of(conversation, trained)
        turns = [k for k, flag in enumerate(trained) if flag]
        broken = self._broken(conversation)
        job = self._filled(Job([], None, False, turns, self._turns), broken)
        rendering = self._renderer.render(job)
        if self._turns == "auto" and Edges(self._heads(rendering, broken.breaker) or [], self._boundary).reached:
            rendering = self._renderer.render(job._replace(method="apart"))
        if rendering.lost:
            return None
        turns, trained = _prompted(rendering, turns, trained)
        samples = self._samples_of(rendering, conversation, turns, None, broken.breaker)
        return Outline(_of_data(samples, added), lambda values: False, is_guess=True)

    def _outlined(
        self, placeholders: Conversation, trained: Sequence[bool], method: Turns, values: Sequence[Any]
    ) -> Generator[Job, Rendering | None, Outlined | None]:
        """Return the samples of placeholders with gaps for pieces.

        Return None if the template does more with the placeholders than write and test them.
        """
        turns = [k for k, flag in enumerate(trained) if flag]
        broken = self._broken(placeholders)
        job = self._filled(Job([], None, self._marked, turns, method, "pieces", values), broken)
        rendering = yield job
        later: list[tuple[str, str]] = []
        try:
            found = rendering and self._samples_of_placeholders(rendering, placeholders, turns, trained, broken, later)
        except (Reject, DataError):  # rendering the conversations reports the reason
            return None
        if not rendering or not found:
            return None
        samples, (*tests, formats), inline = found
        # `locate` strips the start of an answer if its prompt opens reasoning that the template leaves out of the turn.
        strips = bool(tests[3]) or not all(sample.plain for sample in rendering.samples)
        unusual = Unusual(tests, None, strips, inline)
        heads = [Head(*head) for head in self._inner_turns(rendering, broken.breaker)] if method == "auto" else []
        return Outlined(samples, heads, unusual, formats, rendering.pieces, later, rendering.parting)

    def _samples_of_placeholders(
        self,
        rendering: Rendering,
        conversation: Conversation,
        turns: list[int],
        trained: Sequence[bool],
        broken: Broken,
        later: list[tuple[str, str]] | None = None,
    ) -> tuple[list[Sample], list[list[Any]], bool] | None:
        """Return the samples, the traced tests, and whether reasoning in contents matters.

        Return None if turns cannot be located, or if the trace is closed.
        """
        if rendering.lost or rendering.unusual is None:
            return None
        turns, trained = _prompted(rendering, turns, trained)
        marked = self._marked_turns(rendering, conversation, trained)
        samples = self._samples_of(rendering, conversation, turns, marked, broken.breaker, later)
        reads = self._forms.reasoning is not ReasoningForm.NONE or self.adjust.drop_reasoning
        inline = reads or rendering.unprompted or not all(sample.plain for sample in rendering.samples)
        return samples, rendering.unusual, inline

    def _traced(self, broken: Broken, turns: list[int], method: Turns) -> tuple[Rendering, bool]:
        """Return a rendering of placeholders, and whether some white space is stripped."""
        job = self._filled(Job([], None, self._marked, turns, method, "spaced"), broken)
        rendering = self._renderer.render(job)
        if not (rendering.unusual and rendering.unusual[3]) and _has_all_space(rendering):
            return rendering, False
        # Values with and without white space are rendered the same only if the template strips every value everywhere.
        other = self._renderer.render(job._replace(trace="bare"))
        return other, other != rendering

    def _heads(self, rendering: Rendering, breaker: str) -> list[Head] | None:
        """Return the starts of trained turns that `_is_read_alike` checks.

        Return None if one of them has a value as JSON.
        """
        heads: list[Head] = []
        for tail, turn in self._inner_turns(rendering, breaker):
            gap = GAP.search(turn)
            written = turn[: gap.start()] if gap else turn
            if gap and not self._boundary.is_complete(written):
                written += gap.group()
            if any(gap[2] for part in (tail, written) for gap in GAP.finditer(part)):
                return None
            if tail:
                heads.append(Head(tail, written))
        return heads

    def _inner_turns(self, rendering: Rendering, breaker: str) -> Iterator[tuple[str, str]]:
        """Yield the text before and in each trained turn that later prompts contain.

        The first text starts after the last control token before the turn. The second text ends with the first control
        token of the turn.
        """
        controls = self.encoder.control_pattern
        for text, ranges, turn, *_ in rendering.samples:
            for start, stop in ranges[:-1] if turn is None else []:
                ends = [match.end() for match in controls.finditer(text, 0, start)]
                first = controls.search(text, start, stop)
                tail, written = text[ends[-1] if ends else 0 : start], text[start : first.end() if first else stop]
                yield tail.replace(breaker, ""), written.replace(breaker, "")

    def _without(self, rendering: Rendering) -> Ranges:
        """Return the ranges outside the located turns."""
        text, [(_, ranges, *_)] = rendering.text, rendering.samples
        edges = [0, *chain(*((start, self._without_space(text, start, stop)) for start, stop in ranges)), len(text)]
        return list(zip(edges[::2], edges[1::2], strict=True))

    def _broken(self, conversation: Conversation, change: Callable[[Any], Any] = lambda value: value) -> Broken:
        """Return messages and tools in OpenAI's form with broken control strings."""
        messages = [self._forms.expected(message) for message in conversation.messages]
        tools: Any = [orjson.loads(tool) for tool in conversation.tools] or None
        return self._breaker.broken(change(messages), change(tools))

    # Labels

    def _require_located(self, rendering: Rendering, conversation: Conversation, start: str, breaker: str) -> None:
        if rendering.lost is None:
            return
        k, problem = rendering.lost
        role = conversation.messages[k].role
        if role != "assistant" and not self._all:
            raise Reject(
                "flag_not_followed",
                f"messages[{k}] ({role}) has a flag that adds it to the trained turns, but the template {self.name} "
                f"does not separate it: {problem}",
            )
        raise DataError(
            "turn_not_located",
            f"template {self.name}: messages[{k}] ({role}) cannot be located: its rendering does not continue {start}: "
            f"{problem.replace(escaped(breaker), '')}",
        )

    def _marked_turns(self, rendering: Rendering, conversation: Conversation, trained: Sequence[bool]) -> Ranges | None:
        """Return the ranges of the trained answers according to {% generation %} blocks.

        Return None if the template has no such blocks. Raises DataError if not every answer has one.
        """
        if not self._marked:
            return None
        answers = [k for k, message in enumerate(conversation.messages) if message.role == "assistant"]
        if len(answers) == len(rendering.marks):
            return [(start, stop) for k, (start, stop) in zip(answers, rendering.marks, strict=True) if trained[k]]
        raise DataError(
            "turn_not_located",
            f"template {self.name}: rendered {len(rendering.marks)} {{% generation %}} blocks for {len(answers)} "
            f"assistant turns (messages{answers}); mark every assistant turn, or remove the marks",
        )

    def _require_agreement(self, located: Ranges, marked: Ranges, turns: Sequence[int]) -> None:
        for k, (start, stop), (first, last) in zip(turns, located, marked, strict=True):
            if first != start or last < stop:
                raise DataError(
                    "turn_not_located",
                    f"template {self.name}: messages[{k}]: its {{% generation %}} block covers characters {first:,} to "
                    f"{last:,}, but after its prompt the model writes {start:,} to {stop:,}; mark what the model "
                    "writes, or remove the marks",
                )

    def _require_written(
        self, message: Message, k: int, answer: str, breaker: str, later: list[tuple[str, str]] | None
    ) -> None:
        """Check that the template wrote a turn, its reasoning, and its calls.

        A text that the template never writes may be in the answer by chance, so finding it is not enough. If `later` is
        given, placeholders that pieces may write are added to it, with the answer. Raises Reject or DataError.
        """
        if message.content.strip() and not self._has_text(answer):
            raise Reject(
                "answer_not_written", f"messages[{k}] has content, but the template {self.name} does not write it"
            )
        reasoning = reasoning_of(message)
        if later is None and not reasoning and not message.tool_calls:
            return
        said = self.encoder.control_pattern.sub("", answer)
        gaps = answer = answer.replace(breaker, "")
        answer = _JSON_GAP.sub("\0\\1\0", answer)
        never = self._forms.reasoning is ReasoningForm.NONE and bool(message.reasoning)
        never = never and not (message.tool_calls and self._forms.reasons_before_calls)
        names = [call.name for call in message.tool_calls]
        if later is not None and not never and self._forms.calls:
            content = "" if GAP_OF_PIECE.sub("", said).strip() else message.content
            needed = filter(None, (content, reasoning, *names))
            later += [(value, gaps) for value in needed if not is_written(value, answer)]
            return
        self._require_reasoning(message, k, answer, never)
        for name in names:
            if self._forms.calls is None or not is_written(name, answer):
                raise Reject(
                    "calls_not_written",
                    f"messages[{k}] calls {name!r}, but the template {self.name} does not write tool calls",
                )

    def _require_reasoning(self, message: Message, k: int, answer: str, never: bool = False) -> None:
        """Check that a text has the reasoning of a message.

        If `never`, the template does not write it. Raises Reject or DataError.
        """
        reasoning = reasoning_of(message)
        if not reasoning:
            return
        # The content may have the same words as the reasoning.
        content = without_reasoning(message).content.strip()
        head, found, tail = answer.rpartition(content) if content else (answer, "", "")
        others = [head + "\0" + tail, answer.replace(content, "\0", 1)] if found else [answer]
        if never or not any(is_written(reasoning, other) for other in others):
            if self._forms.written_reasoning:
                raise Reject(
                    "reasoning_left_out",
                    f"messages[{k}] has reasoning, but the template {self.name} does not write it here, although it "
                    "writes reasoning elsewhere; remove it, set `train: false` in the message, or `reasoning: drop`",
                )
            raise DataError(
                "reasoning_not_written",
                f"template {self.name}: messages[{k}] has reasoning, but the template does not write it; set "
                "`reasoning: drop`, or use a template that writes reasoning",
            )

    def _has_text(self, answer: str) -> bool:
        """Return whether an answer has text other than white space and controls."""
        start = answer.lstrip()
        if start and not self.encoder.control_pattern.match(start):
            return True
        return bool(self.encoder.control_pattern.sub("", answer).strip())

    def _is_read_alike(self, rendering: Rendering, breaker: str) -> bool:
        """Return whether trained turns and later prompts have the same tokens.

        A turn is encoded from its own start, as the model writes it. Later prompts are encoded as a whole.
        """
        return self._boundary.splits_all(
            (self._boundary.tail(text[:start].replace(breaker, "")), text[start:stop].replace(breaker, ""))
            for text, ranges, turn, *_ in rendering.samples
            if turn is None
            for start, stop in ranges[:-1]  # later prompts contain these turns
        )

    def _without_space(self, text: str, start: int, stop: int) -> int:
        """Return the end of a turn without white space after its last control token."""
        last = max((m.end() for m in self.encoder.control_pattern.finditer(text, start, stop)), default=0)
        return last if last and not text[last:stop].strip() else stop


def _prompted(rendering: Rendering, turns: list[int], trained: Sequence[bool]) -> tuple[list[int], Sequence[bool]]:
    """Return the trained turns that have a prompt, and the flags of all messages.

    A first turn without a prompt, such as a greeting, is context.
    """
    return (turns[1:], [False, *trained[1:]]) if rendering.unprompted else (turns, trained)


def _of_data(samples: list[Sample], added: int) -> list[Sample]:
    """Return samples with the message indices of the data.

    `added` is the number of messages that were added at the start.
    """
    return [Sample(spans, None if turn is None else turn - added) for spans, turn in samples] if added else samples


def _with_own_numbers(message: str, added: int) -> str:
    """Return an error message with the message indices of the data."""

    def name(found: re.Match[str]) -> str:
        number = int(found[1]) - added
        return "the default system message" if number < 0 else f"messages[{number}]"

    return re.sub(r"messages\[(\d+)\]", name, message) if added else message


def _with_added(samples: Sequence[Rendered], added: int) -> list[Rendered]:
    """Return samples with the numbers of their turns after messages were added.

    `_of_data` is the opposite.
    """
    return [sample._replace(turn=None if sample.turn is None else sample.turn + added) for sample in samples]


def _in_order(ranges: Ranges) -> Ranges:
    """Return ranges in ascending order, each without the part that an earlier one has."""
    ordered: Ranges = []
    for start, stop in sorted((start, stop) for start, stop in ranges):
        ordered.append((max([start, *(end for _, end in ordered[-1:])]), stop))
    return ordered


def _touching_joined(ranges: Ranges) -> list[tuple[int, int]]:
    """Return ranges with those that touch joined to one."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined


def _place_without(removed: list[int], place: int) -> int:
    """Return a place in a text without the characters at the places `removed`."""
    return place - bisect_left(removed, place)


def _has_all_space(rendering: Rendering) -> bool:
    """Return whether every gap for a text still has its white space."""
    gaps = [gap for text, *_ in rendering.samples for gap in GAP.finditer(text)]
    return all(gap[0][0] == gap[0][-1] == "\v" for gap in gaps if not gap[2])
