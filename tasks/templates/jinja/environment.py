"""Compile Jinja chat templates in the environment that they are written for.

Published templates are written for `apply_chat_template` of transformers. This module reproduces that environment
without the library: a sandbox that cannot change its inputs, `{% generation %}` blocks, `break` and `continue`, and the
filters and functions. A test renders templates in both environments and compares the results. Two functions differ on
purpose: the date is fixed, and random numbers are the same at every call.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache, partial, wraps
from typing import Any, NoReturn

from jinja2 import Environment, Template, nodes, pass_environment, pass_eval_context
from jinja2.exceptions import FilterArgumentError, SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import ignore_case, make_multi_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from packcorpus.tasks.templates.jinja.control_strings import PRIVATE_AREAS

Range = tuple[int, int]


class Generation(Extension):
    """The block `{% generation %}`, which records the ranges of the marked texts."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def __init__(self, environment: Environment):
        super().__init__(environment)
        self._written: list[str] | None = None
        self._marks: list[Range] = []
        environment.extend(rendered=self.rendered)

    def parse(self, parser: Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_mark"), [], [], body)
        block.set_lineno(line)
        return block

    @pass_eval_context
    def _mark(self, _: nodes.EvalContext, caller: Callable[[], str]) -> str:
        text = caller()
        if self._written is not None:
            start = sum(map(str.__len__, self._written))  # placeholders record calls of `len`
            self._marks.append((start, start + str.__len__(text)))
        return text

    def rendered(self, template: Template, values: Mapping[str, Any], marks: bool) -> tuple[str, list[Range]]:
        """Return the rendered text and, if `marks` is true, the ranges of its blocks."""
        written: list[str] = []
        self._written, self._marks = (written if marks else None), []
        try:
            for piece in template.generate(**values):
                written.append(piece)
            return "".join(written), self._marks
        finally:
            self._written = None


class _SafeNamespace(Namespace):
    """Jinja's namespace, without names that give access to Python's internals."""

    def __init__(self, /, *given: Any, **values: Any) -> None:
        if given:
            values = dict(*given, **values)
        for name in values:
            _refuse_private(name)
        super().__init__(**values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class _SafeDict:
    """The function `dict` without the attributes of Python's type."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name[:1] == "_":
        raise SecurityError(f"a namespace must not have the attribute {name!r}")


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON like transformers. Jinja's own filter escapes JSON for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# Private characters break control strings in texts, and must not decide the order of texts.
_PRIVATE = re.compile("[" + "".join(f"{chr(area[0])}-{chr(area[-1])}" for area in PRIVATE_AREAS) + "]")


def _sort_key(value: Any, case_sensitive: bool) -> Any:
    if isinstance(value, str) and not str.isascii(value):
        value = _PRIVATE.sub("", value)
    return value if case_sensitive else ignore_case(value)


def dictsort(value: Any, case_sensitive: bool = False, by: str = "key", reverse: bool = False) -> list[Any]:
    """Sort like Jinja's filter, without regard to private characters."""
    if by not in ("key", "value"):
        raise FilterArgumentError(f'dictsort: expected "key" or "value", found {by!r}')
    place = 0 if by == "key" else 1
    return sorted(value.items(), key=lambda pair: _sort_key(pair[place], case_sensitive), reverse=reverse)


@pass_environment
def _sort(
    environment: Environment, value: Any, reverse: bool = False, case_sensitive: bool = False, attribute: Any = None
) -> list[Any]:
    """Sort like Jinja's filter, without regard to private characters."""
    key = partial(_sort_key, case_sensitive=case_sensitive)
    return sorted(value, key=make_multi_attrgetter(environment, attribute, postprocess=key), reverse=reverse)


def _seeded(draw: Any) -> Callable[..., Any]:
    """Make a function that draws random numbers depend on its arguments alone."""

    @wraps(draw)  # also keeps the mark of a function that gets the context
    def seeded(*args: Any, **named: Any) -> Any:
        random.seed(0)
        return draw(*args, **named)

    return seeded


def chat_environment(today: datetime) -> Environment:
    """Return an environment for chat templates, with `today` as its date."""

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, LoopControlExtension]
    )
    environment.filters |= {"tojson": to_json, "dictsort": dictsort, "sort": _sort}
    environment.filters["random"] = _seeded(environment.filters["random"])
    environment.globals["lipsum"] = _seeded(environment.globals["lipsum"])
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": today.strftime,
        "dict": _SafeDict(),
        "namespace": _SafeNamespace,
    }
    return environment


@cache
def prepare_compiler() -> None:
    """Compile a small template, so that processes forked later inherit Jinja's caches.

    The lexer takes most of the time: a process that does not inherit it spends a fifth of its start on creating it.
    """
    source = "{% for m in messages %}{% if m.content %}{{ m.content | trim }}{% endif %}{% set a = m %}{% endfor %}"
    ChatTemplate(chat_environment(datetime(2000, 1, 1)), source, {})


def other_file(tree: nodes.Template) -> tuple[int, str] | None:
    """Return the line and name of the first statement that reads another file."""
    others: Any = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
    found: Any = tree.find(others)
    if found is None:
        return None
    return found.lineno, "import" if isinstance(found, nodes.FromImport) else type(found).__name__.lower()


class ChatTemplate:
    """A compiled template.

    `constants` maps names to the special tokens and options that the template sees. `options` replaces some of them in
    the renderings that follow.
    """

    def __init__(self, environment: Environment, source: str, constants: Mapping[str, Any]):
        self._template = environment.from_string(source)
        self._template.globals = dict(self._template.globals)  # every rendering copies them, and a ChainMap is slow
        self._render = environment.rendered  # type: ignore[attr-defined]
        self._constants = {"documents": None} | dict(constants)
        self.options: Mapping[str, Any] = {}

    def render(self, messages: list[Any], tools: Any, prompt: bool, marks: bool = False) -> tuple[str, list[Range]]:
        """Return the rendered text and, if `marks` is true, its `{% generation %}` ranges."""
        values = {"messages": messages, "tools": tools, "add_generation_prompt": prompt}
        return self._render(self._template, {**self._constants, **self.options, **values}, marks)


# Names that Jinja itself defines in loops, blocks, and macros.
_OF_JINJA = ("loop", "self", "super", "caller", "varargs", "kwargs")

_DEFAULTS = ("default", "d")


def names_read(environment: Environment, tree: nodes.Template) -> dict[str, int]:
    """Return in how many places a template reads each name that it does not define.

    A name that the template tests somewhere, or gives a default, is an option of the template and left out. So is a
    name that any statement sets, whether or not it is set in every case.
    """
    every: Any = nodes.Node
    known, read, tested = {*environment.globals, *_OF_JINJA}, list[str](), list[nodes.Node | None]()
    for node in tree.find_all(every):
        if isinstance(node, nodes.Name):
            if node.ctx == "load":
                read.append(node.name)
            else:
                known.add(node.name)
        elif isinstance(node, nodes.Macro):
            known.add(node.name)
        elif isinstance(node, nodes.If | nodes.CondExpr | nodes.For):
            tested.append(node.test)
        elif isinstance(node, nodes.And | nodes.Or):
            tested.append(node.left)
        elif isinstance(node, nodes.Not | nodes.Test) or (isinstance(node, nodes.Filter) and node.name in _DEFAULTS):
            tested.append(node.node)
    for node in filter(None, tested):
        known |= {name.name for name in (node, *node.find_all(nodes.Name)) if isinstance(name, nodes.Name)}
    return dict(sorted(Counter(name for name in read if name not in known).items()))
