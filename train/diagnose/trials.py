"""Run one trial: the real command in a separate process, for a few steps.

words of the command ─Runner.run─▶ python -P -m train … ─training.json─▶ Outcome, or the reason of its failure
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any

import orjson

from tasks.config import Config
from tasks.core.errors import UsageError
from tasks.core.messages import JSON
from tasks.recipe import recipe_of
from tasks.storage.manifest import load_manifest
from tasks.verification.rebuild import config_for, revisions_of
from tasks.work import Publish, run_all
from train.data.corpus import Corpus
from train.diagnose.compare import Outcome, spread_of
from train.diagnose.factors import Trial, option
from train.loop.run_folder import WITHOUT_VALIDATION
from train.measures import PHASES

# Number of steps at the start that are not timed, because they allocate memory and choose kernels.
UNTIMED = 1


class Runner:
    """Runner for the trials of a diagnosis; `stop` ends the current trial at once."""

    def __init__(self, words: list[str], folder: Path):
        self._words, self._folder = words, folder
        self._process: Popen[str] | None = None
        self.errors = ""  # standard error of the latest command

    def stop(self) -> None:
        if self._process:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def run(self, trial: Trial, manifest: Path, limit: float | None) -> tuple[Outcome, dict[str, Any]]:
        """Run a trial for at most `limit` seconds; return its outcome and record."""
        output = self._folder / "run"
        words = [sys.executable, "-P", "-m", "train", "--manifest", str(manifest), *self._words]
        words += [word for name, value in trial.settings.items() for word in option(name, value)]  # override the others
        shutil.rmtree(output, ignore_errors=True)
        started = time.monotonic()
        self._process = Popen(  # noqa: S603 - this Python, and words that no shell sees
            [*words, "--output", str(output)],
            stdout=DEVNULL,
            stderr=PIPE,
            text=True,
            errors="replace",
            env=os.environ | {JSON: "1", WITHOUT_VALIDATION: "1"},
            start_new_session=True,  # so that all of its ranks can be stopped
        )
        try:
            _, self.errors = self._process.communicate(timeout=limit)
            reason = failure(self._process.returncode, self.errors)
        except TimeoutExpired:
            self.stop()
            self._process.communicate()
            reason = f"took longer than {limit:.0f} s"
        seconds = time.monotonic() - started
        if reason:
            return Outcome(trial, reason, seconds=seconds), {}
        record = orjson.loads((output / "training.json").read_bytes())
        reduced = record["choices"]["reduced"]
        if trial.factor != "baseline" and (unused := unused_option(trial, record["choices"]) or "; ".join(reduced)):
            return Outcome(trial, unused, seconds=seconds), record
        return outcome_of(trial, record, seconds), record


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


def outcome_of(trial: Trial, record: dict[str, Any], seconds: float) -> Outcome:
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
        seconds=seconds,
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
