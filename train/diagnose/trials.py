"""Run one trial: the real command in another process, for a few steps.

words of the command ─Runner.run─▶ worker.py ─training.json─▶ Outcome, or the reason of its failure
"""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

import orjson

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.errors import PackError, UsageError
from packcorpus.tasks.core.messages import JSON
from packcorpus.tasks.core.printable import counted, duration
from packcorpus.tasks.recipe import recipe_of
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.verification.rebuild import config_for, revisions_of
from packcorpus.tasks.work import Publish, run_all
from packcorpus.train.data.corpus import Corpus
from packcorpus.train.diagnose.compare import Outcome, spread_of
from packcorpus.train.diagnose.factors import BASELINE, Trial, option
from packcorpus.train.loop.run_folder import ENOUGH, WITHOUT_VALIDATION
from packcorpus.train.measures import PHASES

# Number of steps at the start that are not timed, because they allocate memory and choose kernels.
UNTIMED = 1


# Trials that change one of these run in a process of their own, because they load the model in another way.
LOADING = {"quantization", "precision", "device", "gpus", "sharding"}
# Time that a trial keeps to end its last step and write its results: a share of its limit, and at least some seconds.
RESERVE, LEAST_RESERVE = 0.1, 3.0
# Output of a process that is searched for its error.
READ = 1 << 16


