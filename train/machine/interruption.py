"""Ctrl-C and SIGTERM: all ranks stop after the same step, with one complete checkpoint.

    signal ─▶ a flag ─on_step_end─▶ the highest flag of all ranks ─▶ save, stop ─▶ exit code 75

Before the first step and after the last there is nothing to save, and a signal ends the run at once. So does a second
Ctrl-C, where there is one process. A rank whose launcher was killed stops as if it had been told to: it would go on
unseen.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback

from tasks.core.errors import Interrupted
from train.machine.signals import NUMBERS, end_at_once, is_rank


class Interruption(TrainerCallback):
    """Takes SIGTERM and SIGINT from its construction on; `stopped` says whether one ended the run."""

    def __init__(self) -> None:
        self.stopped = False
        self._asked = self._pressed = 0  # signals of any kind, and Ctrl-C
        self._training = False
        self._launcher = os.getppid() if is_rank() else None
        for number in NUMBERS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._training:
            if not self.stopped:  # else it is about to end, and says after which step
                end_at_once(number, frame)
            return
        self._asked += 1
        self._pressed += number == signal.SIGINT
        if self._pressed == 2:  # once: another one would come from where the first is being told
            raise Interrupted(
                "interrupted", "interrupted twice: stopped in the middle of a step; the same command goes on"
            )
        if self._asked == 1 and os.environ.get("RANK", "0") == "0":
            print("\nstopping after this step, with a checkpoint", file=sys.stderr, flush=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._training = True

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._training = False

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        alone = self._launcher not in (None, os.getppid())
        asked = torch.tensor(self._asked + alone, device=args.device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(asked, op=torch.distributed.ReduceOp.MAX)
        if asked.item():
            self.stopped = state.global_step < state.max_steps
            control.should_save = control.should_training_stop = True
