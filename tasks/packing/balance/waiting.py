"""Forecast how long the ranks of a step wait for the slowest rank.

    Σn² of rows in their order ─idle_share─▶ share of the time of all ranks          ─forecast─▶ one Waiting per number
    rows of each length, or without padding ─────────────────────────────────forecast_rows─▶ the same, in random order

Only the work in cost.py counts, not the exchange of gradients or differences between devices. A step has `ranks` ×
`rows_per_rank` rows. Rank r takes every `ranks`-th row, starting with row r. If rows have several lengths, each step
has rows of one length, and all steps have the same number of tokens, as in training (train/data/mixed_rows.py).
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

# Numbers of ranks to forecast.
RANKS = (8, 64, 512)
# A forecast uses at most this many rows: the first rows of a split, whose order is random.
MOST_ROWS = 1 << 18
# Random orders are tried until they add up to STEPS steps, but at most TRIALS of them.
STEPS, TRIALS = 2000, 50


@dataclass(frozen=True)
class Waiting:
    """Share of time in which ranks wait for the slowest rank of a step, in percent.

    `random` is for rows in random order. `balanced` is for the order of `balance: {ranks: …, rows_per_rank: …}`; it is
    None for rows that `balance` cannot order.
    """

    ranks: int
    rows_per_rank: int  # of the longest rows
    random: float
    balanced: float | None


class RowsOfLength(NamedTuple):
    """Rows of one length in a split: at most MOST_ROWS of `all_rows`.

    Without padding, each row has its own number of `tokens`, at most `length`.
    """

    squares: np.ndarray  # Σn², int64
    trained: np.ndarray  # tokens
    length: int
    all_rows: int
    tokens: np.ndarray | None = None


def forecast_rows(
    parts: Sequence[RowsOfLength], balance: Balance | None, hidden_size: int = HIDDEN_SIZE
) -> list[Waiting]:
    """Forecast the waiting for rows of one or several lengths.

    Rows of several lengths and rows without padding are forecast in random order only.
    """
    if len(parts) == 1 and parts[0].tokens is None:
        [one] = parts
        return forecast(one.squares, one.trained, one.length, balance, hidden_size)
    shares = {ranks: _share_of_random_steps(parts, ranks, hidden_size) for ranks in RANKS}
    return [Waiting(ranks, 1, round(100 * share, 2), None) for ranks, share in shares.items() if share is not None]


def _share_of_random_steps(parts: Sequence[RowsOfLength], ranks: int, hidden_size: int) -> float | None:
    """Return the share of time in which ranks wait, or None if rows fill no step.

    The rows of each length fill as many steps as they can. In a step, a rank takes one row of the longest length, or
    several shorter rows.
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
    """Return the share of time in which ranks wait, 0 to 1, for rows in this order.

    `squares` are int64[rows], for at least `ranks` × `rows_per_rank` rows. The last rows are left out if they do not
    fill a step.
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
    """Forecast the waiting for rows of `length` tokens.

    Forecasts each number of ranks in `numbers`, and the ranks of `balance`. A number is left out if the rows do not
    fill a step. `squares` and `trained` have at most MOST_ROWS rows of a split.
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
