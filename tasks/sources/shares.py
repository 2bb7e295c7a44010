"""Divide work among machines that do not know of each other, by what each piece of it costs.

costs 4 1 1 4 2   ─Share(1, 3)─▶ 4     ─Share(2, 3)─▶ 1 1     ─Share(3, 3)─▶ 4 2
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Share(NamedTuple):
    """Share `number` of `shares`, from 1: neighboring pieces, because what they read lies together."""

    number: int
    shares: int

    def of(self, costs: Sequence[int]) -> list[int]:
        """Return the indices of the pieces whose middle is in this share. Every piece is in one share."""
        ends = list(accumulate(costs, initial=0))[1:]
        total = 2 * max(1, sum(costs))
        middles = [(2 * end - cost) * self.shares // total for end, cost in zip(ends, costs, strict=True)]
        return [index for index, middle in enumerate(middles) if min(middle, self.shares - 1) == self.number - 1]


WHOLE = Share(1, 1)
