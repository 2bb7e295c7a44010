"""How many rows one pass takes: measured, because the most that memory holds is often not the fastest.

    rows of an optimizer step ─sizes─▶ 1, 2, 4, 8 … ─find_micro_batch─▶ a pass of each, timed ─▶ Choice
                                                     until memory is short, or tokens/s falls, or time is up

A model of 23 M parameters ran at 6.7 passes a second of 8 rows, and at 1.2 of 32. 4-bit weights, on the other hand,
are unpacked once a pass, so that passes of one row are slow. Of the sizes within 3 % of the fastest the smallest is
taken: it leaves memory free. Rows of an optimizer step are the same in number whatever the size, so that what is
learned does not hang on the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from tasks.core.errors import PartMissing
from tasks.core.process import peak_memory
from train.config import TrainingConfig
from train.machine import devices
from train.model.attention import batch_of
from train.model.qlora import keep_random

NEAR = 0.03
BUDGET = {"cpu": 30.0, "cuda": 120.0}  # seconds
# Of the free memory: a GPU needs some for what falls between its blocks, a CPU for whatever else the machine does.
SHARE = {"cpu": 0.8, "cuda": 0.95}

# The largest of each figure over all ranks.
Agree = Callable[[list[float]], list[float]]


class Memory(Protocol):
    """What passes cost. `limit` is how many bytes they may; with `foresee`, none is tried that might need more."""

    limit: float
    foresee: bool

    def reset(self) -> None: ...

    def peak(self) -> float:
        """The most bytes in use since `reset`; asked once."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Passes of one size: the median time of one in seconds, and the most memory in bytes that it took."""

    rows: int
    seconds: float
    memory: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Rows of a pass on one device, passes of an optimizer step, and what was measured."""

    micro_batch: int
    accumulation: int
    trials: tuple[Trial, ...]
    reason: str

    def lines(self) -> list[str]:
        """A table for people."""
        table = [
            f"{trial.rows:>6} rows {trial.tokens_per_second:>12,.0f} tokens/s {trial.memory / 1e9:>8.2f} GB"
            + (" ◀" if trial.rows == self.micro_batch else "")
            for trial in self.trials
        ]
        return [*table, f"micro-batch {self.micro_batch} × accumulation {self.accumulation}: {self.reason}"]


def rows_per_step(tokens: float, tokens_per_row: float, rows: int) -> int:
    """Rows of a rank's optimizer step of about `tokens`, at most `rows`.

    With three significant bits: 13 or 17 rows could be taken only one by one or all at once. This changes the tokens of
    a step by 13 % at most.
    """
    wanted = min(max(1, round(tokens / tokens_per_row)), rows)
    unit = 1 << max(0, wanted.bit_length() - 3)
    return min(rows, round(wanted / unit) * unit)


def sizes(rows: int) -> list[int]:
    """Divisors of `rows`, each at least twice the one before."""
    found = [1]
    for size in range(2, rows + 1):
        if rows % size == 0 and size >= 2 * found[-1]:
            found.append(size)
    return found


def find_micro_batch(
    step: Callable[[int], None],
    rows_per_step: int,
    sequence_length: int,
    memory: Memory,
    *,
    budget: float = BUDGET["cpu"],
    agree: Agree = list,
    clock: Callable[[], float] = time.perf_counter,
) -> Choice:
    """Try sizes from 1 on; `step(n)` is a forward and backward pass of n rows, which has ended when it returns.

    A size is warmed up once and timed twice. `budget` bounds the timed passes, in seconds: a first pass may compile for
    minutes. All ranks decide by the same figures, the worst of each. Raises PartMissing where one row does not fit into
    memory.
    """
    spent = 0.0
    limit = -agree([-memory.limit])[0]
    trials: list[Trial] = []
    every = sizes(rows_per_step)
    reason = f"{every[-1]} rows are all of a step"
    for size in every:
        if trials:
            stop = _why_stop(trials, size, limit if memory.foresee else None, spent, budget)
            if stop:
                reason = stop
                break
        times, fits = _time(step, size, budget - spent, clock, memory)
        seconds, taken, short, passes = agree([statistics.median(times), memory.peak(), float(not fits), sum(times)])
        spent += passes
        if short and not trials:
            raise PartMissing(
                "out_of_memory",
                f"one row of {sequence_length} tokens does not fit into the memory of the device; pack shorter rows, "
                "set activation_checkpointing: true, or take a smaller base_model",
            )
        if short or (trials and taken > limit):
            reason = f"{size} rows need more memory than there is"
            break
        trials.append(Trial(size, seconds, taken, size * sequence_length / seconds))
    micro_batch = choose(trials)
    return Choice(micro_batch, rows_per_step // micro_batch, tuple(trials), reason)


def choose(trials: Sequence[Trial]) -> int:
    """The smallest size within 3 % of the most tokens/s."""
    best = max(trial.tokens_per_second for trial in trials)
    return min(trial.rows for trial in trials if trial.tokens_per_second >= (1 - NEAR) * best)


def _why_stop(trials: Sequence[Trial], size: int, limit: float | None, spent: float, budget: float) -> str | None:
    """Why the next size is not tried; None where it is. Time and memory grow with the rows, or more slowly."""
    last, best = trials[-1], max(trial.tokens_per_second for trial in trials)
    if last.tokens_per_second < (1 - NEAR) * best:
        return f"tokens/s fall at {last.rows} rows"
    growth = size / last.rows
    if limit is not None and last.memory * growth > limit:
        return f"{size} rows would need {last.memory * growth / 1e9:.1f} GB, and {limit / 1e9:.1f} may be used"
    if spent + 3 * last.seconds * growth > budget:
        return f"{size} rows would take longer than the {budget:.0f} s that measuring may"
    return None


def _time(
    step: Callable[[int], None], size: int, budget: float, clock: Callable[[], float], memory: Memory
) -> tuple[list[float], bool]:
    """Seconds of one or two passes after one that warms up, and whether they fit into memory."""
    times: list[float] = []
    memory.reset()
    while len(times) < 3 and sum(times[1:]) <= budget * (len(times) > 1):
        begin = clock()
        try:
            step(size)
        except torch.OutOfMemoryError:
            return [clock() - begin], False
        times.append(clock() - begin)
    return times[1:], True


# -- the real thing ----------------------------------------------------------------------------------------------------


def micro_batch(
    model: Any, dataset: Any, collator: Any, config: TrainingConfig, rows_per_step: int, ranks: int, bf16: bool
) -> Choice:
    """The Choice for a model with its adapter, measured on the first rows of the dataset, or as the config says.

    `rows_per_step` are those of one rank. Training goes on as if nothing had been measured: gradients are gone after
    it, random numbers are as before. Raises PartMissing where one row does not fit into memory.
    """
    length = len(dataset[0]["input_ids"])
    device = model.device

    def step(size: int) -> None:
        batch = batch_of(dataset, range(size), collator, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = model(**batch)["loss"]
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    memory: Memory = _GpuMemory(model) if device.type == "cuda" else _CpuMemory(ranks)
    model.train()
    try:
        with keep_random(device):
            if config.micro_batch != "auto":
                return _as_told(config.micro_batch, step, rows_per_step, length, memory)
            return find_micro_batch(
                step, rows_per_step, length, memory, budget=BUDGET[device.type], agree=lambda x: _largest(x, device)
            )
    finally:
        model.zero_grad()
        memory.reset()


def _as_told(
    size: int, step: Callable[[int], None], rows_per_step: int, sequence_length: int, memory: Memory
) -> Choice:
    times, fits = _time(step, size, 0.0, time.perf_counter, memory)
    if not fits:
        raise PartMissing(
            "out_of_memory", f"micro_batch: {size} rows of {sequence_length} tokens do not fit into memory; use auto"
        )
    trial = Trial(size, times[0], memory.peak(), size * sequence_length / times[0])
    return Choice(size, max(1, round(rows_per_step / size)), (trial,), "as the config says")


def _largest(figures: list[float], device: torch.device) -> list[float]:
    if not torch.distributed.is_initialized():
        return figures
    together = torch.tensor(figures, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(together, torch.distributed.ReduceOp.MAX)
    return together.tolist()


class _GpuMemory:
    foresee = False  # a GPU refuses, and no harm is done

    def __init__(self, model: Any):
        self._device = model.device
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        optimizer = 8 * sum(weights.numel() for weights in model.parameters() if weights.requires_grad)
        self.limit = SHARE["cuda"] * (free + torch.cuda.memory_allocated(self._device)) - optimizer

    def reset(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> float:
        return float(torch.cuda.max_memory_allocated(self._device))


class _CpuMemory:
    """Of this process, beyond what it has at rest."""

    foresee = True  # too much would make the machine swap

    def __init__(self, ranks: int):
        self.limit = SHARE["cpu"] * devices.free_memory() / ranks
        self._resting = float("inf")
        self.reset()

    def reset(self) -> None:
        # The peak becomes what is in use now; see proc(5). Where it cannot, that of earlier passes stays.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        # What loading the model left behind may be given back only later.
        self._resting = min(self._resting, self._most())

    def peak(self) -> float:
        most = self._most()
        self.reset()
        return most - self._resting

    def _most(self) -> float:
        return float(peak_memory())
