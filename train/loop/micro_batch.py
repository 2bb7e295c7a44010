"""Choose the number of rows per pass by measuring.

The largest number that fits in memory is often not the fastest. `activation_checkpointing: auto` is measured with it.

    rows of an optimizer step ─sizes─▶ 1, 2, 4, 8 … ─find_micro_batch─▶ a pass of each, timed ─▶ Choice
                                                     until memory is short, tokens/s fall, or time is up

A model of 23M parameters ran 6.7 passes of 8 rows per second, but only 1.2 passes of 32. On the other hand, 4-bit
weights are unpacked once per pass, so passes of one row are slow. Among the sizes within 3 % of the fastest, the
smallest is chosen, because it leaves memory free. The number of rows of an optimizer step does not depend on the size,
so the result of training depends on the machine only through rounding and the random numbers of dropout.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from accelerate.utils import convert_to_fp32

from packcorpus.tasks.core.errors import PackError, PartMissing
from packcorpus.tasks.core.printable import counted
from packcorpus.tasks.core.process import peak_memory
from packcorpus.train.config import TrainingConfig
from packcorpus.train.loop.run_folder import UNTIL, largest_divisor
from packcorpus.train.machine import devices
from packcorpus.train.machine.process import is_shortage
from packcorpus.train.machine.ranks import largest
from packcorpus.train.model.attention import batch_of, run_pass
from packcorpus.train.model.checkpointing import BY_SPEED, Checkpointing, described, usable, use_checkpointing
from packcorpus.train.model.isolation import NEAR
from packcorpus.train.model.qlora import is_sharded, keep_random

BUDGET = {"cpu": 30.0, "cuda": 120.0}  # seconds
SHARE_OF_TRIAL = 0.25
# Share of the free memory to use. A GPU loses some to fragmentation, and a CPU needs some for other processes.
SHARE = {"cpu": 0.8, "cuda": 0.95}

# Part of a row from whose memory that of a whole row is estimated.
PIECES = 8

# Function that returns the maximum of each figure over all ranks.
Agree = Callable[[list[float]], list[float]]


class Memory(Protocol):
    """Memory for passes, up to `limit`; if `cautious`, never exceeded in a trial."""

    limit: float
    cautious: bool

    def reset(self) -> None: ...

    def peak(self) -> float:
        """Return the most bytes in use since `reset`; call this only once."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Timed passes of one size: median seconds of a pass, and peak memory in bytes."""

    rows: int
    seconds: float
    memory: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Rows per pass on one device, passes per optimizer step, and the measurements."""

    micro_batch: int
    accumulation: int
    trials: tuple[Trial, ...]
    reason: str
    limit: float = math.inf  # bytes of memory
    is_short: bool = False  # whether more rows might be faster, but memory is short

    @property
    def chosen(self) -> Trial:
        return next(trial for trial in self.trials if trial.rows == self.micro_batch)

    def lines(self) -> list[str]:
        """Return the measurements as lines of a table."""
        table = [
            f"{trial.rows:>6} rows {trial.tokens_per_second:>12,.0f} tokens/s {trial.memory / 1e9:>8.2f} GB"
            + (" ◀" if trial.rows == self.micro_batch else "")
            for trial in self.trials
        ]
        return [*table, f"micro-batch {self.micro_batch} × accumulation {self.accumulation}: {self.reason}"]


def rows_per_step(tokens: float, tokens_per_row: float, rows: int) -> int:
    """Return the number of rows in a rank's step of about `tokens`, at most `rows`.

    The number is rounded to three significant bits, because 13 or 17 rows could be processed only one by one or all at
    once. This changes the tokens of a step by at most 13 %.
    """
    wanted = min(max(1, round(tokens / tokens_per_row)), rows)
    unit = 1 << max(0, wanted.bit_length() - 3)
    return min(rows, round(wanted / unit) * unit)


def sizes(rows: int) -> list[int]:
    """Return divisors of `rows`, each at least twice the previous divisor."""
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
    """Try sizes from 1 upward, and choose the fastest.

    `step(n)` runs a forward and backward pass of n rows to completion. Each size runs once to warm up and is then timed
    twice. `budget` bounds the timed passes in seconds; the first pass is not counted, because it may compile for
    minutes. All ranks use the same figures, the worst values over all ranks. Raises PartMissing if one row does
    not fit into memory.
    """
    spent = 0.0
    limit, budget = (-value for value in agree([-memory.limit, -budget]))
    trials: list[Trial] = []
    candidates = sizes(rows_per_step)
    reason, is_short = f"a step has {counted(candidates[-1], 'row')}", False
    for size in candidates:
        if trials and (stop := _reason_to_stop(trials, size, spent, budget)):
            reason = stop
            break
        if trials and (need := trials[-1].memory * size / trials[-1].rows) > limit and memory.cautious:
            reason, is_short = f"{size} rows would need {need / 1e9:.1f} of {limit / 1e9:.1f} GB", True
            break
        times, fits = _time(step, size, budget - spent, clock, memory)
        seconds, used, short, timed = agree([statistics.median(times), memory.peak(), float(not fits), sum(times)])
        spent += timed
        if short and not trials:
            raise _too_long(sequence_length)
        if short or (trials and used > limit):
            reason, is_short = f"{size} rows need more memory than available", True
            break
        trials.append(Trial(size, seconds, used, size * sequence_length / seconds))
    # The smallest size within 3 % of the highest tokens/s.
    best = max(trial.tokens_per_second for trial in trials)
    size = min(trial.rows for trial in trials if trial.tokens_per_second >= (1 - NEAR) * best)
    return Choice(size, rows_per_step // size, tuple(trials), reason, limit, is_short and size == trials[-1].rows)


def _too_long(sequence_length: int) -> PartMissing:
    return PartMissing(
        "out_of_memory",
        f"one row of {sequence_length} tokens does not fit into the memory of the device; pack shorter rows "
        "(sequence_length), set activation_checkpointing: true, or use a smaller base_model",
    )


def _reason_to_stop(trials: Sequence[Trial], size: int, spent: float, budget: float) -> str | None:
    # Costs are assumed to grow at most linearly.
    last, best = trials[-1], max(trial.tokens_per_second for trial in trials)
    if last.tokens_per_second < (1 - NEAR) * best:
        return f"tokens/s fall at {last.rows} rows"
    growth = size / last.rows
    if spent + 3 * last.seconds * growth > budget:
        return f"{size} rows would exceed the {budget:.0f} s allowed for measuring"
    return None


def _time(
    step: Callable[[int], None], size: int, budget: float, clock: Callable[[], float], memory: Memory
) -> tuple[list[float], bool]:
    """Time one or two passes after a warm-up: their seconds, and whether they fit."""
    times: list[float] = []
    memory.reset()
    while len(times) < 3 and sum(times[1:]) <= budget * (len(times) > 1):
        start = clock()
        try:
            step(size)
        except RuntimeError as error:
            if not is_shortage(error):
                raise
            return [clock() - start], False
        times.append(clock() - start)
    return times[1:], True


# -- measure a model ---------------------------------------------------------------------------------------------------


def micro_batch(
    model: Any,
    dataset: Any,
    collator: Any,
    config: TrainingConfig,
    rows_per_step: int,
    ranks: int,
    dtype: torch.dtype,
    *,
    checked: bool = False,
) -> Choice:
    """Choose the micro-batch of a model with an adapter, as it is.

    It is measured on the first rows, unless the config sets it. `rows_per_step` is for one rank. Training is not
    affected. With `checked`, a pass that may need more memory than there is raises PartMissing before it runs.
    """
    length = len(dataset[0]["input_ids"])
    device = model.device
    # As in training, accelerate converts all outputs of mixed precision, which takes memory for the logits.
    converted: Callable[[Any], Any] = convert_to_fp32 if dtype != torch.float32 else lambda outputs: outputs

    def step(size: int) -> None:
        run_pass(model, batch_of(dataset, range(size), collator, device), dtype, converted)

    memory: Memory = _GpuMemory(model) if device.type == "cuda" else _CpuMemory(devices.processes_here(ranks))
    model.train()
    try:
        with keep_random(device):
            if checked and memory.cautious:
                piece = [{name: column[: math.ceil(length / PIECES)] for name, column in dataset[0].items()}]
                run_pass(model, batch_of(piece, range(1), collator, device), dtype, converted)
                # The scores of eager attention grow with the square of the length.
                times = PIECES ** (2 if getattr(collator, "backend", "") == "eager" else 1)
                if largest([times * memory.peak() - memory.limit], device)[0] > 0:
                    raise _too_long(length)
            # Ranks that gather a model's weights must run the same passes, but the clocks of two ranks differ. If one
            # of them fails, the others wait in the pass.
            agree: Agree = list if is_sharded(model) else partial(largest, device=device)
            if config.micro_batch != "auto" or config.sharding == "full":
                return _fixed_size(config, step, rows_per_step, length, memory, agree)
            return find_micro_batch(step, rows_per_step, length, memory, budget=_budget(device.type), agree=agree)
    finally:
        model.zero_grad()
        memory.reset()


def _budget(device: str) -> float:
    """Return the seconds for measuring; a trial of `diagnose` has few."""
    until = os.environ.get(UNTIL)
    left = float(until.split()[1]) - time.monotonic() if until else math.inf
    return min(BUDGET[device], max(0.0, SHARE_OF_TRIAL * left))


def with_checkpointing(
    model: Any, wanted: Checkpointing | Literal["auto"], measure: Callable[[bool], Choice]
) -> tuple[Checkpointing, Choice, list[str]]:
    """Choose the activation checkpointing and the micro-batch together; adds notes.

    `measure(checked)` chooses the micro-batch; see `micro_batch`. The way with the least recomputation is used if its
    passes are not limited by memory, or else the fastest.
    """
    ways: Sequence[Checkpointing] = BY_SPEED if wanted == "auto" else (wanted,)
    found = [usable(model, way) for way in ways]
    ways, why, notes = list(dict.fromkeys(way for way, _ in found)), found[-1][1], []
    if why and len(ways) == 1:
        notes.append(f"activation_checkpointing: {described(ways[0])}, because {why}")
    tried: dict[Checkpointing, Choice] = {}
    for way in ways:
        use_checkpointing(model, way)
        is_last = way == ways[-1]
        try:
            choice = measure(not is_last)
        except PackError as error:
            if (is_last and not tried) or error.reason != "out_of_memory":
                raise
            continue
        if is_last or choice.chosen.memory <= choice.limit:
            tried[way] = choice
            if not choice.is_short:
                break
    most = max(choice.chosen.tokens_per_second for choice in tried.values())
    best = next(way for way, choice in tried.items() if choice.chosen.tokens_per_second >= (1 - NEAR) * most)
    use_checkpointing(model, best)
    if wanted == "auto" and len(ways) > 1:
        speeds = (f"{described(way)}: {choice.chosen.tokens_per_second:,.0f} tokens/s" for way, choice in tried.items())
        notes.append(f"activation_checkpointing: {described(best)} ({', '.join(speeds)})")
    return best, tried[best], notes


def _fixed_size(
    config: TrainingConfig,
    step: Callable[[int], None],
    rows_per_step: int,
    sequence_length: int,
    memory: Memory,
    agree: Agree,
) -> Choice:
    wanted = 1 if config.micro_batch == "auto" else config.micro_batch
    size = largest_divisor(rows_per_step, wanted)
    times, fits = _time(step, size, 0.0, time.perf_counter, memory)
    seconds, used, short, limit = agree([statistics.median(times), memory.peak(), float(not fits), -memory.limit])
    if short:
        if size == 1:
            raise _too_long(sequence_length)
        fix = "lower it" if config.sharding == "full" else "lower it, or set it to auto"
        raise PartMissing(
            "out_of_memory",
            f"micro_batch: {wanted}: a pass of {size} rows of {sequence_length} tokens does not fit into the memory of "
            f"the device; {fix}",
        )
    trial = Trial(size, seconds, used, size * sequence_length / seconds)
    reason = f"set by micro_batch: {wanted}"
    if config.micro_batch == "auto":
        reason = "with sharding: full, micro_batch: auto is 1; a larger micro_batch may be faster"
    return Choice(size, rows_per_step // size, (trial,), reason, -limit)


class _GpuMemory:
    cautious = False  # a pass that is too large only raises an error

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
    """Memory of this process in addition to its use at rest."""

    cautious = True  # too much would make the machine swap

    def __init__(self, ranks: int):
        self.limit = SHARE["cpu"] * devices.free_memory() / ranks
        self._resting = float("inf")
        self.reset()

    def reset(self) -> None:
        # Resets the peak to the current use; see proc(5). If that fails, the peak of earlier passes remains.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        # Memory that loading the model left behind may be released only later.
        self._resting = min(self._resting, float(peak_memory()))

    def peak(self) -> float:
        most = float(peak_memory())
        self.reset()
        return most - self._resting
