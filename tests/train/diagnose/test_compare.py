"""Speedups have an error, and differences below it do not count.

Only settings that train the same are recommended.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packcorpus.train.diagnose.compare import (
    FEWEST,
    MOST,
    WORTHWHILE,
    Outcome,
    Speedup,
    combination,
    conclude,
    deviation,
    is_comparable,
    mean_of,
    noise_of,
    speedups,
    spread_of,
    to_repeat,
    winners,
)
from packcorpus.train.diagnose.factors import COMBINED, Trial

positive = st.floats(0.1, 1e6)


def outcome(name: str, factor: str, rate: float, spread: float = 0.0, **others: Any) -> Outcome:
    trial = Trial(f"{name}", factor, {factor: name})
    return Outcome(trial, tokens_per_second=rate, spread=spread, **others)


def in_turn(*runs: Outcome) -> list[Outcome]:
    """Return consecutive runs, one per second."""
    return [replace(one, at=float(second)) for second, one in enumerate(runs)]


BASE = outcome("current settings", "baseline", 100.0, 0.01)


def surrounded(*tried: Outcome) -> list[Outcome]:
    return in_turn(BASE, *tried, BASE)


def simulated(truth: dict[str, float], speed: Callable[[int], float]) -> list[Outcome]:
    """Run each trial once, and then the trials that are to be repeated.

    `speed` returns the speed of the machine during the nth run.
    """
    runs: list[Outcome] = []

    def run(trial: Trial) -> None:
        factor = math.prod(truth[name] for name in trial.name.split(" + ")) if trial.factor != "baseline" else 1.0
        rate = 100 * factor * speed(len(runs))
        runs.append(Outcome(trial, tokens_per_second=rate, at=float(len(runs))))

    for trial in (BASE.trial, *(Trial(name, name, {name: 1}) for name in truth)):
        run(trial)
    run(BASE.trial)
    while trials := to_repeat(runs):
        for trial in (*trials, BASE.trial):
            run(trial)
    return runs


@given(positive, positive, st.floats(0, 0.2), st.floats(0, 0.2))
def test_the_error_of_a_single_run_covers_the_change_of_the_baseline_and_both_spreads(
    first: float, last: float, spread: float, base_spread: float
) -> None:
    ends = [outcome("current", "baseline", rate, base_spread) for rate in (first, last)]
    found = speedups(in_turn(ends[0], outcome("x", "compile", 150.0, spread), ends[1]))["x"]
    mean = (first + last) / 2
    assert found.ratio == pytest.approx(150 / mean)
    assert found.error >= 0.999 * found.ratio * max(abs(first / mean - 1), 2 * spread, 2 * base_spread)


@given(st.floats(-0.02, 0.02), st.dictionaries(st.sampled_from("abc"), st.sampled_from((0.7, 1.0, 1.3)), min_size=1))
def test_a_machine_that_becomes_slower_all_the_time_changes_nothing(slope: float, truth: dict[str, float]) -> None:
    runs = simulated(truth, lambda number: 1 + slope * number)
    speeds = speedups(runs)
    for name, factor in truth.items():
        assert speeds[name].ratio == pytest.approx(factor)
        # A trial that was measured once cannot be distinguished from the change of the machine at that time.
        assert speeds[name].differs == (factor != 1.0) or speeds[name].runs == 1
    assert noise_of(runs).deviation == pytest.approx(0, abs=1e-9)


@given(st.sampled_from("abcdef"), st.floats(1.03, 3))
def test_a_trial_that_was_fast_by_chance_once_is_no_difference(lucky: str, luck: float) -> None:
    number = 1 + "abcdef".index(lucky)
    runs = simulated(dict.fromkeys("abcdef", 1.0), lambda one: luck if one == number else 1.0)
    assert [trial.name for trial in to_repeat(runs[:7])] == [lucky], "it looked faster"
    found = speedups(runs)[lucky]
    assert (found.ratio, found.runs, found.is_repeated, found.differs) == (pytest.approx(1), FEWEST, True, False)
    assert conclude(runs).options == ""


@pytest.mark.parametrize("sigma", [0.03, 0.1])
def test_noise_rarely_makes_a_winner(sigma: float) -> None:
    noise = Random(1)
    wrong = [
        bool(conclude(simulated(dict.fromkeys("abcdefgh", 1.0), lambda _: noise.lognormvariate(0, sigma))).options)
        for _ in range(100)
    ]
    assert sum(wrong) <= 8


def test_what_is_clearly_faster_is_found_in_noise() -> None:
    noise = Random(2)
    truth = dict.fromkeys("abcdefgh", 1.0) | {"d": 1.3}
    found = [conclude(simulated(truth, lambda _: noise.lognormvariate(0, 0.05))).options == "--d 1" for _ in range(50)]
    assert sum(found) >= 45


@given(st.lists(st.floats(0.8, 1.25), min_size=20, max_size=20), st.floats(0.01, 100))
def test_no_unit_of_speed_matters(noise: list[float], unit: float) -> None:
    truth = {"a": 1.6, "b": 1.0}
    found = speedups(simulated(truth, lambda number: noise[number % 20]))
    scaled = speedups(simulated(truth, lambda number: unit * noise[number % 20]))
    assert [one.ratio for one in found.values()] == pytest.approx([one.ratio for one in scaled.values()])


@given(st.dictionaries(st.sampled_from("abcd"), st.floats(0.5, 2), min_size=1), st.integers(0, 1000))
def test_only_apparent_winners_and_their_combination_are_repeated_in_alternation(
    truth: dict[str, float], seed: int
) -> None:
    noise = Random(seed)
    runs = simulated(truth, lambda _: noise.lognormvariate(0, 0.05))
    names = [one.trial.name for one in runs]
    for name in dict.fromkeys(names[1 : 1 + len(truth)]):
        assert names.count(name) <= 1 + MOST
    for before, after in zip(runs[len(truth) :], runs[len(truth) + 1 :], strict=False):
        assert before.trial.name != after.trial.name, "never twice without another between"
    assert names[-1] == "current settings"
    for one in runs[1 + len(truth) :]:
        if one.trial.factor == COMBINED:
            assert all(names.index(name) < names.index(one.trial.name) for name in one.trial.name.split(" + "))


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
    tried = surrounded(
        outcome("fast", "attention", 150),
        outcome("slow", "attention", 120),
        outcome("other", "lora_r", 300),
        outcome("none", "compile", 101),
        Outcome(Trial("failed", "fused_loss"), "E632: does not fit"),
    )
    assert [trial.name for trial in winners(tried)] == ["fast"]
    found = conclude(tried)
    assert found.sentence.startswith("fast trains 1.50×")
    assert "(one run; a larger --budget repeats it)" in found.sentence
    assert found.options == "--attention fast"
    assert "other would be 3.00× ± 0.06, but changes the training" in found.sentence
    assert "failed" not in found.sentence


def test_what_was_repeated_is_recommended_before_what_was_measured_once() -> None:
    fast, faster = outcome("fast", "attention", 150), outcome("faster", "compile", 160)
    runs = in_turn(BASE, fast, faster, BASE, fast, BASE, fast, BASE)
    found = conclude(runs)
    assert found.options == "--attention fast"
    assert found.sentence == "fast trains 1.50× ± 0.02 as many tokens per second (the mean of 2 runs)."


def test_a_repeat_that_fails_is_the_result_of_its_trial() -> None:
    fast = outcome("fast", "attention", 150)
    failed = Outcome(fast.trial, "took longer than 120 s")
    runs = in_turn(BASE, fast, BASE, fast, BASE, failed, BASE)
    assert conclude(runs).options == ""
    assert to_repeat(runs) == []
    assert mean_of([fast, fast, failed]).reason == "took longer than 120 s"


def test_without_a_winner_nothing_is_recommended() -> None:
    found = conclude(surrounded(outcome("slow", "attention", 50), outcome("same", "compile", 100.5)))
    assert (found.options, found.corpus) == ("", "")
    assert found.sentence == "No trial that keeps the training the same is faster than the current settings."


def test_a_budget_for_one_run_concludes_nothing() -> None:
    assert conclude([BASE], untried=3).sentence.endswith("takes too much of the budget.")
    assert conclude([BASE]).sentence.endswith("no trial of these factors can run here.")


def test_rows_that_lose_conversations_are_named_but_not_recommended() -> None:
    shorter = Trial("shorter", "sequence_length", {}, {"sequence_length": 8}, loses=True)
    tried = surrounded(Outcome(shorter, tokens_per_second=300.0), outcome("a", "attention", 150))
    assert [trial.name for trial in winners(tried)] == ["a"]
    assert "shorter would be 3.00× ± 0.06, but changes the training" in conclude(tried).sentence


def test_winners_are_combined_one_of_each_factor_once_they_have_a_repeat() -> None:
    a, b, c = outcome("a", "attention", 150), outcome("b", "compile", 120), outcome("c", "attention", 160)
    runs = in_turn(BASE, a, b, c)
    assert [trial.name for trial in to_repeat(runs)] == ["c", "b"]
    runs = in_turn(*runs, BASE, c, b)
    together = combination(runs)
    assert together
    assert together.settings == {"attention": "c", "compile": "b"}
    assert [trial.name for trial in to_repeat(runs)] == ["c", "b", "c + b"]
    assert combination(in_turn(BASE, a, BASE, a)) is None
    combined = Outcome(together, tokens_per_second=110.0)
    assert conclude(in_turn(*runs, combined, BASE)).options == "--attention c", "the combination was slower"
    combined = Outcome(together, tokens_per_second=161.0)
    assert conclude(in_turn(*runs, combined, BASE)).options == "--attention c", "it was not clearly faster"
    combined = Outcome(together, tokens_per_second=190.0)
    assert conclude(in_turn(*runs, combined, BASE)).options == "--attention c --compile b"


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
