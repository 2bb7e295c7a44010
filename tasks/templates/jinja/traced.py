"""Record the operations of a template on the values of a conversation.

    {{ '<|im_start|>user\\n' + message.content }}     written only: the same for every content
    {{ tool_call.arguments | tojson }}               written as JSON: the same for all arguments
    {% if '</think>' in message.content %}           a test, which fails for contents without '</think>'
    {{ message.content | upper }}                    anything else: every content must be rendered

The template renders placeholders that record its operations. If it only writes and tests values, values that fail all
tests can be filled into the rendering of the placeholders. `Trace` collects the tests. A placeholder keeps its trace
when it is joined with other text. Most tests of the joined text end the trace, because they also depend on the other
text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import jinja2.runtime
from jinja2 import Environment, nodes
from markupsafe import Markup

from packcorpus.tasks.templates.jinja.environment import to_json

# Filters that call methods of a text, which `Traced` records, or that do not join texts.
_SAFE_FILTERS = {
    *("trim", "string", "list", "selectattr", "rejectattr", "default", "d", "items"),
    *("first", "last", "int", "replace", "upper", "lower", "capitalize", "title", "dictsort", "sort", "map", "reject"),
    *("safe", "join", "tojson", "length", "count"),  # as `prepare_tracing` defines them
}

_PLACEHOLDER = re.compile("\v?\0(\\d+)\0\v?")

# An object as JSON text (for templates that read arguments as text), and a placeholder that is written as JSON.
_OBJECT_TEXT = re.compile(r'\{"\\u0000(\d+)\\u0000": ?0\}')
_WRITTEN = re.compile(r'"((?:\\u000b)?)\\u0000(\d+)\\u0000(?:\\u000b)?"')

# Characters that `strip` removes without an argument.
_SPACE = "".join(character for character in map(chr, range(0x3001)) if character.isspace())


class Trace:
    """Tests and JSON formats that a template applies to values.

    A conversation must be rendered if a value contains one of `needles`, or starts or ends with a character of `starts`
    or `ends`. `formats` are the arguments of `to_json` with which values are written. `open` is False once the template
    did anything else with a value. `last` is the trace that is being recorded.
    """

    last: Trace | None = None

    def __init__(self) -> None:
        Trace.last = self
        self.open = True
        self.needles: set[str] = set()
        self.starts: set[str] = set()
        self.ends: set[str] = set()
        self.strips: set[str] = set()
        self.formats: list[list[Any]] = []

    def result(self) -> list[list[Any]] | None:
        """Return the recorded tests and formats; None if any value must be rendered.

        The lists are the needles, the first characters, and the last characters of such values, a list that is empty if
        no value is stripped on both sides, and the formats.
        """
        tests = map(sorted, (self.needles, self.starts, self.ends, self.strips))
        return [*tests, self.formats] if self.open else None

    def as_json(self, value: Any, form: list[Any]) -> str:
        """Return JSON with gaps for a value that is or contains placeholders."""
        if form[1] is not None and not isinstance(value, Traced | TracedObject):
            self.open = False  # the indentation of an inner value depends on its place
        if form not in self.formats:
            self.formats.append(form)
        number = self.formats.index(form)
        text = _WRITTEN.sub(
            lambda found: "{0}\0{1}:{2}\0{0}".format("\v" if found[1] else "", found[2], number),
            to_json(_without_traces(value), *form),
        )
        return Traced.of(text, self)


class Traced(str):
    """A placeholder, or a text that contains a placeholder."""

    trace: Trace

    @classmethod
    def of(cls, text: str, trace: Trace) -> Traced:
        traced = str.__new__(cls, text)
        traced.trace = trace
        return traced

    def _close(self) -> None:
        self.trace.open = False

    def _test(self, needle: object) -> None:
        """Record a test for `needle`, which the placeholder fails."""
        is_usual = isinstance(needle, str) and not isinstance(needle, Traced) and needle and not set(needle) & {*"\v\0"}
        if is_usual and _PLACEHOLDER.fullmatch(str.__str__(self)):
            self.trace.needles.add(str(needle))
        else:
            self._close()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in _RECORDED:
            str.__getattribute__(self, "trace").open = False
        return str.__getattribute__(self, name)

    # Writing

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        self._require_no_markup(other)
        return Traced.of(str.__add__(self, other), self.trace)

    def __radd__(self, other: str) -> str:
        self._require_no_markup(other)
        return Traced.of(str.__add__(other, self), self.trace)

    def _require_no_markup(self, other: object) -> None:
        if isinstance(self, _TracedMarkup) or isinstance(other, Markup | _TracedMarkup):
            self._close()  # text that is not safe would be escaped for HTML

    def __bool__(self) -> bool:
        return True  # a blank content is never filled in

    # Tests

    def __contains__(self, needle: object) -> bool:
        return self._has(needle)

    def _has(self, needle: object, every: bool = False) -> bool:
        """Return whether the text around placeholders has `needle`.

        If it does not, or if `every` occurrence matters, a test is recorded that placeholders fail.
        """
        if not isinstance(needle, str) or isinstance(needle, Traced) or not needle or set(needle) & set("\v\0"):
            self._close()
            return False
        around = _PLACEHOLDER.split(str.__str__(self))[::2]
        is_around = any(needle in text for text in around)
        if every or not is_around:
            parts = range(1, len(needle))
            ends = any(text.endswith(needle[:k]) for text in around[:-1] for k in parts)
            starts = any(text.startswith(needle[k:]) for text in around[1:] for k in parts)
            if ends or starts or any("\0" in text for text in around):
                self._close()  # a value may complete the needle
            self.trace.needles.add(needle)
        return is_around

    def startswith(self, prefix: Any, *where: Any) -> bool:
        if where:
            self._close()
        for needle in prefix if isinstance(prefix, tuple) else (prefix,):
            self._test(needle)
        return False

    endswith = startswith

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Traced) or (isinstance(other, str) and other != ""):
            self._test(other)
        return False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def split(self, separator: Any = None, *limit: Any) -> Any:
        if not self._has(separator, every=True):
            return [self]
        if limit:
            self._close()
        return [Traced.of(part, self.trace) if "\0" in part else part for part in str.split(self, separator)]

    rsplit = split  # type: ignore[assignment]

    def replace(self, old: Any, new: Any, *count: Any) -> str:
        self._test(old)
        return self

    # Stripping

    def strip(self, characters: Any = None) -> str:
        if characters is None:
            self.trace.strips.add("strip")
            return Traced.of(str.strip(self), self.trace)
        return self.lstrip(characters).rstrip(characters)

    def lstrip(self, characters: Any = None) -> str:
        self._strip(self.trace.starts, characters)
        return self

    def rstrip(self, characters: Any = None) -> str:
        self._strip(self.trace.ends, characters)
        return self

    def _strip(self, found: set[str], characters: Any) -> None:
        if not _PLACEHOLDER.fullmatch(str.__str__(self)) or isinstance(characters, Traced):
            self._close()
        found.update(_SPACE if characters is None else characters)

    # Everything else

    def _other(self, *given: Any, **named: Any) -> Any:
        self._close()
        return ""

    __hash__ = str.__hash__

    def __len__(self) -> int:
        self._close()
        return str.__len__(self)

    def __repr__(self) -> str:  # called for an object that contains it
        self._close()
        return str.__repr__(self)

    __iter__ = __getitem__ = __mod__ = __rmod__ = __mul__ = __rmul__ = __format__ = _other
    __lt__ = __le__ = __gt__ = __ge__ = _other


_RECORDED = {"trace", "startswith", "endswith", "split", "rsplit", "replace", "strip", "lstrip", "rstrip"}


class _TracedMarkup(Traced):
    """A text with a placeholder, after the filter `safe`."""


class _Markup(Markup):
    """Any other text, after the filter `safe`: text that is joined with it is escaped."""

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Traced):
            other.trace.open = False
        return super().__add__(other)

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in ("escape",) and Trace.last:
            Trace.last.open = False
        return super().__getattribute__(name)

    def __mod__(self, other: Any) -> Any:
        if Trace.last:
            Trace.last.open = False
        return super().__mod__(other)


class TracedObject(dict[str, Any]):
    """A placeholder for a nonempty object, which can only be written as JSON."""

    def __init__(self, number: int, trace: Trace):
        super().__init__()
        self.trace, self.number = trace, number

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in ("trace", "number"):
            dict.__getattribute__(self, "trace").open = False
        return dict.__getattribute__(self, name)

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        if self is not other:
            self.trace.open = False
        return self is other

    def _other(self, *given: Any, **named: Any) -> Any:
        self.trace.open = False
        raise KeyError("a placeholder")

    __hash__ = None
    __getitem__ = __iter__ = __len__ = __contains__ = __str__ = __repr__ = _other
    __or__ = __ror__ = __reversed__ = __format__ = _other


def _trace_of(value: Any) -> Trace | None:
    if isinstance(value, Traced | TracedObject):
        return value.trace
    if isinstance(value, _Length):
        value.trace.open = False
        return value.trace
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    keys = list(value) if isinstance(value, dict) else []
    return next((trace for trace in map(_trace_of, [*keys, *inner]) if trace), None)


def _without_traces(value: Any) -> Any:
    if isinstance(value, TracedObject):
        return f"\0{value.number}\0"
    if isinstance(value, Traced):
        if not _PLACEHOLDER.fullmatch(str.__str__(value)):
            value.trace.open = False  # other text that is joined with a value would be escaped as well
        return str.__str__(value)
    if isinstance(value, dict):
        return {_without_traces(key): _without_traces(item) for key, item in value.items()}
    return [_without_traces(item) for item in value] if isinstance(value, list | tuple) else value


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    trace = _trace_of(value)
    form = [ensure_ascii, indent, list(separators) if separators else separators, sort_keys]
    return to_json(value, *form) if trace is None else trace.as_json(value, form)


def _joined(texts: Iterable[Any]) -> str:
    """Join texts; the result is traced if one of the texts is."""
    texts = [text if isinstance(text, str) else str(text) for text in texts]
    trace = next((text.trace for text in texts if isinstance(text, Traced)), None)
    whole = "".join(texts)
    return whole if trace is None else Traced.of(whole, trace)


def _join(values: Iterable[Any], between: str = "", attribute: Any = None) -> str:
    """Join values like Jinja's filter, but without its argument `attribute`."""
    texts = list(values)
    if attribute is not None:
        raise TypeError("join by attribute is not traced")
    return _joined(text for number, value in enumerate(texts) for text in ((between, value) if number else (value,)))


