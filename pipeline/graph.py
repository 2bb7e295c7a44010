"""The Luigi graph: each task runs a stage of tasks/stages.py.

source files
 └ TokenizePart × N     N depends on the bytes of the sources and the config, never on the number of workers
    └ PlanPacking × 1   lengths only
       └ WriteShard × S S depends on the bytes of the sources
          └ PackCorpus  the manifest: the commit
             ├ TrainAdapter       in a separate process
             └ DiagnoseTraining   in a separate process: short runs, one setting changed at a time
TrainTokenizer          before TokenizePart, if the config names no tokenizer

The stage decides inputs, outputs, completeness, and work. This is the graph of --on luigi. With an engine (--on
workers, the default; --on ray://…), TokenizeParts and WriteShards each stand for all tasks of their kind. Such a task
hands the steps of these tasks to the engine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import luigi

from pipeline import events, settings, training
from pipeline.engines.engine import is_remote, open_engine
from pipeline.engines.on_ray import join, leave
from pipeline.progress import counters
from pipeline.progress.time_left import sizes_of
from pipeline.run_guard import guard
from tasks import stages
from tasks.config import load_config
from tasks.recipe import Recipe, resolve
from tasks.steps import unreadable
from tasks.stores.scratch import root_of, url_of

# A child that is forked after the tokenizers library has used its threads hangs forever.
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@lru_cache(maxsize=32)
def _recipe(config: str, root: str, sequence_length: str, check_sources: bool) -> Recipe:
    """Return the recipe that all tasks of a run share.

    It holds the digests, keys, and encoder of the run.
    """
    if sequence_length:
        base = _recipe(config, root, "", check_sources)
        return replace(base, config=load_config(Path(config), sequence_length))
    return resolve(Path(config), root_of(root), check_sources)


@lru_cache(maxsize=4)
def _part_sizes(recipe: Recipe) -> list[float]:
    return sizes_of(recipe.parts)


class _Step(luigi.Task):
    """A task of one corpus.

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
        "process), luigi (one task each), ray://auto, or ray://HOST:PORT. The corpus is the same with every engine.",
    )
    check_sources = luigi.BoolParameter(
        default=False,
        significant=False,
        description="Hash every source again, even if its size and times have not changed since an earlier run.",
    )
    sequence_length = ""

    @property
    def recipe(self) -> Recipe:
        return _recipe(self.config, self.root, self.sequence_length or "", self.check_sources)

    @property
    def stage(self) -> stages.Stage:
        raise NotImplementedError

    def requires(self) -> list[luigi.Task]:
        required = self.stage.requires()
        if self.on == "luigi":
            return [self._task_of(stage) for stage in required]
        kinds = dict.fromkeys(type(stage).__name__ for stage in required)
        single = [self._task_of(stage) for stage in required if type(stage).__name__ not in TOGETHER]
        return single + [self.clone(TOGETHER[kind]) for kind in kinds if kind in TOGETHER]

    def _task_of(self, stage: stages.Stage) -> luigi.Task:
        numbers = {name: value for name, value in vars(stage).items() if name != "recipe"}
        return self.clone(TASKS[type(stage)], **numbers)

    def output(self) -> luigi.LocalTarget:
        return luigi.LocalTarget(self.stage.outputs()[-1])

    def complete(self) -> bool:
        self.keep_here()
        return self.stage.is_done()

    def keep_here(self) -> None:
        """Run the tasks in this process if a fork could not do their work.

        A fork has neither the connection to a cluster nor the threads of a bucket.
        """
        if is_remote(self.on) or url_of(root_of(self.root)):
            guard.keep_tasks_here()

    def run(self) -> None:
        with events.stage(self):
            receipt = self.work()
            # Luigi could check this, too (check_complete_on_run), but would print a traceback.
            if not self.is_written():
                raise unreadable(Path(self.output().path))
            events.finished(self, receipt)

    def work(self) -> dict[str, Any]:
        return self.stage.run(events.TaskProgress(self))

    def is_written(self) -> bool:
        """Return whether the work has written its outputs."""
        return self.complete()


class _Sized(_Step):
    """A task that depends on the sequence length."""

    # Text, so that an invalid number is reported like an error in the config.
    sequence_length = luigi.OptionalParameter(default="", description="Overrides the config's sequence_length.")


class TrainTokenizer(_Step):
    @property
    def stage(self) -> stages.Stage:
        return stages.TrainTokenizer(self.recipe)


class TokenizePart(_Step):
    part = luigi.IntParameter(description="Number of the part, in source order.")

    @property
    def stage(self) -> stages.Stage:
        return stages.TokenizePart(self.recipe, self.part)

    @property
    def size(self) -> int:
        """Return the approximate size of the part in bytes of plain text."""
        return round(_part_sizes(self.recipe)[self.part])

    @property
    def priority(self) -> int:
        """Return the priority: the largest part starts first.

        Otherwise, one worker could still be busy with it after the other workers have ended.
        """
        return self.size


