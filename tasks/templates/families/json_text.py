"""Write JSON like published templates and mistral-common.

    {"a":1,"b":"\\u00fc"}  ──▶  {"a": 1, "b": "ü"}      a space after each comma and colon, no unneeded escapes

Python's json module defines the rules. Templates apply `tojson` to values that Python has read, so numbers have
Python's digits, too. The maximum depth that Python reads depends on its version. `DEEPEST` is a fixed limit.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tasks.core.errors import Reject

# Maximum depth of brackets. Python 3.11 reads 992, less the depth of its own stack; later versions read more.
DEEPEST = 800

_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+"|[\[\]{}]', re.DOTALL)


def json_string(text: str) -> str:
    """Return `text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def spaced(text: str) -> str:
    """Return a JSON text with the spaces that templates write.

    Raises Reject if it is nested too deeply.
    """
    try:
        value = json.loads(text)
        _check_depth(text)
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise Reject("too_deep", "a tool, or the arguments of a tool call, are nested too deeply") from None


def value_or_string(text: str) -> str:
    """Return JSON with the spaces that templates write, and other text as a string.

    Other text includes JSON that cannot be rewritten without loss, such as an object with a duplicate key.
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
    """Raise RecursionError if valid JSON is nested deeper than `DEEPEST`."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return
    depth = 0
    for token in _STRING_OR_BRACKET.finditer(text):
        depth += (token.group() in "[{") - (token.group() in "]}")
        if depth > DEEPEST:
            raise RecursionError
