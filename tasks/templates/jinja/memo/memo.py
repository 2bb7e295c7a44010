"""Remember what a template writes of a part of a conversation, which is rendered many times.

    {% macro declare(tool) %}…{% endmacro %}     written once for each tool, instead of once for each rendering
    {{ tool | tojson }}                          likewise
    {% for message in messages %}…{% endfor %}   continued from rendering to rendering: see `blocks`

Locating turns takes two renderings per turn, and most of what they write is the same. What is written is found again by
what it depends on: parts of the conversation, which no template can change, and strings, numbers, and the like.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.runtime import Undefined

# The maximum number of characters that are remembered, and what a text counts in addition.
MOST_CHARACTERS = 4 << 20
EACH = 256

_PLAIN = frozenset([int, bool, type(None)])

# A result of other values alone is not remembered.
_OF_CONVERSATIONS = frozenset([str, dict, list])

Key = tuple[Any, ...]


class Changing(Exception):
    """Something may change in a way that is not seen."""


class Memo:
    """What macros, `tojson`, and blocks have written of the parts of one conversation.

    `macros` are the names of those that are remembered. Before `start`, there is no conversation.
    """

    def __init__(self, macros: frozenset[str] = frozenset()):
        self.macros = macros
        self.parts: set[int] = set()
        self.known: dict[Key, Any] = {}
        self._room = MOST_CHARACTERS

    def start(self, *conversation: Any) -> None:
        """Forget everything, and remember what is written of parts of this conversation, while it exists."""
        self.known = {}
        self.parts = set()
        self._room = MOST_CHARACTERS
        for part in conversation:
            if isinstance(part, dict | list):
                _add_parts(part, self.parts)

    def of(self, name: str, write: Callable[..., str], args: Sequence[Any], named: Mapping[str, Any]) -> str:
        """Return what `write` returns for these arguments; `name` identifies it."""
        values = (*args, *named.values()) if named else args
        if not self.parts or not any(type(value) in _OF_CONVERSATIONS for value in values):
            return write(*args, **named)
        try:
            key = (len(args), name, *named, *map(self.same, values))
        except Changing:
            return write(*args, **named)
        known: str | None = self.known.get(key)
        if known is None:
            known = write(*args, **named)
            self.keep(key, known, len(known))
        return known

    def keep(self, key: Key, known: Any, characters: int) -> None:
        """Remember something with so many characters, if there is room."""
        if self.has_room(characters):
            self.known[key] = known

    def has_room(self, characters: int) -> bool:
        """Return whether so many characters more can be remembered."""
        self._room -= characters + EACH
        return self._room > 0

    def same(self, value: Any) -> Any:
        """Return what is equal for values that are the same. Raises Changing if a value is not known to stay so."""
        kind: Any = type(value)
        if kind is str:
            return value
        if kind is dict or kind is list:
            if id(value) in self.parts:
                return kind, id(value)
        elif kind in _PLAIN:
            return kind, value
        elif kind is float:
            return kind, repr(value)  # 0.0 and -0.0 are equal
        elif kind is Undefined:
            return kind
        raise Changing


def _add_parts(value: Any, found: set[int]) -> None:
    found.add(id(value))
    for item in value.values() if type(value) is dict else value:
        if type(item) is dict or type(item) is list:
            _add_parts(item, found)
