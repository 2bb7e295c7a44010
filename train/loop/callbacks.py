"""Callbacks of the Trainer: progress, signals, the speed of each rank, traces.

signal ─▶ a flag ─on_step_end─▶ the highest flag of all ranks ─▶ save, stop ─▶ exit code 75
time of a trial ─on_step_end─▶ no rank has time for another step ─▶ stop, with the results of these steps

forward: from the model's call to its return        ┐ of every pass: seconds and tokens of this rank
backward: from the loss to the rank's last gradient ┘
  ─gather─▶ one RankSpeed per rank ─slow_ranks─▶ a warning

steps 1 and 2: not traced ─▶ steps 3 … N + 2 ─▶ trace.json.gz, for ui.perfetto.dev or chrome://tracing
"""

from __future__ import annotations

import os
import re
import signal
import socket
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import TrainerCallback

from packcorpus.tasks.core.errors import Interrupted
from packcorpus.tasks.core.printable import counted, duration
from packcorpus.train.loop.run_folder import ENOUGH
from packcorpus.train.machine.process import NUMBERS, SignalGuard, is_rank
from packcorpus.train.machine.ranks import gather
from packcorpus.train.measures import Clock, si

LINE_EVERY = 10.0  # seconds between two lines if the output is not a terminal


class ProgressLine(TrainerCallback):
    """Callback that shows loss, speed, data wait, memory, and MFU of the last step."""

    def __init__(self, console: Console):
        self._console = console
        self._printed_at = 0.0
        self._recent: deque[float] = deque(maxlen=20)  # seconds per step
        self._bar: Progress | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if not self._console.is_terminal:
            return
        columns = (BarColumn(16), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task("…", total=state.max_steps, completed=state.global_step)
        self._bar.start()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **others: Any) -> None:
        if "step_seconds" in logs:
            self._recent.append(logs["step_seconds"])
            line = describe(logs)
            now = time.monotonic()
            if self._bar:
                self._bar.update(self._task, completed=state.global_step, description=line)
            elif now - self._printed_at > LINE_EVERY or state.global_step in (1, state.max_steps):
                self._printed_at = now
                left = (state.max_steps - state.global_step) * statistics.fmean(self._recent)
                self._say(f"step {state.global_step}/{state.max_steps}  {line}  {duration(left)} left")
        elif "eval_loss" in logs:
            line = f"validation loss {logs['eval_loss']:.4f}{accuracy_of(logs.get('eval_token_accuracy'))}"
            self._say(f"step {state.global_step}/{state.max_steps}  {line}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)

    def on_train_end(self, *_: Any, **others: Any) -> None:
        """Remove the bar; after an error, the run calls this itself."""
        if self._bar:
            self._bar.stop()
            self._bar = None


def accuracy_of(share: float | None) -> str:
    return f", token accuracy {100 * share:.1f} %" if share is not None else ""


def describe(logs: dict[str, float]) -> str:
    """Describe one step in one line."""
    rates = "/".join(
        si(logs[f"{which}tokens_per_second"])
        for which in ("", "non_pad_", "trained_")
        if f"{which}tokens_per_second" in logs
    )
    mfu = f"  MFU {100 * logs['mfu']:.1f} %" if "mfu" in logs else ""
    skipped = " (skipped)" * bool(logs.get("skipped"))
    return (
        f"loss {logs['loss']:.4f}{skipped}  {rates} tokens/s (all/non-pad/trained)  "
        f"wait {100 * logs['data_wait']:.2f} %  {logs['memory_bytes'] / 1e9:.1f} GB{mfu}"
    )


class Interruption(TrainerCallback):
    """Callback that stops all ranks after the same step on a signal.

    `stopped` is True if one of them ended the run. Before the first step and after the last there is nothing to save,
    and a signal ends the run at once. With one process, a second Ctrl-C also ends the run at once. A rank whose
    launcher was killed stops as if it had received a signal, because it would otherwise keep running unnoticed.
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


class Deadline(TrainerCallback):
    """Callback that ends a trial of `diagnose` if there is no time for another step."""

    def __init__(self, until: str) -> None:
        self._soon, self._latest = map(float, until.split())  # see UNTIL

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._started = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        now = time.monotonic()
        until = self._soon if state.global_step >= ENOUGH else self._latest
        over = torch.tensor(2 * now - self._started - until, device=args.device)
        if torch.distributed.is_initialized():  # all ranks make the same steps
            torch.distributed.all_reduce(over, op=torch.distributed.ReduceOp.MAX)
        control.should_training_stop = control.should_training_stop or over.item() > 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        # On a loaded machine, a step may take far longer than those before. Ranks would wait for each other in a pass.
        if state.global_step and not torch.distributed.is_initialized() and time.monotonic() > self._latest:
            control.should_training_stop = True


# A rank below this share of the median speed is reported.
SLOW = 0.95
# Passes of each rank that are not measured, rounded up to steps, because the first passes load libraries and kernels.
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class RankSpeed:
    """Speed of a rank, without the time that it waits for other ranks."""

    # Tokens include padding. The step is an optimizer step. `data_wait` is the share of time waiting for own batches.

    rank: int
    host: str
    device: str
    steps: int
    tokens_per_second: float | None  # None if too few passes were measured, or the model is sharded
    step_seconds: float | None
    data_wait: float


class RankClock(TrainerCallback):
    """Callback that measures the passes of this rank, without its waiting.

    All ranks finish a step at the same time, because an early rank waits in the exchange of the gradients. A rank
    starts to wait once its last gradient is ready, so its clock stops there. On a GPU, times are read after the GPU has
    passed them, so that nothing waits for them.
    """

    def __init__(self, device: torch.device, name: str):
        self._clock = Clock(device)
        self._device = f"{device}, {name}" if device.type == "cuda" else name
        self._handles: list[Any] = []
        self._spans: list[tuple[Any, Any, int]] = []  # (start, end, tokens) that have not been read
        self._start: Any = None
        self._last_gradient: Any = None
        self._backward: Any = None
        self._passes = self._steps = self.tokens = 0
        self._is_warm = False
        self.seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        model = getattr(model, "module", model)  # within DistributedDataParallel
        if getattr(model, "shards_frozen_weights", False):
            return  # its ranks wait for each other in every layer, so that none has its own speed
        trained = [(name, weights) for name, weights in model.named_parameters() if weights.requires_grad]
        layers = [int(found[1]) if (found := re.search(r"\.(\d+)\.", name)) else -1 for name, _ in trained]
        # The gradients of the first layer come last.
        last = [weights for (_, weights), layer in zip(trained, layers, strict=True) if layer == min(layers)]
        self._handles = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward),
            *(weights.register_post_accumulate_grad_hook(self._after_gradient) for weights in last),
        ]

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._end_pass()
        self._steps += self._is_warm
        self._is_warm = self._is_warm or self._passes >= WARM_UP
        self._read()

    def on_substep_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._end_pass()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_forward(self, model: Any, args: Any, batch: dict[str, Any]) -> None:
        self._start = self._clock.now()
        self._tokens = batch["input_ids"].numel()

    def _after_forward(self, model: Any, args: Any, out: Any) -> None:
        self._forward = (self._start, self._clock.now())
        # A result is the loss, or an input of TRL's loss. The gradient of one is the first of the backward pass.
        for result in out.values():
            if torch.is_tensor(result) and result.requires_grad:
                result.register_hook(self._before_backward)

    def _before_backward(self, gradient: torch.Tensor) -> None:
        if self._backward is None:
            self._backward = self._clock.now()

    def _after_gradient(self, weights: torch.Tensor) -> None:
        self._last_gradient = self._clock.now()

    def _end_pass(self) -> None:
        if self._backward is None or self._last_gradient is None:
            return
        self._passes += 1
        if self._is_warm:
            self._spans += [(*self._forward, self._tokens), (self._backward, self._last_gradient, 0)]
        self._backward = self._last_gradient = None

    def _read(self, wait: bool = False) -> None:
        unread = []
        for start, end, tokens in self._spans:
            if wait:
                self._clock.wait_for(end)
            if self._clock.has_passed(end):
                self.seconds += self._clock.seconds(start, end)
                self.tokens += tokens
            else:
                unread.append((start, end, tokens))
        self._spans = unread

    def speeds(self, rank: int, data_wait: float) -> list[RankSpeed]:
        """Return the speed of every rank; all ranks call this after the last step."""
        self._read(wait=True)
        per_second = round(self.tokens / self.seconds, 3) if self.seconds else None
        step = round(self.seconds / self._steps, 6) if self._steps else None
        return gather(RankSpeed(rank, socket.gethostname(), self._device, self._steps, per_second, step, data_wait))


def slow_ranks(speeds: Sequence[RankSpeed]) -> str | None:
    """Return a warning about ranks that are slower than the median, or None."""
    known = {speed: speed.tokens_per_second for speed in speeds if speed.tokens_per_second}
    if len(known) < 2:
        return None
    median = statistics.median(known.values())
    slow = [
        f"rank {speed.rank} ({speed.host}, {speed.device}) by {100 * (1 - rate / median):.0f} %"
        for speed, rate in known.items()
        if rate < SLOW * median
    ]
    text = (
        f"{counted(len(slow), 'rank')} computed more slowly than the median of {median:,.0f} tokens/s, and the others "
        f"waited: {', '.join(slow)}. See whether other processes run there, and whether the device is throttled"
    )
    return text if slow else None


UNTRACED = 2  # first steps, which allocate memory and choose kernels
TRACE = "trace.json.gz"


class Profile(TrainerCallback):
    """Callback that writes a trace of `steps` steps of torch's profiler."""

    # The trace is written between two steps and counts as part of neither.

    def __init__(self, steps: int, folder: Path):
        self._steps, self._folder = steps, folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        # A short run is traced from its start.
        untraced = min(UNTRACED, max(0, state.max_steps - state.global_step - self._steps))
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile = profile(
            activities=kinds,
            schedule=schedule(skip_first=untraced, wait=0, warmup=0, active=self._steps, repeat=1),
            on_trace_ready=lambda traced: traced.export_chrome_trace(str(self._folder / TRACE)),
        )
        self._profile.start()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        if "loss" in (logs or {}):  # after the measurements of a step, and not of an evaluation
            self._profile.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._profile.stop()
