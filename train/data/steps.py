"""Order the rows of an epoch in steps, and divide each step among the ranks.

    seed, epoch ─shuffled_steps─▶ rows in random order                                        ┐
                ─balanced_steps─▶ groups of ranks × rows_per_rank rows, in random order       ├─▶ the steps of an epoch
                ─mixed_steps────▶ steps of one length each, all with the same number of tokens┘
    step k ─every ranks-th row─▶ the rows of a rank ─passes of micro_batch rows─▶ Trainer

Step k has the same rows on any number of ranks and with any micro-batch, so a run may continue on another number of
ranks. The last step of an epoch has the remaining rows. A rank without rows receives a *filler*, a row without a
trained token, so that all ranks run the same number of passes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from tasks.config import Balance
from tasks.core.numbers import draws, shuffle
from tasks.storage.schemas import LOSS_WEIGHT
from train.data.corpus import Corpus
from train.data.dataset import PackedDataset

Mix = Literal["tokens", "blocks"]

# Distance between the `stream` numbers of two lengths, for tasks.core.numbers. Epochs are numbered in between.
STREAMS = 1 << 24


class Step(NamedTuple):
    """Rows of an optimizer step, over all ranks; `numbers` are their places in `rows`."""

    rows: Any  # a PackedDataset, or the conversations of format 2.0
    numbers: np.ndarray


# Function that returns the steps of an epoch, counted from 0. All epochs have the same number of steps.
Order = Callable[[int], list[Step]]


def _cut(rows: Any, numbers: np.ndarray, rows_per_step: int) -> list[Step]:
    return [Step(rows, numbers[first : first + rows_per_step]) for first in range(0, len(numbers), rows_per_step)]


def shuffled_steps(packings: Sequence[Any], rows_per_step: int, seed: int, epoch: int) -> list[Step]:
    """Return the steps of an epoch in random order; each epoch reads the next packing."""
    rows = packings[epoch % len(packings)]
    # The sampler of accelerate has the same order, so runs of earlier versions can be resumed.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + epoch))
    return _cut(rows, order.numpy(), rows_per_step)


# -- balanced rows -----------------------------------------------------------------------------------------------------


def balance_of(corpus: Corpus) -> Balance | None:
    """Return the `balance` settings of a corpus; None if its rows are in random order."""
    settings = corpus.manifest.config.get("balance") if corpus.manifest else None
    return Balance(**settings) if settings else None


def line_of_rows(groups: Sequence[int], balance: Balance, seed: int, epoch: int) -> np.ndarray:
    """Return the rows of an epoch, int64, in the order in which steps take them.

    `groups` lists the number of rows in each group of the plan. Each of these groups begins with whole steps. If each
    rank takes every ranks-th row of a step, all ranks have equal work. This holds for the number of ranks that the
    corpus was packed for and for its divisors (tasks/packing/balance). Shuffling single rows would break it, so only
    whole steps are shuffled. Rows that do not fill a step come last.
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
    """Return the steps of an epoch of balanced rows; `groups` is for each packing."""
    number = epoch % len(packings)
    return _cut(packings[number], line_of_rows(groups[number], balance, seed, epoch), rows_per_step)


def why_unbalanced(balance: Balance, ranks: int, rows_per_step: int) -> str | None:
    """Return why ranks may wait for each other despite `balance`; None if they do not."""
    if balance.ranks % ranks:
        return f"{ranks} is not a divisor of {balance.ranks}"
    planned = balance.ranks * balance.rows_per_rank
    if rows_per_step % planned and planned % rows_per_step:
        return f"a step has {rows_per_step} rows, which is neither a multiple nor a divisor of {planned}"
    return None


# -- rows of several lengths -------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Rows of a step: [first, last) of one length, in the order of the epoch."""

    length: int
    first: int
    last: int


def runs_of(rows: Mapping[int, int], rows_per_step: int, longest: int, mix: Mix, seed: int, epoch: int) -> list[Run]:
    """Return the rows of each step of an epoch.

    `rows` maps lengths to numbers of rows. A step has `rows_per_step` rows of the longest length, or as many tokens of
    another. With mix `tokens`, the steps of each length are spread evenly: the epoch is divided into as many equal
    stretches as the length has steps, and each step is at a random place in its stretch. With mix `blocks`, the
    shortest length comes first.
    """
    placed: list[tuple[float, Run]] = []
    for number, (length, count) in enumerate(sorted(rows.items())):
        size = rows_per_step * longest // length
        steps = math.ceil(count / size)
        places = np.zeros(steps)
        if mix == "tokens":
            within = draws(steps, seed, epoch + number * STREAMS) >> np.uint64(40)
            places = (np.arange(steps) + within / 2**24) / max(steps, 1)
        runs = (Run(length, first, min(first + size, count)) for first in range(0, count, size))
        placed += zip(places.tolist(), runs, strict=True)
    # The sort is stable, so steps at the same place (with `blocks`, all steps) stay in the order of their lengths.
    return [run for _, run in sorted(placed, key=lambda pair: pair[0])]


