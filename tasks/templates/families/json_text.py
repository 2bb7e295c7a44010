"""Write JSON as published templates and mistral-common do, with the rules of Python's json module.

    {"a":1,"b":"\\u00fc"}  ──▶  {"a": 1, "b": "ü"}      a space after each comma and colon, no unneeded escapes

Templates write `tojson` of values that were read with Python; the digits of a number are therefore Python's, too. How
deep Python reads is not the same in all its versions; `DEEPEST` is.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tasks.core.errors import Reject

# Brackets within each other. Python 3.11 reads 992, less what its own stack holds; later versions read more.
DEEPEST = 800

_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+"|[\[\]{}]', re.DOTALL)


def json_string(text: str) -> str:
    """Return `text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def spaced(text: str) -> str:
    """Return a JSON text with the spaces that templates write."""
    try:
        value = json.loads(text)
        _check_depth(text)
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise Reject("too_deep", "a tool, or the arguments of a tool call, are nested too deeply") from None


def value_or_string(text: str) -> str:
    """Return a JSON text with the spaces that templates write, and any other text as a JSON string.

    JSON that cannot be written again without a loss, such as an object with the same key twice, is any other text.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
        _check_depth(text)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()  # no lone surrogate
        return written
    except (ValueError, RecursionError):
        return json_string(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("duplicate key")
    return found


def _check_depth(text: str) -> None:
    """Raise RecursionError if a text that is valid JSON is nested deeper than `DEEPEST`."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return
    depth = 0
    for token in _STRING_OR_BRACKET.finditer(text):
        depth += (token.group() in "[{") - (token.group() in "]}")
        if depth > DEEPEST:
            raise RecursionError
