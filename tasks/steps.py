"""The steps of a run, as values that any process on any machine can run.

    Recipe ─stages.py─▶ Step ─pickle─▶ another process ─run─▶ data, then its receipt ─▶ Outcome

A step tokenizes a part or writes a shard. It names everything that it reads and writes. It does nothing if its receipt
exists, so it may run twice, also in two processes at the same time: both write the same bytes. It does not depend on an
engine; pipeline/engines decides where steps run.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.core.errors import DataError, PackError, StorageError
from tasks.core.messages import to_pack_error
from tasks.core.process import peak_memory
from tasks.corpus.publish import write_planned_shard
from tasks.packing.plan import dropped
from tasks.recipe import Recipe
from tasks.sources.model import Part
from tasks.sources.remote import with_copy
from tasks.storage.files import has_artifact, read_receipt, write_receipt
from tasks.storage.layout import Layout, RowLayout
from tasks.stores.mirror import Mirror, mirror_of
from tasks.stores.scratch import root_of
from tasks.tokenization.engine_check import encoder_named
from tasks.tokenization.tokenize_part import tokenize_part

# The errors of reading a damaged token file. pyarrow raises a plain OSError for a damaged footer, and a damaged name of
# a column is a KeyError. If no checksum differs, such an error has another cause.
UNREADABLE = (pa.ArrowException, OSError, ValueError, LookupError)


class Progress:
    """The link between a running step and its engine; this class ignores reports.

    A step reports its progress. An engine provides facts about the run.
    """

    def tokenized(self, conversations: int, rejected: int, tokens: int, share: float) -> None:
        """Receive counts since the start of the part, and the share that has been read."""

    def run_record(self) -> dict[str, Any]:
        """Return the facts about this run for run.json: times, speeds, and versions."""
        return {}


SILENT = Progress()


class Step(ABC):
    """A small frozen value that names the inputs, outputs, and options of the work."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Return the name of the work in messages: a file and its bytes, or a shard."""

    @abstractmethod
    def outputs(self) -> tuple[Path, Path]:
        """Return the file that this step writes, and its receipt, which is written last."""

    @abstractmethod
    def is_done(self) -> bool:
        """Return whether the output exists at its recorded size."""

    @abstractmethod
    def work(self, progress: Progress) -> dict[str, Any]:
        """Write the outputs and return the receipt. Raises PackError."""


@dataclass(frozen=True)
class Texts:
    """The settings that turn records into tokens, the same for all parts of a corpus.

    They are sent to other processes without the lists of sources and parts.
    """

    key: str
    recipe: Recipe = field(compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"key": self.key, "recipe": self.recipe.without_sources()}


@lru_cache(maxsize=4)
def _recipe_of(texts: Texts) -> Recipe:
    """Return the recipe that all steps of a corpus share, to load its encoder once."""
    return texts.recipe


@dataclass(frozen=True)
class Tokenize(Step):
    """Tokenize one part of a source file.

    `engine` is the name of the encoder that was chosen for the corpus. Without `uses_minijinja`, Jinja2 renders all
    conversations.
    """

    texts: Texts
    part: Part
    key: str
    engine: str
    uses_minijinja: bool = True

    @property
    def place(self) -> str:
        return f"{self.part.file.name}, from {self.part.start:,} to {self.part.stop:,}"

    def outputs(self) -> tuple[Path, Path]:
        layout = self.texts.recipe.layout
        return layout.token_file(self.key), layout.token_receipt(self.key)

    def is_done(self) -> bool:
        refused = {"gigatoken", "minijinja"} - {self.engine, "minijinja" if self.uses_minijinja else ""}
        return mirror_of(self.texts.recipe.layout.root).is_stored(*self.outputs(), refused=refused)

    def work(self, progress: Progress) -> dict[str, Any]:
        recipe = _recipe_of(self.texts)
        layout, mirror = recipe.layout, mirror_of(recipe.layout.root)
        if recipe.tokenizer_key:
            mirror.fetch((layout.tokenizer(recipe.tokenizer_key), layout.tokenizer_receipt(recipe.tokenizer_key)))
        if recipe.tokens_key(self.part) != self.key:
            raise DataError(
                "input_changed",
                f"{self.part.file.name}: the tokenizer, the template, or packcorpus itself has changed since the run "
                "started, or differs from the machine that started it; use the same files and the same version "
                "everywhere",
            )
        encoder = encoder_named(self.engine, recipe.encoder)
        if recipe.template.engines and not self.uses_minijinja:
            recipe.template.engines.use_jinja2()
        part = with_copy(self.part, layout.remote())
        work = partial(
            tokenize_part, part, encoder, recipe.template, recipe.config, *self.outputs(), progress.tokenized
        )
        receipt = work()
        # The engines of templates differ. Jinja2 renders the other parts again before they are planned.
        if {"rendering", "rendering_differs"} <= receipt.keys():
            receipt = work()
        mirror.push(self.outputs())
        return receipt


