"""Forecast for how long the ranks of a step wait for the slowest one.

    Σn² of rows in their order ─idle_share─▶ share of the time of all ranks          ─forecast─▶ one Waiting per number
    rows of each length, or without padding ─────────────────────────────────forecast_rows─▶ the same, in random order

Only work is counted, as cost.py has it: no exchange of gradients, and no differences between devices. A step is one of
`ranks` × `rows_per_rank` rows, of which rank r takes every `ranks`-th from row r on. If rows have several lengths, a
step has as many tokens of rows of one length, as in training (train/data/mixed_rows.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tasks.core.seeded_order import shuffle
from tasks.packing.balance.balanced_order import balanced_order
from tasks.packing.balance.cost import HIDDEN_SIZE, linear_cost
from tasks.row_settings import Balance

# Numbers of ranks that are forecast.
RANKS = (8, 64, 512)
# Rows that a forecast is made from: the first of a split, whose order is random.
MOST_ROWS = 1 << 18
# A random order is tried until so many steps are seen, but no more often than TRIALS.
STEPS, TRIALS = 2000, 50


@dataclass(frozen=True)
class Waiting:
    """The share of the time in which ranks wait for the slowest of a step, in percent.

    In random order, and in the order of `balance: {ranks: …, rows_per_rank: …}`; None for rows that it cannot order.
    """

    ranks: int
    rows_per_rank: int  # of the longest rows
    random: float
    balanced: float | None


class RowsOfLength(NamedTuple):
    """Rows of a split, at most MOST_ROWS of `all_rows`. Without padding, each has `tokens`, at most `length`."""

    squares: np.ndarray  # Σn², int64
    trained: np.ndarray  # tokens
    length: int
    all_rows: int
    tokens: np.ndarray | None = None


def forecast_rows(
    parts: Sequence[RowsOfLength], balance: Balance | None, hidden_size: int = HIDDEN_SIZE
) -> list[Waiting]:
    """Forecast the waiting for the rows of each length, as `forecast` does for rows of one length."""
    if len(parts) == 1 and parts[0].tokens is None:
        [one] = parts
        return forecast(one.squares, one.trained, one.length, balance, hidden_size)
    shares = {ranks: _share_of_random_steps(parts, ranks, hidden_size) for ranks in RANKS}
    return [Waiting(ranks, 1, round(100 * share, 2), None) for ranks, share in shares.items() if share is not None]


def _share_of_random_steps(parts: Sequence[RowsOfLength], ranks: int, hidden_size: int) -> float | None:
    """Return the share of the time in which ranks wait; None if the rows fill no step.

    Steps of one length are as many as all of its rows fill. A rank takes one of the longest rows, or several others.
    """
    work = slowest = 0.0
    longest = max((part.length for part in parts), default=0)
    for part in parts:
        size = ranks * longest // part.length
        if not (steps := len(part.squares) // size):
            continue
        tokens = np.array(part.length) if part.tokens is None else part.tokens
        costs = part.squares + linear_cost(tokens, hidden_size)
        firsts = size * np.arange(ranks) // ranks
        trials = min(TRIALS, -(-STEPS // steps))
        share = part.all_rows / len(part.squares) / trials
        for trial in range(trials):
            dealt = costs[shuffle(len(costs), trial, 0)[: steps * size]].reshape(steps, size)
            of_ranks = np.add.reduceat(dealt, firsts, axis=1)
            work += share * float(of_ranks.sum())
            slowest += share * float(of_ranks.max(axis=1).sum())
    return 1 - work / (ranks * slowest) if slowest else None


def idle_share(squares: np.ndarray, ranks: int, rows_per_rank: int, length: int, hidden_size: int) -> float:
    """Return the share of the time of all ranks in which they wait, 0 to 1; of rows in their order.

    `squares` are int64[rows], at least `ranks` × `rows_per_rank`; the last rows, if they do not fill a step, are left
    out.
    """
    steps = len(squares) // (ranks * rows_per_rank)
    work = squares[: steps * ranks * rows_per_rank].reshape(steps, rows_per_rank, ranks).sum(axis=1)
    work += rows_per_rank * linear_cost(length, hidden_size)
    return 1 - float(work.sum()) / (ranks * float(work.max(axis=1).sum()))


def forecast(
    squares: np.ndarray,
    trained: np.ndarray,
    length: int,
    balance: Balance | None,
    hidden_size: int = HIDDEN_SIZE,
    numbers: Sequence[int] = RANKS,
) -> list[Waiting]:
    """Forecast the waiting of RANKS, and of those of `balance`, for rows of `length` tokens.

    `squares` and `trained` are those of at most MOST_ROWS rows of a split. Numbers of ranks of which the rows fill no
    step are left out.
    """
    wanted = dict.fromkeys(numbers, 1) | ({balance.ranks: balance.rows_per_rank} if balance else {})
    found = []
    for ranks, rows_per_rank in sorted(wanted.items()):
        steps = len(squares) // (ranks * rows_per_rank)
        if not steps:
            continue
        trials = min(TRIALS, -(-STEPS // steps))
        shares = [
            idle_share(squares[shuffle(len(squares), trial, 0)], ranks, rows_per_rank, length, hidden_size)
            for trial in range(trials)
        ]
        order = balanced_order(squares, trained, ranks, rows_per_rank, length, 0)
        balanced = idle_share(squares[order], ranks, rows_per_rank, length, hidden_size)
        percent = (round(100 * share, 2) for share in (sum(shares) / trials, balanced))
        found.append(Waiting(ranks, rows_per_rank, *percent))
    return found
