"""Define what an export format is.

    Rows ─write_shard, one thread for each shard─▶ files, a Part ─close_split─▶ files of a split ─close─▶ files of all

A format writes into an OutputFolder, which records every file with its checksum. It states in `settings` what the
trainer must be set to, and in `notes` what the format cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tasks.exports.rows import Rows
from tasks.storage.facts.outputs import FileFacts
from tasks.storage.files import HashingWriter, atomic_file
from tasks.storage.manifest import Manifest
from tasks.storage.splits import TRAIN_EPOCH_PREFIX

Settings = dict[str, Any]
FOLDER = "<folder>"  # in settings: the folder of the export


@dataclass(frozen=True)
class Reader:
    """The reader of a trainer that the export was compared with."""

    package: str
    version: str
    code: str  # the class or function that reads


@dataclass(frozen=True)
class Note:
    """Something that a format cannot hold, or that the trainer must be set to."""

    name: str
    text: str


class OutputFolder:
    """The folder of an export while it is written. Several threads may write files of it."""

    def __init__(self, folder: Path, final: Path):
        self.folder, self.final = folder, final
        self.files: list[FileFacts] = []

    @contextmanager
    def file(self, name: str) -> Iterator[HashingWriter]:
        """Write a file, given by its path within the folder, and record it."""
        with atomic_file(self.folder / name) as out:
            yield out
        self.files.append(FileFacts(path=name, bytes=out.size, sha256=out.digest()))

    def write(self, name: str, data: bytes) -> None:
        with self.file(name) as out:
            out.write(data)


@dataclass
class Part:
    """What is counted of a shard while it is written."""

    rows: int = 0
    pieces: int = 0
    tokens: int = 0
    trained: int = 0
    longest_piece: int = 0
    most_pieces: int = 0
    facts: dict[str, int] = field(default_factory=dict)  # further counts of the format
    columns: dict[str, np.ndarray] = field(default_factory=dict)  # of the format

    def count(self, rows: Rows) -> None:
        self.rows += len(rows)
        self.pieces += len(rows.lengths)
        self.tokens += int(rows.tokens.sum())
        self.trained += rows.trained
        self.longest_piece = max(self.longest_piece, int(rows.lengths.max()))
        self.most_pieces = max(self.most_pieces, int(rows.pieces.max()))


@dataclass(frozen=True)
class ShardJob:
    """One shard to write: the number of it, and of all shards of its split."""

    manifest: Manifest
    split: str
    number: int
    shards: int
    first_row: int  # rows of the split before it

    @property
    def name(self) -> str:
        """Return the name of the shard without its extension, as the corpus has it."""
        return f"{self.split}-{self.number:05d}-of-{self.shards:05d}"


class ExportFormat:
    """An export format. Subclasses define the facts and write_shard."""

    name: str  # as --to takes it
    version: int = 1  # raise it if the files of the same corpus change
    trainer: str  # who reads it
    rows_kept: bool  # the rows of the plan stay rows
    aligned: bool = False  # pieces start where they do in the rows of the plan
    weighted: bool = False  # holds `loss_weight`, for a trainer that honors it
    ordered: bool = False  # the trainer takes the rows in their order, rank by rank
    shifted: str  # who shifts labels: "the export" or "the trainer"
    bounds: str  # what marks the bounds of pieces
    layout: str  # the files of a split, for the documentation
    reader: Reader

    def write_shard(self, job: ShardJob, batches: Iterator[Rows], part: Part, out: OutputFolder) -> None:
        """Write the files of one shard. What `part` counts is complete when `batches` has ended."""
        raise NotImplementedError

    def close_split(self, manifest: Manifest, split: str, parts: Sequence[Part], out: OutputFolder) -> None:
        """Write the files of a split that describe all of its shards."""

    def close(self, manifest: Manifest, splits: Sequence[str], out: OutputFolder) -> None:
        """Write the files that describe all splits."""

    def settings(self, manifest: Manifest, parts: Sequence[Part]) -> Settings:
        """Return what the trainer must be set to. FOLDER is a placeholder for the folder of the export."""
        raise NotImplementedError

    def notes(self, manifest: Manifest, parts: Sequence[Part]) -> list[Note]:
        """Return what the format cannot hold of this corpus."""
        return []


def note_on_alignment(manifest: Manifest, format: ExportFormat) -> list[Note]:
    """Return what to know about a corpus with `align` in a format that has no gaps between pieces."""
    align = manifest.row_shape.align
    if align == 1 or format.aligned:
        return []
    text = f"align: {align} is lost: the padding between conversations is left out, and they start at any token"
    return [Note("align", text)]


def is_balanced(manifest: Manifest) -> bool:
    """Return whether the order of the rows is one for ranks."""
    return manifest.config.get("balance") is not None


def note_on_order(manifest: Manifest, format: ExportFormat) -> list[Note]:
    """Return what to know about a corpus with `balance` in a format whose trainer decides on the order of rows."""
    if format.ordered or not is_balanced(manifest):
        return []
    ranks = manifest.config["balance"]["ranks"]
    text = f"the order for {ranks} ranks is lost: {format.trainer} packs again"
    if format.rows_kept:
        text = (
            f"rows are in the order for {ranks} ranks, or a divisor of it: the trainer must not shuffle them, and has "
            "to deal them to the ranks in turn, one by one; otherwise ranks wait as in random order"
        )
    return [Note("balance", text)]


def note_on_mix(manifest: Manifest) -> Note:
    """Return what to know about rows of several lengths, which are an export each."""
    text = f"the order of the steps (mix: {manifest.row_shape.mix}) is lost: the rows of each length are a folder"
    return Note("mix", f"{text} of their own, and a trainer reads one of them; each step must have rows of one length")


def note_on_epochs(splits: Sequence[str]) -> list[Note]:
    """Return what to know about a corpus that has further packings of its training split."""
    further = [split for split in splits if split.startswith(TRAIN_EPOCH_PREFIX)]
    if not further:
        return []
    text = "each has the conversations of train in other rows: train on one of these splits per epoch, not on several"
    return [Note("epochs", f"{', '.join(further)}: {text}")]
