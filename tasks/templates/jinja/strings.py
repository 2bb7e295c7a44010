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
        self._changing: set[str] = set()
        ours = [f'"role":"{role}"' for role in sorted(roles)] + [f'"{key}":' for key in sorted(keys)]
        # Compact JSON has no other place for these: within a string, the quotes have backslashes.
        self._strings = re.compile("|".join([*map(re.escape, ours), r'"([^"\\]*(?:\\.[^"\\]*)*)"']), re.DOTALL)

    def has_all(self, json: str) -> bool:
        """Return whether all strings of compact JSON, in values and keys, stay as they are."""
        return not self._others(json)

    def changed(self, json: str, change: Callable[[str], str]) -> str:
        """Return compact JSON with those strings changed that do not stay as they are."""
        new = {string: orjson.dumps(change(_plain(string))).decode() for string in self._others(json)}
        return self._strings.sub(lambda match: new.get(match[1]) or match[0], json) if new else json

    def _others(self, json: str) -> set[str]:
        """Return the strings of compact JSON that do not stay as they are."""
        new = set(self._strings.findall(json)) - self._known
        others = new & self._changing
        new -= others
        others |= {string for string in new if self._change(value := _plain(string)) != value}
        if len(self._known) + len(self._changing) > _MOST_KNOWN:
            self._known, self._changing = {""}, set()
        for string in new:
            if len(string) <= _SHORT:
                (self._changing if string in others else self._known).add(string)
        return others


def _plain(string: str) -> str:
    """Return a string without the escapes of JSON."""
    return str(orjson.loads(f'"{string}"')) if "\\" in string else string
