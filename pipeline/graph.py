"""The Luigi graph: each task does all work of one kind.

source files
 └ TokenizeParts         N parts: N depends on the bytes of the sources and the config, never on the number of workers
    └ PlanPacking        lengths only
       └ WriteShards     S shards: S depends on the bytes of the sources
          └ PackCorpus   the manifest: the commit
             ├ TrainAdapter       in a separate process
             └ DiagnoseTraining   in a separate process: short runs, one setting changed at a time
TrainTokenizer           before TokenizeParts, if the config names no tokenizer
TokenizePart, WriteShard one part or one shard, if you run it by name

tasks/work.py decides inputs, outputs, completeness, and work. Luigi orders the tasks and runs them in this process.
Parts and shards go to an engine (--on), which owns all processes.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import FrameType

import luigi
import orjson

from packcorpus.pipeline import display
from packcorpus.pipeline.engines import Here, is_remote, join, leave, open_engine, workers_of
from packcorpus.pipeline.patches import ReportedInterrupt, reporting
from packcorpus.pipeline.progress import Count, run, text_sizes
from packcorpus.tasks import work
from packcorpus.tasks.config import load_config
from packcorpus.tasks.core.error_codes import EXITS
from packcorpus.tasks.core.errors import Interrupted, PackError, UsageError
from packcorpus.tasks.core.messages import JSON
from packcorpus.tasks.core.reading import Reading
from packcorpus.tasks.recipe import Recipe, resolve
from packcorpus.tasks.sources.model import Part
from packcorpus.tasks.stores.urls import root_of, url_of
from packcorpus.tasks.work import Work

# A child that is forked after the tokenizers library has used its threads hangs forever.
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@lru_cache(maxsize=32)
def _recipe(number: int, config: str, root: str, sequence_length: str, check_sources: bool) -> Recipe:
    if sequence_length:
        base = _recipe(number, config, root, "", check_sources)
        return replace(base, config=load_config(Path(config), sequence_length))
    return resolve(Path(config), root_of(root), check_sources)


class _Task(luigi.Task):
    """A task of one corpus, which does work of one kind.

    `config` and `root` are relative to the working directory.
    """

    config = luigi.Parameter(description="Config of the corpus, a YAML file.")
    root = luigi.Parameter(
        default=".",
        description="Project root: a folder, or the URL of a folder in a bucket. Contains data/ and manifests/.",
    )
    on = luigi.Parameter(
        default="workers",
        significant=False,
        config_path={"section": "packcorpus", "name": "on"},
        description="Engine that processes parts and shards: workers (--workers processes), workers:N, here (one "
        "process), ray://auto, or ray://HOST:PORT. The corpus is the same with every engine.",
    )
    check_sources = luigi.BoolParameter(
        default=False,
        significant=False,
        description="Hash every source again, even if its size and times have not changed since an earlier run.",
    )
    sequence_length = ""
    kind: type[Work]

    @property
    def recipe(self) -> Recipe:
        return _recipe(run.number, self.config, self.root, self.sequence_length or "", self.check_sources)

    @property
    def works(self) -> Sequence[Work]:
        """Return the work on the current sources: Luigi keeps a task for later runs."""
        return self.kind.all_of(self.recipe)

    @property
    def counts(self) -> list[Count]:
        """Return the figures of the work of this task, in the same order."""
        return run.counts(self.kind.stage, self.task_id, lambda: [Count() for _ in self.works])

    def requires(self) -> list[luigi.Task]:
        with reporting():
            return [self.clone(TASKS[kind]) for kind in self.kind.needs if kind.all_of(self.recipe)]

    def output(self) -> luigi.LocalTarget:
        return luigi.LocalTarget(self.works[-1].outputs()[-1])

    def complete(self) -> bool:
        with reporting():
            workers_of(self.on, run.workers)  # raises UsageError if there is no such engine
            works = self.works
            for count, step in zip(self.counts, works, strict=True):
                count.is_done = step.is_done()
                count.is_reused = count.is_done and not count.started
                if isinstance(step, work.TokenizePart):
                    count.size = _sizes(self.recipe)[step.part]
                    count.tokens_found = step.receipt()["bytes"] / 4 if count.is_reused else 0.0
            return all(count.is_done for count in self.counts)

    def run(self) -> None:
        with reporting():
            works, counts = self.works, self.counts
            left = [number for number, count in enumerate(counts) if not count.is_done]
            # Large parts first, or one worker would be busy last. Similar ones stay in order, because some files can
            # only be read from their start.
            left.sort(key=lambda number: int(counts[number].size).bit_length(), reverse=True)
            with open_engine(self.on, run.workers) if self.kind.are_steps else Here() as engine:
                if not self.kind.are_steps:
                    counts[0].started = time.time()

                def take(index: int, reading: Reading) -> None:
                    counts[left[index]].reading = reading

                for index, outcome in engine.map([works[number].decided() for number in left], take):
                    counts[left[index]].take(outcome)
                    if self.kind.are_steps:
                        display.status(self)
            if self.kind.are_steps and url_of(self.recipe.layout.root) and not all(step.is_done() for step in works):
                work.refresh(self.recipe)  # other machines, with their own scratch folders, have worked
            display.finished(self)


@lru_cache(maxsize=4)
def _sizes(recipe: Recipe) -> dict[Part, float]:
    return dict(zip(recipe.parts, text_sizes(recipe.parts), strict=True))


def _only(works: Sequence[Work], option: str, number: int) -> Sequence[Work]:
    if not 0 <= number < len(works):
        raise UsageError("bad_command_line", f"--{option} {number}: expected a number from 0 to {len(works) - 1}")
    return [works[number]]


class _Sized(_Task):
    """A task that depends on the sequence length."""

    # Text, so that an invalid number is reported like an error in the config.
    sequence_length = luigi.OptionalParameter(default="", description="Overrides the config's sequence_length.")


class TrainTokenizer(_Task):
    kind = work.TrainTokenizer


class TokenizeParts(_Task):
    kind = work.TokenizePart


class TokenizePart(TokenizeParts):
    part = luigi.IntParameter(description="Number of the part, in source order.")

    @property
    def works(self) -> Sequence[Work]:
        return _only(super().works, "part", self.part)


class PlanPacking(_Sized):
    kind = work.Plan


class WriteShards(_Sized):
    kind = work.WriteShard


class WriteShard(WriteShards):
    shard = luigi.IntParameter(description="Number of the shard, over all splits.")

    @property
    def works(self) -> Sequence[Work]:
        return _only(super().works, "shard", self.shard)


class PackCorpus(_Sized):
    kind = work.Publish

    @property
    def works(self) -> Sequence[Work]:
        return [work.Publish(self.recipe, run.record)]

    def requires(self) -> list[luigi.Task]:
        required: list[luigi.Task] = super().requires()
        with reporting():
            if run.first(f"prepared {self.task_id}"):  # Luigi asks several times
                work.claim(self.recipe)
                self.works[0].discard_damaged()
                display.announce(self.recipe)  # starts the process of a template, before a cluster's threads exist
                if is_remote(self.on) and not all(task.complete() for task in required):
                    join(self.on)  # its workers start while the run does other work
                display.proven(work.open_encoder(self.recipe))
        return required

    def run(self) -> None:
        leave()  # the following tasks, perhaps hours of training, need no engine
        super().run()


TASKS: dict[type[Work], type[_Task]] = {
    task.kind: task for task in (TrainTokenizer, TokenizeParts, PlanPacking, WriteShards, PackCorpus)
}


# -- training: `packcorpus train` in a process of its own, without importing it ----------------------------------------


class TrainingFailed(PackError):
    """The training process ended with an error that it has reported."""

    def __init__(self, reason: str, message: str, exit_code: int):
        super().__init__(reason, message)
        self.exit_code = exit_code if exit_code in EXITS else PackError.exit_code


def train_command(verb: str, manifest: str, root: str, settings: str, options: str) -> tuple[str, ...]:
    """Return the words of a command of `train`.

    `verb` is empty for training itself. `options` is split as in a shell. If neither they nor `settings` can name a
    base model, it is the toy. -P keeps the working directory out of sys.path, so that a user's own train.py or tasks.py
    there is not imported.
    """
    config = ("--config", settings) if settings else ()
    named = (verb,) if verb else ()
    # Checkpoints are never written to a bucket, but to the working directory.
    where = ("--manifest", manifest, "--root", "." if url_of(root_of(root)) else root)
    given = tuple(shlex.split(options))
    is_named = settings or any(word.partition("=")[0] in ("--base-model", "--config") for word in given)
    model = () if is_named else ("--base-model", "toy")
    return (sys.executable, "-P", "-m", "packcorpus.train", *named, *where, *config, *model, *given)


@lru_cache(maxsize=16)
def record_of(words: tuple[str, ...]) -> Path:
    """Return the path of this run's record, which may not exist yet.

    Raises TrainingFailed if a setting is invalid.
    """
    environment = os.environ | {JSON: "1"}
    done = subprocess.run(  # noqa: S603 - this Python, and words that no shell sees
        [*words, "--where"], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        try:
            error = orjson.loads(done.stderr.strip().rpartition("\n")[2])["error"]
        except (ValueError, LookupError, TypeError):
            error = {"reason": "training_failed", "message": done.stderr.strip()}
        raise TrainingFailed(error["reason"], error["message"].split("\n"), done.returncode)
    return Path(done.stdout.splitlines()[-1])


def train(words: tuple[str, ...]) -> None:
    """Run the training, and forward signals to it.

    After a signal, the training saves a checkpoint before it ends. Raises KeyboardInterrupt if the training was stopped
    by a signal. Raises TrainingFailed if it failed.
    """
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if process:
            process.terminate()  # a terminal sends SIGINT to all its processes, and a second SIGINT would cut a step

    handlers = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        # The new process starts with both signals blocked, until it can report that it was stopped.
        signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
        try:
            process = subprocess.Popen(words)  # noqa: S603 - the same words
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
        if received:
            process.terminate()
        code = process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received and (code == Interrupted.exit_code or (code and code not in EXITS)):
        raise ReportedInterrupt if code == Interrupted.exit_code else KeyboardInterrupt
    if code:
        # With one of our exit codes, the training has already reported its error.
        message = "" if code in EXITS else f"the training ended with exit code {code} and printed no error"
        raise TrainingFailed("training_failed", message, code)


class _Training(_Sized):
    """A command of `train`, run in a separate process: torchrun stays possible."""

    verb = ""
    training = luigi.OptionalParameter(
        default="",
        description="Training config; default: train/qlora.yaml and, unless options name one, --base-model toy.",
    )
    options = luigi.OptionalParameter(default="", description="Settings that override it, such as '--max-steps 10'.")

    resources = {"gpu": 1}  # noqa: RUF012 - like in luigi.Task

    def requires(self) -> list[luigi.Task]:
        return [self.clone(PackCorpus)]

    def output(self) -> luigi.LocalTarget:
        with reporting():
            return luigi.LocalTarget(record_of(self._command))

    def complete(self) -> bool:
        return self.requires()[0].complete() and self.output().exists()

    def run(self) -> None:
        with reporting():
            train(self._command)

    @property
    def _command(self) -> tuple[str, ...]:
        manifest = str(self.recipe.published)
        return train_command(self.verb, manifest, self.root, self.training or "", self.options or "")


class TrainAdapter(_Training):
    """Train an adapter on the corpus."""


class DiagnoseTraining(_Training):
    """Find out by trial which settings train faster."""

    verb = "diagnose"