class Runner:
    """Runner for the trials of a diagnosis; `stop` ends the current trial at once.

    One process runs all trials that can share the loaded model. A new one replaces it after a trial that failed, and
    before one that loads the model in another way. `words` are those of the command, for all trials.
    """

    command: tuple[str, ...] = (sys.executable, "-P", "-m", "packcorpus.train.diagnose.worker")

    def __init__(self, words: list[str], folder: Path):
        self.words, self._folder = words, folder
        self._process: Popen[bytes] | None = None
        self.errors = ""  # standard error of the latest command

    def stop(self) -> None:
        process, self._process = self._process, None
        if process:
            # The ranks of a trial lead process groups of their own.
            for pid in [*descendants(process.pid), process.pid]:
                for kill in (os.killpg, os.kill):
                    with suppress(ProcessLookupError, PermissionError):
                        kill(pid, signal.SIGKILL)
            process.wait()

    def run(
        self, trial: Trial, manifest: Path, limit: float, wanted: float = math.inf
    ) -> tuple[Outcome, dict[str, Any]]:
        """Run a trial for at most `limit` seconds; return its outcome and record.

        It makes fewer steps if it would need more time than `wanted`, as long as these are enough, or than the limit.
        """
        output = self._folder / "run"
        words = ["--manifest", str(manifest), *self.words]
        words += [word for name, value in trial.settings.items() for word in option(name, value)]  # override the others
        shutil.rmtree(output, ignore_errors=True)
        started, is_cold = time.monotonic(), self.is_cold(trial)
        is_alone = bool(LOADING & trial.settings.keys())
        if is_alone:
            self.stop()
        latest = started + limit - max(LEAST_RESERVE, RESERVE * limit)
        until = f"{min(latest, started + wanted)} {latest}"
        reason = self._ask({"train": [*words, "--output", str(output)], "until": until}, limit)
        if is_alone:
            self.stop()
        seconds = time.monotonic() - started
        if reason:
            return Outcome(trial, reason, seconds=seconds, is_cold=is_cold), {}
        record = orjson.loads((output / "training.json").read_bytes())
        reduced = record["choices"]["reduced"]
        made, steps = record["result"]["steps"], record["config"]["max_steps"]
        if trial.factor != BASELINE and made < min(ENOUGH, steps):
            reason = f"made only {counted(made, 'step')} in {limit:.0f} s"
            return Outcome(trial, reason, seconds=seconds, is_cold=is_cold), record
        if trial.factor != BASELINE and (unused := unused_option(trial, record["choices"]) or "; ".join(reduced)):
            return Outcome(trial, unused, seconds=seconds, is_cold=is_cold), record
        return replace(outcome_of(trial, record), seconds=seconds, is_cold=is_cold), record

    def replan(self, manifest: Path, root: Path, changes: Mapping[str, Any], limit: float) -> Path:
        """Pack a corpus again, in a process of its own, and return its manifest."""
        folder = self._folder / "-".join(f"{name}-{value}" for name, value in changes.items())
        if not folder.exists():  # each corpus is packed only once
            packer = Runner([], self._folder)
            given = {"manifest": str(manifest), "root": str(root), "changes": dict(changes), "folder": str(folder)}
            try:
                if reason := packer._ask({"replan": given}, limit):
                    shutil.rmtree(folder, ignore_errors=True)
                    raise PackError("training_failed", f"packing the corpus again: {reason}")
            finally:
                packer.stop()
        return next((folder / "manifests").glob("*.json"))

    def is_cold(self, trial: Trial) -> bool:
        """Return whether a trial will start a process, which loads the model."""
        return self._process is None or bool(LOADING & trial.settings.keys())

    def learned(self, length: int) -> str:
        """Return what a run that was stopped before its first step had found out."""
        found = self._folder / "run" / "run.json"
        if not found.exists():
            return "the model was still being loaded, or rows per pass chosen"
        choices = orjson.loads(found.read_bytes())["choices"]
        rows, speed = choices["micro_batch"] * choices["accumulation"], choices["tokens_per_second"]
        time_of_step = duration(rows * length / speed)
        return f"a step has {counted(rows, 'row')} and takes about {time_of_step} at {speed:,.0f} tokens/s"

    def _ask(self, job: dict[str, Any], limit: float) -> str:
        """Give a job to the process: why it failed; "" if it succeeded."""
        until, log = time.monotonic() + limit, self._folder / "errors"
        process = self._process
        if process is None:
            with log.open("wb") as errors:
                process = self._process = Popen(  # noqa: S603 - this Python, and words that no shell sees
                    self.command,
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=errors,
                    bufsize=0,
                    env=os.environ | {JSON: "1", WITHOUT_VALIDATION: "1"},
                    start_new_session=True,  # so that all of its processes can be stopped
                )
        assert process.stdin
        assert process.stdout
        start = log.stat().st_size
        with suppress(BrokenPipeError):
            process.stdin.write(orjson.dumps(job) + b"\n")
        answered, _, _ = select.select([process.stdout], [], [], limit)
        code: int | None = None
        if answered:
            answer = process.stdout.readline()
            # Without an answer, it was killed, or it replaced itself by a run with a smaller micro-batch.
            with suppress(TimeoutExpired):
                code = int(answer) if answer else process.wait(max(0.0, until - time.monotonic()))
            if code or not answer:
                self.stop()
        with log.open("rb") as errors:
            errors.seek(max(start, log.stat().st_size - READ))
            self.errors = errors.read().decode(errors="replace")
        if code is None:
            self.stop()
            return f"took longer than {limit:.0f} s"
        return failure(code, self.errors)


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, directly or not, on Linux."""
    found = []
    for path in Path("/proc").glob(f"{pid}/task/*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [*descendants(child), child]
    return found


def unused_option(trial: Trial, choices: dict[str, Any]) -> str:
    """Return why the run did not use the option of the trial; "" if it did."""
    if (choices["options"] or {}).get(trial.factor, True) or not trial.settings.get(trial.factor):
        return ""
    notes = [note for note in choices["notes"] if note.startswith(f"{trial.factor}: ")]
    return notes[0] if notes else f"{trial.factor}: not used"


def failure(code: int, errors: str) -> str:
    """Return why a command failed, in one line; "" if it succeeded."""
    if code == 0:
        return ""
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + ", which the system sends when memory runs out" * (name == "SIGKILL")
    if error := reported(errors):
        return f"{error['code']}: {error['message']}"
    return errors.strip().rpartition("\n")[2][:300] or f"exit code {code}"


def reported(errors: str) -> dict[str, Any]:
    """Return the error that a command reported as JSON; {} if it reported none."""
    try:
        error: dict[str, Any] = orjson.loads(errors.strip().rpartition("\n")[2])["error"]
    except (ValueError, LookupError, TypeError):
        return {}
    return error


def outcome_of(trial: Trial, record: dict[str, Any]) -> Outcome:
    """Return the figures of a finished run."""
    steps = [entry for entry in record["log"] if "step_seconds" in entry]
    timed = steps[UNTIMED:] or steps
    spent = sum(entry["step_seconds"] for entry in timed)
    tokens = [entry["non_pad_tokens_per_second"] * entry["step_seconds"] for entry in timed]
    mfu = [entry["mfu"] * entry["step_seconds"] for entry in timed if "mfu" in entry]
    choices = record["choices"]
    rows = choices["micro_batch"] * choices["accumulation"] * choices["ranks"]
    return Outcome(
        trial,
        tokens_per_second=sum(tokens) / spent,
        rows_per_second=rows * len(timed) / spent,
        # All steps of packed rows have the same number of tokens, but steps of single conversations do not.
        spread=spread_of([entry["step_seconds"] / count for entry, count in zip(timed, tokens, strict=True)]),
        mfu=sum(mfu) / spent if len(mfu) == len(timed) else None,
        peak_memory_bytes=record["result"]["peak_memory_bytes"],
        phases={phase: sum(entry[f"{phase}_seconds"] for entry in timed) / spent for phase in PHASES},
        losses=tuple(entry["loss"] for entry in steps),
        # A step that fp16 skips has no gradient norm.
        gradient_norms=tuple(math.nan if entry["grad_norm"] is None else entry["grad_norm"] for entry in steps),
        rows_per_step=rows,
        micro_batch=choices["micro_batch"],
        step_seconds=sum(entry["step_seconds"] for entry in steps),
    )


# Folders that packing reads and never changes. They do not depend on the length of the rows.
REUSED = ("tokens", "tokenizers", "engines", "remote")


def lost(corpus: Corpus, manifest: Path) -> str:
    """Return a text about conversations that a replanned corpus lacks; "" if none."""
    assert corpus.manifest
    before, now = (one.ledger.conversations for one in (corpus.manifest, load_manifest(manifest)))
    return f"without {before.packed - now.packed} of {before.packed} conversations" * (now.packed < before.packed)


def replan(corpus: Corpus, changes: Mapping[str, Any], root: Path, folder: Path) -> Path:
    """Return the manifest of a corpus with changed settings, made below `folder`."""
    if corpus.manifest is None:
        raise UsageError("config_unknown", f"{corpus.folder}: has no manifest, so it cannot be packed again")
    config, sources = config_for(corpus.manifest, corpus.folder, None)
    if len(config.row_lengths) > 1:  # a trial has rows of one length
        one = {"sequence_length": config.sequence_length, "mix": "tokens"}
        config = Config.model_validate(config.model_dump() | one)
    for name in REUSED:
        known, link = root / "data" / name, folder / "data" / name
        if known.is_dir() and not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(known.resolve(), target_is_directory=True)
    revisions = revisions_of(corpus.manifest)
    # Shorter rows may lose conversations, which the trial reports.
    recipe = recipe_of(config.model_copy(update={"max_rejects": 1.0, **changes}), sources, folder, revisions)
    run_all(Publish(recipe))
    return recipe.published
