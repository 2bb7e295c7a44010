"""Divide work among machines that do not know of each other, by cost.

costs 4 1 1 4 2   ─Share(1, 3)─▶ 4     ─Share(2, 3)─▶ 1 1     ─Share(3, 3)─▶ 4 2
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Share(NamedTuple):
    """Share `number` of `shares`, counted from 1.

    A share is a range of neighboring items, because the data that they read is also close together.
    """

    number: int
    shares: int

    def of(self, costs: Sequence[int]) -> list[int]:
        """Return the indices of the items whose middle is in this share.

        Every item is in exactly one share.
        """
        ends = list(accumulate(costs, initial=0))[1:]
        total = 2 * max(1, sum(costs))
        middles = [(2 * end - cost) * self.shares // total for end, cost in zip(ends, costs, strict=True)]
        return [index for index, middle in enumerate(middles) if min(middle, self.shares - 1) == self.number - 1]


WHOLE = Share(1, 1)
