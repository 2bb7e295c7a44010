"""Order the rows of an epoch in steps, without torch.

    packed rows, in random order ─shuffled_steps─▶ ┐
    rows in the order of the data ──ordered_steps─▶ ┤
    whole groups of `balance` ─────balanced_steps─▶ ├ the Steps of an epoch
    rows of several lengths ─────────mixed_steps──▶ ┘

Step k has the same rows on any number of ranks and with any micro-batch. The last step of an epoch has the remaining
rows.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from packcorpus.tasks.config import Balance
from packcorpus.tasks.core.numbers import draws, shuffle
from packcorpus.tasks.storage.layout import TRAIN_EPOCH_PREFIX, kind_of
from packcorpus.tasks.storage.manifest import Manifest

Mix = Literal["tokens", "blocks"]

# Distance between the `stream` numbers of two lengths, for tasks.core.numbers. Epochs are numbered in between.
STREAMS = 1 << 24


class Step(NamedTuple):
    """Rows of an optimizer step, over all ranks; `numbers` are their places in `rows`."""

    rows: Any  # a PackedDataset, or the conversations of format 2.0
    numbers: np.ndarray


# Function that returns the steps of an epoch, counted from 0. All epochs have the same number of steps.
Order = Callable[[int], list[Step]]


def shuffled_steps(packings: Sequence[Any], rows_per_step: int, seed: int, epoch: int) -> list[Step]:
    """Return the steps of an epoch in random order; each epoch reads the next packing."""
    rows = packings[epoch % len(packings)]
    # The sampler of accelerate has the same order, so runs of earlier versions can be resumed.
    order = permutation(len(rows), seed + epoch)
    return [Step(rows, order[first : first + rows_per_step]) for first in range(0, len(rows), rows_per_step)]


def ordered_steps(packings: Sequence[Any], rows_per_step: int, epoch: int) -> list[Step]:
    """Return the steps of an epoch in the order of the rows.

    Each epoch reads the next packing.
    """
    rows = packings[epoch % len(packings)]
    order = np.arange(len(rows))
    return [Step(rows, order[first : first + rows_per_step]) for first in range(0, len(rows), rows_per_step)]


def permutation(count: int, seed: int) -> np.ndarray:
    """Return `torch.randperm(count)` after `torch.manual_seed(seed)`, int64.

    Torch is used only if it is loaded, because it takes a tenth of the time.
    """
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "randperm"):
        return np.asarray(torch.randperm(count, generator=torch.Generator().manual_seed(seed)))
    # Both libraries have the same Mersenne Twister (Matsumoto and Nishimura, 1998), and torch swaps each number with
    # itself or a later one (Fisher and Yates, 1938).
    numbers = np.random.RandomState(seed & 0xFFFFFFFF)._bit_generator.random_raw(count).astype(np.int64)
    order = list(range(count))
    for place, other in enumerate((np.arange(count) + numbers % np.arange(count, 0, -1)).tolist()):
        order[place], order[other] = order[other], order[place]
    return np.array(order, np.int64)


def balance_of(manifest: Manifest | None) -> Balance | None:
    """Return the `balance` settings of a corpus; None if its rows are in random order."""
    settings = manifest.config.get("balance") if manifest else None
    return Balance(**settings) if settings else None


def is_in_order(manifest: Manifest | None) -> bool:
    """Return whether the rows of a corpus have the order of the data."""
    return manifest is not None and manifest.config.get("order") == "source"


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
    packings: Sequence[Any], groups: Sequence[Sequence[int]], balance: Balance, size: int, seed: int, epoch: int
) -> list[Step]:
    """Return the steps of `size` balanced rows; `groups` has a list for each packing."""
    number = epoch % len(packings)
    line = line_of_rows(groups[number], balance, seed, epoch)
    return [Step(packings[number], line[first : first + size]) for first in range(0, len(line), size)]


def why_unbalanced(balance: Balance, ranks: int, rows_per_step: int) -> str | None:
    """Return why ranks may wait for each other despite `balance`; None if they do not."""
    if balance.ranks % ranks:
        return f"{ranks} is not a divisor of {balance.ranks}"
    planned = balance.ranks * balance.rows_per_rank
    if rows_per_step % planned and planned % rows_per_step:
        return f"a step has {rows_per_step} rows, which is neither a multiple nor a divisor of {planned}"
    return None


class Slice(NamedTuple):
    """Rows of a step: [first, last) of one length, in the order of the epoch."""

    length: int
    first: int
    last: int


def slices_of(
    rows: Mapping[int, int], rows_per_step: int, longest: int, mix: Mix, seed: int, epoch: int
) -> list[Slice]:
    """Return the rows of each step of an epoch.

    `rows` maps lengths to numbers of rows. A step has `rows_per_step` rows of the longest length, or as many tokens of
    another. With mix `tokens`, the steps of each length are spread evenly: the epoch is divided into as many equal
    stretches as the length has steps, and each step is at a random place in its stretch. With mix `blocks`, the
    shortest length comes first.
    """
    placed: list[tuple[float, Slice]] = []
    for number, (length, count) in enumerate(sorted(rows.items())):
        size = rows_per_step * longest // length
        steps = math.ceil(count / size)
        places = np.zeros(steps)
        if mix == "tokens":
            within = draws(steps, seed, epoch + number * STREAMS) >> np.uint64(40)
            places = (np.arange(steps) + within / 2**24) / max(steps, 1)
        slices = (Slice(length, first, min(first + size, count)) for first in range(0, count, size))
        placed += zip(places.tolist(), slices, strict=True)
    # The sort is stable, so steps at the same place (with `blocks`, all steps) stay in the order of their lengths.
    return [taken for _, taken in sorted(placed, key=lambda pair: pair[0])]


def mixed_steps(
    packings: Sequence[Mapping[int, Any]], rows_per_step: int, mix: Mix, seed: int, epoch: int
) -> list[Step]:
    """Return the steps of an epoch; a packing maps lengths to rows."""
    rows = packings[epoch % len(packings)]
    counts = {length: len(of_length) for length, of_length in rows.items()}
    order = {
        length: shuffle(count, seed, epoch + (place + 1) * 8 * STREAMS)
        for place, (length, count) in enumerate(sorted(counts.items()))
    }
    slices = slices_of(counts, rows_per_step, max(counts), mix, seed, epoch)
    return [Step(rows[length], order[length][first:last]) for length, first, last in slices]


def packings_of(rows: Mapping[str, int], lengths: Sequence[int]) -> list[dict[int, str]]:
    """Return the packings of the training split: the names of their splits by length.

    `rows` maps all splits to their numbers of rows, and `lengths` are the lengths of rows. A later packing with other
    numbers of rows than the first is left out, because all epochs have the same steps.
    """
    kinds = [kind for kind in dict.fromkeys(map(kind_of, rows)) if kind.startswith(TRAIN_EPOCH_PREFIX)]
    every = [{n: f"{kind}-{n}" if len(lengths) > 1 else kind for n in lengths} for kind in ("train", *kinds)]
    kept = [length for length in lengths if rows.get(every[0][length])] or [max(lengths)]
    packings = [{length: names[length] for length in kept} for names in every]
    counts = [[rows.get(name, 0) for name in names.values()] for names in packings]
    return [names for names, own in zip(packings, counts, strict=True) if own == counts[0]]


def order_of(
    packings: Sequence[Mapping[int, Any]],
    mix: Mix | None,
    balance: Balance | None,
    groups: Sequence[Sequence[int]],
    rows_per_step: int,
    seed: int,
    in_order: bool = False,
) -> Order:
    """Return the order of a corpus.

    A packing maps lengths to rows. `mix` is None unless rows have several lengths. `groups` are those of
    `balanced_steps`. `in_order` is that of `order: source`.
    """
    if mix:
        return partial(mixed_steps, packings, rows_per_step, mix, seed)
    rows = [rows for packing in packings for rows in packing.values()]
    if balance:
        return partial(balanced_steps, rows, groups, balance, rows_per_step, seed)
    if in_order:
        return partial(ordered_steps, rows, rows_per_step)
    return partial(shuffled_steps, rows, rows_per_step, seed)
