"""Speedups have an error, differences below it do not count, and only what trains the same is recommended."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.diagnose.compare import (
    WORTHWHILE,
    Outcome,
    Speedup,
    combination,
    conclude,
    deviation,
    is_comparable,
    speedup,
    spread_of,
    winners,
)
from train.diagnose.factors import Trial

positive = st.floats(0.1, 1e6)


def outcome(name: str, factor: str, rate: float, spread: float = 0.0, **others: Any) -> Outcome:
    trial = Trial(f"{name}", factor, {factor: name})
    return Outcome(trial, tokens_per_second=rate, spread=spread, **others)


BASE = [outcome("base", "baseline", 100.0, 0.01), outcome("again", "baseline", 100.0, 0.01)]


@given(positive, positive, st.floats(0, 0.2), st.floats(0, 0.2))
def test_the_error_covers_the_drift_of_the_baseline_and_both_spreads(
    first: float, drift: float, spread: float, base_spread: float
) -> None:
    baselines = [outcome("a", "baseline", first, base_spread), outcome("b", "baseline", drift, base_spread)]
    found = speedup(outcome("x", "compile", 150.0, spread), baselines)
    mean = (first + drift) / 2
    assert found.ratio == pytest.approx(150 / mean)
    assert found.error >= 0.999 * found.ratio * max(abs(first / mean - 1), 2 * spread, 2 * base_spread)


@given(st.floats(0.5, 2), st.floats(0, 1))
def test_what_is_within_the_error_or_tiny_is_no_difference(ratio: float, error: float) -> None:
    found = Speedup(ratio, error)
    assert found.differs == (abs(ratio - 1) > error and abs(ratio - 1) > WORTHWHILE)
    assert (str(found) == "no difference") == (not found.differs)


@given(st.lists(positive, min_size=2, max_size=9), st.floats(0.1, 10))
def test_the_spread_is_relative_and_zero_for_equal_times(seconds: list[float], factor: float) -> None:
    assert spread_of([factor * x for x in seconds]) == pytest.approx(spread_of(seconds), abs=1e-6)
    assert spread_of([seconds[0]] * 5) == pytest.approx(0, abs=1e-9)
    assert spread_of(seconds[:1]) == 0


def test_the_fastest_of_what_trains_the_same_is_recommended_and_the_rest_named() -> None:
    tried = [
        outcome("fast", "attention", 150),
        outcome("slow", "attention", 120),
        outcome("other", "lora_r", 300),
        outcome("none", "compile", 101),
        Outcome(Trial("failed", "fused_loss"), "E632: does not fit"),
    ]
    assert [one.trial.name for one in winners(tried, BASE)] == ["fast"]
    found = conclude(tried, BASE)
    assert found.sentence.startswith("fast trains 1.50×")
    assert found.options == "--attention fast"
    assert "other would be 3.00× ± 0.06, but trains something else" in found.sentence
    assert "failed" not in found.sentence


def test_without_a_winner_nothing_is_recommended() -> None:
    found = conclude([outcome("slow", "attention", 50), outcome("same", "compile", 100.5)], BASE)
    assert (found.options, found.corpus) == ("", "")
    assert found.sentence == "Nothing that was tried trains the same faster than the current settings."


def test_rows_that_lose_conversations_are_named_but_not_recommended() -> None:
    shorter = Trial("shorter", "sequence_length", {}, {"sequence_length": 8}, loses=True)
    tried = [Outcome(shorter, tokens_per_second=300.0), outcome("a", "attention", 150)]
    assert [one.trial.name for one in winners(tried, BASE)] == ["a"]
    assert "shorter would be 3.00× ± 0.06, but trains something else" in conclude(tried, BASE).sentence


def test_winners_are_combined_one_of_each_factor() -> None:
    tried = [outcome("a", "attention", 150), outcome("b", "compile", 120), outcome("c", "attention", 160)]
    together = combination(winners(tried, BASE))
    assert together
    assert together.settings == {"attention": "c", "compile": "b"}
    assert combination(winners(tried[:1], BASE)) is None
    combined = Outcome(together, tokens_per_second=110.0)
    assert conclude([*tried, combined], BASE).options == "--attention c", "the combination was slower"


def test_only_runs_on_the_same_rows_are_compared_with_the_reference() -> None:
    first = outcome("a", "attention", 1, rows_per_step=4)
    assert is_comparable(first, outcome("b", "attention", 1, rows_per_step=4))
    assert not is_comparable(first, outcome("b", "attention", 1, rows_per_step=8))
    assert not is_comparable(first, None)
    assert not is_comparable(first, Outcome(Trial("x", "y"), "failed", rows_per_step=4))
    repacked = Outcome(Trial("l", "sequence_length", {}, {"sequence_length": 2}), rows_per_step=4)
    assert not is_comparable(repacked, first)
    assert deviation((1.0, 2.0, 9.0), (1.0, 4.0)) == 0.5
    assert deviation((1.0, math.nan, 3.0), (1.0, 4.0, 4.0)) == 0.25, "a skipped step does not count"
    assert math.isnan(deviation((math.nan,), (1.0,)))