def mixed_steps(
    packings: Sequence[Mapping[int, PackedDataset]], rows_per_step: int, mix: Mix, seed: int, epoch: int
) -> list[Step]:
    """Return the steps of an epoch; a packing maps lengths to rows."""
    rows = packings[epoch % len(packings)]
    counts = {length: len(of_length) for length, of_length in rows.items()}
    order = {
        length: shuffle(count, seed, epoch + (place + 1) * 8 * STREAMS)
        for place, (length, count) in enumerate(sorted(counts.items()))
    }
    runs = runs_of(counts, rows_per_step, max(counts), mix, seed, epoch)
    return [Step(rows[length], order[length][first:last]) for length, first, last in runs]


# -- ranks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shares:
    """Division of a step: each rank runs `passes` passes of `micro_batch` rows."""

    ranks: int
    micro_batch: int
    passes: int
    rows_per_step: int

    @classmethod
    def of(cls, given: dict[str, Any], rows_per_step: int | None = None) -> Shares:
        """Return the shares; without `rows_per_step`, all passes are full."""
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        size, passes = given["per_device_train_batch_size"], given["gradient_accumulation_steps"]
        return cls(ranks, size, passes, rows_per_step or ranks * size * passes)


class StepRows(torch.utils.data.Dataset):
    """Rows of steps for a DataLoader that asks for numbers in sequence.

    The DataLoader of the Trainer deals batches of `micro_batch` numbers to the ranks in turn. Batch b belongs to rank
    b % ranks, and is its pass b // ranks. If `spread` is set, every step has all passes, and a step with fewer rows
    spreads them over its passes. Otherwise, only the last step of an epoch has fewer rows, and it has fewer passes.
    """

    def __init__(self, order: Order, shares: Shares, filler: Callable[[Any], Any], *, spread: bool = False):
        self._order, self._shares, self.filler, self._spread = order, shares, filler, spread
        self.set_epoch(0)

    def set_epoch(self, number: int) -> None:
        """Switch to the order of an epoch, counted from 0; accelerate calls this."""
        self._steps = self._order(number)

    def __len__(self) -> int:
        ranks, micro_batch, passes = self._shares.ranks, self._shares.micro_batch, self._shares.passes
        last = math.ceil(math.ceil(len(self._steps[-1].numbers) / ranks) / micro_batch)
        return ((len(self._steps) - 1) * passes + (passes if self._spread else last)) * ranks * micro_batch

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Return the rows of the batch that begins with the first of `numbers`."""
        ranks, micro_batch, passes = self._shares.ranks, self._shares.micro_batch, self._shares.passes
        turn, rank = divmod(numbers[0] // micro_batch, ranks)
        step, number = divmod(turn, passes)
        rows, of_step = self._steps[step]
        own = of_step[rank::ranks]
        if self._spread:
            own = own[len(own) * number // passes : len(own) * (number + 1) // passes]
        else:
            own = own[number * micro_batch : (number + 1) * micro_batch]
        return list(rows.__getitems__(own.tolist())) if len(own) else [self.filler(rows)]


def empty_row(rows: PackedDataset) -> dict[str, torch.Tensor]:
    """Return a row of a split's length without a trained token."""
    corpus, length = rows.corpus, rows.length
    ids, labels = torch.zeros(length, dtype=torch.int32), torch.full((length,), -100, dtype=torch.int64)
    positions = {"position_ids": torch.arange(length, dtype=torch.int32)} if corpus.isolated else {}
    weights = {LOSS_WEIGHT: torch.zeros(length)} if corpus.weighted else {}
    return {"input_ids": ids, "labels": labels, **positions, **weights}


def empty_conversation(_: Any) -> dict[str, list[int]]:
    """Return a conversation of format 2.0 without a trained token."""
    return {"input_ids": [0, 0], "labels": [-100, -100]}


def first_row(rows: Any) -> Any:
    """Return a row with trained tokens."""
    return rows[0]
