"""Compare trials with the baseline, and conclude.

baseline, baseline once more ─noise─┐
outcome of a trial ─────────────────┴─speedup─▶ 1.31 ± 0.04, or no difference ─conclude─▶ a sentence, options to copy
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from train.diagnose.factors import Trial, as_word, combined, option

# A difference below this is not worth a setting, however exactly it was measured.
WORTHWHILE = 0.02


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial measured, or the reason why it could not run. Speeds are of all ranks, without the first step."""

    trial: Trial
    reason: str = ""
    tokens_per_second: float = 0.0  # without padding
    rows_per_second: float = 0.0
    spread: float = 0.0  # standard error of the speed, relative
    mfu: float | None = None
    peak_memory_bytes: int = 0
    phases: dict[str, float] | None = None  # shares of the time
    losses: tuple[float, ...] = ()  # of each step
    gradient_norms: tuple[float, ...] = ()
    rows_per_step: int = 0
    seconds: float = 0.0  # of the whole process


@dataclass(frozen=True, slots=True)
class Speedup:
    """A ratio of speeds, and the error of that ratio."""

    ratio: float
    error: float

    @property
    def differs(self) -> bool:
        return abs(self.ratio - 1) > max(self.error, WORTHWHILE)

    def __str__(self) -> str:
        return f"{self.ratio:.2f}× ± {self.error:.2f}" if self.differs else "no difference"


def spread_of(seconds: Sequence[float]) -> float:
    """Return the standard error of the mean of some times, relative to it."""
    if len(seconds) < 2:
        return 0.0
    return statistics.stdev(seconds) / math.sqrt(len(seconds)) / statistics.fmean(seconds)


def speedup(outcome: Outcome, baselines: Sequence[Outcome]) -> Speedup:
    """Return how much faster a trial trains than the mean of the baselines.

    The error is twice the standard error of both, or the difference of the baselines if that is larger: a machine that
    became slower in between shows there.
    """
    base = statistics.fmean(one.tokens_per_second for one in baselines)
    drift = max(abs(one.tokens_per_second / base - 1) for one in baselines)
    spread = math.hypot(outcome.spread, statistics.fmean(one.spread for one in baselines))
    ratio = outcome.tokens_per_second / base
    return Speedup(ratio, ratio * max(2 * spread, drift))


def deviation(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of two series, of the steps that both took; NaN if there are none."""
    pairs = [(a, b) for a, b in zip(found, expected, strict=False) if math.isfinite(a) and math.isfinite(b)]
    return max((abs(a - b) / abs(b) for a, b in pairs), default=math.nan)


def is_comparable(outcome: Outcome, reference: Outcome | None) -> bool:
    """Return whether both took the same rows in the same steps."""
    return bool(
        reference
        and not reference.reason
        and not outcome.reason
        and not outcome.trial.corpus
        and outcome.rows_per_step == reference.rows_per_step
    )


def winners(outcomes: Sequence[Outcome], baselines: Sequence[Outcome]) -> list[Outcome]:
    """Return the fastest outcome of each factor that trains the same and faster than the baseline; fastest first."""
    best: dict[str, Outcome] = {}
    for one in outcomes:
        if one.reason or not one.trial.same_training or one.trial.factor == "combined":
            continue
        found = speedup(one, baselines)
        known = best.get(one.trial.factor)
        if found.differs and found.ratio > 1 and (not known or one.tokens_per_second > known.tokens_per_second):
            best[one.trial.factor] = one
    return sorted(best.values(), key=lambda one: one.tokens_per_second, reverse=True)


def combination(found: Sequence[Outcome]) -> Trial | None:
    """Return the trial of all winners together; None if there are fewer than two."""
    return combined([one.trial for one in found]) if len(found) > 1 else None


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What to do, in a sentence, and the options to copy; empty if nothing is faster."""

    sentence: str
    options: str = ""
    corpus: str = ""  # settings of the corpus, to pack again


def conclude(outcomes: Sequence[Outcome], baselines: Sequence[Outcome]) -> Conclusion:
    """Recommend the fastest way to train the same, and name what else would be faster."""
    usable = [one for one in outcomes if not one.reason]
    faster = [(one, found) for one in usable if (found := speedup(one, baselines)).differs and found.ratio > 1]
    same = [pair for pair in faster if pair[0].trial.same_training]
    other = [pair for pair in faster if not pair[0].trial.same_training]
    also = ""
    if other:
        one, found = max(other, key=lambda pair: pair[1].ratio)
        also = f" {one.trial.name} would be {found}, but trains something else."
    if not same:
        return Conclusion(f"Nothing that was tried trains the same faster than the current settings.{also}")
    one, found = max(same, key=lambda pair: pair[1].ratio)
    return Conclusion(
        f"{one.trial.name} trains {found.ratio:.2f}× ± {found.error:.2f} as many tokens per second.{also}",
        options(one.trial),
        ", ".join(f"{name}: {as_word(value)}" for name, value in one.trial.corpus.items()),
    )


def options(trial: Trial) -> str:
    """Return the settings of a trial as options of the command line."""
    return " ".join(word for name, value in trial.settings.items() for word in option(name, value))
