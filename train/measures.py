"""Measure the phases of a step, and judge the figures of a run.

    enter("data") … enter("copy") … enter("forward") … ─take─▶ {"data": seconds, "copy": …}
    {"data": 0.11, "steps": 40, …} ─advise─▶ [Advice("time spent waiting for data", "11 %", "5 % or less", …), …]

A phase lasts until the next phase is entered. On a GPU, it lasts until the GPU has finished its work. The marks are
read once per step, when the loss is read anyway.

`data` differs from `data_wait`, the share of a step in which this rank waits for its own batches, by the clock of the
CPU. `data` also includes counting the trained tokens of a step and adding them up over all ranks. It therefore includes
waiting for a rank whose batches are late. On a GPU, `data` begins when the GPU has finished all earlier work.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# In the order of a step. `backward` includes waiting for the gradients of other ranks, and `optimizer` clipping.
PHASES = ("data", "copy", "forward", "backward", "optimizer")
# Phases in which a GPU computes.
COMPUTE = ("forward", "backward", "optimizer")


class Clock:
    """Clock of a device."""

    # On a GPU, a time is an event in its queue, which can be read only after the GPU has passed it.

    def __init__(self, device: torch.device):
        self._is_gpu = device.type == "cuda"
        if self._is_gpu:
            from torch.cuda import Event

            self._event = Event

    def now(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        event = self._event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, moment: Any) -> bool:
        return not self._is_gpu or moment.query()

    def wait_for(self, moment: Any) -> None:
        """Wait until a GPU has passed a time."""
        if self._is_gpu:
            moment.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two times that have passed."""
        return float(start.elapsed_time(end) / 1000 if self._is_gpu else end - start)


class Phases:
    """Marks of one optimizer step."""

    def __init__(self, device: torch.device):
        self._clock = Clock(device)
        self._marks: list[tuple[str, Any]] = []

    def enter(self, phase: str) -> None:
        """End the current phase and begin `phase`, or none if it is ""."""
        self._marks.append((phase, self._clock.now()))

    def clear(self) -> None:
        self._marks = []

    def take(self) -> dict[str, float]:
        """Return the seconds of every phase since the last call; waits for the GPU."""
        seconds = dict.fromkeys(PHASES, 0.0)
        if self._marks:
            self._clock.wait_for(self._marks[-1][1])
        for (phase, start), (_, end) in pairwise(self._marks):
            if phase:
                seconds[phase] += self._clock.seconds(start, end)
        self.clear()
        return seconds


# -- advice ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rule:
    """Lowest or highest value of a figure, and the action if the figure misses it."""

    figure: str
    name: str
    action: str
    at_least: float | None = None
    at_most: float | None = None
    is_share: bool = True

    def shown(self, value: float) -> str:
        return f"{100 * value:.3g} %" if self.is_share else f"{value:,.0f}"


@dataclass(frozen=True, slots=True)
class Advice:
    """Figure that misses its target."""

    name: str
    found: str
    target: str
    action: str

    def __str__(self) -> str:
        return f"{self.name}: {self.found}, should be {self.target}; {self.action}"


RULES = (
    Rule("data", "time spent waiting for data", "set load: memory, or loader_workers: 2 if rows are mapped",
         at_most=0.05),
    Rule("gpu", "time in the model and the optimizer", "batches are loaded or copied too slowly; set load: memory",
         at_least=0.85),
    Rule("optimizer", "time in the optimizer", "raise tokens_per_step, so that there are fewer steps",
         at_most=0.10),
    Rule("padding", "padding in the rows", "pack the conversations (packing: true), or use another sequence_length",
         at_most=0.03),
    Rule("memory_high", "memory of the GPU", "little is left: one longer batch may not fit; halve micro_batch, or set "
         "fused_loss: true", at_most=0.95),
    Rule("checkpointed", "memory of the GPU", "set activation_checkpointing: false, which is faster if it fits",
         at_least=0.70),
    Rule("small_batch", "memory of the GPU", "raise micro_batch, or set it to auto", at_least=0.70),
    Rule("steps", "optimizer steps", "a model learns little in so few steps; raise max_steps or epochs, or "
         "lower tokens_per_step", at_least=100, is_share=False),
    Rule("share_in_4_bits", "frozen weights in 4 bits", "the other weights, such as experts and embeddings, take "
         "four times the memory", at_least=0.80),
    Rule("wsl", "Linux inside Windows (WSL)", "keep corpora in the Linux file system (~), not below "
         "/mnt/c, and give WSL more memory in .wslconfig",
         at_most=0, is_share=False),
    Rule("workers", "loader workers for rows in memory", "set loader_workers: 0; a worker would only copy the rows "
         "again", at_most=0, is_share=False),
)  # fmt: skip


def advise(figures: Mapping[str, float], whose: Mapping[str, str] | None = None) -> list[Advice]:
    """Return advice for the figures that miss their targets, in the order of RULES."""
    # `whose` maps a figure of a single rank to a suffix for its name.
    found = []
    for rule in RULES:
        value, low, high = figures.get(rule.figure), rule.at_least, rule.at_most
        if value is None:
            continue
        name = rule.name + (whose or {}).get(rule.figure, "")
        if low is not None and value < low:
            found.append(Advice(name, rule.shown(value), f"{rule.shown(low)} or more", rule.action))
        if high is not None and value > high:
            found.append(Advice(name, rule.shown(value), f"{rule.shown(high)} or less", rule.action))
    return found
