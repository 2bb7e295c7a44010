"""Order the rows of a balanced corpus for a Trainer that asks for rows by number.

    groups of ranks × rows_per_rank rows ─shuffled by seed and epoch─▶ one line of rows
    step = the next rows of the line ─every ranks-th row─▶ a rank ─micro_batch at a time─▶ its passes

A corpus with `balance` consists of groups. If each rank takes every ranks-th row of a group, all ranks have equal work.
This holds for the number of ranks that the corpus was packed for and for its divisors (tasks/packing/balance).
Shuffling single rows would break it, so only whole groups are shuffled. Rows that do not fill a group come last. Each
epoch has every row once.
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
    """Return the `balance` settings of a corpus; None if its rows are in random order."""
    settings = corpus.manifest.config.get("balance") if corpus.manifest else None
    return Balance(**settings) if settings else None


def line_of_rows(groups: Sequence[int], balance: Balance, seed: int, epoch: int) -> np.ndarray:
    """Return the rows of an epoch, int64, in the order in which steps take them.

    `groups` lists the number of rows in each group of the plan. Each of these groups begins with whole steps.
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
    """Map each number that the Trainer asks for to a place in the line, int64[rows].

    The Trainer deals batches of `micro_batch` numbers to the ranks in turn. Rank r gets the places r, r + ranks, … of
    each step. If the last step is not full, its places stay in order.
    """
    size = ranks * micro_batch * accumulation
    # The place in the step, for each [pass, rank, row of the pass].
    passes, of_rank, row = np.meshgrid(*map(np.arange, (accumulation, ranks, micro_batch)), indexing="ij")
    step = ((passes * micro_batch + row) * ranks + of_rank).reshape(-1)
    whole = rows // size
    places = (np.arange(whole)[:, None] * size + step).reshape(-1)
    return np.concatenate([places, np.arange(whole * size, rows)])


class BalancedRows(torch.utils.data.Dataset):
    """Packings of a balanced corpus, for a DataLoader that asks for rows in sequence."""

    def __init__(
        self,
        passes: Passes,
        groups: Sequence[Sequence[int]],
        balance: Balance,
        steps: tuple[int, int, int],
        seed: int,
    ):
        """Order the rows of `passes`.

        `steps` is (ranks, rows per pass, passes per step). `groups` lists, for each packing, the number of rows in each
        group of its plan.
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
        """Do nothing: these rows hold no open resources."""

    def __len__(self) -> int:
        return len(self._passes)

    def __getitem__(self, number: int) -> Row:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Row]:
        return self._passes.__getitems__(self._rows[list(numbers)].tolist())


def why_unbalanced(balance: Balance, ranks: int, rows_per_rank: int) -> str | None:
    """Return why ranks may wait for each other despite `balance`; None if they do not.

    `ranks` and `rows_per_rank` describe one step of the run.
    """
    if balance.ranks % ranks:
        return f"{ranks} is not a divisor of {balance.ranks}"
    size, planned = ranks * rows_per_rank, balance.ranks * balance.rows_per_rank
    if size % planned and planned % size:
        return f"a step has {size} rows, which is neither a multiple nor a divisor of {planned}"
    return None
