"""The graph. A class names its inputs, its output and one call.

source files
 └ TokenizePart × N     N follows from the bytes of the sources and the config, never from the workers
    └ PlanPacking × 1   lengths only
       └ WriteShard × S S follows from the bytes of the sources
          └ PackCorpus  the manifest: the commit
             └ TrainAdapter   a process of its own
TrainTokenizer          before TokenizePart, where the config names no tokenizer
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import luigi

from pipeline import events, exits, settings, training
from pipeline.progress import counters
from pipeline.progress.time_left import size_of
from tasks.config import load_config
from tasks.core.errors import StorageError
from tasks.corpus import publish
from tasks.packing.plan import make_plan
from tasks.recipe import Recipe, resolve
from tasks.tokenization import engine_check
from tasks.tokenization.tokenize_part import tokenize_part
from tasks.tokenization.train_tokenizer import train_tokenizer

# A child that is forked after the tokenizers library has used its threads hangs for ever.
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@lru_cache(maxsize=16)
def _resolved(config: str, root: str) -> Recipe:
    return resolve(Path(config), Path(root))


class _Step(luigi.Task):
    """A task of one corpus. `config` and `root` are paths from the current folder."""

    config = luigi.Parameter(description="Config of the corpus, a YAML file.")
    root = luigi.Parameter(default=".", description="The project's root: data/ and manifests/ are written below it.")

    @property
    def recipe(self) -> Recipe:
        return _resolved(self.config, self.root)

    def run(self) -> None:
        with events.stage(self):
            self.work()
            # Luigi would ask as well (check_complete_on_run), and answer with a traceback.
            if not self.complete():
                raise StorageError(
                    "cannot_read", f"{self.output().path}: was made and cannot be read back; mend the disk, run again"
                )

    def work(self) -> None:
        raise NotImplementedError

    def clone_to(self, task: type[luigi.Task], **parameters: Any) -> luigi.Task:
        return task(config=self.config, root=self.root, **parameters)


class _Sized(_Step):
    """A task that depends on the sequence length."""

    # As text: what is no number is a mistake in the config, and told like one.
    sequence_length = luigi.OptionalParameter(default="", description="Overrides the config's sequence_length.")

    @property
    def recipe(self) -> Recipe:
        base = _resolved(self.config, self.root)
        if not self.sequence_length:
            return base
        return _sized(base, self.config, self.sequence_length)


@lru_cache(maxsize=16)
def _sized(base: Recipe, config: str, sequence_length: str) -> Recipe:
    return replace(base, config=load_config(Path(config), sequence_length))


class TrainTokenizer(_Step):
    def output(self) -> luigi.LocalTarget:
        return luigi.LocalTarget(self.recipe.layout.tokenizer(str(self.recipe.tokenizer_key)))

    def work(self) -> None:
        recipe, config = self.recipe, self.recipe.config
        train_tokenizer(
            recipe.parts, config.template, config.vocab_size, config.max_record_bytes, Path(self.output().path)
        )
        # Here, and not in each of the tasks that will encode.
        events.proven(engine_check.verdict_of(recipe), recipe.encoder)
        events.written(self)


class TokenizePart(_Step):
    part = luigi.IntParameter(description="Number of the part, in source order.")

    def requires(self) -> list[luigi.Task]:
        return [self.clone_to(TrainTokenizer)] if self.recipe.tokenizer_key else []

    def output(self) -> luigi.LocalTarget:
        return luigi.LocalTarget(self.recipe.layout.token_receipt(self._key))

    @property
    def size(self) -> int:
        """Bytes of plain text, about."""
        return round(size_of(self.recipe.parts[self.part], self.recipe.parts))

    @property
    def priority(self) -> int:
        """The largest first, so that no worker is left with one of them when the others have ended."""
        return self.size

    def complete(self) -> bool:
        recipe = self.recipe
        refused = "gigatoken" if engine_check.refused(recipe) else ""
        return publish.has_artefact(self.token_file, Path(self.output().path), refused)

    def work(self) -> None:
        recipe = self.recipe
        tokenize_part(
            recipe.parts[self.part],
            engine_check.encoder_of(recipe),
            recipe.template,
            recipe.config,
            self.token_file,
            Path(self.output().path),
            partial(events.tokenized, self),
        )

    @property
    def token_file(self) -> Path:
        return self.recipe.layout.token_file(self._key)

    @property
    def _key(self) -> str:
        return self.recipe.tokens_key(self.recipe.parts[self.part])


class PlanPacking(_Sized):
    def requires(self) -> list[luigi.Task]:
        return [self.clone_to(TokenizePart, part=part) for part in range(len(self.recipe.parts))]

    def output(self) -> luigi.LocalTarget:
        return luigi.LocalTarget(self.recipe.plan_folder / "plan.json")

    def complete(self) -> bool:
        return publish.has_plan(self.recipe.plan_folder) and all(task.complete() for task in self.requires())

    def work(self) -> None:
        engine_check.forget()  # this corpus has nothing left to encode; another one loads it again
        events.planned(self, make_plan(self.recipe, self.recipe.plan_folder))


class WriteShard(_Sized):
    shard = luigi.IntParameter(description="Number of the shard, over all splits.")

    def requires(self) -> luigi.Task:
        return self.clone_to(PlanPacking, sequence_length=self.sequence_length)

    def output(self) -> luigi.LocalTarget:
        return luigi.LocalTarget(publish.shard_receipt(self.recipe, self.shard))

    def complete(self) -> bool:
        return publish.has_artefact(publish.shard_file(self.recipe, self.shard), Path(self.output().path))

    def work(self) -> None:
        publish.write_shard_of(self.recipe, self.shard)
        events.written(self)


class PackCorpus(_Sized):
    _running = False

    def requires(self) -> Iterator[luigi.Task]:
        with exits.reporting():
            publish.claim(self.recipe)
            events.announce(self.recipe)
            self._open_encoder()
            for shard in range(len(self.recipe.shard_names())):
                yield self.clone_to(WriteShard, sequence_length=self.sequence_length, shard=shard)

    def _open_encoder(self) -> None:
        """Where there is something to encode: once, for all the tasks that are forked from this process."""
        recipe = self.recipe
        parts = (self.clone_to(TokenizePart, part=part) for part in range(len(recipe.parts)))
        if recipe.has_tokenizer and not all(task.complete() for task in parts):
            engine_check.encoder_of(recipe)
            events.proven(engine_check.verdict_of(recipe), recipe.encoder)

    def output(self) -> luigi.LocalTarget:
        return luigi.LocalTarget(self.recipe.published)

    def complete(self) -> bool:
        if not self._running:
            # Luigi asks once before it runs anything: the sources may have changed since this process last looked.
            _resolved.cache_clear()
            events.begin()
        with exits.reporting():
            settings.check_workers()
            return publish.is_published(self.recipe)

    def work(self) -> None:
        self._running = True
        engine = engine_check.verdict_of(self.recipe).engine
        publish.publish_corpus(self.recipe, counters.run_record() | {"engine": engine})
        events.published(self, Path(self.output().path))


class TrainAdapter(_Sized):
    """Trains on the corpus, in a process of its own: there is no CUDA in a forked child, and ranks stay possible."""

    training = luigi.OptionalParameter(default="", description="Settings of the training; default: train/qlora.yaml.")
    options = luigi.OptionalParameter(default="", description="Settings over these, such as '--max-steps 10'.")

    resources = {"gpu": 1}  # noqa: RUF012 - as luigi.Task has it
    may_be_killed = False  # it waits until the training has saved what it has

    def requires(self) -> luigi.Task:
        return self.clone_to(PackCorpus, sequence_length=self.sequence_length)

    def output(self) -> luigi.LocalTarget:
        with exits.reporting():
            return luigi.LocalTarget(training.record_of(self._command))

    def complete(self) -> bool:
        return self.requires().complete() and super().complete()

    def work(self) -> None:
        training.train(self._command)

    @property
    def _command(self) -> tuple[str, ...]:
        manifest = str(self.recipe.published)
        return training.command(manifest, self.root, self.training or "", self.options or "")
