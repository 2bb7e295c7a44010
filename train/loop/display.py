"""Print the output of a training run.

    before   a table of the settings that are actually in effect, and warnings
    during   one line that is redrawn; if the output is not a terminal, a line every few seconds
    after    the result, in two lines

All output goes to standard error. Standard output has only the path of the record.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from transformers import TrainerCallback

from tasks.core.printable import counted, duration
from train.evaluation import Sample, lines_of

LINE_EVERY = 10.0  # seconds between two lines if the output is not a terminal


def open_console(quiet: bool = False) -> Console:
    """Open standard error, wide enough for a table if it is not a terminal."""
    return Console(stderr=True, highlight=False, quiet=quiet, width=None if sys.stderr.isatty() else 110)


def say(console: Console, line: str, style: str | None = None) -> None:
    """Print a line that is neither markup nor wrapped."""
    console.print(line, style=style, markup=False, soft_wrap=True)


def show_effect(
    console: Console, notes: list[str], table: list[str], effect: dict[str, str], warnings: list[str]
) -> None:
    """Print notes, measurements, the settings in effect, and warnings."""
    for line in (*notes, *table):
        say(console, line, "dim")
    width = 2 + max(map(len, effect))
    for name, text in effect.items():
        console.print(Text.assemble((f"{name:<{width}}", "bold"), text), soft_wrap=not console.is_terminal)
    for warning in warnings:
        say(console, f"warning: {warning}", "yellow")


def show_result(
    console: Console, result: dict[str, Any], samples: list[Sample], folder: Path, tokenizer: bool, warning: str | None
) -> None:
    """Print the result of a run, its phases, the decisions of evaluation, and samples."""
    of_steps = f" (means of {counted(result['loss_steps'], 'step')})" if result["loss_steps"] > 1 else ""
    phases = ", ".join(f"{name} {100 * share:.3g} %" for name, share in result["phases"].items())
    validation = ""
    if result["validation_loss"] is not None:
        validation = f", validation {result['validation_loss']:.4f}{_accuracy(result['token_accuracy'])}"
        validation += f" with the adapter of step {result['kept_step']}" * (result["kept_step"] < result["steps"])
    lines = [
        f"trained {counted(result['steps'], 'step')} in {duration(result['seconds'])}: "
        f"loss {result['first_loss']:.4f} → {result['last_loss']:.4f}{of_steps}{validation}; "
        f"{100 * result['data_wait']:.2f} % of the time spent waiting for data",
        f"a step: {phases}",
    ]
    if stopped := result["stopped_early"]:
        best, without = result["best"], counted(stopped["evaluations"], "evaluation")
        lowest = f"; best {best['validation_loss']:.4f} after step {best['step']}" if best else ""
        lines.append(f"stopped early after step {stopped['step']}: {without} without a lower validation loss{lowest}")
    lines += lines_of(samples)
    if result["skipped_steps"]:
        lines.append(
            f"{counted(result['skipped_steps'], 'step')} skipped, because gradients exceeded the range of fp16; the "
            "loss scale was then reduced"
        )
    for line in lines:
        say(console, line)
    if warning:
        say(console, f"warning: {warning}", "yellow")
    files = "adapter, tokenizer" if tokenizer else "adapter (the corpus has no tokenizer)"
    say(console, f"{files}, and training.svg: {folder}")


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
                left = (state.max_steps - state.global_step) * fmean(self._recent)
                say(self._console, f"step {state.global_step}/{state.max_steps}  {line}  {duration(left)} left")
        elif "eval_loss" in logs:
            accuracy = _accuracy(logs.get("eval_token_accuracy"))
            loss = f"validation loss {logs['eval_loss']:.4f}{accuracy}"
            say(self._console, f"step {state.global_step}/{state.max_steps}  {loss}")

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.close()

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None


def _accuracy(share: float | None) -> str:
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


def si(value: float) -> str:
    """Format a number with an SI prefix: 1234 → 1.23 k."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"
