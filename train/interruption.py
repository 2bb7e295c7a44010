"""Ctrl-C and SIGTERM: all ranks stop after the same step, with one complete checkpoint.

    signal ─▶ a flag ─on_step_end─▶ the highest flag of all ranks ─▶ save, stop ─▶ exit code 75

Before the first step there is nothing to save, and a signal ends the run at once. So does a second Ctrl-C. A rank whose
launcher was killed stops as if it had been told to: it would go on unseen.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback

from tasks.errors import PackError


class Interrupted(PackError):
    """The run was told to stop; the same command goes on from its newest checkpoint."""

    exit_code = 75


class Interruption(TrainerCallback):
    """Takes SIGTERM and SIGINT from its construction on; `stopped` says whether one ended the run."""

    def __init__(self) -> None:
        self.stopped = False
        self._asked = 0
        self._training = False
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked += 1
        if not self._training:
            raise Interrupted("interrupted before the first step; the same command starts again")
        if self._asked > 1 and number == signal.SIGINT:
            raise Interrupted("interrupted twice: stopped in the middle of a step; the same command goes on")

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._training = True

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        alone = self._launcher not in (None, os.getppid())
        asked = torch.tensor(self._asked + alone, device=args.device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(asked, op=torch.distributed.ReduceOp.MAX)
        if asked.item():
            self.stopped = state.global_step < state.max_steps
            control.should_save = control.should_training_stop = True
