"""Cast numbers to int32, which plans and indexes have them as, or refuse those that do not fit.

numpy's own casts wrap around silently: conversation 2,147,483,648 would become -2,147,483,648.
"""

from __future__ import annotations

import numpy as np

from tasks.core.errors import DataError

MOST = (1 << 31) - 1


def check_number(number: int, what: str) -> int:
    """Return a number, such as a count, that fits in int32. Raises DataError, naming `what` is counted."""
    if not -MOST <= number <= MOST:
        raise DataError(
            "too_many",
            f"{what}: {number:,} is more than a plan can number ({MOST:,}); make several corpora of fewer sources",
        )
    return number


def as_int32(values: np.ndarray, what: str) -> np.ndarray:
    """Return integers as int32. Raises DataError, naming `what` they are, if one does not fit."""
    if values.dtype.itemsize >= 4 and values.dtype != np.int32 and len(values):
        for extreme in (int(values.min()), int(values.max())):
            check_number(extreme, what)
    return values.astype(np.int32, copy=False)
