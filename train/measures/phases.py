"""Measure how long each phase of an optimizer step takes.

    enter("data") … enter("copy") … enter("forward") … ─take─▶ {"data": seconds, "copy": …}

A phase lasts until the next is entered. On a GPU it is the time until the GPU got through it. The marks are read once
per step, where the loss is read anyway.

`data` is not `data_wait`, the share of a step in which this rank waits for its own batches, by the clock of the CPU.
`data` also includes counting the trained tokens of a step and adding them up over all ranks, and with it the wait for a
rank whose batches are late. On a GPU it begins when the GPU has done all earlier work.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from train.machine.clock import Clock

if TYPE_CHECKING:
    import torch

# In the order of a step. `backward` includes waiting for the gradients of other ranks, `optimizer` clipping.
PHASES = ("data", "copy", "forward", "backward", "optimizer")
# In these a GPU computes.
COMPUTE = ("forward", "backward", "optimizer")


class Phases:
    """Marks of one optimizer step."""

    def __init__(self, device: torch.device):
        self._clock = Clock(device)
        self._marks: list[tuple[str, Any]] = []

    def enter(self, phase: str) -> None:
        """End the current phase and begin another; "" begins none."""
        self._marks.append((phase, self._clock.now()))

    def clear(self) -> None:
        self._marks = []

    def take(self) -> dict[str, float]:
        """Return the seconds of every phase since the last call; waits for a GPU to get through them."""
        seconds = dict.fromkeys(PHASES, 0.0)
        if self._marks:
            self._clock.wait_for(self._marks[-1][1])
        for (phase, start), (_, end) in pairwise(self._marks):
            if phase:
                seconds[phase] += self._clock.seconds(start, end)
        self.clear()
        return seconds
