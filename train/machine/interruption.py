"""Stop all ranks after the same step on Ctrl-C or SIGTERM, with a checkpoint.

    signal ─▶ a flag ─on_step_end─▶ the highest flag of all ranks ─▶ save, stop ─▶ exit code 75

Before the first step and after the last there is nothing to save, and a signal ends the run at once. With one process,
a second Ctrl-C also ends the run at once. A rank whose launcher was killed stops as if it had received a signal,
because it would otherwise keep running unnoticed.
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
from train.machine.signals import NUMBERS, SignalGuard, is_rank


class Interruption(TrainerCallback):
    """Callback that handles SIGTERM and SIGINT.

    `stopped` is True if one of them ended the run.
    """

    def __init__(self, guard: SignalGuard) -> None:
        self.stopped = False
        self._guard = guard
        self._signals = self._presses = 0  # signals of any kind, and Ctrl-C alone
        self._training = False
        self._launcher = os.getppid() if is_rank() else None
        for number in NUMBERS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._training:
            if not self.stopped:  # a stopped run is about to end, and reports its last step
                self._guard.end_at_once(number, frame)
            return
        self._signals += 1
        self._presses += number == signal.SIGINT
        if self._presses == 2:  # not at a third, which would interrupt the report of this error
            raise Interrupted(
                "interrupted", "interrupted twice: stopped in the middle of a step; run the same command to resume"
            )
        if self._signals == 1 and os.environ.get("LOCAL_RANK", "0") == "0":
            print("\nstopping after this step, with a checkpoint", file=sys.stderr, flush=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._training = self._guard.in_steps = True

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._training = False
        self._guard.in_steps = self.stopped  # a stopped run is about to end, and reports its last step

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        orphaned = self._launcher not in (None, os.getppid())
        signals = torch.tensor(self._signals + orphaned, device=args.device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(signals, op=torch.distributed.ReduceOp.MAX)
        if signals.item():
            self.stopped = state.global_step < state.max_steps
            control.should_save = control.should_training_stop = True
