"""Order rows so that the ranks of a step have equal work.

    rows ─sort by cost, then trained tokens─▶ groups of ranks × rows_per_rank rows ─deal to ranks, shuffle groups─▶

A step ends when its slowest rank ends. All rows have the same length, so the work of ranks differs only in Σn², the
cost of attention (LINEAR). A group holds neighbors of the sorted rows, which cost nearly the same. Rows whose costs
differ by less than a thousandth are sorted by their trained tokens. torchtitan proposes this for packed rows (pull
request 3938).

Rank r takes every `ranks`-th row of a group, starting with row r. Every rank gets the same number of rows. The rows are
dealt in rounds, heaviest first: in each round, the heaviest remaining rows go to the ranks with the least work so far.
This is LPT (Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17, 1969) with a fixed number of
items per machine (Babel, Kellerer & Kotov, The k-partitioning problem, Math. Methods of OR 47, 1998). Ranks are then
paired in the same way, and the pairs again, so the order also suits any divisor of `ranks`. For example, if training
uses half as many ranks, each takes the rows of two paired ranks, and all pairs have about the same work.

Rows that do not fill a group come last. They are taken from the middle of the sorted rows, so they also cost nearly the
same. All numbers are integers and all sorts are stable, so the order is the same on every machine. A million rows take
0.5 s of one core.
"""

from __future__ import annotations

import numpy as np

from tasks.core.seeded_order import BALANCED, shuffle

# Cost of a token without attention, in units of Σn². A layer takes about 12·h² operations per token, and attention
# takes 2·h·n more per token of a segment of n tokens. The cost of a row of L tokens is therefore in proportion to
# 6·h·L + Σn², as in verl (utils/seqlen_balancing.py, calculate_workload). The hidden size h is that of models with 8B
# parameters, such as Llama 3 and Qwen3. Smaller models spend a larger share of their time on attention.
LINEAR = 6 * 4096
# Costs count as equal if they differ by less than 1 / EQUAL of a row's cost without attention.
EQUAL = 1000
# Rows whose places are computed at a time, 100 bytes each.
CHUNK = 1 << 18


def balanced_order(
    squares: np.ndarray, trained: np.ndarray, ranks: int, rows_per_rank: int, length: int, seed: int, stream: int = 0
) -> np.ndarray:
    """Return the rows in their new order, int32[rows].

    `squares` is Σn² of each row, int64; `trained` is its number of trained tokens; `length` is the number of tokens of
    every row. Rows that are equal in both keep their order when they are sorted, so pass them in random order.
    """
    size = ranks * rows_per_rank
    groups, left = divmod(len(squares), size)
    if not groups:
        return np.arange(len(squares), dtype=np.int32)
    level = squares // max(1, LINEAR * length // EQUAL)
    # Sort trained tokens up and down in turn: then a group with rows of two levels has similar trained tokens, too.
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
    """Return the place of each row within its group: int64[groups, rows].

    `costs` are int64[groups, rows]. Rank r takes the rows at the places r, r + ranks, r + 2·ranks, … All ranks take the
    same number of rows.
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
    # Ranks are the rows of a smaller problem: deal their work to a divisor of `ranks`.
    smallest = next((factor for factor in range(2, int(ranks**0.5) + 1) if ranks % factor == 0), ranks)
    number = _places(work, ranks // smallest)
    for turn, ranks_of_rows in enumerate(taken):
        rows = heaviest[:, turn * ranks : (turn + 1) * ranks]
        place = np.take_along_axis(number, ranks_of_rows, axis=1) + turn * ranks
        np.put_along_axis(places, rows, place, axis=1)
    return places
