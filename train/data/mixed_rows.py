"""Order rows of several lengths, with one length per step.

All steps have the same number of tokens.

    rows of each length ─seeded order of an epoch─▶ steps of each length ─mix─▶ the steps of the epoch

The Trainer counts in rows of the longest length. A step of `rows_per_step` such rows holds twice as many rows of half
the length, divided evenly among the passes and ranks of the step. The last step of each length has the remaining rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from tasks.core.numbers import draws, shuffle
from train.data.dataset import PackedDataset
from train.data.step_rows import Step

Mix = Literal["tokens", "blocks"]

# Distance between the `stream` numbers of two lengths, for tasks.core.numbers. Epochs are numbered in between.
STREAMS = 1 << 24


class Run(NamedTuple):
    """Rows of a step: [first, last) of one length, in the order of the epoch."""

    length: int
    first: int
    last: int


def runs_of(rows: Mapping[int, int], rows_per_step: int, longest: int, mix: Mix, seed: int, epoch: int) -> list[Run]:
    """Return the rows of each step of an epoch.

    `rows` maps lengths to numbers of rows. With mix `tokens`, the steps of each length are spread evenly: the epoch is
    divided into as many equal stretches as the length has steps, and each step is at a random place in its stretch.
    With mix `blocks`, the shortest length comes first.
    """
    found: list[tuple[float, Run]] = []
    for number, (length, count) in enumerate(sorted(rows.items())):
        size = rows_per_step * longest // length
        steps = math.ceil(count / size)
        places = np.zeros(steps)
        if mix == "tokens":
            within = draws(steps, seed, epoch + number * STREAMS) >> np.uint64(40)
            places = (np.arange(steps) + within / 2**24) / max(steps, 1)
        own = (Run(length, first, min(first + size, count)) for first in range(0, count, size))
        found += zip(places.tolist(), own, strict=True)
    # The sort is stable, so steps at the same place (with `blocks`, all steps) stay in the order of their lengths.
    return [run for _, run in sorted(found, key=lambda each: each[0])]


def mixed_steps(
    packings: Sequence[Mapping[int, PackedDataset]], rows_per_step: int, mix: Mix, seed: int, epoch: int
) -> list[Step]:
    """Return the steps of an epoch; each epoch reads the next packing.

    A packing maps lengths to rows. A step has `rows_per_step` rows of the longest length, or as many tokens of another.
    """
    rows = packings[epoch % len(packings)]
    counts = {length: len(of_length) for length, of_length in rows.items()}
    order = {
        length: shuffle(count, seed, epoch + (place + 1) * 8 * STREAMS)
        for place, (length, count) in enumerate(sorted(counts.items()))
    }
    return [
        Step(rows[length], order[length][first:last])
        for length, first, last in runs_of(counts, rows_per_step, max(counts), mix, seed, epoch)
    ]
