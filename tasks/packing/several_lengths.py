"""Choose the length of each row so that all rows have the fewest places.

    counts ─by length of rows─▶ plans, the one with the fewest places ─column generation─▶ Rows of each length
                                                                                       └─▶ a lower bound of the places

A long conversation needs a long row; a short conversation fits in any row. A plan with more long rows is taken only if
it saves more than a thousandth of the places (NEAR), because a long row of short conversations has no other benefit.

1. Rows are filled from the longest length to the shortest. A conversation opens a row only if no shorter row holds it.
   The search of bin_packing.py fills the row with shorter conversations. The shortest rows hold the remaining
   conversations.
2. Short rows that are not full are packed again as longer rows if this takes fewer places. For example, three
   conversations of 300 tokens waste less in one row of 1024 tokens than in three rows of 512.
3. Steps 1 and 2 are repeated without the shortest length, and so on up to a plan with only the longest rows. The plan
   is therefore at most a thousandth larger than a plan with any single length that holds all conversations.
4. Column generation runs over rows of all lengths. The cost of a row is its length.

Steps 3 and 4 run only if the places are more than a thousandth above the lower bound. Otherwise, no other plan could
save enough to be taken.

The lower bound is the highest of three bounds: the number of tokens; the rows that the longest length alone would need,
if each length is a multiple of the next shorter length, so that short rows can be joined to long rows; and the bound of
the linear program. Bounds are exact integers, and every machine gets the same plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import compress, pairwise
from operator import not_
from typing import NamedTuple

import numpy as np

from packcorpus.tasks.packing import bin_packing
from packcorpus.tasks.packing.bin_packing import best_fit_decreasing, counts_of, exact_fill, search
from packcorpus.tasks.packing.column_generation import Capacities, Row, Rows, improve, lower_bound, tokens_of

ALGORITHM = "bottleneck-exact-fit over several lengths"

# A plan with longer rows must save more than one in NEAR places.
NEAR = 1000

# Rows with at least this share of free places are packed again as longer rows. Every share is tried, and the best
# result is taken.
EMPTY = (0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625)
# Rounds of packing again. On real conversations, a second round saved 0 to 3 rows, and a third round none.
ROUNDS = 2


class Packing(NamedTuple):
    """Rows of each length, ascending, and lower bounds, each with its name.

    `bounds` has the number of rows of each length that every packing of the pieces chosen for it needs. `places` is the
    number of places that every packing needs; None for a single length.
    """

    rows: list[Rows]
    bounds: list[tuple[int, str]]
    places: tuple[int, str] | None


def solve(counts: np.ndarray, lengths: Sequence[int]) -> Packing:
    """Pack a histogram in rows of one or several lengths, and prove lower bounds.

    The rows have as few places as possible. lengths: ascending. counts: integers, shape (longest + 1,), as returned by
    `bin_packing.histogram`.
    """
    if len(lengths) == 1:
        rows, rows_needed = bin_packing.solve(counts, lengths[0])
        return Packing([rows], [rows_needed], None)
    capacities = Capacities(lengths)
    tokens = int(counts @ np.arange(len(counts)))
    bound = _higher(
        (-(-tokens // capacities.unit), "ceil(tokens/length)"),
        _joined(lower_bound(counts, capacities.longest), capacities),
    )
    best: Rows = []
    for shortest in range(len(lengths)):
        if shortest and not _saves(bound[0], capacities.cost(best)):
            break
        used, fits_all = lengths[shortest:], int(np.flatnonzero(counts)[-1:].sum()) <= lengths[shortest]
        if fits_all:
            rows, proved = bin_packing.solve(counts[: used[0] + 1], used[0])
            if len(used) == 1:
                bound = _higher(bound, _joined(proved, capacities))
        else:
            rows = _cascade(counts, used)
        if capacities.cost(rows) > bound[0]:
            rows = _lengthened(rows, used)
        if not shortest or _saves(capacities.cost(rows), capacities.cost(best)):
            best = rows
    if _saves(bound[0], capacities.cost(best)):
        better, proved_cost = improve(
            counts, lengths, best, bound[0], lambda left: _lengthened(_cascade(left, lengths), lengths)
        )
        best = better or best
        bound = _higher(bound, (proved_cost, "linear program"))
    by_length: list[Rows] = [[] for _ in lengths]
    for row, copies in best:
        # A long row is divided into shorter rows that cost no more, by the first length for which that works.
        parts = [row]
        for length, cost in zip(lengths[:-1], capacities.costs, strict=False):
            if row[0][0] <= length and cost < capacities.cost_of(row):
                shorter = _first_fit(row, length)
                if sum(map(capacities.cost_of, shorter)) <= capacities.cost_of(row):
                    parts = shorter
                    break
        for part in parts:
            by_length[bisect_left(lengths, tokens_of(part))].append((part, copies))
    bounds = [lower_bound(counts_of(rows, length), length) for rows, length in zip(by_length, lengths, strict=True)]
    return Packing(by_length, bounds, (bound[0] * capacities.unit, bound[1]))


def _saves(cost: int, before: int) -> bool:
    """Return whether a plan saves enough to have longer rows."""
    return (NEAR + 1) * cost < NEAR * before


def _higher(bound: tuple[int, str], other: tuple[int, str]) -> tuple[int, str]:
    return other if other[0] > bound[0] else bound


def _joined(bound: tuple[int, str], capacities: Capacities) -> tuple[int, str]:
    """Return the minimum cost if the longest length alone needs `bound` rows.

    If each length is a multiple of the next shorter length, rows that cost T can be joined to ceil(T / cost of the
    longest row) rows of the longest length. Otherwise, the minimum is 0.
    """
    rows, name = bound
    if not rows or any(longer % shorter for shorter, longer in pairwise(capacities.lengths)):
        return 0, name
    return capacities.costs[-1] * (rows - 1) + 1, name


def _cascade(counts: np.ndarray, lengths: Sequence[int]) -> Rows:
    """Pack from the longest rows to the shortest.

    A conversation opens a row only if no shorter row holds it.
    """
    rows: Rows = []
    left = counts
    for shorter, length in reversed([*pairwise(lengths)]):
        filled, left = exact_fill(left[: length + 1], length, shorter)
        rows += filled
        if left[shorter + 1 :].any():  # the search used up its steps
            return rows + best_fit_decreasing(left, length)
    return rows + search(left[: lengths[0] + 1], lengths[0], lower_bound(left[: lengths[0] + 1], lengths[0])[0])


def _lengthened(rows: Rows, lengths: Sequence[int]) -> Rows:
    """Repack short rows that are not full as longer rows if that takes fewer places."""
    capacities = Capacities(lengths)
    for _ in range(ROUNDS if len(lengths) > 1 else 0):
        best, saved = rows, 0
        filled = [tokens_of(row) for row, _ in rows]
        numbers = [bisect_left(lengths, tokens) for tokens in filled]
        for number, length in enumerate(lengths[:-1]):
            before = -1
            for share in EMPTY:
                most = length - max(1, share * length)
                chosen = [n == number and tokens <= most for n, tokens in zip(numbers, filled, strict=True)]
                if sum(chosen) in (0, before):
                    continue
                before = sum(chosen)
                again = [*compress(rows, chosen)]
                cost, counts = capacities.cost(again), counts_of(again, lengths[-1])
                for longer in lengths[number + 1 :]:
                    packed = search(counts[: longer + 1], longer)
                    if cost - capacities.cost(packed) > saved:
                        saved = cost - capacities.cost(packed)
                        best = [*compress(rows, map(not_, chosen)), *packed]
        if not saved:
            break
        rows = best
    return rows


def _first_fit(row: Row, length: int) -> list[Row]:
    """Pack the conversations of a row by first-fit-decreasing in rows of `length`."""
    free, parts = list[int](), list[Row]()
    for size, times in row:
        for _ in range(times):
            at = next((at for at, places in enumerate(free) if places >= size), len(free))
            if at == len(free):
                free.append(length)
                parts.append([])
            free[at] -= size
            if parts[at] and parts[at][-1][0] == size:
                parts[at][-1] = (size, parts[at][-1][1] + 1)
            else:
                parts[at].append((size, 1))
    return parts