def _compared(of_zero: bool, of_one: bool | None = None) -> Any:
    """Return a comparison with a number, which has these results for 0 and 1."""

    def compare(length: _Length, other: object) -> bool:
        if other == 0 and isinstance(other, int):
            return of_zero
        if other != 1 or of_one is None:
            length.trace.open = False
        return bool(of_one)

    return compare


class _Length(int):
    """The length of a text with a placeholder, which is positive and unknown."""

    trace: Trace

    __eq__ = __le__ = _compared(False)
    __ne__ = __gt__ = _compared(True)
    __ge__ = _compared(True, True)
    __lt__ = _compared(False, False)

    def __bool__(self) -> bool:
        return True

    def _other(self, *_: Any) -> Any:
        self.trace.open = False
        return 1

    __hash__ = int.__hash__

    def __str__(self) -> str:
        return str(self._other())

    def __format__(self, _: str) -> str:
        return str(self)

    __repr__ = __str__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __floordiv__ = _other
    __truediv__ = __neg__ = __index__ = __int__ = __float__ = __rfloordiv__ = __rtruediv__ = __pow__ = __rpow__ = _other


def _length(value: Any) -> int:
    if not isinstance(value, Traced):
        return len(value)
    length = _Length(1)
    length.trace = value.trace
    return length


