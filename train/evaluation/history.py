"""Read the evaluations of a run from its log, and find the best.

    trainer_state.json, sealed with each checkpoint ─history─▶ History(last, best, stale)

The log is the only state. A resumed run reads it from its checkpoint. Every rank has the same log, because the losses
are summed over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tasks.core.printable import counted
from train.config import TrainingConfig


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Validation loss and token accuracy after an optimizer step.

    Token accuracy is the share of trained tokens that the model predicts.
    """

    step: int
    loss: float
    token_accuracy: float | None  # None in the log of an earlier version

    def as_object(self) -> dict[str, Any]:
        return {"step": self.step, "validation_loss": self.loss, "token_accuracy": self.token_accuracy}


@dataclass(frozen=True, slots=True)
class History:
    """Evaluations of a run so far."""

    last: Evaluation | None
    best: Evaluation | None  # the first with the lowest loss; None if no loss is a number
    stale: int  # evaluations since the best

    def is_over(self, config: TrainingConfig) -> bool:
        """Return whether `early_stopping` ends the run here."""
        return config.early_stopping is not None and self.stale >= config.early_stopping

    def kept(self, config: TrainingConfig) -> Evaluation | None:
        """Return the evaluation of the adapter to write."""
        return self.best or self.last if config.keep == "best" else self.last


def history(log: Iterable[dict[str, Any]]) -> History:
    """Read the evaluations of a log."""
    last, best, stale = None, None, 0
    for entry in log:
        if "eval_loss" not in entry:
            continue
        last = Evaluation(entry["step"], entry["eval_loss"], entry.get("eval_token_accuracy"))
        if last.loss < (best.loss if best else float("inf")):  # NaN is not lower
            best, stale = last, 0
        else:
            stale += 1
    return History(last, best, stale)


def outcome(log: list[dict[str, Any]], config: TrainingConfig, is_complete: bool) -> dict[str, Any]:
    """Return the results and decisions of evaluation, for training.json.

    `is_complete` is whether the last step was run.
    """
    found = history(log)
    kept = found.kept(config)
    stopped = {"step": found.last.step, "evaluations": found.stale} if found.last and found.is_over(config) else None
    return {
        "validation_loss": kept.loss if kept else None,
        "token_accuracy": kept.token_accuracy if kept else None,
        "kept_step": kept.step if kept else max((entry["step"] for entry in log), default=0),
        "best": found.best.as_object() if found.best else None,
        "stopped_early": None if is_complete else stopped,
    }


def described(config: TrainingConfig, rows: int) -> str:
    """Describe when the validation split is evaluated, and which decisions follow."""
    if not rows:
        return "none: the corpus has no validation split"
    text = f"every {counted(config.eval_every, 'step')}" if config.eval_every else "at the end"
    text += f", on {counted(rows, 'row')}"
    text += "; the adapter of the lowest loss is kept" if config.keep == "best" else ""
    if config.early_stopping:
        text += f"; stops after {counted(config.early_stopping, 'evaluation')} without a lower loss"
    return text + (f"; generates {counted(config.samples, 'answer')} each time" if config.samples else "")


def unused(config: TrainingConfig, steps: int) -> str | None:
    """Return a warning if only the last step is evaluated despite `eval_every`."""
    if not (config.eval_every and config.eval_every >= steps):
        return None
    decides = config.keep == "best" or config.early_stopping
    return (
        f"eval_every is {config.eval_every}, but there are only {counted(steps, 'step')}, so only the last step is "
        f"evaluated{' and nothing is compared' if decides else ''}. Lower eval_every"
    )
