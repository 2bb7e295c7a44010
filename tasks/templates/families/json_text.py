"""Write JSON as published templates and mistral-common do, with the rules of Python's json module.

    {"a":1,"b":"\\u00fc"}  ──▶  {"a": 1, "b": "ü"}      a space after each comma and colon, no unneeded escapes

Templates write `tojson` of values that were read with Python; the digits of a number are therefore Python's, too.
"""

from __future__ import annotations

import json
from typing import Any

from tasks.core.errors import Reject


def json_string(text: str) -> str:
    """Return `text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def spaced(text: str) -> str:
    """Return a JSON text with the spaces that templates write."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except RecursionError:
        raise Reject("too_deep", "a tool, or the arguments of a tool call, are nested too deeply") from None


def value_or_string(text: str) -> str:
    """Return a JSON text with the spaces that templates write, and any other text as a JSON string.

    JSON that cannot be written again without a loss, such as an object with the same key twice, is any other text.
    """
    try:
        written = json.dumps(json.loads(text, object_pairs_hook=_unique), ensure_ascii=False, allow_nan=False)
        written.encode()  # no lone surrogate
        return written
    except (ValueError, RecursionError):
        return json_string(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("duplicate key")
    return found
