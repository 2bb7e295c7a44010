"""Count how often each number occurs, in memory that depends on how many different numbers there are.

A corpus has few different lengths of conversations, since they add up to its tokens: at most √(2 × tokens), 1.4 million
with 10¹² tokens, and thousands in practice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Histogram:
    """`values` are ascending, and each occurs; `counts` are how often. Both are int64."""

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
        """Return how many numbers were added."""
        return int(self.counts.sum())

    def above(self, limit: int) -> int:
        """Return how many numbers are larger than a limit."""
        return int(self.counts[self.values > limit].sum())

    def mean(self) -> float:
        return float((self.values * self.counts).sum()) / max(1, len(self))

    def quantiles(self, shares: Sequence[float]) -> list[int]:
        """Return the smallest numbers that at least these shares of all do not exceed, as numpy's "inverted_cdf"."""
        places = np.ceil(len(self) * np.array(shares) - 1).clip(0).astype(np.int64)
        found: list[int] = self.values[np.searchsorted(np.cumsum(self.counts), places, side="right")].tolist()
        return found
