"""Check before torch is loaded that the evaluation settings can have an effect."""

from __future__ import annotations

from collections.abc import Mapping

from tasks.core.errors import DataError, UsageError
from train.config import TrainingConfig
from train.data.corpus import Corpus


def check_evaluation(config: TrainingConfig, corpus: Corpus) -> None:
    """Check that settings have the validation split and `eval_every` that they need.

    Raises DataError if the validation split is missing, UsageError if `eval_every` is missing.
    """
    deciding = {"keep: best": config.keep == "best", f"early_stopping: {config.early_stopping}": config.early_stopping}
    asked = {
        **deciding,
        f"eval_every: {config.eval_every}": config.eval_every,
        f"samples: {config.samples}": config.samples,
    }
    if (setting := _first(asked)) and not corpus.rows("validation"):
        raise DataError(
            "no_validation",
            f"{setting} requires a validation split, which the corpus {corpus.name} does not have; add a line such as "
            "`validation: 0.05` to the corpus config and pack again, or leave the setting out",
        )
    if (setting := _first(deciding)) and not config.eval_every:
        raise UsageError(
            "needs_eval_every",
            f"{setting} compares evaluations, but there is only one, at the end; set the steps between evaluations, "
            "such as eval_every: 50",
        )


def _first(settings: Mapping[str, object]) -> str | None:
    return next((name for name, is_set in settings.items() if is_set), None)
