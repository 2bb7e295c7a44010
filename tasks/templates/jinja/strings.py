"""Find out quickly that nothing of a conversation needs a change, from its JSON.

    {"role":"user","content":"2+2?"}   ──▶   "2+2?"     every string but the keys and roles of the message format

Conversations have hundreds of strings, most of which occur again and again: names of parameters, types, and functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import orjson

# Strings of so many characters are remembered, and so many of them.
_SHORT, _MOST_KNOWN = 64, 1 << 14


class Unchanged:
    """Strings that `change` returns as they are. Keys in `keys` and roles in `roles` are not looked at."""

    def __init__(self, change: Callable[[str], str], keys: Iterable[str] = (), roles: Iterable[str] = ()):
        self._change = change
        self._known: set[str] = {""}
        ours = [f'"role":"{role}"' for role in sorted(roles)] + [f'"{key}":' for key in sorted(keys)]
        # Compact JSON has no other place for these: within a string, the quotes have backslashes.
        self._strings = re.compile("|".join([*map(re.escape, ours), r'"([^"\\]*(?:\\.[^"\\]*)*)"']), re.DOTALL)

    def has_all(self, json: str) -> bool:
        """Return whether all strings of compact JSON, in values and keys, stay as they are."""
        new = set(self._strings.findall(json)) - self._known
        for string in new:
            value = orjson.loads(f'"{string}"') if "\\" in string else string
            if self._change(value) != value:
                return False
        if len(self._known) > _MOST_KNOWN:
            self._known = {""}
        self._known.update(string for string in new if len(string) <= _SHORT)
        return True
