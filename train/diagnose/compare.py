"""Compare trials with the baseline, and draw a conclusion.

    baseline ── trial ── trial ── baseline ── trial ── baseline      all runs, in the order in which they ran
    ─speedups─▶ {trial: 1.31 ± 0.04 or no difference} ─conclude─▶ a sentence, options to copy

A run is compared with the speed of the baseline at the same time, interpolated between the runs of the baseline before
and after it. A machine that steadily becomes slower therefore has no effect. The rest is noise, which repeats reveal. A
trial that is repeated because its first run was fast is judged only by its repeats, because some of many first runs are
fast by chance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from packcorpus.tasks.core.printable import counted
from packcorpus.train.diagnose.factors import BASELINE, COMBINED, Trial, as_word, combined, option

# A difference below this is not worth a setting, no matter how exactly it was measured.
WORTHWHILE = 0.02

# Student's t: if the noise is known from 1, 2, … degrees of freedom, 95 of 100 means are within this number of errors.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)

# Minimum and maximum number of repeats of each winner. The minimum holds only while time is left.
FEWEST, MOST = 2, 4
# A speedup this many times as large as its error needs no more repeats.
CLEAR = 4.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Measurements of a trial without its first step, or why it could not run."""

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
    micro_batch: int = 0
    seconds: float = 0.0  # of the whole run
    step_seconds: float = 0.0  # of all its steps
    is_cold: bool = False  # whether its process was started for it, so it loaded the libraries and the model
    at: float = 0.0  # seconds from the start of the diagnosis to the middle of the run


@dataclass(frozen=True, slots=True)
class Noise:
    """Relative standard deviation of the speed of a run, and its degrees of freedom."""

    deviation: float
    freedom: int

    @property
    def error(self) -> float:
        """Return the error that 95 of 100 runs do not exceed; 0 if nothing is known."""
        return self.deviation * STUDENT[min(self.freedom, len(STUDENT)) - 1] if self.freedom else 0.0


UNKNOWN = Noise(0.0, 0)


@dataclass(frozen=True, slots=True)
class Speedup:
    """Ratio of speeds, its error, and the number of runs that it is the mean of."""

    ratio: float
    error: float
    runs: int = 1
    is_repeated: bool = False  # if it is, the first run does not count

    @property
    def differs(self) -> bool:
        return abs(self.ratio - 1) > max(self.error, WORTHWHILE)

    @property
    def is_faster(self) -> bool:
        return self.differs and self.ratio > 1

    def __str__(self) -> str:
        return f"{self.ratio:.2f}× ± {self.error:.2f}" if self.differs else "no difference"


def spread_of(seconds: Sequence[float]) -> float:
    """Return the standard error of the mean of some times, relative to the mean."""
    if len(seconds) < 2:
        return 0.0
    return statistics.stdev(seconds) / math.sqrt(len(seconds)) / statistics.fmean(seconds)


def baselines_of(runs: Sequence[Outcome]) -> list[Outcome]:
    return [one for one in runs if one.trial.factor == BASELINE and not one.reason]


