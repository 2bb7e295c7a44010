"""Render conversations with minijinja, and let Jinja2 judge.

    jobs ─▶ minijinja, in this process ─▶ renderings
       └──▶ Jinja2, in its child process: what minijinja cannot render, what the two are known to render differently,
            and a seeded sample of all others, which is compared

Unless a conversation is long, Jinja2 renders the prompt of each turn. If the results differ in one conversation, Jinja2
renders all others, too, and `differs` says where.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from typing import Any

import orjson

from tasks.conversations.answers import REASONING_KEYS
from tasks.core.errors import DataError, Reject
from tasks.core.printable import shown
from tasks.templates.jinja.engines import limits
from tasks.templates.jinja.engines.fast import FastTemplate, Unsure, is_sure
from tasks.templates.jinja.engines.renderer import Renderer, work_of
from tasks.templates.jinja.engines.rendering import rendered
from tasks.templates.jinja.engines.requests import Engine, Job, Rendering

# One in so many conversations is rendered by both engines. The digest of its messages decides, so the choice does not
# depend on parts or workers.
COMPARED = 128

# The maximum number of sets of options that are tried with both engines. Jinja2 renders conversations with others.
MOST_OPTIONS = 64

_CITY = {"type": "object", "properties": {"a": {"type": "string", "description": "b"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "c", "description": "d", "parameters": _CITY}}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "c", "arguments": {"a": "e", "f": [1, True]}}}
_QUESTION = {"role": "user", "content": " a\n\xa0b\n"}  # a template that writes it in a list is found
_ANSWERS: list[list[dict[str, Any]]] = [
    [{"role": "assistant", "content": "b"}],
    [{"role": "assistant", "content": "b"} | dict.fromkeys(REASONING_KEYS, "r"), _QUESTION],
    [{"role": "assistant", "content": "", "tool_calls": [_CALL]}, {"role": "tool", "content": "{}", "name": "c"}],
]
# Conversations that both engines render before any other.
TRIALS = [
    Job([*system, _QUESTION, *answer, {"role": "assistant", "content": "g\n"}], tools, False, [], "others")
    for system in ([], [{"role": "system", "content": "s"}])
    for tools in (None, [_TOOL])
    for answer in _ANSWERS
]


class Engines:
    """A template, compiled by both engines.

    `renderer` is Jinja2's. `ends` matches a control token. `differs` is None until the engines differ.
    """

    def __init__(self, renderer: Renderer, source: str, constants: Mapping[str, Any], today: datetime, ends: str):
        self.renderer = renderer
        self.differs: str | None = None
        self._compares_all = False
        self._alike: dict[str, bool] = {}  # whether both engines render the trials alike, by options as JSON
        self._ends, self._eos = re.compile(ends), constants.get("eos_token", "")
        self._fast: FastTemplate | None = None
        with suppress(Unsure):
            self._fast = FastTemplate(source, constants, today)
        if self._fast and any(self._is_wrong(*pair) for pair in zip(TRIALS, renderer.render_all(TRIALS), strict=True)):
            self._fast = None  # for every corpus, so it is not reported

    @property
    def are_fast(self) -> bool:
        """Return whether minijinja renders conversations."""
        return self._fast is not None

    def use_jinja2(self) -> None:
        """Let Jinja2 render all further conversations."""
        self._fast = None

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Compare all conversations that are rendered in this context."""
        self._compares_all = True
        try:
            yield
        finally:
            self._compares_all = False

    def engine_for(self, conversation: str, options: str = "") -> Engine:
        """Return what renders a conversation with options of its own, all as compact JSON."""
        if self.differs:
            return "both"  # what one of them did may be what `locate` expects of turns of a kind
        if self._fast is None or not is_sure(conversation) or (options and not self._are_alike(options)):
            return "jinja2"
        is_compared = self._compares_all or zlib.crc32((conversation + options).encode()) % COMPARED == 0
        return "both" if is_compared else "minijinja"

    def _are_alike(self, options: str) -> bool:
        """Return whether both engines render the trials alike with these options."""
        if options not in self._alike:
            if len(self._alike) >= MOST_OPTIONS or not is_sure(options):
                return False
            trials = [trial._replace(options=orjson.loads(options)) for trial in TRIALS]
            judgments = [*self.renderer.render_all(trials)]
            self._alike[options] = not any(map(self._is_wrong, trials, judgments))
        return self._alike[options]

    def render(self, job: Job) -> Rendering:
        """Render one conversation and locate its turns.

        Raises Reject if the template refuses it, and DataError if the template must not be used at all.
        """
        [found] = self.render_all([job])
        if isinstance(found, Rendering):
            return found
        raise found

    def render_all(self, jobs: Sequence[Job]) -> list[Rendering | Reject | DataError]:
        """Return the rendering of each conversation, or the error of `render`."""
        fast = [self._fast_rendering(job) for job in jobs]
        judged = [n for n, job in enumerate(jobs) if fast[n] is None or job.engine == "both"]
        found: list[Any] = [*fast]
        for n, judgment in zip(judged, self.renderer.render_all([jobs[n] for n in judged]), strict=True):
            if fast[n] is not None and fast[n] != judgment and self._fast:
                self.differs = _difference(fast[n], judgment)
                self.use_jinja2()
            found[n] = judgment
        return found

    def _fast_rendering(self, job: Job) -> Rendering | None:
        """Return minijinja's rendering; None if Jinja2 must render the conversation."""
        if self._fast is None or job.engine == "jinja2":
            return None
        messages, tools, marks, turns, method, *_, options, last = job
        if len(turns) > 1 and work_of(job, len(orjson.dumps(messages))) > limits.MOST_WORK:
            return None
        self._fast.start(messages, options)
        try:
            found = rendered(self._fast, self._ends, self._eos, messages, tools, marks, turns, method, last, False)
        except Unsure:
            return None
        return found if marks else found._replace(marks=[])

    def _is_wrong(self, job: Job, judgment: Rendering | Reject | DataError) -> bool:
        fast = self._fast_rendering(job._replace(engine="minijinja"))
        return fast is not None and fast != judgment


class BothEngines:
    """The engines of two templates that render one corpus."""

    def __init__(self, *engines: Engines):
        self._engines = engines

    @property
    def are_fast(self) -> bool:
        """Return whether minijinja renders conversations with one of the templates."""
        return self.differs is None and any(engines.are_fast for engines in self._engines)

    @property
    def differs(self) -> str | None:
        """Return where the renderings of one of the templates differ."""
        return next((engines.differs for engines in self._engines if engines.differs), None)

    def use_jinja2(self) -> None:
        """Let Jinja2 render all further conversations."""
        for engines in self._engines:
            engines.use_jinja2()

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Compare all conversations that are rendered in this context."""
        with ExitStack() as stack:
            for engines in self._engines:
                stack.enter_context(engines.comparing())
            yield


def _difference(fast: Any, judgment: Any) -> str:
    """Describe where minijinja's rendering diverges from Jinja2's."""
    if not isinstance(judgment, Rendering):
        return f"Jinja2 refuses a conversation: {judgment}"
    pairs = enumerate(zip(fast.text, judgment.text, strict=False))
    place = next((n for n, (one, other) in pairs if one != other), min(len(fast.text), len(judgment.text)))
    start = max(0, place - 20)
    return f"{shown(fast.text[start : place + 20])} instead of {shown(judgment.text[start : place + 20])}"
