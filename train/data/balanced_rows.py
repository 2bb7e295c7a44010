"""Order the rows of a balanced corpus.

    groups of ranks × rows_per_rank rows ─shuffled by seed and epoch─▶ one line of rows ─cut─▶ steps

A corpus with `balance` consists of groups. If each rank takes every ranks-th row of a group, as StepRows deals them,
all ranks have equal work. This holds for the number of ranks that the corpus was packed for and for its divisors
(tasks/packing/balance). Shuffling single rows would break it, so only whole groups are shuffled. Rows that do not fill
a group come last. Each epoch has every row once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from tasks.config import Balance
from tasks.core.seeded_order import shuffle
from train.data.corpus import Corpus
from train.data.dataset import PackedDataset
from train.data.step_rows import Step, cut


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


def balanced_steps(
    packings: Sequence[PackedDataset],
    groups: Sequence[Sequence[int]],
    balance: Balance,
    rows_per_step: int,
    seed: int,
    epoch: int,
) -> list[Step]:
    """Return the steps of an epoch; each epoch reads the next packing.

    `groups` lists, for each packing, the number of rows in each group of its plan.
    """
    number = epoch % len(packings)
    return cut(packings[number], line_of_rows(groups[number], balance, seed, epoch), rows_per_step)


def why_unbalanced(balance: Balance, ranks: int, rows_per_step: int) -> str | None:
    """Return why ranks may wait for each other despite `balance`; None if they do not."""
    if balance.ranks % ranks:
        return f"{ranks} is not a divisor of {balance.ranks}"
    planned = balance.ranks * balance.rows_per_rank
    if rows_per_step % planned and planned % rows_per_step:
        return f"a step has {rows_per_step} rows, which is neither a multiple nor a divisor of {planned}"
    return None
