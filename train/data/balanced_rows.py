"""The order of a balanced corpus for the ranks of the Trainer, which asks for rows by number.

    groups of ranks × rows_per_rank rows ─shuffled by seed and epoch─▶ one line of rows
    step = the next rows of the line ─every ranks-th row─▶ a rank ─micro_batch at a time─▶ its passes

A corpus with `balance` is in groups in which every ranks-th row adds up to the same work, for as many ranks as it was
packed for, or a divisor (tasks/packing/balance). Shuffling rows would lose that, so only whole groups are shuffled.
Rows that fill no group come last. Every row is in an epoch once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from tasks.core.seeded_order import shuffle
from tasks.row_settings import Balance
from train.data.corpus import Corpus
from train.data.dataset import Passes
from train.data.stream import Row


def balance_of(corpus: Corpus) -> Balance | None:
    """Return the steps that the rows of a corpus are ordered for; None if they are in random order."""
    settings = corpus.manifest.config.get("balance") if corpus.manifest else None
    return Balance(**settings) if settings else None


def line_of_rows(groups: Sequence[int], balance: Balance, seed: int, epoch: int) -> np.ndarray:
    """Return the rows of an epoch, int64, in the order in which steps take them.

    `groups` are the rows of the groups of the plan, each of which begins with whole steps.
    """
    size = balance.ranks * balance.rows_per_rank
    firsts = np.cumsum([0, *groups])
    ends = firsts[:-1] + np.array(groups, np.int64) // size * size
    steps = np.concatenate([np.arange(first, end, size) for first, end in zip(firsts[:-1], ends, strict=True)])
    rest = [np.arange(end, last) for end, last in zip(ends, firsts[1:], strict=True)]
    placed = np.empty_like(steps)
    number = hashlib.sha256(repr(("balanced", seed, epoch)).encode()).digest()[:8]
    placed[shuffle(len(steps), int.from_bytes(number, "little"), 0)] = steps
    return np.concatenate([(placed[:, None] + np.arange(size)).reshape(-1), *rest])


def numbers_of_steps(rows: int, ranks: int, micro_batch: int, accumulation: int) -> np.ndarray:
    """Return the place in the line of each number that the Trainer asks for, int64[rows].

    The Trainer deals batches of `micro_batch` numbers to the ranks in turn. Rank r gets the places r, r + ranks, … of
    each step. The last step, if it is not full, is dealt as it is.
    """
    size = ranks * micro_batch * accumulation
    # Of [pass, rank, row of the pass], the place in the step.
    passes, of_rank, row = np.meshgrid(*map(np.arange, (accumulation, ranks, micro_batch)), indexing="ij")
    step = ((passes * micro_batch + row) * ranks + of_rank).reshape(-1)
    whole = rows // size
    places = (np.arange(whole)[:, None] * size + step).reshape(-1)
    return np.concatenate([places, np.arange(whole * size, rows)])


class BalancedRows(torch.utils.data.Dataset):
    """The packings of a balanced corpus for a DataLoader that asks for rows in sequence."""

    def __init__(
        self,
        passes: Passes,
        groups: Sequence[Sequence[int]],
        balance: Balance,
        steps: tuple[int, int, int],
        seed: int,
    ):
        """Take the rows of `passes`; `steps` are ranks, rows per pass, and passes per step.

        `groups` has the rows of the groups of each packing.
        """
        self._passes, self._groups, self._balance, self._seed = passes, groups, balance, seed
        self._places = numbers_of_steps(len(passes), *steps)
        self.start_pass(0)

    def start_pass(self, number: int) -> None:
        """Switch to the packing and the order of a pass, counted from 0."""
        self._passes.start_pass(number)
        line = line_of_rows(self._groups[number % len(self._groups)], self._balance, self._seed, number)
        self._rows = line[self._places]

    def close(self) -> None:
        """End reading; these rows need nothing."""

    def __len__(self) -> int:
        return len(self._passes)

    def __getitem__(self, number: int) -> Row:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Row]:
        return self._passes.__getitems__(self._rows[list(numbers)].tolist())


def why_unbalanced(balance: Balance, ranks: int, rows_per_rank: int) -> str | None:
    """Return why the ranks of this run may wait for each other in spite of `balance`; None if they do not.

    `rows_per_rank` is that of one step of the run.
    """
    if balance.ranks % ranks:
        return f"{ranks} is not a divisor of {balance.ranks}"
    size, planned = ranks * rows_per_rank, balance.ranks * balance.rows_per_rank
    if size % planned and planned % size:
        return f"a step has {size} rows, which is neither a multiple nor a divisor of {planned}"
    return None
