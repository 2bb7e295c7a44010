"""Choose the length of each row so that all rows have the fewest places.

    counts ─by length of rows─▶ plans, the one with the fewest places ─column generation─▶ Patterns of each length
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
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tasks.packing import bin_packing
from tasks.packing.bin_packing import (
    Patterns,
    best_fit_decreasing,
    exact_fill,
    lower_bound,
    patterns_of,
    search,
    solve_rows,
)
from tasks.packing.column_generation import Capacities, Row, improve

ALGORITHM = "bottleneck-exact-fit over several lengths"

# A plan with longer rows must save more than one in NEAR places.
NEAR = 1000

# Rows with at least this share of free places are packed again as longer rows. Every share is tried, and the best
# result is taken.
EMPTY = (0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625)
# Rounds of packing again. On real conversations, a second round saved 0 to 3 rows, and a third round none.
ROUNDS = 2

Rows = list[tuple[Row, int]]  # (row, copies)


class Packing(NamedTuple):
    """Rows of each length, ascending, and lower bounds, each with its name.

    `bounds` has the number of rows of each length that every packing of the pieces chosen for it needs. `places` is the
    number of places that every packing needs; None for a single length.
    """

    patterns: list[Patterns]
    bounds: list[tuple[int, str]]
    places: tuple[int, str] | None

    @property
    def algorithm(self) -> str:
        return ALGORITHM if self.places else bin_packing.ALGORITHM


def solve(counts: np.ndarray, lengths: Sequence[int]) -> Packing:
    """Pack a histogram in rows of one or several lengths, and prove lower bounds.

    The rows have as few places as possible. lengths: ascending. counts: integers, shape (longest + 1,), as returned by
    `bin_packing.histogram`.
    """
    if len(lengths) == 1:
        patterns, rows_needed = bin_packing.solve(counts, lengths[0])
        return Packing([patterns], [rows_needed], None)
    capacities = Capacities(lengths)
    bound = _bound(counts, capacities)
    best: Rows = []
    for shortest in range(len(lengths)):
        if shortest and not _saves(bound[0], capacities.cost(best)):
            break
        used, fits_all = lengths[shortest:], int(np.flatnonzero(counts)[-1:].sum()) <= lengths[shortest]
        if fits_all:
            rows, proved = solve_rows(counts[: used[0] + 1], used[0])
            if len(used) == 1:
                bound = max(bound, _joined(proved, capacities), key=lambda each: each[0])
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
        bound = max(bound, (proved_cost, "linear program"), key=lambda each: each[0])
    by_length: list[Rows] = [[] for _ in lengths]
    for row, copies in _shortened(best, capacities):
        by_length[_number(row, lengths)].append((row, copies))
    bounds = [lower_bound(_counts_of(rows, length), length) for rows, length in zip(by_length, lengths, strict=True)]
    return Packing([patterns_of(rows) for rows in by_length], bounds, (bound[0] * capacities.unit, bound[1]))


def _saves(cost: int, before: int) -> bool:
    """Return whether a plan saves enough to have longer rows."""
    return (NEAR + 1) * cost < NEAR * before


def _bound(counts: np.ndarray, capacities: Capacities) -> tuple[int, str]:
    """Return the minimum cost that can be proved at once, and the name of the bound."""
    tokens = int(counts @ np.arange(len(counts)))
    of_tokens = -(-tokens // capacities.unit), "ceil(tokens/length)"
    return max(of_tokens, _joined(lower_bound(counts, capacities.longest), capacities), key=lambda each: each[0])


def _joined(bound: tuple[int, str], capacities: Capacities) -> tuple[int, str]:
    """Return the minimum cost if the longest length alone needs `bound` rows.

    If each length is a multiple of the next shorter length, rows that cost T can be joined to ceil(T / cost of the
    longest row) rows of the longest length. Otherwise, the minimum is 0.
    """
    rows, name = bound
    if not rows or any(longer % shorter for shorter, longer in pairwise(capacities.lengths)):
        return 0, name
    return capacities.costs[-1] * (rows - 1) + 1, name


def _number(row: Row, lengths: Sequence[int]) -> int:
    """Return the index of the shortest length that holds a row."""
    return bisect_left(lengths, sum(length * times for length, times in row))


def _cascade(counts: np.ndarray, lengths: Sequence[int]) -> Rows:
    """Pack from the longest rows to the shortest.

    A conversation opens a row only if no shorter row holds it.
    """
    rows: Rows = []
    left = counts
    for shorter, length in reversed([*pairwise(lengths)]):
        found, left = exact_fill(left[: length + 1], length, shorter)
        rows += found
        if left[shorter + 1 :].any():  # the search used up its steps
            return rows + best_fit_decreasing(left, length)
    return rows + search(left[: lengths[0] + 1], lengths[0], lower_bound(left[: lengths[0] + 1], lengths[0])[0])


def _lengthened(rows: Rows, lengths: Sequence[int]) -> Rows:
    """Repack short rows that are not full as longer rows if that takes fewer places."""
    capacities = Capacities(lengths)
    for _ in range(ROUNDS if len(lengths) > 1 else 0):
        best, saved = rows, 0
        free = [_free(row, lengths) for row, _ in rows]
        for number, length in enumerate(lengths[:-1]):
            before = -1
            for share in EMPTY:
                chosen = [n == number and places >= max(1, share * length) for n, places in free]
                if sum(chosen) in (0, before):
                    continue
                before = sum(chosen)
                again = [row for row, is_chosen in zip(rows, chosen, strict=True) if is_chosen]
                cost, counts = capacities.cost(again), _counts_of(again, lengths[-1])
                for longer in lengths[number + 1 :]:
                    packed = search(counts[: longer + 1], longer)
                    if cost - capacities.cost(packed) > saved:
                        saved = cost - capacities.cost(packed)
                        best = [row for row, is_chosen in zip(rows, chosen, strict=True) if not is_chosen] + packed
        if not saved:
            break
        rows = best
    return rows


def _free(row: Row, lengths: Sequence[int]) -> tuple[int, int]:
    """Return the index of the length of a row, and its free places."""
    number = _number(row, lengths)
    return number, lengths[number] - sum(length * times for length, times in row)


def _counts_of(rows: Rows, longest: int) -> np.ndarray:
    counts = np.zeros(longest + 1, np.int64)
    for row, copies in rows:
        for length, times in row:
            counts[length] += copies * times
    return counts


def _shortened(rows: Rows, capacities: Capacities) -> Rows:
    """Divide long rows into shorter rows that cost no more.

    The shorter rows are found by first-fit-decreasing.
    """
    found: Rows = []
    for row, copies in rows:
        parts = [row]
        for length, cost in zip(capacities.lengths[:-1], capacities.costs, strict=False):
            if row[0][0] > length or cost >= capacities.cost_of(row):
                continue
            tried = _first_fit(row, length)
            if sum(map(capacities.cost_of, tried)) <= capacities.cost_of(row):
                parts = tried
                break
        found += [(part, copies) for part in parts]
    return found


def _first_fit(row: Row, length: int) -> list[Row]:
    """Pack the conversations of a row by first-fit-decreasing in rows of `length`."""
    free, parts = list[int](), list[Row]()
    for each, times in row:
        for _ in range(times):
            at = next((at for at, places in enumerate(free) if places >= each), len(free))
            if at == len(free):
                free.append(length)
                parts.append([])
            free[at] -= each
            if parts[at] and parts[at][-1][0] == each:
                parts[at][-1] = (each, parts[at][-1][1] + 1)
            else:
                parts[at].append((each, 1))
    return parts