def prepare_tracing(environment: Environment) -> None:
    """Make an environment keep traces when it joins texts.

    This changes Jinja itself, so it must be called in a child process only.
    """

    def safe(value: Any) -> Any:
        return _TracedMarkup.of(value, value.trace) if isinstance(value, Traced) else _Markup(value)

    environment.concat = _joined  # type: ignore[method-assign]
    jinja2.runtime.str_join = _joined  # type: ignore[assignment]
    filters: dict[str, Any] = environment.filters
    ours: dict[str, Any] = {"safe": safe, "join": _join, "tojson": _to_json, "length": _length}
    filters |= ours | {"count": _length}
    tests: dict[str, Any] = environment.tests
    iterable, sequence = tests["iterable"], tests["sequence"]
    tests |= {
        "iterable": lambda value: isinstance(value, Traced) or iterable(value),
        "sequence": lambda value: isinstance(value, Traced) or sequence(value),
    }


def can_be_traced(tree: nodes.Template) -> bool:
    """Return whether a template uses only filters that keep a trace."""
    filters: Any = nodes.Filter
    return all(found.name in _SAFE_FILTERS for found in tree.find_all(filters))


def traced(value: Any, trace: Trace, spaced: bool) -> Any:
    """Return messages or tools with traced placeholders, between spaces if `spaced`."""
    if isinstance(value, str):
        if match := _PLACEHOLDER.fullmatch(value) or _OBJECT_TEXT.fullmatch(value):
            space = "\v" if spaced else ""
            return Traced.of(f"{space}\0{match[1]}\0{space}", trace)
        trace.open = trace.open and "\0" not in value and "\\u0000" not in value
        return value
    if isinstance(value, dict):
        if len(value) == 1 and (match := re.fullmatch("\0(\\d+)\0", next(iter(value)))):
            return TracedObject(int(match[1]), trace)
        return {key: traced(item, trace, spaced) for key, item in value.items()}
    return [traced(item, trace, spaced) for item in value] if isinstance(value, list) else value
