"""Bound how much longer a text can become within a tokenizer.

Replace("a" → 1,000 × "a"), three times  ─check_growth─▶  E402: 200 characters would become 200,000,000,000

The library holds a text as a whole at each step, and ends the process if memory runs out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from tasks.core.errors import DataError

# Published tokenizers reach 3. A text that is encoded at once has up to a million characters.
MOST_GROWTH = 16


def check_growth(spec: Mapping[str, Any], path: Path) -> None:
    """Raise DataError if a step of a `tokenizer.json` may make a text far longer."""
    for key in ("normalizer", "pre_tokenizer", "decoder"):
        if (growth := _growth(spec.get(key))) > MOST_GROWTH:
            raise DataError(
                "bad_tokenizer",
                f"{path}: its {key} can make a text {growth:,.0f} times as long, but at most {MOST_GROWTH} times is "
                "supported; shorten the contents of its replacements, or use another tokenizer",
            )


def _growth(node: Any) -> float:
    """Return how many times as long a text of one character can become."""
    if not isinstance(node, dict):
        return 1
    inner = prod(
        _growth(child)
        for name in ("normalizers", "pretokenizers", "decoders")
        for child in (node[name] if isinstance(node.get(name), list) else ())
    )
    if node.get("type") == "Replace":
        content = len(str(node.get("content") or ""))
        least = _least(node.get("pattern"))
        return max(1, content / least) if least else content + 1
    added = [node.get(name) for name in ("prepend", "prefix", "replacement")]
    return inner * (1 + sum(len(text) for text in added if isinstance(text, str) and len(text) > 1))


def _least(pattern: Any) -> int:
    """Return the least number of characters that a pattern may match."""
    values = pattern if isinstance(pattern, dict) else {}
    if isinstance(text := values.get("String"), str):
        return len(text)
    try:
        return 0 if re.match(str(values.get("Regex")), "") else 1
    except (re.error, RecursionError, OverflowError):  # the library has other rules
        return 1
