"""Measure times on the clock of a device.

    now() … now() ─seconds(start, end)─▶ the time between them

On a GPU, a time is an event in its queue, which costs microseconds. It can be read only after the GPU has passed it. On
a CPU, a time is a number.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Clock:
    """Clock of a device."""

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
