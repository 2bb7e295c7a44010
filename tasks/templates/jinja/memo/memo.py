"""Remember the texts that a template writes for parts of a conversation.

    {% macro declare(tool) %}…{% endmacro %}     written once for each tool, instead of once for each rendering
    {{ tool | tojson }}                          written once for each tool, too
    {% for message in messages %}…{% endfor %}   continued from rendering to rendering: see `blocks`

Locating turns takes two renderings per turn, and the renderings share most of their text. The key of a text is
everything that the text depends on: parts of the conversation, which no template can change, and values such as strings
and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.runtime import Undefined

# The maximum number of remembered characters, and the number that each text counts in addition to its length.
MOST_CHARACTERS = 4 << 20
EACH = 256

_PLAIN = frozenset([int, bool, type(None)])

# A result is only remembered if one of its values has one of these types.
_OF_CONVERSATIONS = frozenset([str, dict, list])

Key = tuple[Any, ...]


class Changing(Exception):
    """A value may change unnoticed."""


class Memo:
    """Texts that macros, `tojson`, and blocks have written for one conversation.

    `macros` are the names of the macros whose texts are remembered. Before `start`, there is no conversation.
    """

    def __init__(self, macros: frozenset[str] = frozenset()):
        self.macros = macros
        self.parts: set[int] = set()
        self.known: dict[Key, Any] = {}
        self._room = MOST_CHARACTERS

    def start(self, *conversation: Any) -> None:
        """Forget all texts, and start to remember texts for this conversation.

        The conversation must exist until the next call, because its parts are identified by `id`.
        """
        self.known = {}
        self.parts = set()
        self._room = MOST_CHARACTERS
        for part in conversation:
            if isinstance(part, dict | list):
                _add_parts(part, self.parts)

    def of(self, name: str, write: Callable[..., str], args: Sequence[Any], named: Mapping[str, Any]) -> str:
        """Return the result of `write`, which `name` identifies, for these arguments."""
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
        """Remember a value that takes this number of characters, if there is room."""
        if self.has_room(characters):
            self.known[key] = known

    def has_room(self, characters: int) -> bool:
        """Reserve room for a number of characters, and return whether there is enough."""
        self._room -= characters + EACH
        return self._room > 0

    def same(self, value: Any) -> Any:
        """Return a key that is equal for equal values.

        Raises Changing if the value may change unnoticed.
        """
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
