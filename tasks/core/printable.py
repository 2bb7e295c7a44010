"""Texts of messages, safe to show in a terminal.

Characters that a terminal would obey, hide, or reorder are escaped, and so are the marks of rows.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import takewhile

# Marks that frame shown text. In the data, they are escaped, so that no text can pass for a mark.
TRAINED = "⟦⟧"
CONTROL = "▐▌"
BOUNDARY = "▏"

# Characters without a glyph that text still needs: joiners in Persian, Indian scripts, and emoji.
JOINERS = "\u200c\u200d"
SPACES = "\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
MARKS = frozenset(TRAINED + CONTROL + BOUNDARY)
KEPT = frozenset("\n" + JOINERS + SPACES)


# A number as messages show it: 22,298, or #22,298.
_NUMBER = re.compile(r"#?(\d{1,3}(?:,\d{3})+|\d+)")


def digits_of(text: str) -> str:
    """Return the digits of a number as messages show it, or another text as it is."""
    number = _NUMBER.fullmatch(text.strip())
    return number[1].replace(",", "") if number else text


def is_plain(char: str) -> bool:
    return (char.isprintable() or char in KEPT) and char not in MARKS


def escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


_shown_as: dict[str, str] = {}


def show_as(folder: str, name: str) -> None:
    """From now on, show paths below a folder as if they were below `name`, a URL."""
    _shown_as[f"{folder}/"] = f"{name}/"


def with_urls(text: str) -> str:
    """Return `text` with each path below a folder of `show_as` as a URL."""
    for folder, name in _shown_as.items():
        text = text.replace(folder, name)
    return text


def printable(text: str) -> str:
    """Return `text` as one escaped line, with URLs as in `with_urls`."""
    return one_line(with_urls(text))


def printable_lines(text: str) -> str:
    """Return `text` like `printable`, but keep its line feeds."""
    return "\n".join(map(one_line, with_urls(text).split("\n")))


def one_line(text: str) -> str:
    """Return `text` with every unsafe character escaped, and its line feeds."""
    if text.isprintable() and MARKS.isdisjoint(text):  # faster
        return text
    return "".join(char if is_plain(char) and char != "\n" else escaped(char) for char in text)


def from_here(text: str) -> str:
    """Return `text` with each path inside the working directory relative to it."""
    try:
        here = os.getcwd()
    except OSError:  # it was deleted
        return text
    return text if here == os.sep else re.sub(rf"(?<![^\s'\"(`=]){re.escape(here)}/(?=[^\s/])", "", text)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: 1 row, or 1,234 rows."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a duration as 4.2 s, 59 s, 1 min, 1 min 5 s, 2 h, or 2 h 5 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    units = {"h": hours, "min": minutes, "s": 0 if hours else seconds}
    return " ".join(f"{count} {unit}" for unit, count in units.items() if count)


def aligned(table: list[list[str]]) -> list[str]:
    """Return the lines of a table; all columns but the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]) for name, *cells in table]


def common_folder(paths: Sequence[str]) -> str:
    """Return the folder that all paths share, with a final slash, or "" without one."""
    levels = zip(*(path.split("/")[:-1] for path in paths), strict=False)
    shared = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]
    least = 3 if any("://" in path for path in paths) else 1  # the first two levels of a URL are s3: and nothing
    return f"{'/'.join(shared)}/" if len(paths) > 1 and len(shared) >= least else ""


_KINDS: dict[type, str] = {
    **{str: "a string", int: "a number", float: "a number", bool: "a boolean", type(None): "null"},
    **{list: "a list", dict: "an object"},
}


def kind(value: object) -> str:
    """Return the JSON type of a value, such as "a string"."""
    return _KINDS.get(type(value)) or f"a value of type {type(value).__name__}"


def shown(value: object) -> str:
    """Return a string, escaped and in at most 60 characters, or another JSON type."""
    if not isinstance(value, str):
        return kind(value)
    text = json.dumps(value if len(value) <= 60 else value[:60] + "…", ensure_ascii=False)
    return "".join(char if is_plain(char) else json.dumps(char)[1:-1] for char in text)


def in_bytes(count: int) -> str:
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:,.1f} {units[0]}" if value < 100 and units[0] != "B" else f"{value:,.0f} {units[0]}"


def lengths_in_words(lengths: Sequence[int]) -> str:
    """Return the lengths that rows have: "1,024", or "512 and 1,024"."""
    *first, last = (f"{length:,}" for length in lengths)
    return " and ".join([", ".join(first), last]) if first else last


def named_at(named: str, commit: str) -> str:
    """Return the name of a model on the Hub with the start of its commit."""
    return f"{named.removeprefix('hf://').partition('@')[0]}@{commit[:8]}"


def suggest(value: str, known: Iterable[str], at_most: int = 1) -> str:
    """Return "; did you mean X?", or "" if no name is close to a value.

    Up to `at_most` names are suggested, the closest first. Case is ignored.
    """
    names = closest(value, known, at_most)
    return f"; did you mean {' or '.join(names)}?" if names else ""


def closest(value: str, known: Iterable[str], at_most: int = 1) -> list[str]:
    """Return up to `at_most` close names, the closest first. Case is ignored."""
    names = {name.lower(): name for name in known}
    return [names[match] for match in get_close_matches(value.lower()[:100], names, at_most)]
