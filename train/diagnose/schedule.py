"""Decide which trials are run again, and for how many runs time must be left.

    all runs so far ─to_repeat─▶ winners with few repeats, and their combination: the next round

A round is the baseline once, and then each of these trials once; the next round has them in reverse. So each trial is
measured in alternation with the baseline, whatever the machine does meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from train.diagnose.compare import UNKNOWN, WORTHWHILE, Outcome, by_trial, counted_runs, speedups, winners
from train.diagnose.factors import BASELINE, COMBINED, Trial, combined

# Repeats of each winner: at least, while time is left, and at most.
FEWEST, MOST = 2, 4
# A speedup this many times as large as its error needs no more repeats.
CLEAR = 4.0


def runs_to_repeat(count: int) -> int:
    """Return the number of runs that repeating so many winners takes, with the combination and the last baseline."""
    return FEWEST * (count + 1) + (count > 1) + 1


def to_repeat(runs: Sequence[Outcome]) -> list[Trial]:
    """Return the trials of the next round: the winners that are not yet clear, and their combination.

    `runs` are all runs so far, in the order in which they ran.
    """
    of_trial = by_trial(runs)
    tried_once = [one for one in runs if one.trial.factor == BASELINE or one is of_trial[one.trial.name][0]]
    speeds, found = speedups(runs), []
    for trial in winners(tried_once, UNKNOWN):  # as far as one run of each shows
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
    """Return the trial of all winners together: the one that has run, or that of the winners which have a repeat.

    None if there are fewer than two.
    """
    of_trial = by_trial(runs)
    known = next((one.trial for one in runs if one.trial.factor == COMBINED), None)
    confirmed = [trial for trial in winners(runs) if len(of_trial[trial.name]) > 1]
    return known or (combined(confirmed) if len(confirmed) > 1 else None)
