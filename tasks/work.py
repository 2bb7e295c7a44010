"""The work of a corpus: requirements, outputs, completeness, and how to do it.

    TrainTokenizer ─▶ TokenizePart × N ─▶ Plan ─▶ WriteShard × S ─▶ Publish
                      └ steps: small values that run in any process, on any machine

Each kind of work is one class, for Luigi's tasks (pipeline/graph.py), engines, `packcorpus part`, rebuild, and repair.
The last output is the commit. It is written after all others, so interrupted work is not done. Work may run twice, even
in two processes at the same time: both write the same bytes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from packcorpus.tasks.core.errors import Busy, DataError, PackError, StorageError
from packcorpus.tasks.core.messages import to_pack_error
from packcorpus.tasks.core.printable import with_urls
from packcorpus.tasks.core.process import peak_memory
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.sources.locate import with_copy
from packcorpus.tasks.sources.model import Part
from packcorpus.tasks.sources.parts import WHOLE, Share, sizes_of
from packcorpus.tasks.sources.unpack import packed, unpacked
from packcorpus.tasks.storage.files import (
    acquire_lock,
    digest_of,
    has_artifact,
    hold_shared,
    read_receipt,
    sync_folder,
    write_receipt,
)
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.stores.mirror import Mirror, mirror_of

# A run that finds the corpus complete takes half of its time to load modules, so those that do the work are loaded when
# there is some.
if TYPE_CHECKING:
    from packcorpus.tasks.tokenization.checks import EngineChoice


@dataclass(frozen=True)
class Work(ABC):
    """One piece of the work that makes the corpus of a recipe."""

    recipe: Recipe

    needs: ClassVar[tuple[type[Work], ...]] = ()  # kinds of work whose outputs this kind reads
    stage: ClassVar[str]  # --stage of `packcorpus part`
    missing: ClassVar[str]  # what is missing if {missing} of {all} are not done
    are_steps: ClassVar[bool] = False  # an engine runs several at once, in any process

    @classmethod
    def all_of(cls, recipe: Recipe) -> list[Self]:
        """Return all work of this kind."""
        return [cls(recipe)]

    def requires(self) -> list[Work]:
        """Return the work whose outputs this one reads."""
        return [work for kind in self.needs for work in kind.all_of(self.recipe)]

    @property
    def mirror(self) -> Mirror:
        return mirror_of(self.recipe.layout.root)

    @property
    def place(self) -> str:
        """Return the name of this work in messages: a file and its bytes, or a shard."""
        return self.outputs()[-1].name

    @abstractmethod
    def outputs(self) -> tuple[Path, ...]:
        """Return the files that this work writes, the commit last."""

    @abstractmethod
    def is_done(self, check_content: bool = False) -> bool:
        """Return whether every output exists at its recorded size.

        With `check_content`, every output must also have its recorded checksum.
        """

    def is_stored(self) -> bool:
        """Return whether the work is done at this moment, perhaps by another process."""
        return self.is_done()

    def discard_damaged(self) -> None:  # noqa: B027 - most work has nothing to drop
        """Discard outputs of an interrupted run, and outputs that were damaged since."""

    def decided(self) -> Self:
        """Return the work with all choices that only the process of the run can make."""
        return self

    @abstractmethod
    def run(self) -> dict[str, Any]:
        """Write the outputs and return the receipt.

        All required work must be done. Raises PackError.
        """

    def receipt(self) -> dict[str, Any]:
        """Return the receipt of work that is done. Raises PackError."""
        return read_receipt(self.outputs()[-1])


@dataclass(frozen=True)
class TrainTokenizer(Work):
    """Train a SentencePiece model on the sources, if the config names no tokenizer."""

    stage = "prepare"
    missing = "the tokenizer is not trained yet"

    @classmethod
    def all_of(cls, recipe: Recipe) -> list[Self]:
        return [cls(recipe)] if recipe.tokenizer_key else []

    def outputs(self) -> tuple[Path, ...]:
        key = str(self.recipe.tokenizer_key)
        return self.recipe.layout.tokenizer(key), self.recipe.layout.tokenizer_receipt(key)

    def is_done(self, check_content: bool = False) -> bool:
        return self.recipe.has_tokenizer

    def run(self) -> dict[str, Any]:
        from packcorpus.tasks.tokenization import checks
        from packcorpus.tasks.tokenization.train_tokenizer import train_tokenizer

        recipe, config = self.recipe, self.recipe.config
        model, receipt = self.outputs()
        facts = train_tokenizer(recipe.parts, config.template, config.vocab_size, config.max_record_bytes, model)
        write_receipt(receipt, facts)
        self.mirror.push((model, receipt))
        checks.choose_engines(recipe)  # here once, not in each process that will encode
        return facts


@dataclass(frozen=True)
class TokenizePart(Work):
    """Tokenize a part of the sources.

    `key` and `engines` are those of the process that has decided this work, for any other process. So are the `ranges`
    of the parts of the file that are unpacked together.
    """

    part: Part
    key: str = ""
    engines: EngineChoice | None = None
    ranges: bytes = field(default=b"", compare=False, repr=False)

    needs = (TrainTokenizer,)
    stage = "tokenize"
    missing = "{missing:,} of {all:,} parts are not tokenized yet"
    are_steps = True

    @classmethod
    def all_of(cls, recipe: Recipe) -> list[Self]:
        return [cls(recipe, part) for part in recipe.parts]

    @property
    def place(self) -> str:
        return f"{self.part.file.name}, from {self.part.start:,} to {self.part.stop:,}"

    def outputs(self) -> tuple[Path, ...]:
        key = self.key or self.recipe.tokens_key(self.part)
        return self.recipe.layout.token_file(key), self.recipe.layout.token_receipt(key)

    def is_done(self, check_content: bool = False) -> bool:
        from packcorpus.tasks.tokenization import checks

        checksum = "xxh3" if check_content else ""
        return self.mirror.has(*self.outputs(), checksum=checksum, refused=checks.refused_engines(self.recipe))

    def is_stored(self) -> bool:
        if self.engines is None:
            return self.is_done()
        return self.mirror.is_stored(*self.outputs(), refused=self.engines.refused)

    def decided(self) -> Self:
        """Return the work with its key and the encoder of the corpus.

        Raises DataError for the first part if the first conversations show that the template does not fit.
        """
        from packcorpus.tasks.tokenization import checks

        recipe, engines = self.recipe, checks.choose_engines(self.recipe)
        if self.part == recipe.parts[0]:
            if recipe.template.engines and not engines.uses_minijinja:
                recipe.template.engines.use_jinja2()
            checks.check_first_conversations(recipe)
        ranges = self.ranges or recipe.ranges.get(self.part.file, b"")
        return replace(self, key=recipe.tokens_key(self.part), engines=engines, ranges=ranges)

    def run(self) -> dict[str, Any]:
        from packcorpus.tasks.tokenization.decontamination import evaluation_of
        from packcorpus.tasks.tokenization.tokenize_part import tokenize_part

        if self.engines is None:
            return self.decided().run()
        recipe, layout, mirror = self.recipe, self.recipe.layout, self.mirror
        if recipe.tokenizer_key:
            mirror.fetch((layout.tokenizer(recipe.tokenizer_key), layout.tokenizer_receipt(recipe.tokenizer_key)))
        if recipe.tokens_key(self.part) != self.key:
            raise DataError(
                "input_changed",
                f"{self.part.file.name}: the tokenizer, the template, or packcorpus itself has changed since the run "
                "started, or differs from the machine that started it; use the same files and the same version "
                "everywhere",
            )
        encoder = self.engines.encoder(recipe.encoder)
        if recipe.template.engines and not self.engines.uses_minijinja:
            recipe.template.engines.use_jinja2()
        file, receipt_file = self.outputs()
        evaluation = evaluation_of(recipe)
        with self._at_hand() as part:
            words = (part, encoder, recipe.template, recipe.config, file, receipt_file, evaluation)
            tokenize = partial(tokenize_part, *words)
            receipt = tokenize()
            # The engines of templates differ. Jinja2 renders the other parts again before they are planned.
            if {"rendering", "rendering_differs"} <= receipt.keys():
                receipt = tokenize()
        mirror.push(self.outputs())
        return receipt

    def _at_hand(self) -> AbstractContextManager[Part]:
        """Return the part for reading, with its file or its unpacked copy here."""
        part = with_copy(self.part, self.recipe.layout.remote())

        def is_needed(other: Part) -> bool:
            outputs = replace(self, part=other, key="").outputs()
            return not self.mirror.has(*outputs, refused=self.engines.refused if self.engines else ())

        key = self.recipe.tokens_key(replace(part, sha256=part.file.sha256))  # of the file, for this tokenizer
        return unpacked(part, self.ranges, self.recipe.layout.unpacked(key), is_needed)


@dataclass(frozen=True)
class Plan(Work):
    """Assign every conversation to a shard, a row, and an offset."""

    needs = (TrainTokenizer, TokenizePart)
    stage = "plan"
    missing = "the corpus is not planned yet"

    def outputs(self) -> tuple[Path, ...]:
        from packcorpus.tasks.packing.plan import plan_files

        return tuple(self.recipe.plan_folder / name for name in (*plan_files(self.recipe.config), "plan.json"))

    @property
    def exists(self) -> bool:
        """Return whether there is a plan, perhaps of token files that are gone."""
        return self.mirror.has_listed(self.recipe.plan_folder / "plan.json")

    def is_done(self, check_content: bool = False) -> bool:
        # A check of the content trusts no plan: the figures in plan.json have no checksum, and planning is cheap.
        return not check_content and self.exists and all(work.is_done() for work in self.requires())

    def run(self) -> dict[str, Any]:
        try:
            receipt = self._make()
            self.mirror.push(self.outputs())
        except DataError:  # its message may name the list of rejects
            self.mirror.push(path for path in self.outputs() if path.name == "rejects.jsonl" and path.is_file())
            raise
        return receipt

    def _make(self) -> dict[str, Any]:
        from packcorpus.tasks.packing.plan import make_plan
        from packcorpus.tasks.tokenization import checks

        recipe, parts = self.recipe, TokenizePart.all_of(self.recipe)
        self.mirror.fetch(*((file, receipt) for file, receipt in (part.outputs() for part in parts)))
        if differs := next(filter(None, (part.receipt().get("rendering_differs") for part in parts)), None):
            checks.refuse_minijinja(recipe, differs)
            for part in parts:
                if not part.is_done():
                    part.run()
        checks.release_encoders()  # this corpus has nothing left to encode; another corpus loads its own
        try:
            return make_plan(recipe, recipe.plan_folder)
        except StorageError:
            damaged = [part for part in parts if not part.is_done(check_content=True)]
            if not damaged:
                raise
        for part in damaged:
            part.run()
        return make_plan(recipe, recipe.plan_folder)


@dataclass(frozen=True)
class WriteShard(Work):
    """Write shard number `shard` of the plan; shards are numbered over all splits."""

    shard: int

    needs = (TrainTokenizer, Plan)
    stage = "write"
    missing = "{missing:,} of {all:,} shards are not written yet"
    are_steps = True

    @classmethod
    def all_of(cls, recipe: Recipe) -> list[Self]:
        return [cls(recipe, shard) for shard in range(len(recipe.shard_names))]

    @property
    def place(self) -> str:
        return self.recipe.shard_names[self.shard]

    def outputs(self) -> tuple[Path, ...]:
        recipe = self.recipe
        shard = recipe.corpus_folder / recipe.shard_names[self.shard]
        return shard, recipe.plan_folder / f"shard-{self.shard:05d}.json"

    def is_done(self, check_content: bool = False) -> bool:
        return self.mirror.has(*self.outputs(), checksum="sha256" if check_content else "")

    def is_stored(self) -> bool:
        return self.mirror.is_stored(*self.outputs())

    def run(self) -> dict[str, Any]:
        from packcorpus.tasks.corpus.publish import write_planned_shard
        from packcorpus.tasks.packing.plan import UNREADABLE

        recipe, layout, mirror = self.recipe, self.recipe.layout, self.mirror
        path, receipt_file = self.outputs()
        token_files = _fetch_plan(mirror, recipe.plan_folder, self.shard)["token_files"]
        try:
            receipt = write_planned_shard(
                path,
                self.shard,
                recipe.plan_folder,
                [layout.token_file(key) for key in token_files],
                recipe.special,
                recipe.config.rows,
                recipe.length_of_shard(self.shard),
                recipe.corpus_key,
                fetch=lambda file: mirror.fetch((file, layout.token_receipt(file.stem))),
            )
        except UNREADABLE:
            _check_token_files(recipe, token_files)
            raise
        write_receipt(receipt_file, receipt)
        mirror.push((path, receipt_file))
        mirror.drop(path)
        return receipt


@dataclass(frozen=True)
class Publish(Work):
    """Write the files next to the shards, then commit the manifest.

    `run_record` returns the facts about this run for run.json: times, speeds, and versions.
    """

    run_record: Callable[[], dict[str, Any]] = field(default=dict, compare=False)

    needs = (TrainTokenizer, WriteShard)
    stage = "publish"
    missing = "the corpus is not published yet"

    def outputs(self) -> tuple[Path, ...]:
        return self.recipe.corpus_folder / "manifest.json", self.recipe.published

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

    def discard_damaged(self) -> None:
        """Remove the receipts of damaged shards, or of all shards without a valid plan."""
        is_planned = Plan(self.recipe).exists
        for shard in WriteShard.all_of(self.recipe):
            receipt = shard.outputs()[-1]
            if receipt.is_file() and not (is_planned and shard.is_done(check_content=True)):
                receipt.unlink()

    def run(self) -> dict[str, Any]:
        from packcorpus.tasks.corpus.publish import publish_corpus
        from packcorpus.tasks.tokenization import checks

        recipe, mirror = self.recipe, self.mirror
        _check_token_files(recipe, recipe.token_keys)
        _fetch_plan(mirror, recipe.plan_folder)
        shards = WriteShard.all_of(recipe)
        for shard in shards:
            mirror.fetch_file(shard.outputs()[-1])
        receipts = [shard.receipt() for shard in shards]
        encoded = {"encoder": asdict(checks.choose_engines(recipe)), "proof": checks.choice_file(recipe).stem}
        publish_corpus(recipe, receipts, self.run_record() | encoded)
        own, published = self.outputs()
        beside = [own.parent / file.path for file in load_manifest(own).files]
        mirror.commit([*beside, own.with_name("run.json")], (own, published))
        return {"manifest": with_urls(str(published))}


KINDS: tuple[type[Work], ...] = (TrainTokenizer, TokenizePart, Plan, WriteShard, Publish)


def _fetch_plan(mirror: Mirror, folder: Path, shard: int | None = None) -> dict[str, Any]:
    """Make sure that a plan can be read locally, and return its receipt."""
    mirror.fetch_file(folder / "plan.json")
    receipt = read_receipt(folder / "plan.json")
    for name in receipt["files"] if shard is None else ["plan.arrow"]:
        mirror.fetch_file(folder / name, receipt["files"][name], receipt["sha256"][name])
    return receipt


def _check_token_files(recipe: Recipe, keys: Sequence[str]) -> None:
    """Check that the local token files of a plan have their recorded checksums."""
    from packcorpus.tasks.packing.plan import discard_receipts

    for key in keys:
        file, receipt = recipe.layout.token_file(key), recipe.layout.token_receipt(key)
        if file.is_file() and receipt.is_file() and not has_artifact(file, receipt, checksum="xxh3"):
            raise discard_receipts(recipe.plan_folder, file, receipt)


def refresh(recipe: Recipe) -> Mirror:
    """Return the mirror of the root of a corpus, refreshed if it is in a bucket."""
    mirror = mirror_of(recipe.layout.root)
    if mirror.url:
        from packcorpus.tasks.tokenization import checks

        steps = [work.outputs() for kind in (TokenizePart, WriteShard) for work in kind.all_of(recipe)]
        trained = [work.outputs() for work in TrainTokenizer.all_of(recipe)]
        own, published = Publish(recipe).outputs()
        artifacts = [(file, receipt) for file, receipt in dict.fromkeys((*trained, *steps))]
        mirror.refresh(artifacts, recipe.plan_folder, (own, published))
        if recipe.config.engine != "reference":
            mirror.adopt(checks.choice_file(recipe))
        for model, receipt in trained:
            if receipt.is_file():
                mirror.fetch((model, receipt))
    return mirror


# -- to do the work ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of work for an engine: figures, or the error that ended it.

    `seconds` (of wall-clock time) and `cpu` are in seconds, `peak` (of memory) is in bytes.
    """

    conversations: int = 0
    rejected: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    peak: int = 0
    error: PackError | None = None


