"""Find the delimiter of a CSV or TSV file from its first rows.

    frage;antwort\n2+2?;4\n  ─find_delimiter─▶  ";"

A delimiter fits if it splits the header into the keys of a known format. If none does, a delimiter fits if it splits
all rows into equally many cells. The usual delimiter for the file's extension wins if it fits, or if none fits.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from itertools import islice

from tasks.core.printable import shown

DELIMITERS = (",", ";", "\t", "|")

_ROWS = 20  # number of rows that are read to find the delimiter


def check_delimiter(value: str) -> str:
    """Return a delimiter as one character, or "auto" unchanged.

    Raises ValueError if the value is not a delimiter.
    """
    if value in ("tab", "\\t"):
        return "\t"
    if value == "auto" or (len(value) == 1 and value.isascii() and not value.isalnum() and value not in '"\r\n\0'):
        return value
    raise ValueError(
        f"{shown(value)} is not a delimiter; use `tab` or a single character that is not a letter or digit, such as ';'"
    )


def find_delimiter(text: str, usual: str, is_known: Callable[[list[str]], bool]) -> str:
    """Return the delimiter of a file that starts with `text`.

    `is_known` returns whether the cells of a header are the keys of a format. Raises ValueError if several delimiters
    are equally likely.
    """
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # never lowered: another reader may need it
    rows = {delimiter: _first_rows(text, delimiter) for delimiter in dict.fromkeys((usual, *DELIMITERS))}
    found = [delimiter for delimiter, own in rows.items() if own and len(own[0]) > 1 and is_known(own[0])]
    # Rows of a table have several columns, and equally many cells. The last row may be incomplete.
    found = found or [
        delimiter
        for delimiter, own in rows.items()
        if own and len(own[0]) > 1 and all(len(row) in (0, len(own[0])) for row in own[1:-1])
    ]
    if len(found) < 2 or usual in found:
        return usual if usual in found or not found else found[0]
    raise ValueError(f"its cells may be separated by {' or '.join(map(name_of, found))}")


def name_of(delimiter: str) -> str:
    """Return the name of a delimiter in messages and as a value of the setting."""
    return "tab" if delimiter == "\t" else f"'{delimiter}'"


def _first_rows(text: str, delimiter: str) -> list[list[str]]:
    """Return the first rows, or [] if they cannot be read with this delimiter.

    The last row may be incomplete.
    """
    try:
        return list(islice(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), _ROWS))
    except csv.Error:
        return []
