"""Cast numbers to int32, the type in plans and indexes, or refuse them.

numpy's own casts wrap around silently: conversation 2,147,483,648 would become -2,147,483,648.
"""

from __future__ import annotations

import numpy as np

from tasks.core.errors import DataError

MOST = (1 << 31) - 1


def check_number(number: int, what: str) -> int:
    """Return a number that fits in int32. Otherwise, raises DataError about `what`."""
    if not -MOST <= number <= MOST:
        raise DataError(
            "too_many",
            f"{what}: {number:,} exceeds the limit of a plan ({MOST:,}); divide the sources into several corpora",
        )
    return number


def as_int32(values: np.ndarray, what: str) -> np.ndarray:
    """Return integers as int32. Raises DataError about `what` if one does not fit."""
    if values.dtype.itemsize >= 4 and values.dtype != np.int32 and len(values):
        for extreme in (int(values.min()), int(values.max())):
            check_number(extreme, what)
    return values.astype(np.int32, copy=False)
