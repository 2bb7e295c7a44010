"""Divide the rows of each step among the ranks.

    seed, epoch, rows of a step ─order─▶ the steps of an epoch, each with its rows
    step k ─every ranks-th row─▶ the rows of a rank ─passes of micro_batch rows─▶ Trainer

Step k has the same rows on any number of ranks and with any micro-batch, so a run may continue on another number of
ranks. The last step of an epoch has the remaining rows. A rank without rows receives a *filler*, a row without a
trained token, so that all ranks run the same number of passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from tasks.storage.schemas import LOSS_WEIGHT
from train.data.dataset import PackedDataset

Row = dict[str, torch.Tensor]


class Step(NamedTuple):
    """Rows of an optimizer step, over all ranks; `numbers` are their places in `rows`."""

    rows: Any  # a PackedDataset, or the conversations of format 2.0
    numbers: np.ndarray


# Function that returns the steps of an epoch, counted from 0. All epochs have the same number of steps.
Order = Callable[[int], list[Step]]


@dataclass(frozen=True, slots=True)
class Shares:
    """Division of a step: each rank runs `passes` passes of `micro_batch` rows."""

    ranks: int
    micro_batch: int
    passes: int
    rows_per_step: int

    @classmethod
    def of(cls, given: dict[str, Any], rows_per_step: int | None = None) -> Shares:
        """Return the shares for the arguments of a Trainer.

        Without `rows_per_step`, all passes are full.
        """
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        size, passes = given["per_device_train_batch_size"], given["gradient_accumulation_steps"]
        return cls(ranks, size, passes, rows_per_step or ranks * size * passes)


def cut(rows: Any, numbers: np.ndarray, rows_per_step: int) -> list[Step]:
    """Cut the rows of an epoch into steps."""
    return [Step(rows, numbers[first : first + rows_per_step]) for first in range(0, len(numbers), rows_per_step)]


def shuffled_steps(packings: Sequence[Any], rows_per_step: int, seed: int, epoch: int) -> list[Step]:
    """Return the steps of an epoch in random order; each epoch reads the next packing."""
    rows = packings[epoch % len(packings)]
    # The sampler of accelerate has the same order, so runs of earlier versions can be resumed.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + epoch))
    return cut(rows, order.numpy(), rows_per_step)


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
        last = passes
        if not self._spread:
            last = math.ceil(math.ceil(len(self._steps[-1].numbers) / ranks) / micro_batch)
        return ((len(self._steps) - 1) * passes + last) * ranks * micro_batch

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
        found: list[Any] = rows.__getitems__(own.tolist()) if len(own) else [self.filler(rows)]
        return found


def empty_row(rows: PackedDataset) -> Row:
    """Return a row as long as the rows of a split, but without a trained token.

    Such a row does not change the loss.
    """
    corpus, length = rows.corpus, rows.length
    ids, labels = torch.zeros(length, dtype=torch.int32), torch.full((length,), -100, dtype=torch.int64)
    positions = {"position_ids": torch.arange(length, dtype=torch.int32)} if corpus.isolated else {}
    weights = {LOSS_WEIGHT: torch.zeros(length)} if corpus.weighted else {}
    return {"input_ids": ids, "labels": labels, **positions, **weights}


def empty_conversation(_: Any) -> dict[str, list[int]]:
    """Return a conversation of format 2.0 without a trained token."""
    return {"input_ids": [0, 0], "labels": [-100, -100]}


def first_row(rows: Any) -> Any:
    """Return a row with trained tokens.

    It is the filler for models that compute the mean loss of each pass, because the mean of a pass without trained
    tokens would be NaN.
    """
    return rows[0]
