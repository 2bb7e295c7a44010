"""Run `python -m train diagnose`: find out by trials which settings train faster.

    python -m train diagnose --manifest MANIFEST [--budget 600] [--steps 8] [--only attention,compile] [settings]

    baseline ─▶ reference ─▶ one factor at a time ─▶ repeats: baseline, winners, winners together … ─▶ diagnosis.json

If the reference would take too much of the budget, it runs last, if time is left.

Every trial runs the real command in a separate process, so a failure is a row with its reason. Dropout of the adapter
is off in all trials, because gradients would otherwise differ by chance. The last line of standard output is the path
of diagnosis.json.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from tasks.core.errors import Interrupted, PackError, UsageError
from tasks.core.messages import format_error
from tasks.core.printable import duration, printable, suggest
from tasks.storage.files import to_json, write_bytes
from train.config import DEFAULT, TrainingConfig
from train.data.corpus import Corpus, open_corpus
from train.diagnose import show
from train.diagnose.compare import (
    Conclusion,
    Outcome,
    Speedup,
    baselines_of,
    by_trial,
    conclude,
    deviation,
    is_comparable,
    mean_of,
    noise_of,
    ratios,
    speedups,
    winners,
)
from train.diagnose.factors import (
    BASELINE,
    FACTORS,
    REFERENCE,
    InEffect,
    Trial,
    as_word,
    in_order,
    option,
    refusal,
    trials_of,
)
from train.diagnose.replan import lost, replan
from train.diagnose.run_trial import UNTIMED, Runner, reported
from train.diagnose.schedule import runs_to_repeat, to_repeat
from train.loop.run_folder import RunFolder
from train.machine.signals import NUMBERS
from train.measures.advice import Advice
from train.options import Parser, config_of, overrides, settings_parser

# Settings of all trials. None of them changes a figure that is compared.
FIXED = {
    "save_every": 1_000_000, "eval_every": "null", "keep": "last", "early_stopping": "null", "samples": 0,
    "lora_dropout": 0, "report_to": "none", "profile": "null",
}  # fmt: skip
# The time limit of a trial is this many times the time of the baseline, but at least this number of seconds.
PATIENCE, SHORTEST_LIMIT = 5.0, 120.0
# The expected time of a trial is the median of this number of runs, so that a single slow run hardly changes it.
RECENT = 5
# Largest share of the budget that is reserved for repeats while there are untried trials.
SHARE_OF_REPEATS = 0.5
# Largest share of the time left after the baseline that the reference may take before the trials.
SHARE_OF_REFERENCE = 0.3
# A GPU takes about this many times as long for a run in fp32 with eager attention as for a run in 16 bits.
SLOWER_REFERENCE = 3.0

CURRENT = Trial("current settings", BASELINE)
REFERENCE_FACTOR = "reference"


def parser() -> Parser:
    """Build a parser with the options of training and three more."""
    ours = settings_parser(
        "python -m train diagnose", "Find out by trials which settings train faster on this machine."
    )
    ours.add_argument("--budget", type=float, metavar="SECONDS", default=600, help="time for all trials (default: 600)")
    ours.add_argument("--steps", type=int, metavar="N", default=8, help="optimizer steps of a trial (default: 8)")
    ours.add_argument("--only", metavar="FACTORS", help=f"try only these, separated by commas: {', '.join(FACTORS)}")
    return ours


def main(arguments: Sequence[str]) -> int:
    """Run the diagnosis and return 0."""
    given = parser().parse_args(list(arguments))
    config = config_of(given)
    only = tuple(given.only.split(",")) if given.only else FACTORS
    for name in only:
        if name not in FACTORS:
            raise UsageError("bad_command_line", f"--only {name}: no such factor{suggest(name, FACTORS)}")
    if given.steps <= UNTIMED:
        raise UsageError("bad_command_line", f"--steps {given.steps}: the first step is not timed; use 2 or more")
    corpus = open_corpus(given.manifest, config.allow_unisolated, given.root)
    key = RunFolder(given.root, config, corpus).key
    result = given.root / "data" / "diagnoses" / f"{corpus.name}-{key[:12]}" / "diagnosis.json"
    if given.where:
        print(result)
        return 0
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 160)
    with tempfile.TemporaryDirectory(prefix="packcorpus-diagnose-") as folder:
        diagnosis = Diagnosis(given, config, corpus, only, Path(folder), console)
        diagnosis.run()
    for number in NUMBERS:  # the files take a second, and some of them without the others would mislead
        signal.signal(number, signal.SIG_IGN)
    results = results_of(diagnosis)
    print_results(diagnosis, results)
    write_results(diagnosis, results, result)
    print(printable(str(result)))
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
    runs: list[Outcome] = field(default_factory=list)
    untried: list[Trial] = field(default_factory=list)
    refused: list[Outcome] = field(default_factory=list)  # known to be impossible here, without a run
    reference: Outcome | None = None
    record: dict[str, Any] = field(default_factory=dict)  # training.json of the baseline
    stopped: bool = False  # by a signal
    _manifests: dict[str, Path] = field(default_factory=dict)

    def run(self) -> None:
        """Run all trials that the budget allows.

        Raises PackError if the current settings do not train.
        """
        self._started = time.monotonic()
        self._runner = Runner(self._words(), self.folder)
        for one in NUMBERS:
            signal.signal(one, self._stop)
        first = self._try(CURRENT)
        if first.reason:
            raise self._failed(first)
        self.now = in_effect(self.record, self.corpus)
        # From here on, the measured choices of the baseline are fixed, so that a trial changes one factor.
        fixed = [*option("micro_batch", self.now.micro_batch), *option("attention", self.now.attention)]
        self._runner = Runner([*self._words(), *fixed], self.folder)
        wanted = [trial for trial in trials_of(self.config, self.now) if trial.factor in self.only]
        reasons = {trial.name: refusal(trial, self.record["unavailable"]) for trial in wanted}
        self.refused = [Outcome(one, f"not tried: {reasons[one.name]}") for one in wanted if reasons[one.name]]
        trials = in_order([trial for trial in wanted if not reasons[trial.name]])
        self._find_reference(trials, SHARE_OF_REFERENCE * self._left)
        self._try_each(trials)
        self._repeat()
        if self.reference is None:
            self._find_reference(trials, self._left)

    def _try_each(self, trials: list[Trial]) -> None:
        """Run each trial once, as long as enough time is left to repeat the winners."""
        for number, trial in enumerate(trials):
            tried = [one.trial for one in self.runs]
            if trial in tried:
                continue
            self.untried = [trial for trial in trials[number:] if trial not in tried]
            repeats = runs_to_repeat(max(1, len(winners(self.runs)))) * self._expected()
            if self._left < self._expected(trial) + min(repeats, SHARE_OF_REPEATS * self.given.budget):
                return
            self._try(trial, f"{number + 1}/{len(trials)}")
        self.untried = []

    def _repeat(self) -> None:
        """Repeat the winners in alternation with the baseline.

        This ends when there is only time for the last run of the baseline.
        """
        number = 0
        while len(self.runs) > 1 and self._left >= self._expected():
            self._try(CURRENT, f"repeat {number}" if number else "")
            number += 1
            trials = [trial for trial in to_repeat(self.runs) if self._has_time_before_last(trial)]
            if not trials:
                return
            for trial in trials if number % 2 else reversed(trials):
                if self._has_time_before_last(trial):
                    self._try(trial, f"repeat {number}")

    def _has_time_before_last(self, trial: Trial) -> bool:
        """Return whether a trial fits before the last run of the baseline."""
        return self._left >= self._expected(trial) + self._expected()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """End the trial and this process, after a table of the finished trials.

        No file is written, because it would replace that of an earlier diagnosis with more trials.
        """
        if self.stopped:  # Ctrl-C and SIGTERM came together
            return
        self.stopped = True
        self._runner.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            if by_trial(self.runs):
                # A console that was interrupted while it printed would keep the text.
                self.console = Console(file=self.console.file, highlight=False, width=self.console.width)
                print_results(self, results_of(self))
        finally:  # not even an error may change the exit code
            text = format_error(Interrupted("interrupted", "interrupted; no diagnosis was written"))
            with suppress(OSError):  # stderr may be closed
                os.write(2, f"{text}\n".encode())
            os._exit(Interrupted.exit_code)

    def _failed(self, first: Outcome) -> PackError:
        """Return the error of the current settings as the error of the diagnosis."""
        error = reported(self._runner.errors)
        failed = PackError(error.get("reason", "training_failed"), str(error.get("message", first.reason)))
        failed.exit_code = error.get("exit_code", failed.exit_code)
        return failed

    @property
    def _left(self) -> float:
        return float(self.given.budget) - (time.monotonic() - self._started)

    def _expected(self, trial: Trial = CURRENT) -> float:
        """Return the expected seconds of a trial.

        It is the median of recent runs. Compiling may take longer than all steps together, so it has its own median.
        """
        finished = [one for one in self.runs if not one.reason]
        alike = [one.seconds for one in finished if _compiles(one.trial) == _compiles(trial)]
        recent = (alike or [one.seconds for one in finished])[-RECENT:]
        return max(statistics.median(recent), baselines_of(self.runs)[-1].seconds)

    @property
    def trained_share(self) -> float:
        """Return the share of the corpus's tokens that is trained on.

        A trial sees too few rows to measure it.
        """
        return float(self.record["corpus"]["trained"] / self.record["corpus"]["tokens"])

    def _words(self) -> list[str]:
        given = self.given
        settings = {**overrides(given), **FIXED, "max_steps": given.steps}
        words = ["--root", str(given.root), *(["--config", str(given.config)] if given.config != DEFAULT else [])]
        return words + [word for name, value in settings.items() if name != "output" for word in option(name, value)]

    def _find_reference(self, trials: list[Trial], most: float) -> None:
        """Find or run the reference, unless time is short.

        If the baseline has the settings of the reference, it is the reference. Otherwise, a trial with these settings
        is run, or else a separate run. If it is slower than other trials, it may take up to `most` seconds.
        """
        current = {**self.now.measured(), "compile": self.config.compile}
        differs = {name: value for name, value in REFERENCE.items() if current[name] != value}
        if not differs:
            self.reference = self.runs[0]
            return
        same = next((trial for trial in trials if dict(trial.settings) == differs), None)
        known = next((one for one in self.runs if one.trial == same), None)
        slower = SLOWER_REFERENCE if "precision" in differs else 1
        if known:
            self.reference = known
        elif same and slower == 1:  # a trial like the others
            if self._left >= 2 * self._expected():
                self.reference = self._try(same)
        elif self._expected() * slower <= most:
            self.reference = self._try(same or Trial("reference: fp32, eager", REFERENCE_FACTOR, REFERENCE), limit=most)

    def _try(self, trial: Trial, place: str = "", limit: float | None = None) -> Outcome:
        """Run a trial, and add it to the runs unless it is the reference."""
        if self.runs and limit is None:
            limit = max(SHORTEST_LIMIT, PATIENCE * self._expected(trial))
        manifest = self.given.manifest
        started = time.monotonic() - self._started
        try:
            if trial.corpus:
                trial, manifest = self._packed_again(trial)
            outcome, record = self._runner.run(trial, manifest, limit)
        except PackError as error:
            outcome, record = Outcome(trial, " ".join(str(error).split())), {}
        outcome = replace(outcome, at=started + outcome.seconds / 2)
        if trial.factor != REFERENCE_FACTOR:
            self.runs.append(outcome)
        self.record = self.record or record
        self._show(outcome, place)
        return outcome

    def _packed_again(self, trial: Trial) -> tuple[Trial, Path]:
        """Return a trial and the manifest of its repacked corpus.

        The trial records whether its rows lose conversations. Each corpus is packed only once.
        """
        changed = "-".join(f"{name}-{value}" for name, value in trial.corpus.items())
        if changed not in self._manifests:
            self._manifests[changed] = replan(self.corpus, trial.corpus, self.given.root, self.folder / changed)
        manifest = self._manifests[changed]
        if fewer := lost(self.corpus, manifest):
            trial = replace(trial, name=f"{trial.name} ({fewer})", loses=True)
        return trial, manifest

    def _show(self, outcome: Outcome, place: str) -> None:
        """Print the result of a run, how long it took, and the time that is left."""
        found = outcome.reason
        if not found and outcome.trial.factor == BASELINE:
            found = f"{outcome.tokens_per_second:,.0f} tokens/s"
        elif not found:
            found = f"{ratios([outcome], baselines_of(self.runs))[0]:.2f}×"
        line = f"{f'[{place}] ' * bool(place)}{outcome.trial.name}: {found}; {duration(outcome.seconds)}, "
        line += f"{duration(max(0.0, self._left))} left"
        self.console.print(line, markup=False, soft_wrap=True, style="dim")


def _compiles(trial: Trial) -> bool:
    return bool(trial.settings.get("compile"))


def in_effect(record: dict[str, Any], corpus: Corpus) -> InEffect:
    """Return the settings in effect in a finished run."""
    choices = record["choices"]
    return InEffect(
        device=choices["device"],
        precision=choices["precision"],
        attention=choices["attention"],
        micro_batch=choices["micro_batch"],
        rows_per_step=choices["micro_batch"] * choices["accumulation"],
        sequence_length=corpus.sequence_length,
        packed=corpus.packed,
        has_fused_loss=bool((choices["options"] or {}).get("fused_loss")),
    )


@dataclass(frozen=True)
class Results:
    """Everything that is shown of a diagnosis."""

    outcomes: list[Outcome]  # of each trial, without the baseline
    speeds: dict[str, Speedup]
    rows: list[list[str]]  # of the table
    verdict: Conclusion
    commands: list[str]  # recommended changes, one line each
    chosen: dict[str, Any]  # values of settings that are `auto`
    advice: list[dict[str, Any]]
    not_compared: str


def results_of(diagnosis: Diagnosis) -> Results:
    """Return the results of the runs so far, with at least one run of the baseline."""
    runs, reference = diagnosis.runs, diagnosis.reference
    baselines, speeds = baselines_of(runs), speedups(runs)
    outcomes = [*(mean_of(of_trial) for of_trial in by_trial(runs).values()), *diagnosis.refused]
    rows = []
    for one in (mean_of(baselines), *outcomes):
        off = None
        if is_comparable(one, reference):
            assert reference
            off = deviation(one.losses, reference.losses), deviation(one.gradient_norms, reference.gradient_norms)
        rows.append(show.cells(one, speeds.get(one.trial.name), len(baselines), diagnosis.trained_share, off))
    verdict, commands = conclude(runs, bool(diagnosis.untried)), []
    if verdict.corpus:
        commands.append(f"in the config of the corpus: {verdict.corpus}; then pack it again")
    if verdict.options:
        commands.append(f"options of the training: {verdict.options}")
    settings = diagnosis.config.model_dump()
    return Results(
        outcomes=outcomes,
        speeds=speeds,
        rows=rows,
        verdict=verdict,
        commands=commands,
        chosen={name: value for name, value in diagnosis.now.measured().items() if settings[name] == "auto"},
        advice=[one for one in diagnosis.record["advice"] if one["name"] != "optimizer steps"],
        not_compared=_why_not_compared(diagnosis),
    )


def print_results(diagnosis: Diagnosis, results: Results) -> None:
    """Print the table and the conclusion."""
    console = diagnosis.console
    if results.chosen:
        text = ", ".join(f"{name}: {as_word(value)}" for name, value in results.chosen.items())
        console.print(f"chosen by auto, and the same in all trials: {text}", markup=False, soft_wrap=True)
    console.print(show.table(results.rows))
    for one in results.outcomes:
        if one.reason:
            console.print(f"{one.trial.name}: {one.reason}", markup=False, soft_wrap=True, style="dim")
    if diagnosis.untried:
        names = ", ".join(trial.name for trial in diagnosis.untried)
        why, fix = ("of the interruption", "") if diagnosis.stopped else ("the budget ended", "; raise --budget")
        console.print(f"not tried, because {why}: {names}{fix}", markup=False, soft_wrap=True)
    if results.not_compared:
        console.print(f"Δ loss and Δ gradient are missing: {results.not_compared}", markup=False, soft_wrap=True)
    for advice in results.advice:
        console.print(f"advice: {Advice(**advice)}", markup=False, soft_wrap=True, style="yellow")
    console.print(results.verdict.sentence, markup=False, soft_wrap=True, style="bold")
    for line in results.commands:
        console.print(f"  {line}", markup=False, soft_wrap=True)


def write_results(diagnosis: Diagnosis, results: Results, path: Path) -> None:
    """Write diagnosis.json, .md, and .svg."""
    record, runs, reference, speeds = diagnosis.record, diagnosis.runs, diagnosis.reference, results.speeds
    write_bytes(path.with_suffix(".md"), f"{show.markdown(results.rows)}\n{results.verdict.sentence}\n".encode())
    outcomes = results.outcomes
    bars = [(one.trial.name, speeds[one.trial.name], one.trial.same_training) for one in outcomes if not one.reason]
    write_bytes(path.with_suffix(".svg"), show.picture(bars, f"{diagnosis.corpus.name}: speed of {len(bars)} trials"))
    facts = {
        "corpus": record["corpus"],
        "device": record["in_effect"]["device"],
        "choices": record["choices"],
        "settings": diagnosis.config.model_dump() | results.chosen,
        "chosen_by_auto": sorted(results.chosen),
        "steps": diagnosis.given.steps,
        "untimed_steps": UNTIMED,
        "trained_share": diagnosis.trained_share,
        "reference": reference.trial.name if reference else None,
        "not_compared": results.not_compared or None,
        "noise": asdict(noise_of(runs)),
        "baselines": [asdict(one) for one in baselines_of(runs)],
        "trials": [
            asdict(one) | {"speedup": asdict(speeds[one.trial.name]) if not one.reason else None} for one in outcomes
        ],
        "runs": [
            {"trial": one.trial.name, "tokens_per_second": one.tokens_per_second, "reason": one.reason, "at": one.at}
            for one in runs
        ],
        "untried": [trial.name for trial in diagnosis.untried],
        "advice": results.advice,
        "conclusion": asdict(results.verdict) | {"commands": results.commands},
        "versions": record["versions"],
    }
    write_bytes(path, to_json(facts))


def _why_not_compared(diagnosis: Diagnosis) -> str:
    """Return why losses could not be compared; "" if they could."""
    reference = diagnosis.reference
    if reference is None and diagnosis.stopped:
        return "the diagnosis was interrupted before the run in fp32 with eager attention"
    if reference is None:
        return "the budget has no time for a run in fp32 with eager attention; raise --budget"
    return f"{reference.trial.name}: {reference.reason}" if reference.reason else ""
