"""Convert a conversation to spans with a Jinja chat template.

The template is the tokenizer's own, or a file.

    messages ─break─▶ messages whose control strings are broken ─render─▶ texts ─split─▶ control tokens and text
                                                                  └─locate─▶ which characters are trained on

Templates are rendered as in the environment that they are written for, so the model sees the same text at inference.
This module adds two things:

- Content stays content (see `breaker`): any control string that is intact after rendering was written by the template.
- Trained turns are located (see `locate`): each follows exactly the prompt that the model sees at inference. If the
  template has `{% generation %}` marks, they must hold all that the model writes. If a turn cannot be located, the
  conversation is rejected, because a guess could silently produce wrong labels.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import orjson

from tasks.conversations.model import Conversation, in_parts, options_json
from tasks.core.errors import DataError, PackError, Reject, UsageError
from tasks.encoders.auto_tokenizer import NAMES as SPECIAL_TOKENS
from tasks.encoders.encoder import Encoder
from tasks.templates.adjust import GIVEN_TO_TEMPLATES, NO_CHANGE, Adjust
from tasks.templates.built_in import plain_text
from tasks.templates.jinja.breaker import Breaker, Broken
from tasks.templates.jinja.engines.choice import Engines
from tasks.templates.jinja.engines.renderer import Renderer
from tasks.templates.jinja.engines.requests import Engine, Job, Method, Rendering, Tracing
from tasks.templates.jinja.expected_forms import ExpectedForms
from tasks.templates.jinja.neutral import Neutral
from tasks.templates.jinja.splitter import Splitter
from tasks.templates.jinja.token_boundary import TokenBoundary
from tasks.templates.jinja.turns.context import Checked, Context, has_gaps
from tasks.templates.jinja.turns.cuts import Answer, Cuts, Written, answers_at, empty_block, starts_with_block, without
from tasks.templates.jinja.turns.flagged import Range
from tasks.templates.jinja.turns.labels import Labels
from tasks.templates.jinja.unusual import Edges, Head, Unusual
from tasks.templates.placeholders import GAP, is_placeholder
from tasks.templates.reasoning import ReasoningForm, reasoning_of, separated
from tasks.templates.sections import ALL_SECTIONS, Sections
from tasks.templates.spans import TEXT, Outline, Sample, Span, Template, TrainOn, Turns, has_flagged

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

# Special tokens that an encoder knows, also without a name in the settings of the tokenizer.
_OF_ENCODERS = ("bos_token", "eos_token", "pad_token")

# Number of conversations that are rendered together. Their renderings are held in memory.
AT_ONCE = 64

# The maximum number of sets of options for which it is known how the template reads messages.
MOST_READINGS = 64

# The maximum number of conversations whose control tokens are remembered for comparison.
MOST_KNOWN = 1024


class _Case(NamedTuple):
    """A conversation to be rendered.

    `added` messages at its start are not in the data.
    """

    conversation: Conversation
    added: int
    broken: Broken
    job: Job


class _Reading(NamedTuple):
    """What a template reads with some options, and the checks of its renderings."""

    forms: ExpectedForms
    labels: Labels


class JinjaTemplate(Template):
    """A Jinja chat template bound to a tokenizer.

    `today` is the date that the template sees, as YYYY-MM-DD. `options` are further variables, such as enable_thinking.
    """

    markers_as_text: tuple[str, ...] = ()
    engines: Engines

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
        sections: Sections = ALL_SECTIONS,
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
        special = {key: token for key, token in encoder.named_tokens.items() if key not in _OF_ENCODERS}
        special |= {
            key: encoder.control_strings.get(token, "")
            for key, token in zip(_OF_ENCODERS, (encoder.bos_id, encoder.eos_id, encoder.pad_id), strict=True)
            if token is not None
        }
        self._boundary = TokenBoundary(encoder)
        self._breaker = Breaker(encoder, source)
        self._neutral = Neutral(encoder)
        self._splitter = Splitter(encoder)
        self._known_controls: dict[tuple[Any, ...], list[list[str]]] = {}
        ends = encoder.control_pattern.pattern
        constants = special | dict(options or {})
        self._renderer = Renderer(name, source, constants, date, ends)
        given = {*constants, *GIVEN_TO_TEMPLATES, "documents", *SPECIAL_TOKENS}
        self.undefined = ({name: n for name, n in self._renderer.names_read.items() if name not in given},)
        self.engines = Engines(self._renderer, source, constants, date, ends)
        self._source = source
        self._readings: dict[str, _Reading] = {}  # by options of conversations as JSON
        self.sections = sections
        self._cuts = Cuts(name, encoder, self._boundary, sections)
        self._context = Context(name)

    def knows_developer(self, conversation: Conversation) -> bool:
        return self._reading(conversation).forms.knows_developer

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
        [found] = self.all_samples([(conversation, trained)])
        if isinstance(found, list):
            return found
        raise found

    def all_samples(
        self, conversations: Sequence[tuple[Conversation, Sequence[bool]]]
    ) -> Iterator[list[Sample] | Reject | PackError]:
        """Yield the samples of each conversation, or the error that `samples` raises."""
        for first in range(0, len(conversations), AT_ONCE):
            cases = [self._case(*each) for each in conversations[first : first + AT_ONCE]]
            renderings = iter(self.engines.render_all([case.job for case in cases if isinstance(case, _Case)]))
            for case in cases:
                yield self._result(case, next(renderings)) if isinstance(case, _Case) else case

    def _case(self, conversation: Conversation, trained: Sequence[bool]) -> _Case | list[Sample] | Reject | PackError:
        """Return a conversation to be rendered.

        If it is not rendered, return its samples or its error.
        """
        if conversation.messages[0].role == "text":
            return [Sample(plain_text(conversation, trained, self.encoder))]
        added = 0
        try:
            conversation, trained, added = self.adjust.of(conversation, trained)
            broken = self._broken(conversation)
        except (Reject, PackError) as problem:
            return _with_own_numbers(problem, added)
        turns = [k for k, flag in enumerate(trained) if flag != self._all]
        job = self._job(broken, turns, "others" if self._all else self._turns)
        return _Case(conversation, added, broken, job)

    def _result(self, case: _Case, rendering: Rendering | Reject | DataError) -> list[Sample] | Reject | PackError:
        if not isinstance(rendering, Rendering):
            return _with_own_numbers(rendering, case.added)
        try:
            return _of_data(self._samples(case, rendering), case.added)
        except (Reject, PackError) as problem:
            return _with_own_numbers(problem, case.added)

    def _samples(self, case: _Case, rendering: Rendering) -> list[Sample]:
        """Return the samples of a rendered conversation. Raises Reject or DataError."""
        conversation, _, broken, job = case
        breaker = broken.breaker
        if job.method == "auto" and (last := self._read_otherwise(rendering, breaker)):
            job = job._replace(last=last)
            rendering = self.engines.render(job)
        if rendering.lost:
            self._require_own_controls(self._controls_of(rendering, breaker), job, conversation)
        labels = self._reading(conversation).labels
        if self._all:
            start = "the rendering of the messages before it"
            labels.require_located(rendering, conversation, start, breaker, every=True)
            text = rendering.text.replace(breaker, "")
            for k, message in enumerate(conversation.messages):
                labels.require_reasoning(message, k, text)
            samples = [Sample(self._splitter.split(rendering.text, self._without(rendering), breaker))]
        else:
            labels.require_located(rendering, conversation, "its prompt", breaker)
            samples = self._located(rendering, conversation, job, breaker)
        controls = [[span.text for span in sample.spans if span.token != TEXT] for sample in samples]
        if not samples or samples[0].turn is not None:
            controls.insert(0, [string for _, string, _ in self._splitter.controls_in(rendering.text, breaker)])
        self._require_own_controls(controls, job, conversation)
        self._context.require(
            self._checked(rendering, job), job.messages, job.tools, breaker, partial(self._checked_with, job, rendering)
        )
        return samples

    def _checked(self, rendering: Rendering, job: Job) -> list[Checked]:
        """Return the samples of a rendering with the ranges of each trained message."""
        if not rendering.samples:
            return [Checked(rendering.text, len(job.messages), {})]
        checked, after = [], 0
        for text, ranges, turn, turns, _, flagged in rendering.samples:
            end = len(job.messages) if turn is None else turn + 1
            if self._all:
                others = self._without(rendering)
                where = {k: others for k in range(end) if k not in turns}
            else:
                where = {k: ranges[n : n + 1] for n, k in enumerate(turns)}
                added = [k for k in job.turns if after <= k < end and job.messages[k]["role"] != "assistant"]
                where |= {k: [*flagged] for k in added}
            checked.append(Checked(text, end, where))
            after = end
        return checked

    def _checked_with(
        self, job: Job, rendering: Rendering, messages: Sequence[Any], tools: Any, located: bool
    ) -> list[Checked]:
        """Return the samples of other messages; [] for a reject.

        If one sample has every prompt, turns are located only if `located`, because this takes further renderings.
        """
        is_fast = self.engines.are_fast and job.engine != "jinja2"
        engine: Engine = "minijinja" if is_fast else "jinja2"
        other = job._replace(messages=[*messages], tools=tools, marks=False, engine=engine)
        if not located and (not rendering.samples or rendering.samples[0].turn is None):
            other = other._replace(turns=[], method="others")
        try:
            found = self.engines.render(other)
        except (Reject, DataError):
            return []
        return self._checked(found, other) if found.samples else []

    @property
    def _reads_marks(self) -> bool:
        return self._marked and not self._all

    def _located(
        self,
        rendering: Rendering,
        conversation: Conversation,
        job: Job | None,
        breaker: str,
    ) -> list[Sample]:
        """Check the located samples and return them as spans.

        `job` is None for placeholders.
        """
        samples, labels = rendering.samples, self._reading(conversation).labels
        marks = rendering.marks if self._reads_marks else None
        ranges = [labels.ranges_of(sample, conversation, marks, breaker) for sample in samples]
        written: list[Written] = [(one.text, answers_at(one.turns, one.ranges)) for one in samples]
        return self._as_samples(written, ranges, [sample.turn for sample in samples], conversation, job, breaker)

    def _as_samples(
        self,
        written: Sequence[Written],
        ranges: list[list[Range]],
        turns: list[int | None],
        conversation: Conversation,
        job: Job | None,
        breaker: str,
    ) -> list[Sample]:
        """Return samples as spans, without labels on sections that are left out."""
        texts = [text for text, _ in written]
        if job and self.sections != ALL_SECTIONS:
            left_out = self._cuts.left_out(written, conversation, job, self._texts_of, breaker)
            ranges = [without(*each) for each in zip(ranges, left_out, strict=True)]
        split = self._splitter.split_all(zip(texts, ranges, strict=True), breaker)
        before = [-1, *(turn for turn in turns if turn is not None)]
        counts = [self._counts(text, answers, conversation, breaker) for text, answers in written]
        return [
            Sample(spans, turn, after, *count)
            for spans, turn, after, count in zip(split, turns, before, counts, strict=False)
        ]

    def _texts_of(self, job: Job) -> list[str]:
        """Return the texts of samples."""
        rendering = self.engines.render(job)
        return [sample.text for sample in rendering.samples] or [rendering.text]

    def _counts(
        self, text: str, answers: Sequence[Answer], conversation: Conversation, breaker: str
    ) -> tuple[int, int]:
        """Return the numbers of answers with reasoning, and with an empty block of it.

        A block counts if the template writes it.
        """
        reads = self._reading(conversation).forms.reasoning is not ReasoningForm.NONE
        reasoned = closed = 0
        for answer in answers:
            message = conversation.messages[answer.k]
            if reads and reasoning_of(message):
                reasoned += 1
            elif block := empty_block(text, answer):
                # A block in a content is not counted, because such a content is filled in like any other one.
                rest = text[answer.start + len(block) : answer.stop].replace(breaker, "").lstrip()
                is_own = reads or not starts_with_block(message.content)
                closed += is_own or rest.startswith(message.content.strip())
        return reasoned, closed

    def _reading(self, conversation: Conversation) -> _Reading:
        options = options_json(conversation)
        if options not in self._readings:
            if len(self._readings) >= MOST_READINGS:
                self._readings.clear()
            forms = ExpectedForms(self._source, self._renderer, conversation.template_options)
            self._readings[options] = _Reading(forms, Labels(self.name, self.encoder, forms))
        return self._readings[options]

    def _job(self, broken: Broken, turns: list[int], method: Method, trace: Tracing = "") -> Job:
        """Return a job with messages and tools in the form that the template expects."""
        messages = [in_parts(m) if broken.reads_parts or isinstance(m["content"], list) else m for m in broken.messages]
        engine = "jinja2" if trace else self.engines.engine_for(broken.json, broken.json_of_options)
        return Job(messages, broken.tools, self._reads_marks, turns, method, trace, engine, broken.options)

    def _broken(self, conversation: Conversation, change: Callable[[Any], Any] = lambda value: value) -> Broken:
        """Return messages and tools in OpenAI's form with broken control strings.

        Raises Reject.
        """
        _check_options(conversation)
        forms = self._reading(conversation).forms
        messages = [forms.expected(message) for message in conversation.messages]
        tools: Any = [orjson.loads(tool) for tool in conversation.tools] or None
        broken = self._breaker.broken(
            change(messages), change(tools), conversation.template_options, options_json(conversation)
        )
        return broken._replace(reads_parts=forms.reads_parts)

    def _require_own_controls(self, found: list[list[str]], job: Job, conversation: Conversation) -> None:
        """Check that the template wrote every control token itself.

        Raises Reject if the template turned a text of the conversation into a control token (see `neutral`). `found`
        has the control strings of the whole rendering, and of each sample that is not the whole conversation. Comparing
        them with an earlier conversation of the same structure is nearly always enough.
        """
        alike = (
            job.method,
            len(conversation.tools),
            *(
                (m.given_role, not m.content, not m.reasoning, len(m.tool_calls), len(m.parts))
                for m in conversation.messages
            ),
            options_json(conversation),
            *job.turns,
            *(~k for k in job.last),
        )
        if self._known_controls.get(alike) == found:
            return
        expected = found
        if not self._neutral.has(job.messages, job.tools):
            broken = self._broken(conversation, self._neutral.of)
            neutral_job = self._job(broken, job.turns, job.method)._replace(last=job.last)
            if neutral_job.messages != job.messages or neutral_job.tools != job.tools:  # otherwise, all are neutral
                neutral = self.engines.render(neutral_job)
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

    def _read_otherwise(self, rendering: Rendering, breaker: str) -> list[int]:
        """Return the trained turns whose tokens differ in later prompts.

        A turn is encoded alone, as the model writes it. Later prompts are encoded as a whole.
        """
        edges: dict[int, list[tuple[str, str]]] = {}
        for k, before, after in _edges(rendering):
            edges.setdefault(k, []).append(
                (self._boundary.tail(before.replace(breaker, "")), after.replace(breaker, ""))
            )
        if self._boundary.splits_all(chain(*edges.values())):
            return []
        return [k for k, own in edges.items() if not all(self._boundary.splits(*edge) for edge in own)]

    def _without(self, rendering: Rendering) -> list[Range]:
        """Return the ranges outside the located turns."""
        text, [(_, ranges, *_)] = rendering.text, rendering.samples
        edges = [0, *chain(*((start, self._without_space(text, start, stop)) for start, stop in ranges)), len(text)]
        return list(zip(edges[::2], edges[1::2], strict=True))

    def _without_space(self, text: str, start: int, stop: int) -> int:
        """Return the end of a turn without white space after its last control token."""
        last = max((m.end() for m in self.encoder.control_pattern.finditer(text, start, stop)), default=0)
        return last if last and not text[last:stop].strip() else stop

    # Tracing

    def separate(self, conversation: Conversation) -> Conversation | None:
        """Return a conversation with its reasoning where this template reads it.

        Return None if the conversation must be rendered.
        """
        if any(message.parts for message in conversation.messages):
            forms = self._reading(conversation).forms
            if any(message.parts and forms.reads_lists(forms.role_of(message)) for message in conversation.messages):
                return None
            messages = tuple(replace(message, parts=()) for message in conversation.messages)
            conversation = replace(conversation, messages=messages)
        return separated(conversation) if self.adjust.drop_reasoning else self._separate(conversation)

    def _separate(self, conversation: Conversation) -> Conversation | None:
        if self._reading(conversation).forms.reasoning is ReasoningForm.FIELD:
            return separated(conversation)
        return None if any(message.reasoning for message in conversation.messages) else conversation

    def outline(self, conversation: Conversation, trained: Sequence[bool]) -> Outline | None:
        """Return the samples of a conversation of placeholders.

        Return None if the template does more with the placeholders than write and test them.
        """
        if self._all or conversation.messages[0].role == "text" or has_flagged(conversation, trained):
            return None
        if self.sections != ALL_SECTIONS:  # tokens decide where a label may change
            return None
        conversation, trained, added = self.adjust.of(conversation, trained)
        forms = self._reading(conversation).forms
        if forms.calls and forms.calls[1]:  # the template reads arguments as text
            calls = [call for message in conversation.messages for call in message.tool_calls]
            if not all(is_placeholder(call.arguments) for call in calls):
                return None
        turns = [k for k, flag in enumerate(trained) if flag]
        broken = self._broken(conversation)
        rendering, strips = self._traced(broken, turns, self._turns)
        heads = self._heads(rendering, broken.breaker) if self._turns == "auto" else []
        if heads is None:
            return None
        edges = Edges(heads, self._boundary)
        if edges.are_mixed:
            return None
        if edges.reached:  # like `samples`, where a sample ends after each turn
            rendering, strips = self._traced(broken, turns, "apart")
        if rendering.lost or rendering.unusual is None:
            return None
        for text, ranges, turn, numbers, *_ in rendering.samples:
            parts = [(text, broken.messages if turn is None else broken.messages[: turn + 1], broken.tools)]
            parts += [
                (text[start:stop], [broken.messages[k]], None) for k, (start, stop) in zip(numbers, ranges, strict=True)
            ]
            if not all(has_gaps(*part) for part in parts):
                return None  # each of these conversations is rendered and rejected
        samples = self._located(rendering, conversation, None, broken.breaker)
        *tests, formats = rendering.unusual
        reads = forms.reasoning is not ReasoningForm.NONE or self.adjust.drop_reasoning
        inline = reads or rendering.unprompted or not all(sample.plain for sample in rendering.samples)
        return Outline(_of_data(samples, added), Unusual(tests, edges, strips, inline), formats)

    def _traced(self, broken: Broken, turns: list[int], method: Turns) -> tuple[Rendering, bool]:
        """Return a rendering of placeholders, and whether some white space is stripped."""
        job = self._job(broken, turns, method, "spaced")
        rendering = self._renderer.render(job)
        if not (rendering.unusual and rendering.unusual[3]) and _has_all_space(rendering):
            return rendering, False
        # Values with and without white space are rendered the same only if the template strips every value everywhere.
        other = self._renderer.render(job._replace(trace="bare"))
        return other, other != rendering

    def _heads(self, rendering: Rendering, breaker: str) -> list[Head] | None:
        """Return the edges of trained turns that `_read_otherwise` checks.

        Return None if one of them has a value as JSON.
        """
        controls, heads = self.encoder.control_pattern, []
        for _, before, after in _edges(rendering):
            ends = [match.end() for match in controls.finditer(before)]
            first = controls.search(after)
            tail = before[ends[-1] if ends else 0 :].replace(breaker, "")
            text = (after[: first.end()] if first else after).replace(breaker, "")
            gap = GAP.search(text)
            written = text[: gap.start()] if gap else text
            if gap and not self._boundary.is_complete(written):
                written += gap.group()
            if any(gap[2] for part in (tail, written) for gap in GAP.finditer(part)):
                return None
            if tail and written:
                heads.append(Head(tail, written))
        return heads


def _edges(rendering: Rendering) -> Iterator[tuple[int, str, str]]:
    """Yield the edges of trained turns that later prompts contain.

    An edge is the start or the end of a turn: the number of the turn, the text before the edge, and the text after it.
    """
    for text, ranges, _, turns, *_ in rendering.samples:
        for k, ((start, stop), (following, _)) in zip(turns, pairwise(ranges), strict=False):
            yield k, text[:start], text[start:stop]
            yield k, text[start:stop], text[stop:following]


def _check_options(conversation: Conversation) -> None:
    """Raise Reject if a conversation sets a variable that its messages and tools set."""
    for name in conversation.template_options or ():
        if name in GIVEN_TO_TEMPLATES:
            raise Reject(
                "bad_options",
                f"chat_template_kwargs.{name}: comes from the conversation and cannot be an option; remove it",
            )


def _of_data(samples: list[Sample], added: int) -> list[Sample]:
    """Return samples with the message indices of the data.

    `added` is the number of messages that were added at the start.
    """
    if not added:
        return samples
    return [
        sample._replace(turn=None if sample.turn is None else sample.turn - added, after=sample.after - added)
        for sample in samples
    ]


def _with_own_numbers(problem: Reject | PackError, added: int) -> Reject | PackError:
    """Return an error with the message indices of the data, and without its traceback.

    A traceback refers to all texts of the conversation.
    """

    def name(found: re.Match[str]) -> str:
        number = int(found[1]) - added
        return "the default system message" if number < 0 else f"messages[{number}]"

    if not added:
        return problem.with_traceback(None)
    return type(problem)(problem.reason, re.sub(r"messages\[(\d+)\]", name, problem.message))


def _has_all_space(rendering: Rendering) -> bool:
    """Return whether every gap for a text still has its white space."""
    gaps = [gap for text, *_ in rendering.samples for gap in GAP.finditer(text)]
    return all(gap[0][0] == gap[0][-1] == "\v" for gap in gaps if not gap[2])
