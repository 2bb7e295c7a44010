"""Record what a template does to the contents of messages, by rendering placeholders that watch it.

    {{ '<|im_start|>user\\n' + message.content }}     written only: the same for every content
    {% if '</think>' in message.content %}           a test, which fails for contents without '</think>'
    {{ message.content | upper }}                    anything else: every content must be rendered

If a template only writes contents and tests them, contents that no test finds anything in can be filled into the
rendering of the placeholders. `Trace` collects the tests. A placeholder keeps its trace when it is joined with other
text; then any test of the whole ends the trace, because the other text takes part in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import jinja2.runtime
from jinja2 import Environment, nodes

# Filters that call methods of a text, which `Traced` records, or that do not join texts to a new one.
_SAFE_FILTERS = {
    *("trim", "string", "tojson", "length", "count", "list", "selectattr", "rejectattr", "default", "d", "items"),
    *("first", "last", "int", "replace", "upper", "lower", "capitalize", "title", "dictsort", "sort", "map", "reject"),
    *("safe", "join"),  # as `prepare_tracing` defines them
}

_PLACEHOLDER = re.compile("\v?\0\\d+\0\v?")


class Trace:
    """What was tested: contents with one of `needles`, or that start or end with one of these characters, are unusual.

    `open` is False once a template did anything else to a content.
    """

    def __init__(self) -> None:
        self.open = True
        self.needles: set[str] = set()
        self.starts: set[str] = set()
        self.ends: set[str] = set()
        self.strips: set[str] = set()

    def result(self) -> list[list[str]] | None:
        """Return the needles, first characters, and last characters of unusual contents; None if all are unusual.

        The last list is empty if no content is stripped on both sides.
        """
        found = (self.needles, self.starts, self.ends, self.strips)
        return [sorted(each) for each in found] if self.open else None


class Traced(str):
    """A placeholder, or a text that contains one."""

    trace: Trace

    @staticmethod
    def of(text: str, trace: Trace) -> Traced:
        traced = str.__new__(Traced, text)
        object.__setattr__(traced, "trace", trace)
        return traced

    def _close(self) -> None:
        self.trace.open = False

    def _test(self, needle: object) -> None:
        """Record a test for `needle`, which the placeholder fails."""
        if not isinstance(needle, str) or isinstance(needle, Traced) or not needle:
            self._close()
        elif _PLACEHOLDER.fullmatch(str.__str__(self)) and not set(needle) & set("\v\0"):
            self.trace.needles.add(needle)
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
        return Traced.of(str.__add__(self, other), self.trace)

    def __radd__(self, other: str) -> str:
        return Traced.of(str.__add__(other, self), self.trace)

    def __bool__(self) -> bool:
        return True  # a blank content is never filled in

    # Tests

    def __contains__(self, needle: object) -> bool:
        self._test(needle)
        return False

    def startswith(self, prefix: Any, *where: Any) -> bool:
        if where:
            self._close()
        for needle in prefix if isinstance(prefix, tuple) else (prefix,):
            self._test(needle)
        return False

    endswith = startswith

    def __eq__(self, other: object) -> bool:
        if other != "" or isinstance(other, Traced):
            self._test(other)
        return False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def split(self, separator: Any = None, *limit: Any) -> Any:
        self._test(separator)
        return [self]

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
        found.update(" " if characters is None else characters)

    # Everything else

    def _other(self, *given: Any, **named: Any) -> Any:
        self._close()
        return ""

    __hash__ = str.__hash__

    def __len__(self) -> int:
        self._close()
        return str.__len__(self)

    __iter__ = __getitem__ = __mod__ = __rmod__ = __mul__ = __rmul__ = __format__ = _other
    __lt__ = __le__ = __gt__ = __ge__ = _other


_RECORDED = {
    *("trace", "startswith", "endswith", "split", "rsplit", "replace", "strip", "lstrip", "rstrip"),
}


def _joined(texts: Iterable[Any]) -> str:
    """Join texts; the result is traced if one of them is."""
    texts = [text if isinstance(text, str) else str(text) for text in texts]
    trace = next((text.trace for text in texts if isinstance(text, Traced)), None)
    whole = "".join(texts)
    return whole if trace is None else Traced.of(whole, trace)


def _join(values: Iterable[Any], between: str = "", attribute: Any = None) -> str:
    """Join values as Jinja's filter does, without its attributes."""
    texts = list(values)
    if attribute is not None:
        raise TypeError("join by attribute is not traced")
    return _joined(text for number, value in enumerate(texts) for text in ((between, value) if number else (value,)))


def prepare_tracing(environment: Environment) -> None:
    """Make an environment keep traces where it joins texts. It changes Jinja itself: for a child process only."""
    environment.concat = _joined  # type: ignore[method-assign]
    environment.filters |= {"safe": lambda value: value, "join": _join}
    jinja2.runtime.str_join = _joined  # type: ignore[assignment]


def can_be_traced(environment: Environment, source: str) -> bool:
    """Return whether a template uses only filters that keep a trace."""
    filters: Any = nodes.Filter
    return all(found.name in _SAFE_FILTERS for found in environment.parse(source).find_all(filters))


def traced(messages: list[Any], trace: Trace) -> list[Any]:
    """Return messages whose contents are traced."""
    return [
        message | {"content": Traced.of(message["content"], trace)} if _has_gap(message.get("content")) else message
        for message in messages
    ]


def _has_gap(content: object) -> bool:
    return isinstance(content, str) and _PLACEHOLDER.fullmatch(content) is not None
