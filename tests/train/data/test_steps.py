"""Each step has the same rows on any number of ranks.

This holds with any micro-batch and in every order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples
from torch.utils.data import BatchSampler, SequentialSampler

from packcorpus.tasks.config import Balance
from packcorpus.train.data.steps import Order, balanced_steps, mixed_steps, ordered_steps, shuffled_steps
from packcorpus.train.loop.feed import Shares, StepRows

LENGTHS = (32, 64)
FILLER = "filler"


class Named(NamedTuple):
    """Stands for the rows of a packing."""

    name: str
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, numbers: Sequence[int]) -> list[tuple[str, int]]:
        return [(self.name, number) for number in numbers]


def order_of(kind: str, rows: int, rows_per_step: int, seed: int) -> Order:
    """Return an order of two packings, with `rows` rows each."""
    packings: list[Any] = [Named("first", rows), Named("second", rows)]
    if kind == "plain":
        return partial(shuffled_steps, packings, rows_per_step, seed)
    if kind == "ordered":
        return partial(ordered_steps, packings, rows_per_step)
    if kind == "balance":
        balance = Balance(ranks=2, rows_per_rank=2)
        return partial(balanced_steps, packings, [[rows], [rows // 2, rows - rows // 2]], balance, rows_per_step, seed)
    short = 2 * rows + 1
    mixed: list[Any] = [{32: Named(f"{name} 32", short), 64: Named(f"{name} 64", rows)} for name in ("first", "second")]
    return partial(mixed_steps, mixed, rows_per_step, "tokens", seed)


def dealt(rows: StepRows, shares: Shares) -> list[list[list[list[Any]]]]:
    """Return the rows of each rank, step, and pass."""
    # accelerate deals the batches to the ranks, as in the Trainer.
    batches = BatchSampler(SequentialSampler(rows), shares.micro_batch, drop_last=False)
    found = []
    for rank in range(shares.ranks):
        own = [rows.__getitems__(numbers) for numbers in BatchSamplerShard(batches, shares.ranks, rank)]
        found.append([own[top : top + shares.passes] for top in range(0, len(own), shares.passes)])
    return found


@settings(max_examples=examples(300), deadline=None)
@given(
    st.sampled_from(["plain", "ordered", "balance", "mix"]),
    st.integers(1, 60),
    st.integers(1, 24),
    st.sampled_from([1, 2, 3, 4, 5, 8, 16]),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 9),
)
def test_a_step_has_the_same_rows_on_any_number_of_ranks(
    kind: str, rows: int, rows_per_step: int, ranks: int, most: int, epoch: int, seed: int
) -> None:
    order = order_of(kind, rows, rows_per_step, seed)
    wanted = [step.rows.__getitems__(step.numbers.tolist()) for step in order(epoch)]
    packing = ("first", "second")[epoch % 2]
    expected = Counter({(packing, number): 1 for number in range(rows)})
    if kind == "mix":
        expected = Counter({(f"{packing} 64", number): 1 for number in range(rows)})
        expected += Counter({(f"{packing} 32", number): 1 for number in range(2 * rows + 1)})
    assert Counter(row for step in wanted for row in step) == expected, "every row once"
    if kind == "ordered":
        assert [number for step in wanted for _, number in step] == [*range(rows)]

    share = math.ceil(rows_per_step / ranks)
    micro_batch = next(size for size in range(min(share, most), 0, -1) if share % size == 0)
    shares = Shares(ranks, micro_batch, share // micro_batch, rows_per_step)
    taken = StepRows(order, shares, lambda _: FILLER, spread=kind == "mix")
    taken.set_epoch(epoch)
    found = dealt(taken, shares)
    assert {len(of_rank) for of_rank in found} == {len(wanted)}, "every rank takes every step"
    for number, step in enumerate(wanted):
        of_step = [of_rank[number] for of_rank in found]
        assert len({len(passes) for passes in of_step}) == 1, "all ranks run as many passes"
        fits = micro_batch * (2 if kind == "mix" and step[0][0].endswith("32") else 1)
        for rank, passes in enumerate(of_step):
            own = [row for one in passes for row in one if row != FILLER]
            assert own == step[rank::ranks]
            assert all(1 <= len(one) <= fits for one in passes)
            assert all(one == [FILLER] for one in passes if FILLER in one)
    if ranks == 1 and kind != "mix":
        assert not any(FILLER in one for step in found[0] for one in step), "one rank needs no filler"


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_the_order_is_that_of_earlier_versions(epoch: int) -> None:
    sampler = SeedableRandomSampler(range(50), generator=torch.Generator(), data_seed=42)
    sampler.set_epoch(epoch)
    steps = order_of("plain", 50, 8, 42)(epoch)
    assert np.concatenate([step.numbers for step in steps]).tolist() == list(sampler)


def test_epochs_and_seeds_have_other_orders() -> None:
    for kind in ("plain", "balance", "mix"):
        orders = [
            np.concatenate([step.numbers for step in order_of(kind, 200, 8, seed)(epoch)]).tolist()
            for seed, epoch in ((1, 0), (1, 2), (5, 0))
        ]
        assert len({tuple(order) for order in orders}) == 3, kind
