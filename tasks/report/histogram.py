"""Count how often each number occurs.

Memory depends on the number of different numbers. A corpus has few different lengths of conversations, because the
lengths add up to its tokens: at most √(2 × tokens), which is 1.4 million for 10¹² tokens, and thousands in practice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Histogram:
    """Numbers and how often they occur.

    `values` are the numbers that occur, ascending. `counts` is how often each of them occurs. Both are int64.
    """

    def __init__(self, numbers: np.ndarray | Sequence[int] = ()) -> None:
        self.values, self.counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.add(np.asarray(numbers, np.int64))

    def add(self, numbers: np.ndarray) -> None:
        """Count further numbers."""
        values, counts = np.unique(numbers, return_counts=True)
        self.values, inverse = np.unique(np.concatenate([self.values, values]), return_inverse=True)
        counts = np.concatenate([self.counts, counts])
        self.counts = np.zeros(len(self.values), np.int64)
        np.add.at(self.counts, inverse, counts)

    def __len__(self) -> int:
        """Return the count of all added numbers."""
        return int(self.counts.sum())

    def above(self, limit: int) -> int:
        """Return the count of numbers above a limit."""
        return int(self.counts[self.values > limit].sum())

    def mean(self) -> float:
        return float((self.values * self.counts).sum()) / max(1, len(self))

    def quantiles(self, shares: Sequence[float]) -> list[int]:
        """Return the quantiles at these shares, by the method "inverted_cdf" of numpy.

        A quantile is the smallest number that at least this share of all numbers does not exceed.
        """
        places = np.ceil(len(self) * np.array(shares) - 1).clip(0).astype(np.int64)
        found: list[int] = self.values[np.searchsorted(np.cumsum(self.counts), places, side="right")].tolist()
        return found
