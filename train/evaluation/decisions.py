"""Save a new best adapter, or stop the run, after each evaluation.

    on_evaluate ─history─▶ lower than all before: save (keep: best)
                          ─▶ `early_stopping` evaluations without a lower loss: save and stop

All ranks have the same log, so they decide the same. The last step of a run is evaluated before its checkpoint is
written. The checkpoint therefore has all evaluations, and an experiment tracker receives them before it is closed.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from train.config import TrainingConfig
from train.evaluation.history import history


class Decisions(TrainerCallback):
    """Callback that saves and stops by the validation loss.

    If there are validation rows, it also evaluates the last step.
    """

    def __init__(self, config: TrainingConfig, has_rows: bool):
        self._config, self._has_rows = config, has_rows

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._has_rows and state.global_step >= state.max_steps:
            control.should_evaluate = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        found = history(state.log_history)
        if self._config.keep == "best" and not found.stale:
            control.should_save = True
        if found.is_over(self._config):
            control.should_save = control.should_training_stop = True
