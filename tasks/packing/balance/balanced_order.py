"""Order rows so that the ranks of a step have equal work.

    rows ─sort by cost, then trained tokens─▶ groups of ranks × rows_per_rank rows ─deal to ranks, shuffle groups─▶

A step ends when its slowest rank does. All rows have the same length, so a rank's work differs only in Σn², what
attention costs (cost.py). A group holds neighbors of the sorted rows, which cost nearly the same; where costs differ by
less than a thousandth, rows are sorted by their trained tokens. This is what torchtitan proposes for packed rows (pull
request 3938).

Rank r takes every `ranks`-th row of a group, from row r on. Rows are dealt to ranks heaviest first, as many to each:
in every round, the heaviest of the rows that are left go to the ranks with the least work so far. This is LPT (Graham,
Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17, 1969) with a fixed number of items per machine
(Babel, Kellerer & Kotov, The k-partitioning problem, Math. Methods of OR 47, 1998). Then ranks are paired in the same
way, and the pairs again, so that the order also serves a divisor of `ranks`, half of them for example: rank r of half
as many takes the rows of two ranks whose work adds up to about the same for all.

Rows that do not fill a group come last. They are taken from the middle of the sorted rows, so that they cost nearly the
same, too. Numbers are integers and sorts are stable, so that the order is the same on every machine. Time: 0.5 s of one
core for a million rows.
"""

from __future__ import annotations

import numpy as np

from tasks.core.seeded_order import BALANCED, shuffle
from tasks.packing.balance.cost import linear_cost

# Costs that differ by less than this share of a row's cost without attention count as equal: 1 / 1000.
EQUAL = 1000
# Rows whose places are computed at a time, 100 bytes each.
CHUNK = 1 << 18


def balanced_order(
    squares: np.ndarray, trained: np.ndarray, ranks: int, rows_per_rank: int, length: int, seed: int, stream: int = 0
) -> np.ndarray:
    """Return the rows in their new order, int32[rows].

    `squares` is Σn² of each row, int64, `trained` its trained tokens; `length` is the tokens of a row. Rows that are
    equal in both keep their order within the sorted ones, so that it should be a random one.
    """
    size = ranks * rows_per_rank
    groups, left = divmod(len(squares), size)
    if not groups:
        return np.arange(len(squares), dtype=np.int32)
    level = squares // max(1, linear_cost(length) // EQUAL)
    # Up and down in turn: a group that holds rows of two levels has similar trained tokens as well.
    order = np.lexsort((np.where(level % 2, -trained.astype(np.int64), trained), level)).astype(np.int32)
    middle = slice((len(order) - left) // 2, (len(order) - left) // 2 + left)
    last = order[middle].copy()
    dealt = np.delete(order, middle).reshape(groups, size)
    for top in range(0, groups, max(1, CHUNK // size)):
        some = dealt[top : top + max(1, CHUNK // size)]
        places = _places(squares[some], ranks)
        np.put_along_axis(some, places, some.copy(), axis=1)
    found = np.empty_like(dealt)
    found[shuffle(groups, seed, stream + BALANCED)] = dealt
    return np.concatenate([found.reshape(-1), last])


def _places(costs: np.ndarray, ranks: int) -> np.ndarray:
    """Return the place of each row within its group, int64[groups, rows]; `costs` are int64[groups, rows].

    The rows at the places r, r + ranks, r + 2·ranks, … are those of rank r. Their number is the same for all ranks.
    """
    groups, size = costs.shape
    heaviest = np.argsort(-costs, axis=1, kind="stable")
    places = np.empty((groups, size), np.int64)
    if ranks == 1:
        np.put_along_axis(places, heaviest, np.broadcast_to(np.arange(size), places.shape), axis=1)
        return places
    work = np.zeros((groups, ranks), np.int64)
    taken = []  # by round: the rank that takes each of the rows
    for top in range(0, size, ranks):
        least = np.argsort(work, axis=1, kind="stable")
        rows = heaviest[:, top : top + ranks]
        added = np.take_along_axis(work, least, axis=1) + np.take_along_axis(costs, rows, axis=1)
        np.put_along_axis(work, least, added, axis=1)
        taken.append(least)
    # Ranks are rows of a smaller problem: their work is dealt to as many as divide them.
    number = _places(work, ranks // _smallest_factor(ranks))
    for turn, ranks_of_rows in enumerate(taken):
        rows = heaviest[:, turn * ranks : (turn + 1) * ranks]
        place = np.take_along_axis(number, ranks_of_rows, axis=1) + turn * ranks
        np.put_along_axis(places, rows, place, axis=1)
    return places


def _smallest_factor(number: int) -> int:
    """Return the smallest prime factor of a number above 1."""
    return next((factor for factor in range(2, int(number**0.5) + 1) if number % factor == 0), number)
