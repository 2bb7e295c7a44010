"""Measure how long each phase of an optimizer step takes.

    enter("data") … enter("copy") … enter("forward") … ─take─▶ {"data": seconds, "copy": …}

A phase lasts until the next phase is entered. On a GPU, it lasts until the GPU has finished its work. The marks are
read once per step, when the loss is read anyway.

`data` differs from `data_wait`, the share of a step in which this rank waits for its own batches, by the clock of the
CPU. `data` also includes counting the trained tokens of a step and adding them up over all ranks. It therefore includes
waiting for a rank whose batches are late. On a GPU, `data` begins when the GPU has finished all earlier work.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from train.machine.clock import Clock

if TYPE_CHECKING:
    import torch

# In the order of a step. `backward` includes waiting for the gradients of other ranks, and `optimizer` clipping.
PHASES = ("data", "copy", "forward", "backward", "optimizer")
# Phases in which a GPU computes.
COMPUTE = ("forward", "backward", "optimizer")


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
        """Return the seconds of every phase since the last call.

        On a GPU, this waits until the phases have ended.
        """
        seconds = dict.fromkeys(PHASES, 0.0)
        if self._marks:
            self._clock.wait_for(self._marks[-1][1])
        for (phase, start), (_, end) in pairwise(self._marks):
            if phase:
                seconds[phase] += self._clock.seconds(start, end)
        self.clear()
        return seconds
