"""The search for the micro-batch, on simulated devices and once on a real model."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import convert_to_fp32
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.training.tiny_training import LENGTH, packed_rows, tiny_model

from packcorpus.tasks.core.errors import PartMissing
from packcorpus.train.config import TrainingConfig
from packcorpus.train.loop import micro_batch as micro_batch_module
from packcorpus.train.loop.micro_batch import NEAR, Choice, find_micro_batch, micro_batch, rows_per_step, sizes
from packcorpus.train.model.attention import Collator

BOUNDLESS = 1e18


class Device:
    """A simulated device: a pass of n rows takes seconds(n) and bytes(n)."""

    def __init__(
        self,
        seconds: Callable[[int], float],
        size: Callable[[int], float] = float,
        limit: float = BOUNDLESS,
        cautious: bool = False,
    ):
        self._seconds, self._bytes, self.limit, self.cautious = seconds, size, limit, cautious
        self.now, self._peak, self.passes = 0.0, 0.0, list[int]()

    def step(self, rows: int) -> None:
        self.passes.append(rows)
        self.now += self._seconds(rows)
        self._peak = max(self._peak, self._bytes(rows))
        if self._bytes(rows) > self.limit:
            raise torch.OutOfMemoryError("no memory")

    def reset(self) -> None:
        self._peak = 0.0

    def peak(self) -> float:
        return self._peak

    def find(self, rows: int, budget: float = BOUNDLESS, agree: micro_batch_module.Agree = list) -> Choice:
        return find_micro_batch(self.step, rows, 1024, self, budget=budget, agree=agree, clock=lambda: self.now)


ROWS = st.integers(1, 300)
# Seconds of a pass by the index of its size: any curve.
CURVES = st.lists(st.floats(0.01, 10), min_size=10, max_size=10)


def by_size(rows: int, curve: list[float]) -> dict[int, float]:
    return dict(zip(sizes(rows), curve, strict=False))


@given(ROWS)
def test_sizes_divide_the_step_and_at_least_double(rows: int) -> None:
    found = sizes(rows)
    assert found[0] == 1
    assert found[-1] == rows or rows < 2 * found[-1]
    assert not any(rows % size for size in found)
    assert all(b >= 2 * a for a, b in pairwise(found))


@given(ROWS, CURVES)
def test_the_smallest_of_the_fast_sizes_is_chosen(rows: int, curve: list[float]) -> None:
    seconds = by_size(rows, curve)
    choice = Device(seconds.__getitem__).find(rows)
    tried = [trial.rows for trial in choice.trials]
    assert tried == sizes(rows)[: len(tried)]
    rates = {size: size * 1024 / seconds[size] for size in tried}
    assert [trial.tokens_per_second for trial in choice.trials] == pytest.approx([*rates.values()])
    enough = (1 - NEAR) * max(rates.values()) * (1 - 1e-9)
    assert choice.micro_batch == next(size for size in tried if rates[size] >= enough)
    assert choice.micro_batch * choice.accumulation == rows


@given(ROWS, st.floats(1, 1000))
def test_a_gpu_runs_out_of_memory_at_most_once(rows: int, limit: float) -> None:
    device = Device(lambda n: 1 + n / 100, limit=limit)  # larger is faster
    choice = device.find(rows)
    fits = [size for size in sizes(rows) if size <= limit]
    assert choice.micro_batch == fits[-1]
    assert len([n for n in device.passes if n > limit]) == (len(fits) < len(sizes(rows)))


@given(ROWS, st.floats(1, 1000), st.floats(0, 0.5))
def test_a_cpu_never_exceeds_its_memory(rows: int, limit: float, fixed: float) -> None:
    """Memory grows with the rows, and a part of it is constant."""
    device = Device(lambda n: 1 + n / 100, lambda n: fixed + n * (1 - fixed), limit, cautious=True)
    device.find(rows)
    assert max(map(device._bytes, device.passes)) <= limit


@given(ROWS, st.floats(0.001, 20), st.floats(0.001, 2), st.floats(1, 60))
def test_measuring_time_is_bounded(rows: int, fixed: float, each: float, budget: float) -> None:
    """Passes take a fixed time plus some per row; the first of a size is free."""
    device = Device(lambda n: fixed + each * n)
    device.find(rows, budget)
    warm = sum(fixed + each * n for n in set(device.passes))
    assert device.now - warm <= max(budget, fixed + each) + fixed + each


@given(ROWS, CURVES, CURVES, st.floats(1, 400), st.floats(1, 400), st.booleans())
@settings(max_examples=examples(30), deadline=None)
def test_all_ranks_choose_the_same(
    rows: int, one: list[float], other: list[float], limit: float, other_limit: float, cautious: bool
) -> None:
    """Two ranks with different speed and memory, each in a thread."""
    meet = threading.Barrier(2, timeout=120)
    sent: list[list[float]] = [[], []]
    found: list[Choice | None] = [None, None]

    def rank(number: int, curve: list[float], limit: float) -> None:
        def agree(figures: list[float]) -> list[float]:
            sent[number] = figures
            meet.wait()
            largest = [max(pair) for pair in zip(*sent, strict=True)]
            meet.wait()
            return largest

        device = Device(by_size(rows, curve).__getitem__, limit=limit, cautious=cautious)
        found[number] = device.find(rows, 30.0, agree)

    threads = [threading.Thread(target=rank, args=a) for a in ((0, one, limit), (1, other, other_limit))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert found[0] is not None
    assert found[0] == found[1]
    assert found[0].micro_batch <= min(limit, other_limit)


def test_one_row_that_does_not_fit_is_rejected() -> None:
    with pytest.raises(PartMissing, match="one row of 1024 tokens does not fit"):
        Device(float, limit=0.5).find(8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batch": 8}, "micro_batch: 8: a pass of 4 rows .* does not fit .*; lower it, or set it to auto"),
        ({"micro_batch": 4, "sharding": "full"}, "micro_batch: 4: a pass of 4 rows .* of the device; lower it$"),
        ({"micro_batch": 1}, "one row of 1024 tokens does not fit"),
        ({"sharding": "full"}, "one row of 1024 tokens does not fit"),
    ],
)
def test_a_size_that_is_not_measured_and_does_not_fit_names_what_can_be_changed(
    settings: dict[str, Any], message: str
) -> None:
    device = Device(float, limit=0.5)
    with pytest.raises(PartMissing, match=message):
        micro_batch_module._fixed_size(TrainingConfig(**settings), device.step, 4, 1024, device, list)


def test_with_sharding_auto_is_one_row_and_says_so() -> None:
    device = Device(float)
    choice = micro_batch_module._fixed_size(TrainingConfig(sharding="full"), device.step, 4, 1024, device, list)
    assert (choice.micro_batch, choice.accumulation) == (1, 4)
    assert choice.reason == "with sharding: full, micro_batch: auto is 1; a larger micro_batch may be faster"


def test_a_size_that_is_not_measured_fits_on_all_ranks_or_on_none() -> None:
    config, device = TrainingConfig(micro_batch=2), Device(lambda _: 2.0, lambda _: 3.0, 9.0)

    def of_two(figures: list[float]) -> list[float]:
        return [max(pair) for pair in zip(figures, other, strict=True)]

    other = [4.0, 5.0, 0.0, -8.0]
    choice = micro_batch_module._fixed_size(config, device.step, 4, 1024, device, of_two)
    assert choice.trials == (micro_batch_module.Trial(2, 4.0, 5.0, 512.0),)
    assert choice.limit == 8.0
    other = [4.0, 5.0, 1.0, -8.0]
    with pytest.raises(PartMissing, match="micro_batch: 2: a pass of 2 rows"):
        micro_batch_module._fixed_size(config, device.step, 4, 1024, device, of_two)


@pytest.mark.parametrize("message", ["CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", "a bug"])
def test_only_failed_allocations_end_the_search(message: str) -> None:
    device = Device(lambda n: 1 + n / 100)
    step = device.step

    def fail(rows: int) -> None:
        step(rows)
        if rows > 2:
            raise RuntimeError(message)

    device.step = fail  # type: ignore[method-assign]
    if message == "a bug":
        with pytest.raises(RuntimeError, match="a bug"):
            device.find(8)
    else:
        assert device.find(8).micro_batch == 2


def test_32_rows_that_are_slower_than_8() -> None:
    rates = {1: 3.0, 2: 5.0, 4: 6.5, 8: 6.7 * 8, 16: 20.0, 32: 1.2 * 32}
    choice = Device(lambda n: n / rates[n]).find(32)
    assert (choice.micro_batch, choice.accumulation) == (8, 4)
    assert choice.reason == "tokens/s fall at 16 rows"
    table = choice.lines()
    assert [line.split()[0] for line in table[:-1]] == ["1", "2", "4", "8", "16"]
    assert [line.split()[0] for line in table if "◀" in line] == ["8"]
    assert json.loads(json.dumps(asdict(choice)))["trials"][3]["tokens_per_second"] == pytest.approx(6.7 * 8 * 1024)


def test_the_first_pass_only_warms_up() -> None:
    times = iter([9.0, 1.0, 3.0])
    (trial,) = Device(lambda _: next(times)).find(1).trials
    assert trial.seconds == 2.0


# -- with activation checkpointing -------------------------------------------------------------------------------------


def chosen(
    monkeypatch: pytest.MonkeyPatch, ways: dict[Any, Device], wanted: Any = "auto", supported: bool = True
) -> tuple[Any, int, list[Any], list[str]]:
    """Return the way, its micro-batch of 8 rows, the ways that were tried, and notes."""
    model = SimpleNamespace(config=SimpleNamespace(model_type="x"), supports_gradient_checkpointing=supported)
    used: list[Any] = []
    monkeypatch.setattr(micro_batch_module, "use_checkpointing", lambda _, way: used.append(way))
    # Without a device for each way, the model supports only all layers.
    whole = 2 not in ways and True in ways
    monkeypatch.setattr(
        micro_batch_module,
        "usable",
        lambda _, way: (False, "no") if not supported else (True, "only all") if whole and way == 2 else (way, ""),
    )
    best, choice, notes = micro_batch_module.with_checkpointing(model, wanted, lambda _: ways[used[-1]].find(8))
    assert used[-1] is best
    return best, choice.micro_batch, used[:-1], notes


def gpu(seconds: float, memory: float, limit: float = 80.0) -> Device:
    """Each pass takes a second in addition to those of its rows."""
    return Device(lambda n: 1 + seconds * n, lambda n: memory * n, limit)


def test_nothing_is_recomputed_if_the_rows_of_a_step_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    best, size, tried, notes = chosen(monkeypatch, {False: gpu(1.0, 10.0)})
    assert (best, size, tried) == (False, 8, [False])
    assert notes == ["activation_checkpointing: off (off: 910 tokens/s)"]


def test_a_way_that_is_not_supported_is_not_named_if_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, tried, notes = chosen(monkeypatch, {False: gpu(1.0, 70.0), True: gpu(1.6, 5.0)})
    assert tried == [False, True]
    assert notes == ["activation_checkpointing: on (off: 512 tokens/s, on: 594 tokens/s)"]


def test_the_fastest_is_chosen_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {False: gpu(1.0, 40.0), 2: gpu(1.15, 22.0), True: gpu(1.6, 5.0)}
    best, size, tried, _ = chosen(monkeypatch, ways)
    assert (best, size, tried) == (False, 2, [False, 2, True]), "683, 621, and 594 tokens/s"
    ways |= {False: gpu(1.0, 70.0), True: gpu(1.3, 5.0)}
    best, size, _, notes = chosen(monkeypatch, ways)
    assert (best, size) == (True, 8)
    assert notes == ["activation_checkpointing: on (off: 512 tokens/s, every 2 layers: 621 tokens/s, on: 719 tokens/s)"]
    ways[2] = gpu(1.15, 8.0)
    assert chosen(monkeypatch, ways)[:3] == (2, 8, [False, 2]), "all layers cannot be faster"


def test_a_row_that_fits_only_with_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {False: gpu(1.0, 200.0), 2: gpu(1.15, 110.0), True: gpu(1.3, 50.0)}
    assert chosen(monkeypatch, ways)[:3] == (True, 1, [False, 2, True])
    with pytest.raises(PartMissing, match="one row of 1024 tokens does not fit"):
        chosen(monkeypatch, dict.fromkeys(ways, ways[False]))
    # A pass that fits leaves no memory for the states of the optimizer.
    full = Device(float, lambda n: 90.0, 100.0)
    full.find = lambda *_: Choice(1, 8, (micro_batch_module.Trial(1, 1.0, 90.0, 9e9),), "", 80.0)  # type: ignore[method-assign]
    assert chosen(monkeypatch, ways | {False: full})[0] is True


def test_a_set_way_is_only_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, {2: gpu(1.0, 40.0)}, wanted=2) == (2, 2, [2], [])
    best, _, tried, notes = chosen(monkeypatch, {False: gpu(1.0, 1.0)}, wanted=True, supported=False)
    assert (best, tried, notes) == (False, [False], ["activation_checkpointing: off, because no"])
    assert chosen(monkeypatch, {False: gpu(1.0, 1.0)}, supported=False)[2:] == (
        [False],
        ["activation_checkpointing: off, because no"],
    )


@pytest.mark.parametrize(("free", "expected"), [(1 << 50, False), (1 << 20, True)])
def test_on_a_cpu_a_row_is_not_tried_if_a_piece_shows_that_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, free: int, expected: bool
) -> None:
    model, rows, tried = tiny_model(), packed_rows()[:4], []
    layers, memory = model.get_decoder().layers, micro_batch_module._CpuMemory
    monkeypatch.setattr(micro_batch_module.devices, "free_memory", lambda: free)
    monkeypatch.setattr(memory, "peak", lambda _: 1e9 * (not layers[1].gradient_checkpointing))
    real = micro_batch_module.run_pass

    def run(model: Any, batch: Any, *others: Any) -> float:
        tried.append((sum(layer.gradient_checkpointing for layer in layers), batch["input_ids"].shape[1]))
        return real(model, batch, *others)

    monkeypatch.setattr(micro_batch_module, "run_pass", run)
    best, _, _ = micro_batch_module.with_checkpointing(
        model,
        "auto",
        lambda checked: micro_batch(
            model, rows, Collator("sdpa"), TrainingConfig(), 4, 1, torch.float32, checked=checked
        ),
    )
    assert best is expected
    whole = {count for count, length in tried if length == LENGTH}
    assert whole == ({2} if expected else {0})
    assert {count for count, length in tried if length == LENGTH // 8} == ({0, 1} if expected else {0})


# -- on a model --------------------------------------------------------------------------------------------------------


def test_measuring_does_not_change_training() -> None:
    model, rows, collator = tiny_model(dropout=0.3), packed_rows()[:8], Collator("sdpa")

    def losses(measure: bool) -> tuple[Choice | None, float, list[torch.Tensor]]:
        model.zero_grad()
        torch.manual_seed(3)
        choice = micro_batch(model, rows, collator, TrainingConfig(), 8, 1, torch.float32) if measure else None
        loss = model(**collator(rows[:2]))["loss"]
        loss.backward()
        return choice, loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    _, loss, gradients = losses(measure=False)
    choice, measured_loss, measured_gradients = losses(measure=True)
    assert choice is not None
    assert choice.micro_batch * choice.accumulation == 8
    assert all(trial.tokens_per_second == pytest.approx(trial.rows * LENGTH / trial.seconds) for trial in choice.trials)
    assert measured_loss == loss
    assert all(torch.equal(a, b) for a, b in zip(gradients, measured_gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_passes_need_the_memory_of_training(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """accelerate converts the logits of mixed precision to fp32."""
    converted: list[torch.dtype] = []

    def convert(outputs: Any) -> Any:
        converted.append(outputs.logits.dtype)
        return convert_to_fp32(outputs)

    monkeypatch.setattr(micro_batch_module, "convert_to_fp32", convert)
    model = tiny_model(initializer_range=0.02)
    micro_batch(model, packed_rows()[:2], Collator("sdpa"), TrainingConfig(micro_batch=1), 1, 1, dtype)
    assert set(converted) == {dtype} - {torch.float32}


def test_a_configured_size_is_used_and_timed() -> None:
    model, config = tiny_model(), TrainingConfig(micro_batch=4)
    choice = micro_batch(model, packed_rows()[:8], Collator("sdpa"), config, 16, 1, torch.float32)
    assert (choice.micro_batch, choice.accumulation) == (4, 4)
    (trial,) = choice.trials
    assert (trial.rows, trial.tokens_per_second) == (4, pytest.approx(4 * LENGTH / trial.seconds))


@pytest.mark.parametrize(("wanted", "rows", "size"), [(4, 14, 2), (7, 14, 7), (20, 14, 14), (5, 13, 1)])
def test_a_configured_size_never_changes_the_rows_of_a_step(wanted: int, rows: int, size: int) -> None:
    model, config = tiny_model(), TrainingConfig(micro_batch=wanted)
    choice = micro_batch(model, packed_rows()[:2], Collator("sdpa"), config, rows, 1, torch.float32)
    assert (choice.micro_batch, choice.accumulation) == (size, rows // size)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_rows_per_step_are_close_to_the_request_and_divisible(wanted: int, there: int) -> None:
    rows = rows_per_step(wanted * 1024.0, 1024.0, there)
    assert 1 <= rows <= there
    most = min(wanted, there)
    assert abs(rows - most) <= 0.125 * most
    assert rows == there or len(sizes(rows)) >= math.log2(rows) - 1


def test_compiling_does_not_count_against_the_time_limit() -> None:
    times = iter([100.0, 1.0, 1.0, 100.0, 1.5, 1.5, 100.0, 4.0, 4.0])
    choice = Device(lambda _: next(times)).find(4, budget=30.0)
    assert [trial.rows for trial in choice.trials] == [1, 2, 4]
    assert choice.micro_batch == 2


def test_memory_of_this_process_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch_module.devices, "free_memory", lambda: 1 << 30)
    memory = micro_batch_module._CpuMemory(ranks=2)
    assert 0 < memory.limit < 1 << 29
    size = 1 << 28
    tensor = torch.ones(size, dtype=torch.uint8)
    assert size * 0.9 < memory.peak() < size * 1.5
    del tensor
    memory.reset()
    assert memory.peak() < size / 2


def test_a_trial_of_a_diagnosis_measures_for_a_share_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch_module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    assert micro_batch_module._budget("cpu") == 30
    monkeypatch.setenv("PACKCORPUS_UNTIL", "100 140")
    assert micro_batch_module._budget("cpu") == 10
    monkeypatch.setenv("PACKCORPUS_UNTIL", "50 90")
    assert micro_batch_module._budget("cpu") == 0
