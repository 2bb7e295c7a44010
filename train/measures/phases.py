"""Measure how long each phase of an optimizer step takes.

    enter("data") … enter("copy") … enter("forward") … ─take─▶ {"data": seconds, "copy": …}

A phase lasts until the next is entered. On a GPU the marks are events in its queue, which cost microseconds: a phase
is the time until the GPU got through it. They are read once per step, where the loss is read anyway. On a CPU the marks
are times.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# In the order of a step. `backward` includes waiting for the gradients of other ranks, `optimizer` clipping.
PHASES = ("data", "copy", "forward", "backward", "optimizer")
# In these a GPU computes.
COMPUTE = ("forward", "backward", "optimizer")


class Phases:
    """Marks of one optimizer step."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            from torch.cuda import Event

            self._event = Event
        self._marks: list[tuple[str, Any]] = []

    def enter(self, phase: str) -> None:
        """End the current phase and begin another; "" begins none."""
        mark: Any = time.perf_counter()
        if self._on_gpu:
            mark = self._event(enable_timing=True)
            mark.record()
        self._marks.append((phase, mark))

    def clear(self) -> None:
        self._marks = []

    def take(self) -> dict[str, float]:
        """Return the seconds of every phase since the last call; waits for a GPU to get through them."""
        seconds = dict.fromkeys(PHASES, 0.0)
        if self._on_gpu and self._marks:
            self._marks[-1][1].synchronize()
        for (phase, start), (_, end) in pairwise(self._marks):
            if phase:
                seconds[phase] += start.elapsed_time(end) / 1000 if self._on_gpu else end - start
        self.clear()
        return seconds
