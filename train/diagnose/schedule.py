"""Decide which trials to repeat, and for how many runs time must be left.

    all runs so far ─to_repeat─▶ winners with few repeats, and their combination: the next round

A round runs the baseline once, and then each of these trials once. The next round runs them in reverse. Each trial is
therefore measured in alternation with the baseline, even if the speed of the machine changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from train.diagnose.compare import UNKNOWN, WORTHWHILE, Outcome, by_trial, counted_runs, speedups, winners
from train.diagnose.factors import BASELINE, COMBINED, Trial, combined

# Minimum and maximum number of repeats of each winner. The minimum holds only while time is left.
FEWEST, MOST = 2, 4
# A speedup this many times as large as its error needs no more repeats.
CLEAR = 4.0


def runs_to_repeat(count: int) -> int:
    """Return the number of runs that it takes to repeat `count` winners.

    It includes the combination and the last run of the baseline.
    """
    return FEWEST * (count + 1) + (count > 1) + 1


def to_repeat(runs: Sequence[Outcome]) -> list[Trial]:
    """Return the trials of the next round: unclear winners, and their combination.

    `runs` are all runs so far, in order.
    """
    of_trial = by_trial(runs)
    tried_once = [one for one in runs if one.trial.factor == BASELINE or one is of_trial[one.trial.name][0]]
    speeds, found = speedups(runs), []
    for trial in winners(tried_once, UNKNOWN):  # judged by one run of each trial
        repeats = len(of_trial[trial.name]) - 1
        if trial.name not in speeds or repeats >= MOST:
            continue
        speed = speeds[trial.name]
        if repeats < FEWEST or WORTHWHILE < speed.ratio - 1 < CLEAR * speed.error:
            found.append(trial)
    if together := combination(runs):
        repeats = len(counted_runs(of_trial.get(together.name, [])))
        if repeats < FEWEST and (not repeats or together.name in speeds):
            found.append(together)
    return found


def combination(runs: Sequence[Outcome]) -> Trial | None:
    """Return the trial that combines all winners; None if there are fewer than two.

    If a combination has already run, it is returned. Otherwise, only winners that have a repeat are combined.
    """
    of_trial = by_trial(runs)
    known = next((one.trial for one in runs if one.trial.factor == COMBINED), None)
    confirmed = [trial for trial in winners(runs) if len(of_trial[trial.name]) > 1]
    return known or (combined(confirmed) if len(confirmed) > 1 else None)
