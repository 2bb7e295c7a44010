"""Export formats: the base class, and folders for `datasets.load_from_disk`.

    RowBatch ─write_shard, a thread for each shard─▶ files, a Part ─close_split─▶ files of a split ─close─▶ files of all

A format writes into an OutputFolder, which records every file with its checksum. `settings` returns the settings that
the trainer needs, and `notes` lists the facts that the format cannot hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packcorpus.tasks.storage.facts import FileFacts
from packcorpus.tasks.storage.files import HashingWriter, atomic_file, to_json
from packcorpus.tasks.storage.layout import TRAIN_EPOCH_PREFIX
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.schemas import offsets_of, to_arrow
from packcorpus.tasks.storage.shards import RowBatch

Settings = dict[str, Any]
FOLDER = "<folder>"  # in settings: the folder of the export


@dataclass(frozen=True)
class Reader:
    """The trainer's reader that the export was tested with."""

    package: str
    version: str
    code: str  # the class or function that reads the files


@dataclass(frozen=True)
class Note:
    """A fact that a format cannot hold, or a setting that the trainer needs."""

    name: str
    text: str


class OutputFolder:
    """The folder of an export while it is written, by several threads."""

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
    """Counts of a shard, made while it is written."""

    rows: int = 0
    pieces: int = 0
    tokens: int = 0
    trained: int = 0
    longest_piece: int = 0
    most_pieces: int = 0
    facts: dict[str, int] = field(default_factory=dict)  # further counts of the format
    columns: dict[str, np.ndarray] = field(default_factory=dict)  # of the format

    def count(self, rows: RowBatch) -> None:
        self.rows += len(rows)
        self.pieces += len(rows.lengths)
        self.tokens += int(rows.tokens.sum())
        self.trained += rows.trained
        self.longest_piece = max(self.longest_piece, int(rows.lengths.max()))
        self.most_pieces = max(self.most_pieces, int(rows.pieces.max()))


@dataclass(frozen=True)
class ShardJob:
    """One shard to write: its number, and the number of shards in its split."""

    manifest: Manifest
    split: str
    number: int
    shards: int

    @property
    def name(self) -> str:
        """Return the name of the shard in the corpus, without its extension."""
        return f"{self.split}-{self.number:05d}-of-{self.shards:05d}"


class ExportFormat:
    """An export format. Subclasses define the facts and `write_shard`."""

    name: str  # the argument of --to
    version: int = 1  # raise it if the files of the same corpus change
    trainer: str  # the trainers that read this format
    rows_kept: bool  # the rows of the plan stay rows
    aligned: bool = False  # pieces start where they do in the rows of the plan
    weighted: bool = False  # holds `loss_weight`, for a trainer that honors it
    ordered: bool = False  # the trainer takes the rows in their order, rank by rank
    shifted: str  # where labels are shifted: in "the export", "the trainer", or "the model"
    bounds: str  # what marks the bounds of pieces
    layout: str  # the files of a split, for the documentation
    reader: Reader

    def write_shard(self, job: ShardJob, batches: Iterator[RowBatch], part: Part, out: OutputFolder) -> None:
        """Write the files of one shard; `part` is counted when `batches` has ended."""
        raise NotImplementedError

    def close_split(self, manifest: Manifest, split: str, parts: Sequence[Part], out: OutputFolder) -> None:
        """Write the files of a split that describe all of its shards."""

    def close(self, manifest: Manifest, splits: Sequence[str], out: OutputFolder) -> None:
        """Write the files that describe all splits."""

    def settings(self, manifest: Manifest, parts: Sequence[Part]) -> Settings:
        """Return the trainer's settings; FOLDER stands for the folder of the export."""
        raise NotImplementedError

    def notes(self, manifest: Manifest, parts: Sequence[Part]) -> list[Note]:
        """Return the facts of this corpus that the format cannot hold."""
        return []


def is_balanced(manifest: Manifest) -> bool:
    return manifest.config.get("balance") is not None


def common_notes(manifest: Manifest, format: ExportFormat, splits: Sequence[str]) -> list[Note]:
    """Return notes on settings of rows, as far as the format loses them."""
    notes, align = list[Note](), manifest.row_layout.align
    if align > 1 and not format.aligned:
        text = f"align: {align} is lost: the export has no padding between conversations, so they start at any token"
        notes.append(Note("align", text))
    if is_balanced(manifest) and not format.ordered:
        ranks = manifest.config["balance"]["ranks"]
        text = (
            f"rows are ordered for {ranks} ranks, or a divisor of {ranks}: the trainer must not shuffle them and must "
            "deal them to the ranks in turn, one row at a time; otherwise, ranks wait as long as in random order"
        )
        if not format.rows_kept:
            text = f"the order for {ranks} ranks is lost, because {format.trainer} packs the conversations again"
        notes.append(Note("balance", text))
    if manifest.config.get("order") == "source":
        text = "rows have the order of the data: the trainer must not shuffle them"
        if not format.rows_kept:
            text = f"the order of the data is lost, because {format.trainer} packs the conversations again"
        notes.append(Note("order", text))
    if further := [split for split in splits if split.startswith(TRAIN_EPOCH_PREFIX)]:
        text = "each split has the conversations of train in different rows; train on one split per epoch"
        notes.append(Note("epochs", f"{', '.join(further)}: {text}"))
    return notes


def lists(values: np.ndarray, lengths: np.ndarray) -> pa.Array:
    """Return a column that divides the values into lists of the given lengths."""
    return pa.ListArray.from_arrays(to_arrow(offsets_of(lengths).astype(np.int32)), to_arrow(values))


class DatasetFolder(ExportFormat):
    """A format that is a folder of datasets. Subclasses define `columns`.

    It opens as a DatasetDict, and the folder of a split as a Dataset. Its shards are mapped, not copied. Writing it
    needs no Hugging Face library.
    """

    def columns(self, rows: RowBatch, manifest: Manifest) -> dict[str, pa.Array]:
        """Return the columns of some rows."""
        raise NotImplementedError

    def splits_loaded(self, splits: Sequence[str]) -> Sequence[str]:
        """Return the splits of the DatasetDict; others have a folder only."""
        return splits

    def write_shard(self, job: ShardJob, batches: Iterator[RowBatch], part: Part, out: OutputFolder) -> None:
        with out.file(f"{job.split}/{_name(job.number, job.shards)}") as file:
            writer = None
            for rows in batches:
                batch = pa.RecordBatch.from_pydict(self.columns(rows, job.manifest))
                writer = writer or pa.ipc.new_stream(file, batch.schema)
                writer.write_batch(batch)
            assert writer is not None, f"{job.name} has no rows"
            writer.close()

    def close_split(self, manifest: Manifest, split: str, parts: Sequence[Part], out: OutputFolder) -> None:
        facts = f"{manifest.digest} {self.name} {self.version} {split}"
        state: dict[str, Any] = {
            "_data_files": [{"filename": _name(number, len(parts))} for number in range(len(parts))],
            "_fingerprint": hashlib.sha256(facts.encode()).hexdigest()[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": split,
        }
        out.write(f"{split}/state.json", to_json(state))
        out.write(f"{split}/dataset_info.json", to_json({"description": f"{manifest.name} {manifest.key}"}))

    def close(self, manifest: Manifest, splits: Sequence[str], out: OutputFolder) -> None:
        out.write("dataset_dict.json", to_json({"splits": list(self.splits_loaded(splits))}))


def _name(number: int, count: int) -> str:
    return f"data-{number:05d}-of-{count:05d}.arrow"