def attempt(work: Work) -> Outcome:
    """Do work, unless it is a step that is done, and return its figures or its error.

    An error is a value, so that it arrives complete from any process.
    """
    start, cpu = time.perf_counter(), time.process_time()
    try:
        receipt = work.receipt() if work.are_steps and work.is_stored() else work.run()
        if not work.is_stored():
            raise StorageError(
                "cannot_read",
                f"{work.outputs()[0]}: was written, but cannot be read back; check the disk, then run again",
            )
    except Exception as error:
        return Outcome(error=to_pack_error(error))
    figures = receipt if work.are_steps else {}
    return Outcome(
        conversations=figures.get("conversations", 0),
        rejected=len(figures.get("rejects", ())),
        tokens=figures.get("tokens", 0),
        seconds=time.perf_counter() - start,
        cpu=time.process_time() - cpu,
        peak=peak_memory(),
    )


def load_modules() -> None:
    """Load the modules that do the steps, for processes that are forked later."""
    import packcorpus.tasks.corpus.publish
    import packcorpus.tasks.tokenization.tokenize_part  # noqa: F401


def run_all(target: Work, check_content: bool = False) -> None:
    """Do `target` and the work that it requires in this process, unless it is done."""
    visited: set[Work] = set()

    def visit(work: Work) -> None:
        if work in visited:
            return
        visited.add(work)
        if not work.is_done(check_content):
            work.discard_damaged()
            for required in work.requires():
                visit(required)
            work.run()

    visit(target)


