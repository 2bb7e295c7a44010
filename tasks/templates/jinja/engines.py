"""Render conversations with minijinja, and let Jinja2 judge.

    jobs ─▶ minijinja, in this process ─▶ renderings
       └──▶ Jinja2, in its child process: what minijinja cannot render, what the two are known to render differently,
            and a seeded sample of all others, which is compared

minijinja renders published templates three to five times as fast as Jinja2, and cannot reach Python objects. `fuel`
limits loops, recursion, and memory. It differs from Jinja2 in the texts of `is_sure`, and in constructs that are
refused here. Whatever it refuses is rendered by Jinja2, which also reports the problem. If the results differ in one
conversation, Jinja2 renders all others, too, and `Engines.differs` says where.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from operator import is_
from typing import Any

import minijinja
import orjson

from packcorpus.tasks.conversations.answers import REASONING_KEYS
from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.core.printable import shown
from packcorpus.tasks.templates.jinja.environment import Range, dictsort, to_json
from packcorpus.tasks.templates.jinja.renderer import Renderer, work_of
from packcorpus.tasks.templates.jinja.rendering import MOST_CHARACTERS, MOST_WORK, EngineName, Job, Rendering, rendered

# Fuel is used up by instructions and by text that is created. Rendering takes about one unit per character and ten per
# statement, and 10 million units take two seconds at most.
FUEL = 10_000_000

# Conversations, as compact JSON, that the engines may render differently: U+001C to U+001F, which only Python strips;
# null, as a content that templates iterate over; floats that Python writes with an exponent or a zero at the end, and
# floats of 16 digits, the last of which may be rounded in two ways; letters whose other case is new in Unicode. Two
# more characters mark blocks here.
_DIFFERS = re.compile(
    r"\\u001[c-f]|\"content\":null"
    r"|[\[:,]-?\d+(?:\.0\b|(?:\.\d+)?e)|[\[:,]-?(?=[\d.]{17})\d+\."
    "|[\u019b\u0264\u1c89\u1c8a\ua7cb-\ua7dc\U00010d50-\U00010d85\U00016ea0-\U00016ed3]"
    "|[\ufdd0\ufdd1]"
)
# Conversations with calls or tools, from which a template may make lists or objects. Python escapes more characters in
# those that it writes.
_NESTED = re.compile(r'"arguments":|\}\]\]$')

# Filters and tests that differ for some values, and methods that do.
_FILTERS = (
    "sort", "unique", "groupby", "min", "max", "title", "e", "escape", "urlencode", "indent", "striptags", "pprint",
    "filesizeformat",
)  # fmt: skip
_TESTS = ("odd", "even", "divisibleby", "lower", "upper")
_METHODS = re.compile(r"\.\s*(?:title|splitlines|is(?:digit|alpha|alnum|upper|lower|numeric|decimal))\b")

# Jinja2 refuses attributes that start with an underscore, and minijinja knows only those of the conversation.
_PRIVATE = re.compile(r"""[.|]\s*_|\[\s*["']_|\battr\b""")

_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_MARK = re.compile("[\ufdd0\ufdd1]")
# A block becomes a call, which has a scope of its own as in Jinja2. The line end after it is trimmed.
_DEFINITION = "{% macro generation__() %}\ufdd0{{ caller() }}\ufdd1{% endmacro %}\n"


class Unsure(Exception):
    """Jinja2 must render this conversation."""


class FastTemplate:
    """A template compiled by minijinja.

    It sees `constants` and the date `today`, as in Jinja2. Raises Unsure if minijinja cannot compile the template.
    """

    def __init__(self, source: str, constants: Mapping[str, Any], today: datetime):
        if any(pattern.search(source) for pattern in (_PRIVATE, _METHODS, _MARK)):
            raise Unsure
        environment: Any = minijinja.Environment()
        environment.trim_blocks = environment.lstrip_blocks = environment.pycompat = True
        environment.undefined_behavior = "lenient"
        environment.fuel = FUEL
        for name, value in constants.items():
            environment.add_global(name, value)
        environment.add_global("raise_exception", _refuse)
        environment.add_global("strftime_now", today.strftime)
        environment.add_filter("tojson", self._to_json)
        environment.add_filter("dictsort", dictsort)  # minijinja sorts "ß" as "ss"
        for name in _FILTERS:
            environment.add_filter(name, _refuse)
        for name in _TESTS:
            environment.add_test(name, _refuse)
        environment.add_test("iterable", _has_methods("__iter__"))
        environment.add_test("sequence", _has_methods("__len__", "__getitem__"))
        self._is_marked = _GENERATION.search(source) is not None
        if self._is_marked:
            call = {None: "call generation__()", "end": "endcall"}
            source = _DEFINITION + _GENERATION.sub(lambda found: found[1] + call[found[2]] + found[3], source)
        try:
            environment.add_template("chat", source)
        except Exception as error:
            raise Unsure(str(error)) from None
        self._render_template = environment.render_template
        self._messages: list[Any] = []
        self._options: Mapping[str, Any] = {}
        self._documents = constants.get("documents")
        self._known: dict[tuple[int, bool], tuple[str, list[Range]]] = {}
        self._json: dict[tuple[Any, ...], tuple[Any, str]] = {}

    def start(self, messages: list[Any], options: Mapping[str, Any] | None = None) -> None:
        """Start a conversation, whose renderings are remembered until the next one starts.

        `options` are variables of this conversation, over those of the template.
        """
        if messages is not self._messages or self._options != (options or {}):
            self._messages, self._options, self._known, self._json = messages, options or {}, {}, {}

    def render(self, messages: list[Any], tools: Any, prompt: bool, marks: bool = False) -> tuple[str, list[Range]]:
        """Return the rendered text and the ranges of its `{% generation %}` blocks.

        `prompt` adds the generation prompt. Raises Unsure.
        """
        if len(messages) > len(self._messages) or not all(map(is_, messages, self._messages)):
            return self._rendered(messages, tools, prompt)
        key = len(messages), prompt
        if key not in self._known:
            self._known[key] = self._rendered(messages, tools, prompt)
        return self._known[key]

    def _to_json(self, value: Any, *form: Any, **named: Any) -> str:
        """Remember the JSON of a list or dict, which is rendered many times."""
        if not isinstance(value, dict | list):
            return to_json(value, *form, **named)
        key = id(value), repr((form, named)) if form or named else ""
        if key not in self._json:
            self._json[key] = value, to_json(value, *form, **named)  # with the value, whose id is not used again
        return self._json[key][1]

    def _rendered(self, messages: list[Any], tools: Any, prompt: bool) -> tuple[str, list[Range]]:
        try:
            given = {"messages": messages, "tools": tools, "add_generation_prompt": prompt}
            text: str = self._render_template("chat", **{"documents": self._documents, **self._options, **given})
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is not an Exception
            raise Unsure(str(error)) from None
        if len(text) > MOST_CHARACTERS:
            raise Unsure
        return _with_marks(text) if self._is_marked else (text, [])


def is_sure(conversation: str) -> bool:
    """Return whether both engines render a conversation, as compact JSON, alike."""
    if not conversation.isprintable() and _NESTED.search(conversation):
        return False
    return _DIFFERS.search(conversation) is None


def _with_marks(text: str) -> tuple[str, list[Range]]:
    parts, ranges, starts, place = _MARK.split(text), [], list[int](), 0
    for part, mark in zip(parts, _MARK.findall(text), strict=False):
        place += len(part)
        if mark == "\ufdd0":
            starts.append(place)
        else:
            ranges.append((starts.pop(), place))
    return "".join(parts), ranges


def _refuse(*_: Any, **__: Any) -> None:
    raise Unsure


def _has_methods(*names: str) -> Callable[[Any], bool]:
    def test(value: Any) -> bool:
        if value is None:  # it may be an undefined value, over which Jinja2 iterates
            raise Unsure
        return all(hasattr(value, name) for name in names)

    return test


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

    def engine_for(self, conversation: str, options: str = "") -> EngineName:
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
        if len(job.turns) > 1 and work_of(job, len(orjson.dumps(job.messages))) > MOST_WORK:
            return None
        self._fast.start(job.messages, job.options)
        try:
            found = rendered(self._fast.render, self._ends, self._eos, job, False)
        except Unsure:
            return None
        return found if job.marks else found._replace(marks=[])

    def _is_wrong(self, job: Job, judgment: Rendering | Reject | DataError) -> bool:
        fast = self._fast_rendering(job._replace(engine="minijinja"))
        return fast is not None and fast != judgment


class BothEngines:
    """The engines of two templates that render one corpus, like `Engines`."""

    def __init__(self, *engines: Engines):
        self._engines = engines

    @property
    def are_fast(self) -> bool:
        return self.differs is None and any(engines.are_fast for engines in self._engines)

    @property
    def differs(self) -> str | None:
        return next((engines.differs for engines in self._engines if engines.differs), None)

    def use_jinja2(self) -> None:
        for engines in self._engines:
            engines.use_jinja2()

    @contextmanager
    def comparing(self) -> Iterator[None]:
        with ExitStack() as stack:
            for engines in self._engines:
                stack.enter_context(engines.comparing())
            yield


def _difference(fast: Any, judgment: Any) -> str:
    if not isinstance(judgment, Rendering):
        return f"Jinja2 refuses a conversation: {judgment}"
    pairs = enumerate(zip(fast.text, judgment.text, strict=False))
    place = next((n for n, (one, other) in pairs if one != other), min(len(fast.text), len(judgment.text)))
    start = max(0, place - 20)
    return f"{shown(fast.text[start : place + 20])} instead of {shown(judgment.text[start : place + 20])}"
