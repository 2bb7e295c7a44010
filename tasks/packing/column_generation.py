"""Prove how few rows are needed, and pack lengths that the search packs badly.

    counts ─linear program over patterns─▶ copies of each pattern, as fractions; a lower bound
           └─▶ whole copies are kept ─▶ linear program of the rest ─▶ … ─▶ rows

The program has a column for each set of lengths that fits in a row. Its columns are generated when they are needed
(Gilmore & Gomory, "A linear programming approach to the cutting-stock problem", Operations Research 9, 1961): a
knapsack over the prices of the lengths finds the rows that are worth most. Prices are smoothed (Wentges, International
Transactions in Operational Research 4, 1997), which saves two thirds of the knapsacks. Any prices prove a bound: the
value of all conversations divided by the value of the best row (Farley, Operations Research 38, 1990). The bound is
computed in integers, so it holds however the prices are rounded.

Every machine gets the same rows. Floats are only added, subtracted, multiplied, divided, and compared, one by one, as
IEEE 754 defines these operations, and all limits are counts. A solver such as HiGHS adds in a different order on a
different processor, and chooses different rows that are equally good. This is why the simplex method is implemented
here.

Rows may have several lengths. The cost of a row is then its length, and the sum of the costs is minimized. With one
length, every row costs 1. The row of a pattern has the shortest length that holds the pattern.

If there are more than MOST_CLASSES different lengths, they are rounded up to MOST_CLASSES classes. This leaves a few
tokens in each row empty. The bound still holds for the exact lengths.

Before that, `lower_bound` computes simpler bounds. The highest of three bounds wins. All arithmetic is in
integers:

* ``ceil(tokens/length)``: the rows must hold all tokens.
* ``L2``: no two conversations longer than half a row share a row. Martello & Toth, "Lower bounds and reduction
  procedures for the bin packing problem", Discrete Applied Mathematics 28 (1990). All thresholds are evaluated in one
  pass over cumulative sums.
* ``DFF`` (dual feasible functions): lengths are replaced by values such that any set that fits in a row still fits,
  then the first bound is applied. The family f2 of Carlier, Clautiaux & Moukrim, Computers & Operations Research 34
  (2007). Every member is a valid bound, so any subset of the family may be tried.

L2 is the one that matters for conversations: at 512 it proves 8,740 rows, while the tokens alone require 8,721. DFF
proves best-fit-decreasing optimal for evenly spread lengths (100,000 lengths in 1..512: 50,179 rows; L2 gives 50,169).
The u(k) of Fekete & Schepers (2001) never beat these two in twenty trials and was left out.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# f2 computes one value per distinct length and member; this many take 0.1 s. This suffices for all members up to
# capacity 2048. With more distinct lengths, an even selection of the members is tried.
DFF_ELEMENTS = 1 << 22
# Values computed at a time: 0.5 MB, which stays in the cache.
BLOCK_ELEMENTS = 1 << 16
# A pivot updates the square of this many numbers.
MOST_CLASSES = 512
# Limit of all numbers that are computed, about 1.5 · 10⁹ a second. The limit is lower for a plan that is less than 1 %
# above the bound: saving 2 rows of 5,000 is not worth 6 s.
MOST_WORK = 15_000_000_000
# A fifth of a second, where more rows than the fewest will do.
LITTLE_WORK = MOST_WORK // 64
# Work that one search of the rest counts as, because it may take a second.
SEARCH_WORK = MOST_WORK // 128
# The unit of integer prices, in rows.
UNIT = 2.0**-40
# Rows are generated for a mean of two sets of prices. SMOOTHING is the weight of the prices that proved the best bound.
# It falls by STEP whenever no rows are generated.
SMOOTHING, STEP = 0.75, 0.25
EPSILON = 1e-9
# Copies that are this close to a whole number are whole.
ROUNDING = 1e-6

Row = list[tuple[int, int]]  # (length, times), longest first
Rows = list[tuple[Row, int]]  # (row, copies)
_Pattern = tuple[tuple[int, int], ...]  # (length of a class, times), longest first


# -- simple bounds ----------------------------------------------------------------------------------------------------


def lower_bound(counts: np.ndarray, capacity: int) -> tuple[int, str]:
    """Return the number of rows that every packing needs, and the name of the bound.

    counts: integers, shape (capacity + 1,): conversations of each length in tokens. If bounds are equal, the simplest
    is named. The bound for no conversations is 0.
    """
    counts = np.asarray(counts, dtype=np.int64)
    lengths = np.flatnonzero(counts)
    copies = counts[lengths]
    best = (-(-int(lengths @ copies) // capacity), "ceil(tokens/length)")
    for rows, name in ((_l2(counts, capacity), "L2"), (_dff(lengths, copies, capacity), "DFF")):
        if rows > best[0]:
            best = (rows, name)
    return best


def _l2(counts: np.ndarray, capacity: int) -> int:
    """Compute L2, the maximum over all thresholds alpha in 0..capacity/2.

    Conversations longer than capacity - alpha have their own row. Conversations longer than half a row need a row each.
    The space they leave can hold conversations of alpha tokens and more; the rest of these conversations need further
    rows.
    """
    fewer = np.concatenate(([0], np.cumsum(counts)))  # fewer[i]: conversations shorter than i
    tokens = np.concatenate(([0], np.cumsum(counts * np.arange(capacity + 1))))
    half = capacity // 2
    alpha = np.arange(half + 1)
    paired = fewer[capacity - alpha + 1] - fewer[half + 1]
    free = paired * capacity - (tokens[capacity - alpha + 1] - tokens[half + 1])
    overflow = np.maximum(0, tokens[half + 1] - tokens[alpha] - free)
    return int((fewer[capacity + 1] - fewer[half + 1] + -(-overflow // capacity)).max())


def _dff(lengths: np.ndarray, copies: np.ndarray, capacity: int) -> int:
    """Compute the best bound of f2(k), k in 1..capacity/2.

    A row has the value 2 * (capacity // k), a conversation the value `_f2`.
    """
    members = capacity // 2
    tried = min(members, max(1, DFF_ELEMENTS // max(1, len(lengths))))
    k = 1 + np.arange(tried) * members // tried
    best = 0
    step = max(1, BLOCK_ELEMENTS // max(1, len(lengths)))
    for some in (k[first : first + step, None] for first in range(0, tried, step)):
        worth = _f2(lengths, some, capacity) @ copies
        best = max(best, int((-(-worth // (2 * (capacity // some[:, 0])))).max()))
    return best


def _f2(lengths: np.ndarray, k: np.ndarray, capacity: int) -> np.ndarray:
    """Apply f2(k) to `lengths`.

    For a length below half a row, the value is twice the number of times that k fits in it. For a longer length, it is
    the value of a row minus twice the number of times that k fits in the remaining space. For exactly half a row, it is
    half the value of a row.
    """
    long = 2 * (capacity // k - (capacity - lengths) // k)
    return np.where(2 * lengths > capacity, long, np.where(2 * lengths == capacity, capacity // k, 2 * (lengths // k)))


# -- linear program ----------------------------------------------------------------------------------------------------


class Improved(NamedTuple):
    """Rows with a lower cost, and a lower bound of the cost.

    `rows` are (row, copies), or None if no cheaper rows are found. Every packing costs at least `bound`.
    """

    rows: Rows | None
    bound: int


class Capacities:
    """Lengths that a row may have, ascending, and the cost of a row of each length.

    The cost is the length in units of the GCD of all lengths.
    """

    def __init__(self, lengths: Sequence[int]):
        self.lengths, self.unit = tuple(lengths), math.gcd(*lengths)
        self.costs = tuple(length // self.unit for length in lengths)
        self.longest = self.lengths[-1]

    def cost_of(self, row: Iterable[tuple[int, int]]) -> int:
        """Return the cost of the shortest row that holds `row`."""
        return self.costs[min(bisect_left(self.lengths, tokens_of(row)), len(self.costs) - 1)]

    def cost(self, rows: Iterable[tuple[Row, int]]) -> int:
        if len(self.lengths) == 1:
            return rows_of(rows)
        return sum(copies * self.cost_of(row) for row, copies in rows)


def improve(
    counts: np.ndarray,
    lengths: Sequence[int],
    rows: Rows,
    bound: int,
    search: Callable[[np.ndarray], Rows],
    most_work: int = MOST_WORK,
) -> Improved:
    """Pack a histogram at a lower cost than `rows`, or prove a higher bound.

    `lengths` are the lengths that a row may have, ascending. Costs are defined by Capacities; with one length, they are
    numbers of rows. `search` packs the conversations that remain at the end. `most_work` limits the numbers that are
    computed.
    """
    capacities = Capacities(lengths)
    left, fewest = counts.copy(), capacities.cost(rows)
    work = _Work(min(most_work, MOST_WORK * 100 * (fewest - bound) // fewest))
    classes = _Classes(counts, capacities)
    program = _Program(classes.counts(left), capacities, map(classes.pattern, (row for row, _ in rows)), work)
    program.solve(enough=fewest)
    bound = max(bound, classes.bound(program, counts, capacities))
    best, kept = None, Rows()
    while bound < fewest and work.left > 0 and (more := list(classes.take(program.whole(), left))):
        kept += more
        work.left -= SEARCH_WORK
        rest = search(left)
        if (total := capacities.cost(kept) + capacities.cost(rest)) < fewest:
            best, fewest = kept + rest, total
        if not left.any():
            break
        program = _Program(classes.counts(left), capacities, program.patterns, work)
        program.solve()
    return Improved(best, bound)


def rows_of(rows: Iterable[tuple[Row, int]]) -> int:
    return sum(copies for _, copies in rows)


def tokens_of(row: Iterable[tuple[int, int]]) -> int:
    return sum(length * times for length, times in row)


@dataclass
class _Work:
    """Number of numbers that may still be computed."""

    left: int


class _Classes:
    """Classes of lengths: single lengths, or neighbors if there are too many lengths.

    A class is named by its longest length. All lengths of a class fit in the same lengths of rows.
    """

    def __init__(self, counts: np.ndarray, capacities: Capacities):
        lengths = np.flatnonzero(counts)[::-1]
        step = np.arange(len(lengths)) * min(len(lengths), MOST_CLASSES) // len(lengths)
        step = step * len(capacities.lengths) - np.searchsorted(capacities.lengths, lengths)
        first = np.searchsorted(step, step)
        self._of = dict(zip(lengths.tolist(), lengths[first].tolist(), strict=True))
        self._members: dict[int, list[int]] = {}
        for length, name in self._of.items():
            self._members.setdefault(name, []).append(length)

    def counts(self, left: np.ndarray) -> dict[int, int]:
        """Return the conversations left in each class that has any, the longest first."""
        counts = {name: sum(int(left[length]) for length in lengths) for name, lengths in self._members.items()}
        return {name: count for name, count in counts.items() if count}

    def pattern(self, row: Row) -> _Pattern:
        """Return the classes of a row; rounded up, they may not fit."""
        times: dict[int, int] = {}
        for length, copies in row:
            times[self._of[length]] = times.get(self._of[length], 0) + copies
        return tuple(times.items())

    def take(self, patterns: Iterable[tuple[_Pattern, int]], left: np.ndarray) -> Iterator[tuple[Row, int]]:
        """Take the conversations of patterns out of `left`, and yield their rows.

        The longest conversations of each class are taken first. Patterns that need more conversations than are left are
        skipped.
        """
        for pattern, wanted in patterns:
            while wanted and (row := self._row(pattern, left)):
                copies = min(wanted, *(int(left[length]) // times for length, times in row))
                for length, times in row:
                    left[length] -= copies * times
                wanted -= copies
                yield row, copies

    def _row(self, pattern: _Pattern, left: np.ndarray) -> Row:
        row: Row = []
        for name, times in pattern:
            for length in self._members[name]:
                if some := min(times, int(left[length])):
                    row.append((length, some))
                    times -= some
            if times:
                return []
        return row

    def bound(self, program: _Program, counts: np.ndarray, capacities: Capacities) -> int:
        """Return the bound that the program's best prices prove for the exact lengths."""
        if len(self._members) == len(self._of):
            return program.bound
        # The price of a length is interpolated between the next shorter class and its own class.
        names = np.array([0, *reversed(self._members)])
        units = np.append(0, np.floor(program.best_prices[::-1] / UNIT).astype(np.int64))
        lengths = np.array(list(self._of))
        above = np.searchsorted(names, lengths)
        below = above - 1
        rise = (units[above] - units[below]) * (lengths - names[below]) // (names[above] - names[below])
        return _bound(units[below] + rise, lengths, counts[lengths].tolist(), capacities)[0]


class _Program:
    """Linear program: the cheapest rows that hold `counts` conversations per length.

    It is solved by the revised simplex method with an explicit inverse of the basis. A basic column is a pattern, or
    None if it stands for a length that may have more places than conversations.
    """

    def __init__(self, counts: dict[int, int], capacities: Capacities, patterns: Iterable[_Pattern], work: _Work):
        self._capacities, self._work = capacities, work
        capacity = capacities.longest
        self._lengths, self._counts = np.array(list(counts)), list(counts.values())
        self._number = {length: number for number, length in enumerate(counts)}
        times = capacity // self._lengths
        self._basis: list[_Pattern | None] = [
            ((length, copies),) for length, copies in zip(counts, times.tolist(), strict=True)
        ]
        self._inverse = np.diag(1.0 / times)
        self._copies = np.array(self._counts) / times  # of each basic column
        self._prices = np.array([float(capacities.cost_of(pattern or ())) for pattern in self._basis]) / times
        self.best_prices, self.bound = self._lengths / capacities.unit, 0
        self.patterns: list[_Pattern] = []
        self._known: set[_Pattern] = set()
        self._costs = np.zeros(0)  # of the patterns
        # Columns as (class, times), padded with times 0.
        self._class, self._times = np.zeros((2, 0, 1), dtype=np.int64)
        self._add(
            [
                pattern
                for pattern in patterns
                if tokens_of(pattern) <= capacity and all(length in self._number for length, _ in pattern)
            ]
        )

    def _add(self, patterns: Sequence[_Pattern]) -> None:
        new = [pattern for pattern in dict.fromkeys(patterns) if pattern not in self._known]
        self._known.update(new)
        self.patterns += new
        self._costs = np.append(self._costs, [float(self._capacities.cost_of(pattern)) for pattern in new])
        width = max([self._class.shape[1], *map(len, new)])
        classes, times = np.zeros((2, len(self.patterns), width), dtype=np.int64)
        classes[: len(self._class), : self._class.shape[1]] = self._class
        times[: len(self._times), : self._times.shape[1]] = self._times
        for at, pattern in enumerate(new, len(self._class)):
            for place, (length, copies) in enumerate(pattern):
                classes[at, place], times[at, place] = self._number[length], copies
        self._class, self._times = classes, times

    def solve(self, enough: int = 0) -> None:
        """Solve the program, unless it takes too much work.

        Stops once the bound is `enough`, if given.
        """
        while self._work.left > 0:
            self._improve()
            cost = float(sum(self._capacities.cost_of(p) * copies for p, copies in self._whole_and_part().items()))
            if self.bound >= (enough or cost - ROUNDING) or not self._generate():
                return

    def _improve(self) -> None:
        """Exchange basic columns while a known column makes the rows cheaper."""
        size = len(self._lengths)
        while self._work.left > 0:
            self._work.left -= 2 * size * size + self._class.size
            worth = np.zeros(len(self.patterns))
            for place in range(self._class.shape[1]):
                worth += self._prices[self._class[:, place]] * self._times[:, place]
            gains = worth - self._costs
            best, cheapest = int(gains.argmax()) if len(gains) else -1, int(self._prices.argmin())
            gain = gains[best] if len(gains) else 0.0
            if max(gain, -self._prices[cheapest]) < EPSILON:
                return
            if gain >= -self._prices[cheapest]:
                entering, change = self.patterns[best], np.zeros(size)
                for length, times in entering:
                    change += self._inverse[:, self._number[length]] * times
                self._exchange(entering, change, gain)
            else:
                self._exchange(None, -self._inverse[:, cheapest], -self._prices[cheapest])

    def _exchange(self, entering: _Pattern | None, change: np.ndarray, gain: float) -> None:
        can_leave = change > EPSILON
        most = np.full(len(change), np.inf)
        most[can_leave] = self._copies[can_leave] / change[can_leave]
        leaving = int(most.argmin())
        self._copies = np.maximum(self._copies - most[leaving] * change, 0.0)
        self._copies[leaving] = most[leaving]
        row = self._inverse[leaving] / change[leaving]
        self._prices = self._prices - gain * row
        change[leaving] = 0.0
        self._inverse -= change[:, None] * row[None, :]
        self._inverse[leaving] = row
        self._basis[leaving] = entering

    def _generate(self) -> bool:
        """Add patterns that make the rows cheaper. Returns False if there are none."""
        smoothing, capacities = SMOOTHING, self._capacities
        while self._work.left > 0:
            prices = smoothing * self.best_prices + (1.0 - smoothing) * np.maximum(self._prices, 0.0)
            units = np.floor(prices / UNIT).astype(np.int64)
            bound, table = _bound(units, self._lengths, self._counts, capacities)
            if bound > self.bound:
                costs = zip(capacities.lengths, capacities.costs, strict=True)
                self.bound, self.best_prices = bound, units / max(float(table[length]) / cost for length, cost in costs)
            self._work.left -= len(units) * capacities.longest
            rows = [row for length in reversed(capacities.lengths) for row in self._best_rows(length, units, table)]
            before = len(self.patterns)
            self._add([row for row in rows if self._worth(row) > capacities.cost_of(row) + EPSILON])
            if len(self.patterns) > before:
                return True
            if not smoothing:
                return False
            smoothing = max(0.0, smoothing - STEP)
        return False

    def _worth(self, pattern: _Pattern) -> float:
        worth = 0.0
        for length, times in pattern:
            worth += float(self._prices[self._number[length]]) * times
        return worth

    def _best_rows(self, capacity: int, units: np.ndarray, table: np.ndarray) -> Iterator[_Pattern]:
        """Yield the best row of `capacity` with each length, the most valuable first.

        They are read from a knapsack table.
        """
        fitting = np.flatnonzero(self._lengths <= capacity)
        with_it = units[fitting] + table[capacity - self._lengths[fitting]]
        for first in fitting[np.argsort(-with_it, kind="stable")].tolist():
            times, free = {first: 1}, capacity - int(self._lengths[first])
            while value := int(table[free]):
                free = int(np.searchsorted(table, value))
                rest = np.maximum(free - self._lengths, 0)
                taken = (self._lengths <= free) & (units > 0) & (table[rest] + units == value)
                number = int(taken.argmax())
                times[number] = times.get(number, 0) + 1
                free -= int(self._lengths[number])
            self._work.left -= len(units) * (1 + len(times))
            # Places beyond the number of conversations would stay empty.
            yield tuple((int(self._lengths[n]), min(times[n], self._counts[n])) for n in sorted(times))

    def _whole_and_part(self) -> dict[_Pattern, float]:
        copies = zip(self._basis, self._copies.tolist(), strict=True)
        return {pattern: number for pattern, number in copies if pattern is not None}

    def whole(self) -> list[tuple[_Pattern, int]]:
        """Return the whole copies of the patterns.

        If there are none, return one copy of each of the patterns with the largest shares.
        """
        shares = self._whole_and_part()
        if whole := [(pattern, int(copies + ROUNDING)) for pattern, copies in shares.items() if copies + ROUNDING >= 1]:
            return whole
        nearest = sorted(shares, key=lambda pattern: -shares[pattern])
        return [(pattern, 1) for pattern in nearest[: 1 + len(nearest) // 16]]


def _bound(units: np.ndarray, lengths: np.ndarray, counts: list[int], capacities: Capacities) -> tuple[int, np.ndarray]:
    """Return the cost that prices prove to be needed, and the knapsack table.

    The table has the highest value that fits in each number of tokens.
    """
    capacity = capacities.longest
    table = np.zeros(capacity + 1, np.int64)
    for length, price in zip(lengths.tolist(), units.tolist(), strict=True):
        # Blocks of `length` tokens: each block can hold one more conversation of this length than the previous block.
        for start in range(length, capacity + 1, length) if price else ():
            stop = min(start + length, capacity + 1)
            np.maximum(table[start:stop], table[start - length : stop - length] + price, out=table[start:stop])
    value = sum(price * count for price, count in zip(units.tolist(), counts, strict=True))
    costs = zip(capacities.lengths, capacities.costs, strict=True)
    return min(-(-value * cost // max(1, int(table[length]))) for length, cost in costs), table
