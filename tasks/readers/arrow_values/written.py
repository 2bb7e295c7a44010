"""Hold a date, a time, or a decimal of a table, with its text.

In arguments and schemas, it becomes this text (`"2026-01-31"`, `"0.10"`). It is not a string, so it is never the
content of a message.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Written:
    """A value that JSON has no type for, and its text."""

    text: str


class Date(Written): ...


class Time(Written): ...


class Decimal(Written): ...


def text_of_written(value: object) -> str:
    """Return the text of a `Written`, for an encoder of JSON.

    Raises TypeError for any other value.
    """
    if isinstance(value, Written):
        return value.text
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")
