"""The stages of a corpus: requirements, outputs, completeness, and work.

    TrainTokenizer ─▶ TokenizePart × N ─▶ Plan ─▶ WriteShard × S ─▶ Publish

Each stage is defined once. It is a small frozen value that can be sent to another process. It depends on neither Luigi
nor any other engine: Luigi's tasks (pipeline/graph.py), `run_all`, rebuild, and repair call the same methods. The last
output of a stage is its commit. It is written after all others, so an interrupted stage is not done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.core.errors import Busy, DataError, PackError, StorageError
from tasks.core.printable import with_urls
from tasks.corpus.publish import publish_corpus
from tasks.packing.plan import make_plan, plan_files
from tasks.recipe import Recipe
from tasks.sources.parts import sizes_of
from tasks.sources.shares import WHOLE, Share
from tasks.steps import (
    SILENT,
    Pack,
    Progress,
    Texts,
    Tokenize,
    check_token_files,
    fetch_plan,
    shard_receipt,
)
from tasks.storage.files import (
    acquire_lock,
    digest_of,
    read_receipt,
    sync_folder,
    write_receipt,
)
from tasks.storage.manifest import load_manifest
from tasks.stores.mirror import Mirror, Remote, mirror_of
from tasks.stores.scratch import sent_root
from tasks.tokenization import engine_check
from tasks.tokenization.first_conversations import check_first_conversations
from tasks.tokenization.train_tokenizer import train_tokenizer


@dataclass(frozen=True)
class Stage(ABC):
    """One stage of making the corpus of a recipe."""

    recipe: Recipe

    @abstractmethod
    def requires(self) -> Sequence[Stage]:
        """Return the stages whose outputs this one reads."""

    @abstractmethod
    def outputs(self) -> list[Path]:
        """Return the files that this stage writes, the commit last."""

    @abstractmethod
    def is_done(self, check_content: bool = False) -> bool:
        """Return whether every output exists at its recorded size.

        With `check_content`, every output must also have its recorded checksum.
        """

    def prepare(self) -> None:  # noqa: B027 - most stages have nothing to drop
        """Discard outputs of an interrupted run, and outputs that were damaged since.

        This is called before the required stages are checked.
        """

    @abstractmethod
    def run(self, progress: Progress = SILENT) -> dict[str, Any]:
        """Write the outputs and return the receipt.

        All required stages must be done. Raises PackError.
        """

    def receipt(self) -> dict[str, Any]:
        """Return the receipt of a stage that is done. Raises PackError."""
        return read_receipt(self.outputs()[-1])


def _tokenizer(recipe: Recipe) -> list[Stage]:
    return [TrainTokenizer(recipe)] if recipe.tokenizer_key else []


@dataclass(frozen=True)
class TrainTokenizer(Stage):
    """Train a SentencePiece model on the sources, if the config names no tokenizer."""

    def requires(self) -> Sequence[Stage]:
        return ()

    def outputs(self) -> list[Path]:
        key = str(self.recipe.tokenizer_key)
        return [self.recipe.layout.tokenizer(key), self.recipe.layout.tokenizer_receipt(key)]

    def is_done(self, check_content: bool = False) -> bool:
        return self.recipe.has_tokenizer

    def run(self, progress: Progress = SILENT) -> dict[str, Any]:
        recipe, config = self.recipe, self.recipe.config
        model, receipt = self.outputs()
        facts = train_tokenizer(recipe.parts, config.template, config.vocab_size, config.max_record_bytes, model)
        write_receipt(receipt, facts)
        mirror_of(recipe.layout.root).push((model, receipt))
        return self.receipt()

    def receipt(self) -> dict[str, Any]:
        # Check the encoder once here, not in each process that will encode.
        return asdict(engine_check.verdict_of(self.recipe))


@dataclass(frozen=True)
class TokenizePart(Stage):
    """Tokenize part number `part` of the sources."""

    part: int

    def requires(self) -> Sequence[Stage]:
        return _tokenizer(self.recipe)

    def outputs(self) -> list[Path]:
        key = self.recipe.tokens_key(self.recipe.parts[self.part])
        return [self.recipe.layout.token_file(key), self.recipe.layout.token_receipt(key)]

    def is_done(self, check_content: bool = False) -> bool:
        refused, mirror = engine_check.refused(self.recipe), mirror_of(self.recipe.layout.root)
        return mirror.has(*self.outputs(), checksum="xxh3" if check_content else "", refused=refused)

    def step(self) -> Tokenize:
        """Return the work as a value for another process, with the encoder chosen here.

        Raises DataError for the first part if the first conversations show that the template does not fit.
        """
        recipe, part = self.recipe, self.recipe.parts[self.part]
        verdict = engine_check.verdict_of(recipe)
        if self.part == 0:
            if recipe.template.engines and not verdict.uses_minijinja:
                recipe.template.engines.use_jinja2()
            check_first_conversations(recipe)
        texts = Texts(f"{recipe.texts_key} {recipe.config.packing} {recipe.layout.root}", recipe)
        return Tokenize(texts, part, recipe.tokens_key(part), verdict.engine, verdict.uses_minijinja)

    def run(self, progress: Progress = SILENT) -> dict[str, Any]:
        return self.step().work(progress)


def _parts(recipe: Recipe) -> list[Stage]:
    return [TokenizePart(recipe, part) for part in range(len(recipe.parts))]


def _planned(recipe: Recipe, progress: Progress) -> dict[str, Any]:
    """Make the plan; if a token file is damaged, rebuild it and retry."""
    parts = _parts(recipe)
    mirror_of(recipe.layout.root).fetch(*((file, receipt) for file, receipt in (part.outputs() for part in parts)))
    differs = next(filter(None, (stage.receipt().get("rendering_differs") for stage in _parts(recipe))), None)
    if differs:
        engine_check.refuse_minijinja(recipe, differs)
        for stage in _parts(recipe):
            if not stage.is_done():
                stage.run(progress)
    engine_check.release_encoders()  # this corpus has nothing left to encode; another corpus loads its own
    try:
        return make_plan(recipe, recipe.plan_folder)
    except StorageError:
        damaged = [part for part in parts if not part.is_done(check_content=True)]
        if not damaged:
            raise
    for part in damaged:
        part.run(progress)
    return make_plan(recipe, recipe.plan_folder)


def _has_plan(recipe: Recipe) -> bool:
    return mirror_of(recipe.layout.root).has_listed(recipe.plan_folder / "plan.json")


@dataclass(frozen=True)
class Plan(Stage):
    """Assign every conversation to a shard, a row, and an offset."""

    def requires(self) -> Sequence[Stage]:
        return _tokenizer(self.recipe) + _parts(self.recipe)

    def outputs(self) -> list[Path]:
        return [self.recipe.plan_folder / name for name in (*plan_files(self.recipe.config), "plan.json")]

    def is_done(self, check_content: bool = False) -> bool:
        # A check of the content trusts no plan: the figures in plan.json have no checksum, and planning is cheap.
        if check_content or not _has_plan(self.recipe):
            return False
        return all(stage.is_done() for stage in self.requires())

    def run(self, progress: Progress = SILENT) -> dict[str, Any]:
        mirror = mirror_of(self.recipe.layout.root)
        try:
            receipt = _planned(self.recipe, progress)
            mirror.push(self.outputs())
        except DataError:  # its message may name the list of rejects
            mirror.push(path for path in self.outputs() if path.name == "rejects.jsonl" and path.is_file())
            raise
        return receipt


@dataclass(frozen=True)
class WriteShard(Stage):
    """Write shard number `shard` of the plan; shards are numbered over all splits."""

    shard: int

    def requires(self) -> Sequence[Stage]:
        return [*_tokenizer(self.recipe), Plan(self.recipe)]

    def outputs(self) -> list[Path]:
        recipe = self.recipe
        shard = recipe.corpus_folder / recipe.shard_names[self.shard]
        return [shard, shard_receipt(recipe.plan_folder, self.shard)]

    def is_done(self, check_content: bool = False) -> bool:
        mirror = mirror_of(self.recipe.layout.root)
        return mirror.has(*self.outputs(), checksum="sha256" if check_content else "")

    def step(self) -> Pack:
        """Return the work as a value that another process can run."""
        recipe, config = self.recipe, self.recipe.config
        special = (recipe.encoder.eos_id, recipe.encoder.pad_id) if config.packing else None
        layout, length = recipe.layout, recipe.length_of_shard(self.shard)
        plan, shard = layout.name_of(recipe.plan_folder), layout.name_of(self.outputs()[0])
        root = sent_root(layout.root)
        return Pack(root, plan, shard, self.shard, config.rows, length, special, recipe.corpus_key)

    def run(self, progress: Progress = SILENT) -> dict[str, Any]:
        return self.step().work(progress)


@dataclass(frozen=True)
class Publish(Stage):
    """Write the files next to the shards, then commit the manifest."""

    def requires(self) -> Sequence[Stage]:
        shards = [WriteShard(self.recipe, shard) for shard in range(len(self.recipe.shard_names))]
        return [*_tokenizer(self.recipe), *shards]

    def outputs(self) -> list[Path]:
        return [self.recipe.corpus_folder / "manifest.json", self.recipe.published]

    def is_done(self, check_content: bool = False) -> bool:
        """Return whether the manifest is published and unedited, and its files exist.

        Every file that it lists must have its recorded size and, with `check_content`, its checksum. A corpus whose
        texts were written by another version (keys.VERSIONS["texts"]) is done, too.
        """
        own, published = self.outputs()
        mirror = refresh(self.recipe)
        if not published.is_file():
            return False
        try:
            manifest, folder = load_manifest(published), own.parent
            if own.read_bytes() != published.read_bytes():
                return False
            # A killed run may have left the manifest in a folder that is not synced.
            sync_folder(published.parent)
            return all(
                mirror.has_size(folder / file.path, file.bytes)
                and (not check_content or digest_of(folder / file.path, "sha256") == file.sha256)
                for file in manifest.listed()
            )
        except (PackError, OSError):
            return False

    def prepare(self) -> None:
        """Remove the receipts of damaged shards, or of all shards without a valid plan.

        A new run has no receipts yet, so it hashes nothing.
        """
        is_planned = _has_plan(self.recipe)
        for stage in self.requires():
            receipt = stage.outputs()[-1]
            if not isinstance(stage, WriteShard) or not receipt.is_file():
                continue
            if not (is_planned and stage.is_done(check_content=True)):
                receipt.unlink()

    def run(self, progress: Progress = SILENT) -> dict[str, Any]:
        recipe = self.recipe
        mirror = mirror_of(recipe.layout.root)
        check_token_files(recipe.layout, recipe.token_keys, recipe.plan_folder)
        fetch_plan(mirror, recipe.plan_folder)
        written = [stage.outputs()[-1] for stage in self.requires() if isinstance(stage, WriteShard)]
        for receipt in written:
            mirror.fetch_file(receipt)
        receipts = [read_receipt(receipt) for receipt in written]
        encoded = {"encoder": asdict(engine_check.verdict_of(self.recipe))}
        publish_corpus(self.recipe, receipts, progress.run_record() | encoded)
        own, published = self.outputs()
        beside = [own.parent / file.path for file in load_manifest(own).files]
        mirror.commit([*beside, own.with_name("run.json")], (own, published))
        return {"manifest": with_urls(str(published))}


def refresh(recipe: Recipe) -> Mirror:
    """Return the mirror of the root of a corpus, refreshed if it is in a bucket."""
    mirror, publish = mirror_of(recipe.layout.root), Publish(recipe)
    if isinstance(mirror, Remote):
        made = [stage.outputs() for stage in (*_parts(recipe), *publish.requires())]
        artifacts = {(found[0], found[1]): None for found in made}
        own, published = publish.outputs()
        mirror.refresh(list(artifacts), recipe.plan_folder, (own, published))
        if recipe.config.engine != "reference":
            mirror.adopt(engine_check.verdict_file(recipe))
        if (key := recipe.tokenizer_key) and recipe.layout.tokenizer_receipt(key).is_file():
            mirror.fetch((recipe.layout.tokenizer(key), recipe.layout.tokenizer_receipt(key)))
    return mirror


def run_all(target: Stage, progress: Progress = SILENT, check_content: bool = False) -> None:
    """Run `target` and its required stages in this process, unless they are done."""
    visited: set[Stage] = set()

    def visit(stage: Stage) -> None:
        if stage in visited:
            return
        visited.add(stage)
        if not stage.is_done(check_content):
            stage.prepare()
            for required in stage.requires():
                visit(required)
            stage.run(progress)

    visit(target)


def run_alone(recipe: Recipe, name: str, share: Share = WHOLE) -> tuple[int, int]:
    """Run a share of one stage of `packcorpus part`.

    This is for machines that share files or a bucket and do not know of each other. Every stage before must have ended
    on all of them. Returns the number of steps in this share, and the number of them that were done before. Raises Busy
    if the outputs of an earlier stage are missing.
    """
    refresh(recipe)
    parts, plan, publish = _parts(recipe), Plan(recipe), Publish(recipe)
    shards: list[Stage] = [stage for stage in publish.requires() if isinstance(stage, WriteShard)]
    needed: list[Stage] = []
    if name == "prepare":
        steps, costs = _tokenizer(recipe), [1]
    elif name == "tokenize":
        steps, needed, costs = parts, _tokenizer(recipe), sizes_of(recipe.parts)
    elif name == "plan":
        steps, needed, costs = [plan], [*_tokenizer(recipe), *parts], [1]
    elif name == "write":
        steps, needed, costs = shards, [*_tokenizer(recipe), plan], [1] * len(shards)
    else:
        steps, needed, costs = [publish], [*_tokenizer(recipe), *shards], [1]
        if not publish.is_done():
            publish.prepare()
    if not all(stage.is_done() for stage in steps):
        _require(recipe, needed)
    if name in ("plan", "publish"):
        claim(recipe)
    own = [steps[number] for number in share.of(costs)] if steps else []
    left = [stage for stage in own if not stage.is_done()]
    for stage in left:
        run_all(stage)
    if name == "prepare":
        engine_check.verdict_of(recipe)
    return len(own), len(own) - len(left)


def _require(recipe: Recipe, needed: Sequence[Stage]) -> None:
    """Raise Busy if stages are not done, and name the stage to run first."""
    for kind, stage_name, missing_what in (
        (TrainTokenizer, "prepare", "the tokenizer is not trained yet"),
        (TokenizePart, "tokenize", "{missing:,} of {all:,} parts are not tokenized yet"),
        (Plan, "plan", "the corpus is not planned yet"),
        (WriteShard, "write", "{missing:,} of {all:,} shards are not written yet"),
    ):
        stages = [stage for stage in needed if isinstance(stage, kind)]
        if missing := sum(not stage.is_done() for stage in stages):
            problem = missing_what.format(missing=missing, all=len(stages))
            every = " for every share" if kind in (TokenizePart, WriteShard) else ""
            raise Busy(
                "parts_missing",
                f"{recipe.config.name}: {problem}; run packcorpus part --stage {stage_name}{every} first",
            )


# Checks of an engine before it starts, and of files on disk


def claim(recipe: Recipe) -> None:
    """Make sure that no other run makes this corpus at the same time.

    Call this before workers are forked. Raises Busy.
    """
    path = recipe.layout.lock(recipe.config.name, recipe.corpus_key)
    if not acquire_lock(path):
        raise Busy("busy", f"{recipe.corpus_folder}: another run is packing this corpus; wait for it, then run again")


def open_encoder(recipe: Recipe) -> engine_check.Verdict | None:
    """Open and check the encoder for all processes that are forked from this process.

    Returns None if nothing is left to encode, or if the tokenizer is not trained yet: TrainTokenizer then opens it.
    """
    if not recipe.has_tokenizer or all(stage.is_done() for stage in _parts(recipe)):
        return None
    engine_check.encoder_of(recipe)
    return engine_check.verdict_of(recipe)
