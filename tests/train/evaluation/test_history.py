"""The log of a run says which evaluation is the best, and whether the run is over."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packcorpus.train.config import TrainingConfig
from packcorpus.train.evaluation import described, history, outcome, unused

LOSSES = st.lists(st.sampled_from([1.0, 2.0, 2.5, 3.0, math.nan, math.inf]), max_size=12)


def log_of(losses: list[float], every: int = 5) -> list[dict[str, Any]]:
    """Return the log of a run: steps, and an evaluation after each `every` of them."""
    log: list[dict[str, Any]] = []
    for number, loss in enumerate(losses):
        log += [{"step": number * every + step, "loss": 0.0, "step_seconds": 1.0} for step in range(1, every + 1)]
        log.append({"step": (number + 1) * every, "eval_loss": loss, "eval_token_accuracy": 0.5})
    return log


@given(LOSSES)
def test_the_best_is_the_first_of_the_lowest_losses(losses: list[float]) -> None:
    found = history(log_of(losses))
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        assert found.best is None
        assert found.stale == len(losses)
    else:
        first = losses.index(min(finite))
        assert found.best is not None
        assert (found.best.step, found.best.loss) == (5 * (first + 1), min(finite))
        assert found.stale == len(losses) - 1 - first


@given(LOSSES, st.integers(1, 4))
def test_a_run_is_over_after_so_many_evaluations_without_a_lower_loss(losses: list[float], patience: int) -> None:
    config = TrainingConfig(early_stopping=patience, eval_every=5)
    over = [history(log_of(losses[:count])).is_over(config) for count in range(1, len(losses) + 1)]
    expected = []
    for count in range(1, len(losses) + 1):
        before, last = losses[: max(0, count - patience)], losses[max(0, count - patience) : count]
        lowest = min((loss for loss in before if not math.isnan(loss)), default=math.inf)
        expected.append(count >= patience and not any(loss < lowest for loss in last))
    assert over == expected
    assert not history(log_of(losses)).is_over(TrainingConfig(eval_every=5))


@pytest.mark.parametrize(("keep", "step", "loss"), [("last", 15, 2.5), ("best", 10, 2.0)])
def test_the_outcome_is_that_of_the_adapter_that_is_kept(keep: str, step: int, loss: float) -> None:
    found = outcome(log_of([3.0, 2.0, 2.5]), TrainingConfig(keep=keep, eval_every=5), is_complete=True)
    assert (found["kept_step"], found["validation_loss"], found["token_accuracy"]) == (step, loss, 0.5)
    assert found["best"] == {"step": 10, "validation_loss": 2.0, "token_accuracy": 0.5}
    assert found["stopped_early"] is None


def test_without_a_finite_loss_or_a_validation_split_the_last_adapter_is_kept() -> None:
    found = outcome(log_of([math.nan, math.nan]), TrainingConfig(keep="best", eval_every=5), is_complete=True)
    assert (found["kept_step"], found["best"]) == (10, None)
    found = outcome(log_of([1.0])[:-1], TrainingConfig(), is_complete=True)
    assert (found["kept_step"], found["validation_loss"], found["best"]) == (5, None, None)


def test_only_a_run_that_did_not_take_all_its_steps_stopped_early() -> None:
    config = TrainingConfig(early_stopping=2, eval_every=5)
    log = log_of([1.0, 2.0, 2.0])
    assert outcome(log, config, is_complete=False)["stopped_early"] == {"step": 15, "evaluations": 2}
    assert outcome(log, config, is_complete=True)["stopped_early"] is None


def test_evaluation_is_described() -> None:
    config = TrainingConfig(eval_every=50, keep="best", early_stopping=3, samples=4)
    assert described(config, 25) == (
        "every 50 steps, on 25 rows; the adapter of the lowest loss is kept; stops after 3 evaluations without a lower "
        "loss; generates 4 answers each time"
    )
    assert described(TrainingConfig(), 25) == "at the end, on 25 rows"
    assert described(TrainingConfig(), 0) == "none: the corpus has no validation split"


def test_settings_that_compare_a_single_evaluation_are_a_warning() -> None:
    config = TrainingConfig(eval_every=50, keep="best")
    assert unused(config, 51) is None
    assert "only 50 steps, so only the last step is evaluated and nothing is compared" in str(unused(config, 50))
    assert "compared" not in str(unused(TrainingConfig(eval_every=50), 50))
    assert unused(TrainingConfig(), 50) is None