def run_stage(recipe: Recipe, kind: type[Work], share: Share = WHOLE) -> tuple[int, int]:
    """Do a share of all work of one kind, as `packcorpus part` does.

    This is for machines that share files or a bucket and do not know of each other. Every stage before must have ended
    on all of them. Returns how much work is in this share, and how much of it was done before. Raises Busy if the
    outputs of an earlier stage are missing.
    """
    hold_shared(recipe.layout.runs_lock())
    refresh(recipe)
    steps = kind.all_of(recipe)
    if kind is Publish and not steps[0].is_done():
        steps[0].discard_damaged()
    if not all(work.is_done() for work in steps):
        for needed in kind.needs:
            required = needed.all_of(recipe)
            if missing := sum(not work.is_done() for work in required):
                problem = needed.missing.format(missing=missing, all=len(required))
                every = " for every share" * needed.are_steps
                raise Busy(
                    "parts_missing",
                    f"{recipe.config.name}: {problem}; run packcorpus part --stage {needed.stage}{every} first",
                )
    if kind in (Plan, Publish):
        claim(recipe)
    costs = sizes_of(recipe.parts) if kind is TokenizePart else [1] * len(steps)
    own = [steps[number] for number in share.of(costs)]
    if mirror_of(recipe.layout.root).url:  # nobody else reads what is unpacked here
        parts = [step.part for step in own if isinstance(step, TokenizePart)]
        ranges = {file: packed(of_file) for file, of_file in groupby(parts, attrgetter("file"))}
        own = [replace(step, ranges=ranges[step.part.file]) if isinstance(step, TokenizePart) else step for step in own]
    left = [work for work in own if not work.is_done()]
    for work in left:
        run_all(work)
    if kind is TrainTokenizer:
        from packcorpus.tasks.tokenization import checks

        checks.choose_engines(recipe)
    return len(own), len(own) - len(left)


def claim(recipe: Recipe) -> None:
    """Make sure that no other run makes this corpus at the same time.

    Until this process ends, `clean` deletes nothing. Call this before workers are forked. Raises Busy.
    """
    hold_shared(recipe.layout.runs_lock())
    path = recipe.layout.lock(recipe.config.name, recipe.corpus_key)
    if not acquire_lock(path):
        raise Busy("busy", f"{recipe.corpus_folder}: another run is packing this corpus; wait for it, then run again")


def open_encoder(recipe: Recipe) -> EngineChoice | None:
    """Open and check the encoder for all processes that are forked from this process.

    Returns None if nothing is left to encode, or if the tokenizer is not trained yet: TrainTokenizer then opens it.
    """
    from packcorpus.tasks.tokenization import checks

    if not recipe.has_tokenizer or all(part.is_done() for part in TokenizePart.all_of(recipe)):
        return None
    engines = checks.choose_engines(recipe)
    engines.encoder(recipe.encoder)
    return engines
