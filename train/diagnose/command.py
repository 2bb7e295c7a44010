"""Run `packcorpus train diagnose`: find out by trials which settings train faster.

    packcorpus train diagnose [CORPUS] --base-model MODEL [--budget 600] [--steps 8] [--only attention,compile] …

    baseline ─▶ one factor at a time ⇄ repeats: baseline, winners, winners together … ─▶ reference ─▶ diagnosis.json

Every trial runs the real command in another process, so a failure is a row with its reason, and a trial that hangs is
stopped. Trials that can share the loaded model run in one process. Dropout of the adapter is off in all trials, because
gradients would otherwise differ by chance. The last line of standard output is the path of diagnosis.json.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from packcorpus.tasks.core.errors import Interrupted, PackError, UsageError
from packcorpus.tasks.core.messages import format_error
from packcorpus.tasks.core.printable import counted, duration, printable, suggest
from packcorpus.train.config import DEFAULT, Parser, TrainingConfig, config_of, overrides, settings_parser
from packcorpus.train.data.corpus import Corpus, open_corpus, use_corpus
from packcorpus.train.diagnose.compare import (
    Outcome,
    baselines_of,
    by_trial,
    conclude,
    mean_of,
    ratios,
    runs_to_repeat,
    speedups,
    to_repeat,
)
from packcorpus.train.diagnose.factors import (
    BASELINE,
    FACTORS,
    REFERENCE,
    InEffect,
    Trial,
    in_order,
    option,
    refusal,
    trials_of,
)
from packcorpus.train.diagnose.show import Results, print_results, write_results
from packcorpus.train.diagnose.trials import UNTIMED, Runner, lost, reported
from packcorpus.train.loop.run_folder import RunFolder
from packcorpus.train.machine.process import NUMBERS

# Settings of all trials. None of them changes a figure that is compared.
FIXED = {
    "save_every": 1_000_000, "eval_every": "null", "keep": "last", "early_stopping": "null", "samples": 0,
    "lora_dropout": 0, "report_to": "none", "profile": "null",
}  # fmt: skip
# The time limit of a trial is this many times the time of the baseline, but at least this number of seconds.
PATIENCE, SHORTEST_LIMIT = 5.0, 120.0
# The expected time of a trial is the median of this number of runs, so that a single slow run hardly changes it.
RECENT = 5
# Share of the budget after which the first run ends with the steps that it has made, so that something can be tried.
SHARE_OF_FIRST = 1 / 3
# Share of the time outside of the steps that a run needs if the libraries and the model are loaded.
LOADED = 0.5
# Largest share of the budget that is reserved for repeats while there are untried trials.
SHARE_OF_REPEATS = 0.5

CURRENT = Trial("current settings", BASELINE)
REFERENCE_FACTOR = "reference"


def parser() -> Parser:
    """Build a parser with the options of training and three more."""
    ours = settings_parser(
        "packcorpus train diagnose", "Find out by trials which settings train faster on this machine."
    )
    ours.add_argument("--budget", type=float, metavar="SECONDS", default=600, help="time for all trials (default: 600)")
    ours.add_argument("--steps", type=int, metavar="N", default=8, help="optimizer steps of a trial (default: 8)")
    ours.add_argument("--only", metavar="FACTORS", help=f"try only these, separated by commas: {', '.join(FACTORS)}")
    return ours


def main(arguments: Sequence[str]) -> int:
    """Run the diagnosis and return 0."""
    started = time.monotonic()
    given = parser().parse_args(list(arguments))
    use_corpus(given)
    config = config_of(given)
    only = tuple(given.only.split(",")) if given.only else FACTORS
    for name in only:
        if name not in FACTORS:
            raise UsageError("bad_command_line", f"--only {name}: no such factor{suggest(name, FACTORS)}")
    if given.steps <= UNTIMED:
        raise UsageError("bad_command_line", f"--steps {given.steps}: the first step is not timed; use 2 or more")
    corpus = open_corpus(given.manifest, config.allow_unisolated, given.root)
    key = RunFolder(given.root, config, corpus).key
    path = given.root / "data" / "diagnoses" / f"{corpus.name}-{key[:12]}" / "diagnosis.json"
    if given.where:
        print(path)
        return 0
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 160)
    with tempfile.TemporaryDirectory(prefix="packcorpus-diagnose-") as folder:
        diagnosis = Diagnosis(given, config, corpus, only, Path(folder), console, started)
        diagnosis.run()
    for number in NUMBERS:  # the files take a second, and some of them without the others would mislead
        signal.signal(number, signal.SIG_IGN)
    results = diagnosis.results()
    print_results(results, console)
    write_results(results, path)
    print(printable(str(path)))
    return 0


@dataclass
class Diagnosis:
    """Runs of one diagnosis in order; the first run is the baseline."""

    given: argparse.Namespace
    config: TrainingConfig
    corpus: Corpus
    only: tuple[str, ...]
    folder: Path
    console: Console
    started: float  # time.monotonic()
    runs: list[Outcome] = field(default_factory=list)
    untried: list[Trial] = field(default_factory=list)
    refused: list[Outcome] = field(default_factory=list)  # known to be impossible here, without a run
    reference: Outcome | None = None
    record: dict[str, Any] = field(default_factory=dict)  # training.json of the baseline
    stopped: bool = False  # by a signal

    def run(self) -> None:
        """Run all trials that the budget allows."""
        settings = {**overrides(self.given), **FIXED, "max_steps": self.given.steps}
        config_file = [] if self.given.config == DEFAULT else ["--config", str(self.given.config)]
        words = ["--root", str(self.given.root), *config_file]
        words += [word for name, value in settings.items() if name != "output" for word in option(name, value)]
        self._runner = Runner(words, self.folder)
        for number in NUMBERS:
            signal.signal(number, self._stop)
        try:
            self._run_all()
        finally:
            self._runner.stop()

    def _run_all(self) -> None:
        first = self._try(CURRENT)
        if first.reason:  # the error of the current settings is the error of the diagnosis
            raise self._error_of(first)
        self.now = InEffect.of(self.record, self.corpus)
        # From here on, the measured choices of the baseline are fixed, so that a trial changes one factor.
        names = ("micro_batch", "attention", "activation_checkpointing", "compile")
        self._runner.words += [word for name in names for word in option(name, self.now.measured()[name])]
        wanted = [trial for trial in trials_of(self.config, self.now) if trial.factor in self.only]
        reasons = {trial.name: refusal(trial, self.record["unavailable"]) for trial in wanted}
        self.refused = [Outcome(one, f"not tried: {reasons[one.name]}") for one in wanted if reasons[one.name]]
        self.untried = in_order([trial for trial in wanted if not reasons[trial.name]])
        count = len(self.untried)
        while self._try_more(count) or self._repeat(until_clear=False):
            pass
        self._repeat(until_clear=True)
        self._find_reference()

    @property
    def _chosen(self) -> dict[str, Any]:
        """Return the values in effect of the settings that are `auto`."""
        settings = self.config.model_dump()
        return {name: value for name, value in self.now.measured().items() if settings[name] == "auto"}

    def _error_of(self, first: Outcome) -> PackError:
        """Return the error of a diagnosis whose first run failed."""
        if self._left <= 0:
            learned = self._runner.learned(self.corpus.sequence_length)
            return UsageError(
                "budget_too_small",
                f"--budget {self.given.budget:g}: ended before the first step, so nothing was measured; {learned}; "
                "raise --budget, or lower --tokens-per-step",
            )
        error = reported(self._runner.errors)
        failed = PackError(error.get("reason", "training_failed"), str(error.get("message", first.reason)))
        failed.exit_code = error.get("exit_code", failed.exit_code)
        return failed

    def _try_more(self, count: int) -> bool:
        """Run untried trials as long as repeats have time; return whether one ran."""
        before = len(self.runs)
        for trial in list(self.untried):
            repeats = len(to_repeat(self.runs, until_clear=False))
            reserved = min(runs_to_repeat(repeats) * self._expected(), SHARE_OF_REPEATS * self.given.budget)
            # Without a winner, only the last run of the baseline remains.
            is_first = len(self.runs) == 1  # without a last run of the baseline, something is learned all the same
            if self._left >= self._expected(trial) + (reserved if repeats else 0 if is_first else self._expected()):
                self._try(trial, f"{count - len(self.untried) + 1}/{count}")
                self.untried.remove(trial)
        return len(self.runs) > before

    def _repeat(self, until_clear: bool) -> bool:
        """Repeat the winners in alternation with the baseline; return whether one ran."""
        # This ends when there is only time for the last run of the baseline.

        def has_time(trial: Trial) -> bool:
            return self._left >= self._expected(trial) + self._expected()

        before, number = len(self.runs), 0
        while self._left >= self._expected():
            if self.runs[-1].trial != CURRENT:
                self._try(CURRENT, f"repeat {number}" if number else "")
            trials = [trial for trial in to_repeat(self.runs, until_clear) if has_time(trial)]
            if not trials:
                break
            number += 1
            for trial in trials if number % 2 else reversed(trials):
                if has_time(trial):
                    self._try(trial, f"repeat {number}")
        return len(self.runs) > before

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """End the trial and this process, after a table of the finished trials."""
        # No file is written, because it would replace that of an earlier diagnosis with more trials.
        if self.stopped:  # Ctrl-C and SIGTERM came together
            return
        self.stopped = True
        self._runner.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            if by_trial(self.runs):
                # A console that was interrupted while it printed would keep the text.
                console = Console(file=self.console.file, highlight=False, width=self.console.width)
                print_results(self.results(), console)
        finally:  # not even an error may change the exit code
            text = format_error(Interrupted("interrupted", "interrupted; no diagnosis was written"))
            with suppress(OSError):  # stderr may be closed
                os.write(2, f"{text}\n".encode())
            os._exit(Interrupted.exit_code)

    @property
    def _left(self) -> float:
        return float(self.given.budget) - (time.monotonic() - self.started)

    def _expected(self, trial: Trial = CURRENT) -> float:
        """Return the expected seconds of a trial."""
        # The median of recent runs. Compiling may take longer than all steps together, so it has its own median.
        compiles = bool(trial.settings.get("compile"))
        finished = [run for run in self.runs if not run.reason]
        warm = [run for run in finished if not run.is_cold]
        known = warm or finished
        alike = [run.seconds for run in known if bool(run.trial.settings.get("compile")) == compiles]
        recent = statistics.median((alike or [run.seconds for run in known])[-RECENT:])
        seconds = max([recent, *(run.seconds for run in baselines_of(known)[-1:])])
        if not warm and known and not self._runner.is_cold(trial):  # the libraries and the model are loaded
            steps = known[-1].step_seconds
            seconds = steps + LOADED * (seconds - steps)
        starting = self.runs[0].seconds - warm[0].seconds if warm and self._runner.is_cold(trial) else 0.0
        return seconds + max(0.0, starting)

    def _find_reference(self) -> None:
        """Find or run the reference, unless time is short.

        If the baseline or a trial has the settings of the reference, it is the reference.
        """
        current = self.now.measured()
        differs = {name: value for name, value in REFERENCE.items() if current[name] != value}
        for run in self.runs:
            changes = {name: value for name, value in run.trial.changes.items() if name != "micro_batch"}
            if changes == differs and (not run.reason or self.reference is None):
                self.reference = run
        if self.reference is None and self._left >= self._expected():
            size = {"micro_batch": "auto"} if self.config.micro_batch == "auto" else {}
            self.reference = self._try(Trial("reference: fp32, eager", REFERENCE_FACTOR, differs | size))

    def _try(self, trial: Trial, place: str = "") -> Outcome:
        """Run a trial, print its result, and keep it unless it is the reference."""
        limit = self._left
        if self.runs and trial.factor != REFERENCE_FACTOR:
            limit = min(limit, max(SHORTEST_LIMIT, PATIENCE * self._expected(trial)))
        manifest = self.given.manifest
        started = time.monotonic()
        try:
            if trial.corpus:
                manifest = self._runner.replan(manifest, self.given.root, trial.corpus, limit)
                if fewer := lost(self.corpus, manifest):
                    trial = replace(trial, name=f"{trial.name} ({fewer})", loses=True)
            wanted = SHARE_OF_FIRST * limit
            if self.runs:  # if the first run made fewer steps, each trial makes as few as are enough
                wanted = 0.0 if self._steps_of(self.runs[0]) else math.inf
            outcome, record = self._runner.run(trial, manifest, limit - (time.monotonic() - started), wanted)
        except PackError as error:
            outcome, record = Outcome(trial, " ".join(str(error).split())), {}
        outcome = replace(outcome, at=started - self.started + outcome.seconds / 2)
        if trial.settings.get("micro_batch") == "auto" and not outcome.reason:  # measured once, and repeated with it
            size = {"micro_batch": outcome.micro_batch}
            is_same = not trial.corpus and outcome.micro_batch == self.now.micro_batch
            others = {name: value for name, value in trial.settings.items() if name != "micro_batch"}
            outcome = replace(outcome, trial=replace(trial, settings=others | ({} if is_same else size)))
        if trial.factor != REFERENCE_FACTOR:
            self.runs.append(outcome)
        self.record = self.record or record
        figure = outcome.reason
        if not figure and trial.factor == BASELINE:
            figure = f"{outcome.tokens_per_second:,.0f} tokens/s"
        elif not figure:
            figure = f"{ratios([outcome], baselines_of(self.runs))[0]:.2f}×"
        line = f"{f'[{place}] ' * bool(place)}{trial.name}: {figure}{self._steps_of(outcome)}; "
        line += f"{duration(outcome.seconds)}, "
        line += f"{duration(max(0.0, self._left))} left"
        self.console.print(line, markup=False, soft_wrap=True, style="dim")
        return outcome

    def _steps_of(self, outcome: Outcome) -> str:
        """Return the steps of a run that the budget ended before its last one; else ""."""
        made = len(outcome.losses)
        return f" in {made} of {counted(self.given.steps, 'step')}" * (0 < made < self.given.steps)

    def results(self) -> Results:
        """Return the results of the runs so far, with at least one run of the baseline."""
        return Results(
            config=self.config,
            record=self.record,
            runs=self.runs,
            outcomes=[*(mean_of(of_trial) for of_trial in by_trial(self.runs).values()), *self.refused],
            untried=[trial.name for trial in self.untried],
            reference=self.reference,
            chosen=self._chosen,
            speeds=speedups(self.runs),
            verdict=conclude(self.runs, len(self.untried)),
            steps=self.given.steps,
            stopped=self.stopped,
        )