def by_trial(runs: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Return the runs of each trial by its name, without the baseline."""
    found: dict[str, list[Outcome]] = {}
    for one in runs:
        if one.trial.factor != BASELINE:
            found.setdefault(one.trial.name, []).append(one)
    return found


def counted_runs(runs: Sequence[Outcome]) -> Sequence[Outcome]:
    """Return the runs of one trial that count for its speed.

    The first run of a repeated trial does not count, because its speed was the reason to repeat the trial. This does
    not apply to the baseline or to the combination.
    """
    return runs[1:] if len(runs) > 1 and runs[0].trial.factor not in (BASELINE, COMBINED) else runs


def mean_of(runs: Sequence[Outcome]) -> Outcome:
    """Return one outcome for all runs of a trial, or the first failure."""
    # It has mean speeds, the most memory, and all other figures of the last run.
    if failed := next((one for one in runs if one.reason), None):
        return failed
    counted = counted_runs(runs)
    return replace(
        runs[-1],
        tokens_per_second=statistics.fmean(one.tokens_per_second for one in counted),
        rows_per_second=statistics.fmean(one.rows_per_second for one in counted),
        peak_memory_bytes=max(one.peak_memory_bytes for one in runs),
    )


def speedups(runs: Sequence[Outcome], noise: Noise | None = None) -> dict[str, Speedup]:
    """Return the speedup of each trial over the baseline, by name.

    Failed trials are left out. `runs` are all runs in order, with at least one run of the baseline. The error of a
    speedup is the largest of three values: twice the standard error of its steps, the noise of repeated runs, and, for
    a single run, half of the change of the baseline around it. `noise` defaults to the noise of the runs.
    """
    baselines = baselines_of(runs)
    noise = noise or noise_of(runs)
    base_spread = statistics.fmean(one.spread for one in baselines)
    found = {}
    for name, of_trial in by_trial(runs).items():
        if any(one.reason for one in of_trial):
            continue
        counted = counted_runs(of_trial)
        count = len(counted)
        ratio = statistics.fmean(ratios(counted, baselines))
        steps = 2 * math.hypot(statistics.fmean(one.spread for one in counted), base_spread) / math.sqrt(count)
        # Runs of the baseline surround these runs, so there is one more of them.
        chance = noise.error * math.sqrt(1 / count + 1 / (count + 1))
        drift = 0.0
        if count == 1:  # the change between the runs of the baseline before and after this run, or between the last two
            after = next((n for n, one in enumerate(baselines) if one.at > counted[0].at), len(baselines) - 1)
            around = [one.tokens_per_second for one in baselines[max(0, after - 1) : after + 1]]
            drift = (max(around) - min(around)) / statistics.fmean(around) / 2
        found[name] = Speedup(ratio, ratio * max(steps, chance, drift), count, len(counted) < len(of_trial))
    return found


def ratios(runs: Sequence[Outcome], baselines: Sequence[Outcome]) -> list[float]:
    """Return the speed of each run, relative to the baseline at the same time."""
    speeds = [one.tokens_per_second for one in baselines]
    expected = np.interp([one.at for one in runs], [one.at for one in baselines], speeds)
    return [one.tokens_per_second / float(speed) for one, speed in zip(runs, expected, strict=True)]


def noise_of(runs: Sequence[Outcome]) -> Noise:
    """Return the noise of single runs, as far as repeats show it."""
    # From deviations of repeats from the mean of their trial, and of each run of the baseline from its neighbors.
    baselines = baselines_of(runs)
    squares, freedom = 0.0, 0
    for of_trial in by_trial(runs).values():
        counted = counted_runs(of_trial)
        if len(counted) > 1 and not any(one.reason for one in of_trial):
            values = ratios(counted, baselines)
            squares += sum((value / statistics.fmean(values) - 1) ** 2 for value in values)
            freedom += len(values) - 1
    for before, one, after in zip(baselines, baselines[1:], baselines[2:], strict=False):
        weight = (one.at - before.at) / (after.at - before.at) if after.at > before.at else 0.5
        [value] = ratios([one], [before, after])
        squares += (value - 1) ** 2 / (1 + weight**2 + (1 - weight) ** 2)
        freedom += 1
    return Noise(math.sqrt(squares / freedom), freedom) if freedom else UNKNOWN


def deviation(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of two series; NaN without steps."""
    pairs = [(a, b) for a, b in zip(found, expected, strict=False) if math.isfinite(a) and math.isfinite(b)]
    return max((abs(a - b) / abs(b) for a, b in pairs), default=math.nan)


def is_comparable(outcome: Outcome, reference: Outcome | None) -> bool:
    """Return whether both runs trained on the same rows in the same steps."""
    return bool(
        reference
        and not reference.reason
        and not outcome.reason
        and not outcome.trial.corpus
        and outcome.rows_per_step == reference.rows_per_step
    )


def winners(runs: Sequence[Outcome], noise: Noise | None = None) -> list[Trial]:
    """Return the fastest trial of each factor that is faster than the baseline."""
    # Trials that train something else do not count.
    trials = {one.trial.name: one.trial for one in runs}
    speeds = speedups(runs, noise)
    best: dict[str, Trial] = {}
    for name in sorted(speeds, key=lambda name: speeds[name].ratio, reverse=True):
        trial = trials[name]
        if trial.same_training and trial.factor != COMBINED and speeds[name].is_faster:
            best.setdefault(trial.factor, trial)
    return list(best.values())


@dataclass(frozen=True, slots=True)
class Conclusion:
    """Recommendation in a sentence, and the options to copy."""

    sentence: str
    options: str = ""
    corpus: str = ""  # settings of the corpus, to pack it again


def conclude(runs: Sequence[Outcome], untried: int = 0) -> Conclusion:
    """Recommend the fastest settings that train the same.

    The sentence also names the fastest trial that trains something else. If there was time for repeats, only repeated
    trials are recommended. Fewer changed settings are preferred, unless more settings are clearly faster. `untried` is
    the number of trials for which the budget had no time.
    """
    trials = {one.trial.name: one.trial for one in runs}
    tried = len({name for name in by_trial(runs) if trials[name].factor != COMBINED})
    if not tried:
        why = "one run of the current settings takes too much of the budget"
        return Conclusion(f"Nothing was tried: {why if untried else 'no trial of these factors can run here'}.")
    also = f" Only {tried} of {counted(tried + untried, 'trial')} were tried; raise --budget." if untried else ""
    faster = {name: found for name, found in speedups(runs).items() if found.is_faster}
    same = {name: found for name, found in faster.items() if trials[name].same_training}
    other = {name: found for name, found in faster.items() if name not in same}
    if len(by_trial(runs)) < len(runs) - len(baselines_of(runs)):  # some were repeated, so winners are among them
        same = {name: found for name, found in same.items() if found.is_repeated or trials[name].factor == COMBINED}
    if other:
        name = max(other, key=lambda name: other[name].ratio)
        also = f" {name} would be {other[name]}, but changes the training.{also}"
    if not same:
        return Conclusion(f"No trial that keeps the training the same is faster than the current settings.{also}")
    best = max(same.values(), key=lambda found: found.ratio)
    near = [name for name, found in same.items() if best.ratio - found.ratio <= max(best.error, WORTHWHILE)]
    name = min(near, key=lambda name: (len(trials[name].changes), -same[name].ratio))
    found = same[name]
    how = f"the mean of {found.runs} runs" if found.runs > 1 else "one run; a larger --budget repeats it"
    return Conclusion(
        f"{name} trains {found.ratio:.2f}× ± {found.error:.2f} as many tokens per second ({how}).{also}",
        " ".join(word for setting, value in trials[name].settings.items() for word in option(setting, value)),
        ", ".join(f"{name}: {as_word(value)}" for name, value in trials[name].corpus.items()),
    )


# -- repeats -----------------------------------------------------------------------------------------------------------


def runs_to_repeat(count: int) -> int:
    """Return the number of runs that it takes to repeat `count` winners."""
    # With the combination and the last run of the baseline.
    return FEWEST * (count + 1) + (count > 1) + 1


def to_repeat(runs: Sequence[Outcome], until_clear: bool = True) -> list[Trial]:
    """Return the trials of the next round: unclear winners, and their combination.

    Without `until_clear`, each is repeated only as often as is necessary to recommend it.

    A round runs the baseline once, and then each of these trials once. The next round runs them in reverse. Each trial
    is therefore measured in alternation with the baseline, even if the speed of the machine changes.
    """
    of_trial = by_trial(runs)
    tried_once = [one for one in runs if one.trial.factor == BASELINE or one is of_trial[one.trial.name][0]]
    speeds, found = speedups(runs), []
    for trial in winners(tried_once, UNKNOWN):  # judged by one run of each trial
        repeats = len(of_trial[trial.name]) - 1
        if trial.name not in speeds or repeats >= MOST:
            continue
        speed = speeds[trial.name]
        if repeats < FEWEST or (until_clear and WORTHWHILE < speed.ratio - 1 < CLEAR * speed.error):
            found.append(trial)
    if together := combination(runs):
        repeats = len(counted_runs(of_trial.get(together.name, [])))
        if repeats < FEWEST and (not repeats or together.name in speeds):
            found.append(together)
    return found


def combination(runs: Sequence[Outcome]) -> Trial | None:
    """Return the trial that combines all winners; None if there are fewer than two."""
    # If a combination has already run, it is returned. Otherwise, only winners that have a repeat are combined.
    of_trial = by_trial(runs)
    known = next((one.trial for one in runs if one.trial.factor == COMBINED), None)
    confirmed = [trial for trial in winners(runs) if len(of_trial[trial.name]) > 1]
    return known or (combined(confirmed) if len(confirmed) > 1 else None)
