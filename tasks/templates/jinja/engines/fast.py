"""Render Jinja templates with minijinja, in this process.

minijinja renders published templates three to five times as fast as Jinja2, and cannot reach Python objects. `fuel`
limits loops, recursion, and memory. It differs from Jinja2 in the texts of `is_sure`, and in constructs that are
refused here. Whatever minijinja refuses is rendered by Jinja2, which also reports the problem.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from operator import is_
from typing import Any

import minijinja

from tasks.templates.jinja.engines import limits
from tasks.templates.jinja.engines.environment import Range, dictsort, to_json

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
        environment.add_test("iterable", _is_iterable)
        environment.add_test("sequence", _is_sequence)
        self._is_marked = _GENERATION.search(source) is not None
        if self._is_marked:
            source = _DEFINITION + _GENERATION.sub(_as_call, source)
        try:
            environment.add_template("chat", source)
        except Exception as error:
            raise Unsure(str(error)) from None
        self._render = environment.render_template
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
        """Return JSON.

        That of a list or dict is remembered, because a conversation is rendered many times.
        """
        if not isinstance(value, dict | list):
            return to_json(value, *form, **named)
        key = id(value), repr((form, named)) if form or named else ""
        if key not in self._json:
            self._json[key] = value, to_json(value, *form, **named)  # with the value, whose id is not used again
        return self._json[key][1]

    def _rendered(self, messages: list[Any], tools: Any, prompt: bool) -> tuple[str, list[Range]]:
        try:
            given = {"messages": messages, "tools": tools, "add_generation_prompt": prompt}
            text: str = self._render("chat", **{"documents": self._documents, **self._options, **given})
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is not an Exception
            raise Unsure(str(error)) from None
        if len(text) > limits.MOST_CHARACTERS:
            raise Unsure
        return _with_marks(text) if self._is_marked else (text, [])


def is_sure(conversation: str) -> bool:
    """Return whether both engines render a conversation alike, as far as is known.

    The conversation is compact JSON.
    """
    if not conversation.isprintable() and _NESTED.search(conversation):
        return False
    return _DIFFERS.search(conversation) is None


def _as_call(found: re.Match[str]) -> str:
    return f"{found[1]}{'endcall' if found[2] else 'call generation__()'}{found[3]}"


def _with_marks(text: str) -> tuple[str, list[Range]]:
    """Return a text without its marks, and the ranges between them."""
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


def _is_iterable(value: Any) -> bool:
    _require_value(value)
    return hasattr(value, "__iter__")


def _is_sequence(value: Any) -> bool:
    _require_value(value)
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _require_value(value: Any) -> None:
    """Raise Unsure for None.

    It may be an undefined value, over which Jinja2 iterates.
    """
    if value is None:
        raise Unsure
