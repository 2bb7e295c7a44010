"""Estimate how long the ranks of a step wait for the slowest rank.

    Σn² of rows in their order ─idle_share─▶ share of the time of all ranks ─forecast─▶ one Waiting per number of ranks

Only attention and the other work of each token count, not the exchange of gradients or differences between devices.
Rank r takes every `ranks`-th row, starting with row r.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tasks.core.seeded_order import shuffle
from tasks.packing.balance.balanced_order import LINEAR, balanced_order

# Numbers of ranks to estimate.
RANKS = (8, 64, 512)
# An estimate uses at most this many rows: the first rows of a split, whose order is random.
MOST_ROWS = 1 << 18
# Random orders are tried until they add up to STEPS steps, but at most TRIALS of them.
STEPS, TRIALS = 2000, 50


class Waiting(NamedTuple):
    """Share of time in which ranks wait for the slowest rank of a step, in percent.

    Each rank takes one row. `random` is for rows in random order, and `balanced` is for the order of `balance`.
    """

    ranks: int
    random: float
    balanced: float


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
    found = []
    for ranks in RANKS:
        if not (steps := len(squares) // ranks):
            continue
        trials = min(TRIALS, -(-STEPS // steps))
        linear = LINEAR * length
        shares = [idle_share(squares[shuffle(len(squares), trial, 0)], ranks, linear) for trial in range(trials)]
        balanced = idle_share(squares[balanced_order(squares, trained, ranks, 1, length, 0)], ranks, linear)
        found.append(Waiting(ranks, round(100 * sum(shares) / trials, 2), round(100 * balanced, 2)))
    return found
