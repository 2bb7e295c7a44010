"""Convert a conversation to spans with a Jinja chat template.

The template is the tokenizer's own, or a file.

    messages ─break─▶ messages whose control strings are broken ─render─▶ texts ─split─▶ control tokens and text
                                                                  └─locate─▶ which characters are trained on

Templates are rendered as in the environment that they are written for, so the model sees the same text at inference.
This module adds two things:

- Content stays content (see `control_strings`): any control string that is intact after rendering was written by the
  template.
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
from itertools import chain, islice
from typing import Any, NamedTuple

import orjson

from packcorpus.tasks.conversations.model import Conversation, in_parts, options_json
from packcorpus.tasks.core.errors import DataError, PackError, Reject, UsageError
from packcorpus.tasks.encoders.auto_classes import NAMES as SPECIAL_TOKENS
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.templates.adjust import (
    GIVEN_TO_TEMPLATES,
    NO_CHANGE,
    Adjust,
    ReasoningForm,
    reasoning_of,
    separated,
)
from packcorpus.tasks.templates.built_in import plain_text
from packcorpus.tasks.templates.jinja.control_strings import Broken, ControlStrings, Harmless
from packcorpus.tasks.templates.jinja.engines import BothEngines, Engines
from packcorpus.tasks.templates.jinja.expected_forms import ExpectedForms
from packcorpus.tasks.templates.jinja.outline import Edges, MustRender, edges_of, traced_edges
from packcorpus.tasks.templates.jinja.renderer import Renderer
from packcorpus.tasks.templates.jinja.rendering import EngineName, Job, Method, Rendering, Tracing
from packcorpus.tasks.templates.jinja.splitting import Splitter, TokenBoundary
from packcorpus.tasks.templates.jinja.turns.checks import Checked, Checks, has_gaps, has_reasoning
from packcorpus.tasks.templates.jinja.turns.cuts import Cuts, empty_block, starts_with_block, without
from packcorpus.tasks.templates.jinja.turns.locate import Located
from packcorpus.tasks.templates.jinja.turns.marks import Range
from packcorpus.tasks.templates.markers import find_unknown_markers
from packcorpus.tasks.templates.placeholders import GAP, is_placeholder
from packcorpus.tasks.templates.sections import ALL_SECTIONS, Sections
from packcorpus.tasks.templates.spans import TEXT, Outline, Sample, Template, TrainOn, Turns, has_flagged

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

    `added` messages at its start are not in the data. `private` breaks its control strings.
    """

    conversation: Conversation
    added: int
    private: str
    job: Job


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
        self.name, self.encoder, self.adjust, self.sections = name, encoder, adjust, sections
        self._source, self._turns, self._all = source, turns, train_on == "all"
        self.unknown = find_unknown_markers(source, encoder, adjust.default_system or "")
        self._as_rendered = turns == "as_rendered"
        self._reads_marks = not self._all and re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
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
        self._control_strings = ControlStrings(encoder, source)
        self._harmless = Harmless(encoder)
        self._splitter = Splitter(encoder)
        self._known_controls: dict[tuple[Any, ...], list[list[str]]] = {}
        ends = encoder.control_pattern.pattern
        constants = special | dict(options or {})
        self._renderer = Renderer(name, source, constants, date, ends)
        given = {*constants, *GIVEN_TO_TEMPLATES, "documents", *SPECIAL_TOKENS}
        self.undefined = ({name: n for name, n in self._renderer.names_read.items() if name not in given},)
        self.engines = Engines(self._renderer, source, constants, date, ends)
        self._checks: dict[str, Checks] = {}  # by options of conversations as JSON
        self._cuts = Cuts(name, encoder, self._boundary, sections)

    @property
    def writes_reasoning(self) -> bool:  # type: ignore[override]
        return ExpectedForms(self._source, self._renderer).written_reasoning is not None

    def knows_developer(self, conversation: Conversation) -> bool:
        return self._checks_for(conversation).forms.knows_developer

    def expected_messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """Return messages in OpenAI's form, as the template reads them."""
        forms = self._checks_for(conversation).forms
        messages = [forms.expected(message) for message in conversation.messages]
        return [in_parts(m) if forms.reads_parts or isinstance(m["content"], list) else m for m in messages]

    def all_samples(
        self, conversations: Sequence[tuple[Conversation, Sequence[bool]]]
    ) -> Iterator[list[Sample] | Reject | PackError]:
        for first in range(0, len(conversations), AT_ONCE):
            cases = [self._case(*each) for each in conversations[first : first + AT_ONCE]]
            renderings = iter(self.engines.render_all([case.job for case in cases if isinstance(case, _Case)]))
            for case in cases:
                yield self._result(case, next(renderings)) if isinstance(case, _Case) else case

    def _case(self, conversation: Conversation, trained: Sequence[bool]) -> _Case | list[Sample] | Reject | PackError:
        """Return a conversation to be rendered, or else its samples or its error."""
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
        return _Case(conversation, added, broken.private, job)

    def _result(self, case: _Case, rendering: Rendering | Reject | DataError) -> list[Sample] | Reject | PackError:
        if not isinstance(rendering, Rendering):
            return _with_own_numbers(rendering, case.added)
        try:
            return _of_data(self._samples(case, rendering), case.added)
        except (Reject, PackError) as problem:
            return _with_own_numbers(problem, case.added)

    def _samples(self, case: _Case, rendering: Rendering) -> list[Sample]:
        conversation, _, private, job = case
        if job.method == "auto" and (last := self._read_otherwise(rendering, private)):
            job = job._replace(last=last)
            rendering = self.engines.render(job)
        if rendering.lost:
            self._require_own_controls(self._controls_of(rendering, private), job, conversation)
        checks = self._checks_for(conversation)
        checks.require_located(rendering, conversation, private, every=self._all)
        if self._all:
            text = rendering.text.replace(private, "")
            for k, message in enumerate(conversation.messages):
                checks.require_reasoning(message, k, text)
            [spans] = self._splitter.split_all([(rendering.text, self._without(rendering))], private)
            messages = enumerate(conversation.messages)
            lacking = [k for k, message in messages if self._as_rendered and not has_reasoning(message, text)]
            samples = [Sample(spans, unreasoned=tuple(lacking))]
        else:
            samples = self._located(rendering, conversation, job.turns, job, private)
        controls = [[span.text for span in sample.spans if span.token != TEXT] for sample in samples]
        if not samples or samples[0].turn is not None:
            controls.insert(0, [string for _, string, _ in self._splitter.controls_in(rendering.text, private)])
        self._require_own_controls(controls, job, conversation)
        unwritten = checks.require_texts(
            self._checked(rendering, job), job.messages, job.tools, private, partial(self._checked_with, job, rendering)
        )
        return [samples[0]._replace(unwritten=tuple(unwritten)), *samples[1:]] if unwritten else samples

    def _checked(self, rendering: Rendering, job: Job) -> list[Checked]:
        """Return the samples of a rendering with the ranges of each trained message."""
        if not rendering.samples:
            return [Checked(rendering.text, len(job.messages), {})]
        checked, after = [], 0
        for text, ranges, turn, turns, _, flagged, *_ in rendering.samples:
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
        engine: EngineName = "minijinja" if is_fast else "jinja2"
        other = job._replace(messages=[*messages], tools=tools, marks=False, engine=engine)
        if not located and (not rendering.samples or rendering.samples[0].turn is None):
            other = other._replace(turns=[], method="others")
        try:
            found = self.engines.render(other)
        except (Reject, DataError):
            return []
        return self._checked(found, other) if found.samples else []

    def _located(
        self, rendering: Rendering, conversation: Conversation, turns: Sequence[int], job: Job | None, private: str
    ) -> list[Sample]:
        """Check the located samples and return them as spans.

        `turns` are those that are trained on. Sections that are left out have no labels. `job` is None for
        placeholders.
        """
        turns = turns[rendering.unprompted :]
        samples, checks = rendering.samples, self._checks_for(conversation)
        for k in self._absent(samples[0], conversation, turns) if self._as_rendered else ():
            checks.require_written(conversation.messages[k], k, "", private)
        marks = rendering.marks if self._reads_marks else None
        ranges = [checks.ranges_of(sample, conversation, marks, private) for sample in samples]
        if job and self._as_rendered:
            ranges = [self._between_tokens(samples[0].text, ranges[0], private)]
        if job and self.sections != ALL_SECTIONS:
            left_out = self._cuts.left_out(samples, conversation, job, self.engines.render, private)
            ranges = [without(*each) for each in zip(ranges, left_out, strict=True)]
        split = self._splitter.split_all(zip((sample.text for sample in samples), ranges, strict=True), private)
        before = [-1, *(sample.turn for sample in samples if sample.turn is not None)]
        return [
            self._counted(Sample(spans, sample.turn, after), sample, conversation, turns, private)
            for spans, sample, after in zip(split, samples, before, strict=False)
        ]

    def _between_tokens(self, text: str, ranges: Sequence[Range], private: str) -> list[Range]:
        """Return ranges whose edges no token crosses.

        So the tokens are those of the whole text. A token may join white space at the edge of an answer with the text
        around it. It is not trained on.
        """
        moved = []
        for start, stop in ranges:
            answer = text[start:stop]
            first, last = len(answer) - len(answer.lstrip()), len(answer.rstrip())
            starts, stops = range(start, start + first + 1), range(stop, start + last - 1, -1)
            first, last = (
                next((n for n in each if self._splits(text, n, private)), each[0]) for each in (starts, stops)
            )
            moved.append((first, last))
        return moved

    def _splits(self, text: str, place: int, private: str) -> bool:
        before, after = (part.replace(private, "") for part in (text[max(0, place - 200) : place], text[place:][:200]))
        return self._boundary.splits(self._boundary.tail(before), after)

    def _counted(
        self, sample: Sample, located: Located, conversation: Conversation, turns: Sequence[int], private: str
    ) -> Sample:
        """Return a sample with the counts of its answers.

        `turns` are those that are trained on.
        """
        reads = self._checks_for(conversation).forms.reasoning is not ReasoningForm.NONE
        reasoned, closed, text, unreasoned = 0, 0, located.text, []
        for k, (start, stop) in located.answers:
            content = conversation.messages[k].content
            if self._as_rendered and not has_reasoning(conversation.messages[k], text[start:stop].replace(private, "")):
                unreasoned.append(k)
            elif reads and reasoning_of(conversation.messages[k]):
                reasoned += 1
            elif block := empty_block(text, start, stop):
                # A block in a content is not counted, because such a content is filled in like any other one.
                rest = text[start + len(block) : stop].replace(private, "").lstrip()
                closed += reads or not starts_with_block(content) or rest.startswith(content.strip())
        sample = sample._replace(reasoned=reasoned, closed=closed)
        if self._as_rendered:
            absent = self._absent(located, conversation, turns)
            sample = sample._replace(unlike=located.unlike, changed=located.changed, absent=absent)
            sample = sample._replace(unreasoned=(*unreasoned, *absent))
        return sample

    @staticmethod
    def _absent(located: Located, conversation: Conversation, turns: Sequence[int]) -> tuple[int, ...]:
        """Return the trained answers of which the one rendering has nothing."""
        return tuple(k for k in turns if k not in located.turns and conversation.messages[k].role == "assistant")

    def _checks_for(self, conversation: Conversation) -> Checks:
        options = options_json(conversation)
        if options not in self._checks:
            if len(self._checks) >= MOST_READINGS:
                self._checks.clear()
            forms = ExpectedForms(self._source, self._renderer, conversation.template_options)
            self._checks[options] = Checks(self.name, self.encoder, forms, self._as_rendered)
        return self._checks[options]

    def _job(self, broken: Broken, turns: list[int], method: Method, trace: Tracing = "") -> Job:
        messages = [in_parts(m) if broken.reads_parts or isinstance(m["content"], list) else m for m in broken.messages]
        engine = "jinja2" if trace else self.engines.engine_for(broken.json, broken.json_of_options)
        return Job(messages, broken.tools, self._reads_marks, turns, method, trace, engine, broken.options)

    def _broken(self, conversation: Conversation, change: Callable[[Any], Any] = lambda value: value) -> Broken:
        """Return messages and tools in OpenAI's form, broken. Raises Reject."""
        for name in conversation.template_options or ():
            if name in GIVEN_TO_TEMPLATES:
                raise Reject(
                    "bad_options",
                    f"chat_template_kwargs.{name}: comes from the conversation and cannot be an option; remove it",
                )
        forms = self._checks_for(conversation).forms
        messages = [forms.expected(message) for message in conversation.messages]
        tools: Any = [orjson.loads(tool) for tool in conversation.tools] or None
        broken = self._control_strings.broken(
            change(messages), change(tools), conversation.template_options, options_json(conversation)
        )
        return broken._replace(reads_parts=forms.reads_parts)

    def _require_own_controls(self, found: list[list[str]], job: Job, conversation: Conversation) -> None:
        """Check that the template wrote every control token itself.

        Raises Reject if the template turned a text of the conversation into a control token (see `control_strings`).
        `found` has the control strings of the whole rendering, and of each sample that is not the whole conversation.
        Comparing them with an earlier conversation of the same structure is nearly always enough.
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
        if not self._harmless.has(job.messages, job.tools):
            broken = self._broken(conversation, self._harmless.of)
            other = self._job(broken, job.turns, job.method)._replace(last=job.last)
            if other.messages != job.messages or other.tools != job.tools:  # otherwise, all are harmless
                expected = self._controls_of(self.engines.render(other), broken.private)
        if len(self._known_controls) < MOST_KNOWN:
            self._known_controls.setdefault(alike, expected)
        # There may be one sample for these texts, and several samples for harmless texts.
        pairs = zip(found, expected, strict=True) if len(found) == len(expected) else [(found[0], expected[0])]
        for forged in chain(*(Counter(one) - Counter(other) for one, other in pairs)):
            raise Reject(
                "forged_token",
                f"the template {self.name} turns a text of this conversation into the control token {forged!r}",
            )

    def _controls_of(self, rendering: Rendering, private: str) -> list[list[str]]:
        texts = [rendering.text, *(sample.text for sample in rendering.samples if sample.turn is not None)]
        return [[string for _, string, _ in self._splitter.controls_in(text, private)] for text in texts]

    def _read_otherwise(self, rendering: Rendering, private: str) -> list[int]:
        """Return the trained turns whose tokens differ in later prompts.

        A turn is encoded alone, as the model writes it. Later prompts are encoded as a whole.
        """
        edges: dict[int, list[tuple[str, str]]] = {}
        for k, before, after in edges_of(rendering):
            edges.setdefault(k, []).append(
                (self._boundary.tail(before.replace(private, "")), after.replace(private, ""))
            )
        if self._boundary.splits_all(chain(*edges.values())):
            return []
        return [k for k, own in edges.items() if not all(self._boundary.splits(*edge) for edge in own)]

    def _without(self, rendering: Rendering) -> list[Range]:
        """Return the ranges outside the located turns, with white space at their ends."""
        text, [(_, ranges, *_)] = rendering.text, rendering.samples
        edges = [0]
        for start, stop in ranges:
            last = max((m.end() for m in self.encoder.control_pattern.finditer(text, start, stop)), default=0)
            edges += [start, last if last and not text[last:stop].strip() else stop]
        return list(zip(edges[::2], [*edges[1::2], len(text)], strict=True))

    # Tracing

    def separate(self, conversation: Conversation) -> Conversation | None:
        if any(message.parts for message in conversation.messages):
            forms = self._checks_for(conversation).forms
            if any(message.parts and forms.reads_lists(forms.role_of(message)) for message in conversation.messages):
                return None
            messages = tuple(replace(message, parts=()) for message in conversation.messages)
            conversation = replace(conversation, messages=messages)
        if self.adjust.drop_reasoning or self._checks_for(conversation).forms.reasoning is ReasoningForm.FIELD:
            return separated(conversation)
        return None if any(message.reasoning for message in conversation.messages) else conversation

    def outline(self, conversation: Conversation, trained: Sequence[bool]) -> Outline | None:
        """Return the outline; None if the template does more than write and test values."""
        if self._all or conversation.messages[0].role == "text" or has_flagged(conversation, trained):
            return None
        if self.sections != ALL_SECTIONS:  # tokens decide where a label may change
            return None
        conversation, trained, added = self.adjust.of(conversation, trained)
        forms = self._checks_for(conversation).forms
        if forms.calls and forms.calls[1]:  # the template reads arguments as text
            calls = [call for message in conversation.messages for call in message.tool_calls]
            if not all(is_placeholder(call.arguments) for call in calls):
                return None
        turns = [k for k, flag in enumerate(trained) if flag]
        broken = self._broken(conversation)
        rendering, strips = self._traced(broken, turns, self._turns)
        has_edges, every = self._turns in ("auto", "as_rendered"), self._as_rendered
        found = traced_edges(rendering, broken.private, self._boundary, every) if has_edges else []
        if found is None:
            return None
        edges = Edges(found, self._boundary)
        if edges.are_mixed or (edges.reached and self._as_rendered):
            return None
        if edges.reached:  # like `samples`, where a sample ends after each turn
            rendering, strips = self._traced(broken, turns, "apart")
        if rendering.lost or rendering.trace is None:
            return None
        for text, ranges, turn, numbers, *_ in rendering.samples:
            parts = [(text, broken.messages if turn is None else broken.messages[: turn + 1], broken.tools)]
            parts += [
                (text[start:stop], [broken.messages[k]], None) for k, (start, stop) in zip(numbers, ranges, strict=True)
            ]
            if not all(has_gaps(*part) for part in parts):
                return None  # each of these conversations is rendered and rejected
        samples = self._located(rendering, conversation, turns, None, broken.private)
        *tests, formats = rendering.trace
        reads = forms.reasoning is not ReasoningForm.NONE or self.adjust.drop_reasoning
        inline = reads or rendering.unprompted or not all(sample.plain for sample in rendering.samples)
        return Outline(_of_data(samples, added), MustRender(tests, edges, strips, inline), formats)

    def _traced(self, broken: Broken, turns: list[int], method: Turns) -> tuple[Rendering, bool]:
        """Return a rendering of placeholders, and whether some white space is stripped."""
        job = self._job(broken, turns, method, "spaced")
        rendering = self._renderer.render(job)
        gaps = [gap for text, *_ in rendering.samples for gap in GAP.finditer(text)]
        keep_space = all(gap[0][0] == gap[0][-1] == "\v" for gap in gaps if not gap[2])
        if not (rendering.trace and rendering.trace[3]) and keep_space:
            return rendering, False
        # Values with and without white space are rendered the same only if the template strips every value everywhere.
        other = self._renderer.render(job._replace(trace="bare"))
        return other, other != rendering


def _of_data(samples: list[Sample], added: int) -> list[Sample]:
    """Return samples with the indices of the data: `added` messages come first."""
    if not added:
        return samples
    return [
        sample._replace(
            turn=None if sample.turn is None else sample.turn - added,
            after=sample.after - added,
            unwritten=tuple(k - added for k in sample.unwritten),
            unreasoned=tuple(k - added for k in sample.unreasoned),
            absent=tuple(k - added for k in sample.absent),
        )
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


def open_jinja(name: str, sources: Sequence[str], *settings: Any) -> Template:
    """Open a Jinja template.

    A second source is for conversations with tools. `settings` are the further arguments of a JinjaTemplate.
    """
    default, *others = (JinjaTemplate(name, source, *settings) for source in sources)
    return ByTools(default, *others) if others else default


class ByTools(Template):
    """Two Jinja templates of one tokenizer, one of them for conversations with tools."""

    markers_as_text: tuple[str, ...] = ()

    def __init__(self, default: JinjaTemplate, tool_use: JinjaTemplate):
        self._default, self._tool_use = default, tool_use
        self.name, self.encoder = default.name, default.encoder
        self.adjust, self.sections = default.adjust, default.sections
        self.engines = BothEngines(default.engines, tool_use.engines)
        self.undefined = (*default.undefined, *tool_use.undefined)
        self.unknown = default.unknown | tool_use.unknown

    @property
    def writes_reasoning(self) -> bool:  # type: ignore[override]
        return self._default.writes_reasoning or self._tool_use.writes_reasoning

    def of(self, conversation: Conversation) -> JinjaTemplate:
        """Return the template that renders a conversation."""
        return self._tool_use if conversation.tools else self._default

    def knows_developer(self, conversation: Conversation) -> bool:
        return self.of(conversation).knows_developer(conversation)

    def all_samples(
        self, conversations: Sequence[tuple[Conversation, Sequence[bool]]]
    ) -> Iterator[list[Sample] | Reject | PackError]:
        remaining = iter(conversations)
        while some := list(islice(remaining, AT_ONCE)):
            samples = {
                template: template.all_samples([pair for pair in some if self.of(pair[0]) is template])
                for template in (self._default, self._tool_use)
            }
            for conversation, _ in some:
                yield next(samples[self.of(conversation)])

    def separate(self, conversation: Conversation) -> Conversation | None:
        return self.of(conversation).separate(conversation)

    def outline(self, conversation: Conversation, trained: Sequence[bool]) -> Outline | None:
        return self.of(conversation).outline(conversation, trained)
