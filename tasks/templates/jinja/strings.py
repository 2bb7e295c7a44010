"""Find the strings of a conversation that a function would change.

    {"role":"user","content":"2+2?"}   ──▶   "2+2?"     every string but the keys and roles of the message format

A conversation has hundreds of strings, and most of them occur many times, such as names of parameters, types, and
functions. A regular expression finds the strings in JSON, and results for short strings are remembered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import orjson

# Up to _MOST_KNOWN strings of up to _SHORT characters are remembered.
_SHORT, _MOST_KNOWN = 64, 1 << 14


class Unchanged:
    """Strings that `change` returns unchanged.

    Keys in `keys` and roles in `roles` are ignored.
    """

    def __init__(self, change: Callable[[str], str], keys: Iterable[str] = (), roles: Iterable[str] = ()):
        self._change = change
        self._known: set[str] = {""}
        self._changing: set[str] = set()
        ours = [f'"role":"{role}"' for role in sorted(roles)] + [f'"{key}":' for key in sorted(keys)]
        # Compact JSON has these texts nowhere else: quotes within a string have backslashes.
        self._strings = re.compile("|".join([*map(re.escape, ours), r'"([^"\\]*(?:\\.[^"\\]*)*)"']), re.DOTALL)

    def has_all(self, json: str) -> bool:
        """Return whether all keys and strings of compact JSON would stay unchanged."""
        return not self._others(json)

    def changed(self, json: str, change: Callable[[str], str]) -> str:
        """Return compact JSON with `change` applied to the strings that need a change."""
        new = {string: orjson.dumps(change(_plain(string))).decode() for string in self._others(json)}
        return self._strings.sub(lambda match: new.get(match[1]) or match[0], json) if new else json

    def _others(self, json: str) -> set[str]:
        """Return the strings of compact JSON that would change."""
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
    """Return a JSON string with its escapes decoded."""
    return str(orjson.loads(f'"{string}"')) if "\\" in string else string
