"""Feed rows of several lengths to the Trainer, with one length per step.

All steps have the same number of tokens.

    rows of each length ─seeded order of an epoch─▶ steps of each length ─mix─▶ the steps of the epoch
    numbers of a batch, as the Trainer asks for them ─its step, its place in the step─▶ rows of the step's length

The Trainer counts in rows of the longest length. A step of `rows_per_step` such rows holds twice as many rows of half
the length, divided evenly among the passes and ranks of the step. The last step of each length has the remaining rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from tasks.core.seeded_order import draws, shuffle
from train.data.dataset import PackedDataset
from train.data.dealt_rows import empty_row

Row = dict[str, torch.Tensor]
Mix = Literal["tokens", "blocks"]

# Distance between the `stream` numbers of two lengths, for tasks.core.seeded_order. Epochs are numbered in between.
STREAMS = 1 << 24


class Step(NamedTuple):
    """Step with the rows [first, last) of one length, in the order of the epoch."""

    length: int
    first: int
    last: int


class JoinedRows(torch.utils.data.Dataset):
    """Rows of all lengths, one length after another."""

    def __init__(self, parts: Sequence[PackedDataset]):
        self.parts = list(parts)

    @property
    def max_id(self) -> int:
        return max(part.max_id for part in self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, row: int) -> Row:
        for part in self.parts:
            if row < len(part):
                return part[row]
            row -= len(part)
        raise IndexError("there are fewer rows")


def steps_of(rows: Mapping[int, int], rows_per_step: int, longest: int, mix: Mix, seed: int, epoch: int) -> list[Step]:
    """Return the steps of an epoch in order; `rows` maps lengths to numbers of rows.

    With mix `tokens`, the steps of each length are spread evenly: the epoch is divided into as many equal stretches as
    the length has steps, and each step is at a random place in its stretch. With mix `blocks`, the shortest length
    comes first.
    """
    found: list[tuple[float, Step]] = []
    for number, (length, count) in enumerate(sorted(rows.items())):
        size = rows_per_step * longest // length
        steps = math.ceil(count / size)
        places = np.zeros(steps)
        if mix == "tokens":
            within = draws(steps, seed, epoch + number * STREAMS) >> np.uint64(40)
            places = (np.arange(steps) + within / 2**24) / max(steps, 1)
        own = (Step(length, first, min(first + size, count)) for first in range(0, count, size))
        found += zip(places.tolist(), own, strict=True)
    # The sort is stable, so steps at the same place (with `blocks`, all steps) stay in the order of their lengths.
    return [step for _, step in sorted(found, key=lambda each: each[0])]


class MixedRows(torch.utils.data.Dataset):
    """Rows of several lengths for a DataLoader that deals batches to ranks in turn.

    The DataLoader of the Trainer does this. It counts in rows of the longest length: batch b has the numbers
    [b · micro_batch, (b + 1) · micro_batch), and receives its share of the rows of step b // batches_per_step. A batch
    without rows receives a filler, a row without a trained token. `packings` map lengths to rows, and each epoch reads
    the next packing. All packings have the same number of rows.
    """

    def __init__(
        self,
        packings: Sequence[Mapping[int, PackedDataset]],
        longest: int,
        micro_batch: int,
        batches_per_step: int,
        mix: Mix,
        seed: int,
    ):
        self.packings, self._micro_batch, self._batches = packings, micro_batch, batches_per_step
        self._longest, self._mix, self._seed = longest, mix, seed
        self.fillers: dict[int, Row] = {}  # by length; other lengths use empty_row
        self.start_pass(0)

    def start_pass(self, number: int) -> None:
        """Switch to an epoch, counted from 0."""
        self._rows = self.packings[number % len(self.packings)]
        counts = {length: len(rows) for length, rows in self._rows.items()}
        size = self._micro_batch * self._batches
        self.steps = steps_of(counts, size, self._longest, self._mix, self._seed, number)
        self._order = {
            length: shuffle(count, self._seed, number + (place + 1) * 8 * STREAMS)
            for place, (length, count) in enumerate(sorted(counts.items()))
        }

    def close(self) -> None:
        """Do nothing: these rows hold no open resources."""

    def __len__(self) -> int:
        return len(self.steps) * self._batches * self._micro_batch

    def __getitem__(self, number: int) -> Row:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Row]:
        """Return the rows of the batch that begins with the first of `numbers`."""
        step, batch = divmod(numbers[0] // self._micro_batch, self._batches)
        length, first, last = self.steps[step]
        size = last - first
        own = self._order[length][first + size * batch // self._batches : first + size * (batch + 1) // self._batches]
        if len(own):
            return self._rows[length].__getitems__(own.tolist())
        rows = self._rows[length]
        return [self.fillers.get(length) or empty_row(rows.corpus, rows.split)]
