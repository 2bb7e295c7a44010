"""A rank's speed counts its own passes, but not its waits for other ranks."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.training.gloo_ranks import gloo_ranks
from support.training.tiny_training import packed_rows, tiny_model
from transformers import default_data_collator

from packcorpus.train.loop.callbacks import WARM_UP, RankClock, RankSpeed, slow_ranks


def speed(rank: int, tokens_per_second: float | None) -> RankSpeed:
    return RankSpeed(rank, f"host{rank}", "cuda:0, NVIDIA H200", 9, tokens_per_second, 1.0, 0.0)


def clock_of(model: Any) -> RankClock:
    clock = RankClock(torch.device("cpu"), "CPU")
    clock.on_train_begin(None, None, None, model=model)
    return clock


def take_pass(clock: RankClock, model: Any, batch: dict[str, Any], last: bool, wait: float = 0.0) -> float:
    """Run a pass, wait as for other ranks, and end the pass."""
    # Returns the seconds of the pass itself.
    start = time.perf_counter()
    model(**batch).loss.backward()
    seconds = time.perf_counter() - start
    time.sleep(wait)
    (clock.on_step_end if last else clock.on_substep_end)(None, None, None)
    return seconds


def test_the_clock_counts_passes_and_not_waits() -> None:
    model = tiny_model()
    batch = default_data_collator(packed_rows()[:2])
    clock = clock_of(model)
    for _ in range(WARM_UP):
        take_pass(clock, model, batch, last=True)
    assert clock.speeds(0, 0.1) == [RankSpeed(0, clock.speeds(0, 0.1)[0].host, "CPU", 0, None, None, 0.1)]
    spent = sum(take_pass(clock, model, batch, last=last, wait=0.05) for last in (False, True) * 3)
    [own] = clock.speeds(3, 0.0)
    assert (own.rank, own.device, own.steps) == (3, "CPU", 3)
    assert 0 < clock.seconds < spent
    assert clock.tokens == 6 * batch["input_ids"].numel()
    assert own.tokens_per_second == pytest.approx(clock.tokens / clock.seconds)
    assert own.step_seconds == pytest.approx(clock.seconds / 3, abs=1e-6)


def test_passes_without_gradients_and_after_the_end_do_not_count() -> None:
    model, batch = tiny_model(), default_data_collator(packed_rows()[:1])
    clock = clock_of(model)
    for _ in range(WARM_UP + 1):
        take_pass(clock, model, batch, last=True)
    counted = clock.tokens
    with torch.no_grad():
        model.eval()(**batch)
    clock.on_step_end(None, None, None)
    clock.on_train_end(None, None, None)
    take_pass(clock, model.train(), batch, last=True)
    assert clock.tokens == counted > 0


def test_a_slow_rank_differs_from_one_that_waits_for_it() -> None:
    # Both are in one process group with DistributedDataParallel. Rank 1 is slow, and rank 0 waits in backward.
    code = """
import time, torch
from torch.nn.parallel import DistributedDataParallel
from packcorpus.train.loop.callbacks import RankClock, slow_ranks

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    def forward(self, input_ids):
        time.sleep(0.3 * rank)
        return {"loss": self.second(self.first(input_ids)).sum()}

model = DistributedDataParallel(Model())
clock = RankClock(torch.device("cpu"), "CPU")
clock.on_train_begin(None, None, None, model=model)
start = time.perf_counter()
for step in range(6):
    model(input_ids=torch.ones(4, 8))["loss"].backward()
    clock.on_step_end(None, None, None)
speeds = clock.speeds(rank, 0.0)
result = [[one.step_seconds for one in speeds], slow_ranks(speeds), (time.perf_counter() - start) / 6]
"""
    (own, warning, wall), (others, warning_of_slow, _) = gloo_ranks(2, code)
    assert own == others
    assert own[0] < 0.2 < 0.3 < own[1]
    assert wall > 0.3, "both ranks need the time of the slow one"
    assert warning == warning_of_slow
    assert "rank 1 (" in warning
    assert "rank 0" not in warning


def test_only_ranks_more_than_five_percent_slower_than_the_median_are_named() -> None:
    assert slow_ranks([speed(0, 50.0)]) is None
    assert slow_ranks([speed(0, 50.0), speed(1, None)]) is None
    assert slow_ranks([speed(0, 100.0), speed(1, 100.0), speed(2, 95.1)]) is None
    warning = slow_ranks([speed(0, 100.0), speed(1, 100.0), speed(2, 90.0), speed(3, 101.0)])
    assert warning is not None
    assert warning.startswith("1 rank computed more slowly than the median of 100 tokens/s")
    assert "rank 2 (host2, cuda:0, NVIDIA H200) by 10 %" in warning


def test_a_sharded_model_has_no_speed_per_rank() -> None:
    model = SimpleNamespace(shards_frozen_weights=True)
    clock = clock_of(model)
    assert clock.speeds(0, 0.0)[0].tokens_per_second is None