@dataclass(frozen=True)
class Pack(Step):
    """Write one shard of a plan.

    `sent_root` is the path or URL of the root; `plan` and `file` are relative to it, because every machine has its own
    scratch folder for a root in a bucket. `special` has the ids of EOS and padding, or is None for format 2.0.
    """

    sent_root: str
    plan: str
    file: str
    shard: int
    rows: RowLayout
    length: int
    special: tuple[int, int] | None
    corpus_key: str

    @property
    def place(self) -> str:
        return Path(self.file).name

    def outputs(self) -> tuple[Path, Path]:
        root = root_of(self.sent_root)
        return root / self.file, shard_receipt(root / self.plan, self.shard)

    def is_done(self) -> bool:
        return mirror_of(root_of(self.sent_root)).is_stored(*self.outputs())

    def work(self, progress: Progress) -> dict[str, Any]:
        root, (path, receipt_file) = root_of(self.sent_root), self.outputs()
        layout, mirror, plan_folder = Layout(root), mirror_of(root), root / self.plan
        facts = fetch_plan(mirror, plan_folder, self.shard)
        files = [layout.token_file(key) for key in facts["token_files"]]
        try:
            receipt = write_planned_shard(
                path,
                self.shard,
                plan_folder,
                files,
                self.special,
                self.rows,
                self.length,
                self.corpus_key,
                fetch=lambda file: mirror.fetch((file, layout.token_receipt(file.stem))),
            )
        except UNREADABLE:
            check_token_files(layout, facts["token_files"], plan_folder)
            raise
        write_receipt(receipt_file, receipt)
        mirror.push((path, receipt_file))
        mirror.drop(path)
        return receipt


def fetch_plan(mirror: Mirror, folder: Path, shard: int | None = None) -> dict[str, Any]:
    """Make sure that a plan can be read locally, and return its receipt.

    With `shard`, only the placements of that shard are fetched.
    """
    mirror.fetch_file(folder / "plan.json")
    receipt = read_receipt(folder / "plan.json")
    for name in receipt["files"] if shard is None else ["plan.arrow"]:
        mirror.fetch_file(folder / name, receipt["files"][name], receipt["sha256"][name])
    return receipt


def shard_receipt(plan_folder: Path, shard: int) -> Path:
    return plan_folder / f"shard-{shard:05d}.json"


def check_token_files(layout: Layout, keys: list[str], plan_folder: Path) -> None:
    """Check that the local token files of a plan have their recorded checksums.

    Raises StorageError if a file is damaged, after removing its receipt and the receipts of all shards.
    """
    for key in keys:
        file, receipt = layout.token_file(key), layout.token_receipt(key)
        if file.is_file() and receipt.is_file() and not has_artifact(file, receipt, checksum="xxh3"):
            raise dropped(plan_folder, file, receipt)


# Run


def run(step: Step) -> dict[str, Any]:
    """Run a step unless it is done, and return its receipt. Raises PackError."""
    return read_receipt(step.outputs()[1]) if step.is_done() else step.work(SILENT)


def unreadable(written: Path) -> StorageError:
    """Return the error for an output that is missing after it was written."""
    return StorageError(
        "cannot_read", f"{written}: was written, but cannot be read back; check the disk, then run again"
    )


@dataclass(frozen=True)
class Outcome:
    """The result of a step for an engine: figures, or the error that ended it.

    `seconds` (of wall-clock time) and `cpu` are in seconds, `peak` (of memory) is in bytes.
    """

    conversations: int = 0
    rejected: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    peak: int = 0
    error: PackError | None = None


def load_modules() -> None:
    """Do nothing; calling this in another process loads all modules there."""


def attempt(step: Step) -> Outcome:
    """Run a step and return its figures or its error.

    An error is a value, so that it arrives complete from any process.
    """
    start, cpu = time.perf_counter(), time.process_time()
    try:
        receipt = run(step)
        if not step.is_done():
            raise unreadable(step.outputs()[0])
    except Exception as error:
        return Outcome(error=to_pack_error(error))
    return Outcome(
        conversations=receipt.get("conversations", 0),
        rejected=len(receipt.get("rejects", ())),
        tokens=receipt.get("tokens", 0),
        seconds=time.perf_counter() - start,
        cpu=time.process_time() - cpu,
        peak=peak_memory(),
    )