class PlanPacking(_Sized):
    @property
    def stage(self) -> stages.Stage:
        return stages.Plan(self.recipe)


class WriteShard(_Sized):
    shard = luigi.IntParameter(description="Number of the shard, over all splits.")

    @property
    def stage(self) -> stages.Stage:
        return stages.WriteShard(self.recipe, self.shard)


class _Together(_Step):
    """All stages of one kind, `of`, whose steps an engine runs."""

    of = ""

    @property
    def members(self) -> Sequence[stages.TokenizePart | stages.WriteShard]:
        """Return the stages of the current recipe.

        They are not stored, because Luigi keeps this task for later runs, perhaps with other sources.
        """
        raise NotImplementedError

    @property
    def stage(self) -> stages.Stage:
        return self.members[-1]

    def complete(self) -> bool:
        self.keep_here()
        return all(stage.is_done() for stage in self.members)

    def size_of(self, number: int) -> float:
        return 0.0

    def is_written(self) -> bool:
        return True  # the engine has checked each stage

    def work(self) -> dict[str, Any]:
        members = self.members
        left = [number for number in range(len(members)) if not counters.of_task(f"{self.of} {number}", "reused")]
        left.sort(key=self.size_of, reverse=True)  # largest first, like TokenizePart.priority
        with open_engine(self.on, settings.workers()) as engine:
            for index, outcome in engine.map([members[number].step() for number in left]):
                events.taken(self, left[index], outcome)
        if left:
            events.status_of_steps(self)
        if url_of(self.recipe.layout.root) and not self.complete():
            stages.refresh(self.recipe)  # other machines, with their own scratch folders, ran the steps
        return {}


class TokenizeParts(_Together):
    """TokenizePart for all parts."""

    of = "TokenizePart"

    @property
    def members(self) -> list[stages.TokenizePart]:
        return [stages.TokenizePart(self.recipe, part) for part in range(len(self.recipe.parts))]

    def size_of(self, number: int) -> float:
        return _part_sizes(self.recipe)[number]


class WriteShards(_Sized, _Together):
    """WriteShard for all shards."""

    of = "WriteShard"

    @property
    def members(self) -> list[stages.WriteShard]:
        return [stages.WriteShard(self.recipe, shard) for shard in range(len(self.recipe.shard_names))]


class PackCorpus(_Sized):
    _prepared = -1  # the number of the run

    @property
    def stage(self) -> stages.Stage:
        return stages.Publish(self.recipe)

    def requires(self) -> list[luigi.Task]:
        with guard.reporting():
            stages.claim(self.recipe)
            is_first = self._prepared != guard.run
            if is_first:  # once, before the workers are forked
                self.stage.prepare()
                self._prepared = guard.run
            events.announce(self.recipe)  # starts the process of a template, before a cluster's threads exist here
            required = super().requires()
            if is_first and is_remote(self.on) and not all(task.complete() for task in required):
                join(self.on)  # its workers start while the run does other work
            events.proven(stages.open_encoder(self.recipe))
            return required

    def work(self) -> dict[str, Any]:
        leave()  # the following tasks, perhaps hours of training, need no engine
        return super().work()

    def complete(self) -> bool:
        # Luigi calls this several times in a run. At the first call, the sources may have changed since an earlier run.
        # A fork for a task must not read them again, because it cannot use a store that its parent has used.
        if events.begin():
            _recipe.cache_clear()
        with guard.reporting():
            settings.check_workers(self.on)
            return super().complete()


TASKS = {
    stages.TrainTokenizer: TrainTokenizer,
    stages.TokenizePart: TokenizePart,
    stages.Plan: PlanPacking,
    stages.WriteShard: WriteShard,
    stages.Publish: PackCorpus,
}
TOGETHER = {task.of: task for task in (TokenizeParts, WriteShards)}


class _Training(_Sized):
    """A command of `train`, run in a separate process.

    CUDA fails in a forked child, and torchrun stays possible.
    """

    verb = ""
    training = luigi.OptionalParameter(default="", description="Training config; default: train/qlora.yaml.")
    options = luigi.OptionalParameter(default="", description="Settings that override it, such as '--max-steps 10'.")

    resources = {"gpu": 1}  # noqa: RUF012 - like in luigi.Task
    may_be_killed = False  # it waits until the training has saved its checkpoint

    def requires(self) -> list[luigi.Task]:
        return [self.clone(PackCorpus)]

    def output(self) -> luigi.LocalTarget:
        with guard.reporting():
            return luigi.LocalTarget(training.record_of(self._command))

    def complete(self) -> bool:
        return self.requires()[0].complete() and self.output().exists()

    def work(self) -> dict[str, Any]:
        training.train(self._command)
        return {}

    @property
    def _command(self) -> tuple[str, ...]:
        manifest = str(self.recipe.published)
        return training.command(self.verb, manifest, self.root, self.training or "", self.options or "")


class TrainAdapter(_Training):
    """Train an adapter on the corpus."""


class DiagnoseTraining(_Training):
    """Find out by trial which settings train faster."""

    verb = "diagnose"
