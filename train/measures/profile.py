"""Trace some steps with torch's profiler.

    steps 1 and 2: not traced ─▶ steps 3 … N + 2 ─▶ trace.json.gz, for ui.perfetto.dev or chrome://tracing

The first steps allocate memory and choose kernels. Tracing slows down the steps that it covers. Writing the trace takes
seconds, so this happens between two steps and counts as part of neither.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import TrainerCallback

UNTRACED = 2
TRACE = "trace.json.gz"


class Profile(TrainerCallback):
    """Callback that writes a trace of `steps` steps to `folder`."""

    def __init__(self, steps: int, folder: Path):
        self._steps, self._folder = steps, folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        # A short run is traced from its start.
        untraced = min(UNTRACED, max(0, state.max_steps - state.global_step - self._steps))
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile = profile(
            activities=kinds,
            schedule=schedule(skip_first=untraced, wait=0, warmup=0, active=self._steps, repeat=1),
            on_trace_ready=self._write,
        )
        self._profile.start()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        if "loss" in (logs or {}):  # after the measurements of a step, and not of an evaluation
            self._profile.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._profile.stop()

    def _write(self, found: Any) -> None:
        found.export_chrome_trace(str(self._folder / TRACE))
