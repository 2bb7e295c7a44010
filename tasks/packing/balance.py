"""Order rows for equal work of the ranks of a step; estimate how long they wait.

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

The estimates count attention and the other work of each token, but neither the exchange of gradients nor differences
between devices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.numbers import BALANCED, shuffle
from packcorpus.tasks.packing.pieces import CHUNK, Pieces
from packcorpus.tasks.packing.placement import Placed, stream_of
from packcorpus.tasks.storage.shards import RowStatistics
from packcorpus.tasks.storage.token_files import TokenColumns

# Cost of a token without attention, in units of Σn². A layer takes about 12·h² operations per token, and attention
# takes 2·h·n more per token of a segment of n tokens. The cost of a row of L tokens is therefore in proportion to
# 6·h·L + Σn², as in verl (utils/seqlen_balancing.py, calculate_workload). The hidden size h is that of models with 8B
# parameters, such as Llama 3 and Qwen3. Smaller models spend a larger share of their time on attention.
LINEAR = 6 * 4096
# Costs count as equal if they differ by less than 1 / EQUAL of a row's cost without attention.
EQUAL = 1000
# Rows whose places are computed at a time, 100 bytes each.
GROUPED = 1 << 18

# Numbers of ranks to estimate.
RANKS = (8, 64, 512)
# An estimate uses at most this many rows: the first rows of a split, whose order is random.
MOST_ROWS = 1 << 18
# Random orders are tried until they add up to STEPS steps, but at most TRIALS of them.
STEPS, TRIALS = 2000, 50


def statistics_of(row: np.ndarray, rows: int, pieces: Pieces, tokens: TokenColumns) -> RowStatistics:
    """Return the statistics of all rows; `row` is the row of each piece, int32."""
    counted = RowStatistics.zeros(rows)
    for chunk in pieces.chunks():
        of = pieces.columns(chunk)
        length, shared = of.length, of.shared.astype(np.int64)
        np.add.at(counted.squares, row[chunk], (shared + length) ** 2 - shared**2)
        np.maximum.at(counted.longest, row[chunk], length)
        np.add.at(counted.segments, row[chunk], np.int32(1))
        np.add.at(counted.trained, row[chunk], pieces.trained(chunk, tokens))
    return counted


def put_in_order(placed: Placed, statistics: RowStatistics, config: Config, epoch: int) -> RowStatistics:
    """Renumber the rows of `placed` in place, split by split.

    Returns the reordered statistics. Requires `balance`. The rows must be in random order. Every row keeps its pieces,
    and every shard its number of rows.
    """
    assert config.balance
    order = np.empty(placed.rows, np.int32)
    for split, rows in placed.slices().items():
        of_split, steps = statistics.take(rows), (config.balance.ranks, config.balance.rows_per_rank)
        seeded = config.sequence_length, config.seed, stream_of(split, epoch)
        order[rows] = rows.start + balanced_order(of_split.squares, of_split.trained, *steps, *seeded)
    place_of = np.empty_like(order)
    place_of[order] = np.arange(len(order), dtype=np.int32)
    for top in range(0, len(placed.row), CHUNK):
        chunk = slice(top, top + CHUNK)
        placed.row[chunk] = place_of[placed.row[chunk]]
    return statistics.take(order)


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
    balanced = np.delete(order, middle).reshape(groups, size)
    for top in range(0, groups, max(1, GROUPED // size)):
        some = balanced[top : top + max(1, GROUPED // size)]
        places = _places(squares[some], ranks)
        np.put_along_axis(some, places, some.copy(), axis=1)
    shuffled = np.empty_like(balanced)
    shuffled[shuffle(groups, seed, stream + BALANCED)] = balanced
    return np.concatenate([shuffled.reshape(-1), last])


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


class Waiting(NamedTuple):
    """Share of time in which ranks wait for the slowest rank of a step, in percent.

    Each rank takes one row.
    """

    ranks: int
    random: float  # for rows in random order
    balanced: float  # for the order of `balance`


def idle_share(squares: np.ndarray, ranks: int, linear: int) -> float:
    """Return the share of time in which ranks wait, 0 to 1, for rows in this order.

    `squares` are int64[rows], for at least `ranks` rows; `linear` is the cost of a row without attention. The last rows
    are left out if they do not fill a step.
    """
    work = squares[: len(squares) // ranks * ranks].reshape(-1, ranks) + linear
    return 1 - float(work.sum()) / (ranks * float(work.max(axis=1).sum()))


def forecast(squares: np.ndarray, trained: np.ndarray, length: int) -> list[Waiting]:
    """Estimate the waiting for rows of `length` tokens and each number of RANKS.

    A number is left out if the rows do not fill a step. `squares` and `trained` have at most MOST_ROWS rows of a split.
    """
    forecasts = []
    for ranks in RANKS:
        if not (steps := len(squares) // ranks):
            continue
        trials = min(TRIALS, -(-STEPS // steps))
        linear = LINEAR * length
        shares = [idle_share(squares[shuffle(len(squares), trial, 0)], ranks, linear) for trial in range(trials)]
        balanced = idle_share(squares[balanced_order(squares, trained, ranks, 1, length, 0)], ranks, linear)
        forecasts.append(Waiting(ranks, round(100 * sum(shares) / trials, 2), round(100 * balanced, 2)))
    return forecasts
