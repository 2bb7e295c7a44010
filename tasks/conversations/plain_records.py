"""Records that hold turns and nothing else → columns of their roles and contents.

    {"messages": [{"role": "user", "content": "2+2?"}, …]}  ┐    roles     (user, assistant), (user, assistant)
    {"prompt": "6 × 7?", "completion": "42"}                ┴▶   contents  "2+2?", "4", "6 × 7?", "42"

Each step over a record is one call in C, of 30 to 100 ns; `conversations.read_record` takes 3 µs in all. Where one of
the records is not so, they are looked at one by one (1 µs), and those that are plain are still read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice, repeat
from operator import itemgetter
from typing import Any, NamedTuple

from tasks.conversations.chat import ROLES_OF


class Turns(NamedTuple):
    """Of some records the names of their roles, how many turns each has, and the contents of all turns."""

    roles: list[tuple[Any, ...]]
    counts: list[int]
    contents: list[str]


class _Lists(NamedTuple):
    """A key with a list of turns, their keys, and the keys that would say more."""

    turns: str
    role: str
    content: str
    others: tuple[str, ...]


class _Texts(NamedTuple):
    """A key for each turn; keys that would stand for one of them if they were not null; keys that would say more."""

    keys: tuple[str, ...]
    before: tuple[str, ...]
    others: tuple[str, ...]


_LISTS = {
    "messages": _Lists("messages", "role", "content", ("tools",)),
    "sharegpt": _Lists("conversations", "from", "value", ("tools", "system")),
}
_NOTHING = (None, "")
_SAID_APART = ("system", "history", "input", "context")
_TEXTS = {
    "text": (_Texts(("text",), (), ()),),
    "alpaca": (
        _Texts(("instruction", "output"), (), _SAID_APART),
        _Texts(("instruction", "response"), ("output",), _SAID_APART),
    ),
    "dolly": (_Texts(("instruction", "response"), (), ("system", "context")),),
    "prompt_completion": (
        _Texts(("prompt", "completion"), (), ("system", "tools")),
        _Texts(("prompt", "response"), ("completion",), ("system", "tools")),
        _Texts(("question", "answer"), ("prompt",), ("system", "tools")),
        _Texts(("question", "response"), ("prompt", "answer"), ("system", "tools")),
    ),
}


def turn_columns(records: Sequence[Any], format: str) -> Turns | None:
    """The turns of records of this format; None where one of them is other than plain, and has to be read with care.

    Each content is a string that is not blank; a role is whatever stands there.
    """
    if not records or not isinstance(records[0], dict):
        return None
    try:
        turns = _of_lists(records, _LISTS[format]) if format in _LISTS else _of_texts(records, _TEXTS.get(format, ()))
        return None if turns is None or any_blank(turns.contents) else turns
    except (KeyError, TypeError):
        return None


def plain_turns(record: Any, format: str) -> tuple[tuple[Any, ...], list[str]] | None:
    """Roles and contents of one record, as `turn_columns` has them; None where it is other than plain."""
    if not isinstance(record, dict):
        return None
    try:
        if format in _LISTS:
            names = _LISTS[format]
            if len(record) > 1 and any(record.get(key) not in _NOTHING for key in names.others):
                return None
            turns = record[names.turns]
            contents = [turn[names.content] for turn in turns]
            roles = tuple([turn[names.role] for turn in turns])
            if sum(map(len, turns)) > 2 * len(turns):
                return None
        else:
            for way in _TEXTS.get(format, ()):
                contents = [record.get(key) for key in way.keys]
                if None not in contents:
                    break
            else:
                return None
            if any(record.get(key) not in _NOTHING for key in way.others):
                return None
            if any(record.get(key) is not None for key in way.before):
                return None
            roles = _roles(way)
        whole = "".join(contents)
        if not contents or any_blank(contents) or "\0" in whole:
            return None
        if not whole.isascii():
            whole.encode()
        return roles, contents
    except (KeyError, TypeError, UnicodeEncodeError):
        return None


def role_of(name: str, format: str) -> str:
    """What we call a role of `Turns`; empty where it is none."""
    return ROLES_OF.get(format, {"user": "user", "assistant": "assistant", "text": "text"}).get(name, "")


def grouped(values: Iterable[Any], counts: Sequence[int]) -> list[tuple[Any, ...]]:
    """The first `counts[0]` values, the `counts[1]` that follow, …"""
    values = iter(values)
    if counts.count(counts[0]) == len(counts):
        return list(zip(*[values] * counts[0], strict=True))
    return [tuple(islice(values, count)) for count in counts]


def any_blank(contents: Sequence[str]) -> bool:
    """Whether a content is empty or white space alone: it is then another matter what the template writes, and whether
    the turn is trained on. Raises TypeError where one is no string."""
    return any(map(str.isspace, contents)) or not all(contents)


def _of_lists(records: Sequence[Any], names: _Lists) -> Turns | None:
    if max(map(len, records)) > 1 and not _all_null(records, names.others, ""):
        return None
    lists = list(map(itemgetter(names.turns), records))
    turns = list(chain.from_iterable(lists))
    roles, contents = map(itemgetter(names.role), turns), list(map(itemgetter(names.content), turns))
    if sum(map(len, turns)) > 2 * len(turns):
        return None
    counts = list(map(len, lists))
    if 0 in counts:
        return None
    return Turns(grouped(roles, counts), counts, contents)


def _of_texts(records: Sequence[Any], ways: Sequence[_Texts]) -> Turns | None:
    names = next((names for names in ways if all(isinstance(records[0].get(key), str) for key in names.keys)), None)
    if not names or not (_all_null(records, names.before) and _all_null(records, names.others, "")):
        return None
    roles = _roles(names)
    contents = zip(*(map(itemgetter(key), records) for key in names.keys), strict=True)
    counts = [len(roles)] * len(records)
    return Turns([roles] * len(records), counts, list(chain.from_iterable(contents)))


def _roles(names: _Texts) -> tuple[str, ...]:
    return ("user", "assistant") if len(names.keys) > 1 else ("text",)


def _all_null(records: Sequence[Any], keys: Sequence[str], *alike: str) -> bool:
    """Whether these keys are absent, or null or one of `alike`, in all records."""
    for key in keys:
        values = list(map(dict.get, records, repeat(key)))
        if values.count(None) + sum(map(values.count, alike)) < len(values):
            return False
    return True
