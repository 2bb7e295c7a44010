"""Suggest a known name for a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def suggest(value: str, known: Iterable[str], at_most: int = 1) -> str:
    """Return "; did you mean X?", or "" if no name is close to a value.

    Up to `at_most` names are suggested, the closest first. Case is ignored.
    """
    near = closest(value, known, at_most)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def closest(value: str, known: Iterable[str], at_most: int = 1) -> list[str]:
    """Return up to `at_most` close names, the closest first. Case is ignored."""
    names = {name.lower(): name for name in known}
    return [names[match] for match in get_close_matches(value.lower()[:100], names, at_most)]
