"""MosaicML streaming (MDS): rows of fixed size.

A shard holds the number of samples (u32), their offsets (u32[samples + 1]), the config as JSON, and the samples. A
sample holds its columns, sorted by name. All columns here have a fixed size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from packcorpus.tasks.exports.model import (
    FOLDER,
    ExportFormat,
    Note,
    OutputFolder,
    Part,
    Reader,
    Settings,
    ShardJob,
    is_balanced,
)
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.schemas import LOSS_WEIGHT
from packcorpus.tasks.storage.shards import RowBatch

SHARD_BYTES = 1 << 26  # most bytes of a file, unless one row needs more; offsets have 32 bits


class Mds(ExportFormat):
    name = "mds"
    trainer = "MosaicML `streaming`, Composer"
    rows_kept = True
    aligned = True
    weighted = True
    shifted = "the model"
    bounds = "`position_ids`"
    layout = "`index.json`, `shard.*.mds`: `input_ids`, `labels`, `position_ids`, and `loss_weight` if the rows have it"
    reader = Reader("mosaicml-streaming", "0.13.0", "streaming.StreamingDataset")

    def write_shard(self, job: ShardJob, batches: Iterator[RowBatch], part: Part, out: OutputFolder) -> None:
        shape, shards = _Shape.of(job.manifest), job.manifest.splits[job.split].shards
        files = [shape.rows_of_files(shard.rows) for shard in shards]
        first = sum(len(rows) for rows in files[: job.number])
        rest = np.empty((0, 0), np.int32)  # samples of a batch, taken some at a time
        for number, count in enumerate(files[job.number], first):
            with out.file(f"{job.split}/{_name(number)}") as file:
                file.write(shape.head(count))
                while count:
                    if not len(rest):
                        rows = next(batches)
                        weights = [] if rows.weights is None else [rows.weights.view(np.int32)]
                        rest = np.hstack([rows.ids, rows.labels, *weights, rows.positions]).astype("<i4", copy=False)
                    block, rest = rest[:count], rest[count:]
                    count -= len(block)
                    file.write(np.ascontiguousarray(block))
        # Read to the end of the batches, so that all rows of the shard are counted.
        assert next(batches, None) is None, "rows are left"

    def close_split(self, manifest: Manifest, split: str, parts: Sequence[Part], out: OutputFolder) -> None:
        shape = _Shape.of(manifest)
        counts = [count for part in parts for count in shape.rows_of_files(part.rows)]
        written = {file.path: file for file in out.files}
        shards = []
        for number, count in enumerate(counts):
            file = written[f"{split}/{_name(number)}"]
            data = {"basename": _name(number), "bytes": file.bytes, "hashes": {"sha256": file.sha256}}
            shards.append({"samples": count, "raw_data": data, "zip_data": None, "version": 2} | shape.config())
        out.write(f"{split}/index.json", json.dumps({"version": 2, "shards": shards}, sort_keys=True).encode())

    def settings(self, manifest: Manifest, parts: Sequence[Part]) -> Settings:
        shuffle = not is_balanced(manifest)
        return {"StreamingDataset": {"local": FOLDER, "split": "train", "shuffle": shuffle, "batch_size": 1}}

    def notes(self, manifest: Manifest, parts: Sequence[Part]) -> list[Note]:
        text = (
            "the fine-tuning loader of llm-foundry takes input_ids as a prompt and labels as its response, so it "
            "cannot hold these labels; read the columns with StreamingDataset in your own training loop"
        )
        weights = (
            "no model uses loss_weight by default: multiply the loss of each token by it in your training loop, as "
            "shown in the dataset card"
        )
        return [Note("labels", text), *[Note(LOSS_WEIGHT, weights)] * (manifest.loss_weight is not None)]


class _Shape(NamedTuple):
    """The columns of a sample: 4 bytes for each of `length` places."""

    length: int
    columns: dict[str, str]

    @classmethod
    def of(cls, manifest: Manifest) -> _Shape:
        weights = {} if manifest.loss_weight is None else {LOSS_WEIGHT: "float32"}
        columns = {"input_ids": "int32", "labels": "int32", **weights, "position_ids": "int32"}
        return cls(manifest.sequence_length, columns)

    @property
    def sample_bytes(self) -> int:
        return 4 * self.length * len(self.columns)

    def rows_of_files(self, rows: int) -> list[int]:
        """Return the number of rows in each file that a shard is divided into."""
        most = max(1, SHARD_BYTES // self.sample_bytes)
        return [min(most, rows - top) for top in range(0, rows, most)]

    def config(self) -> dict[str, Any]:
        return {
            "format": "mds",
            "compression": None,
            "hashes": ["sha256"],
            "size_limit": SHARD_BYTES,
            "column_names": list(self.columns),
            "column_encodings": [f"ndarray:{kind}:{self.length}" for kind in self.columns.values()],
            "column_sizes": [4 * self.length] * len(self.columns),
        }

    def head(self, count: int) -> bytes:
        """Return the bytes of a file before its samples."""
        config = json.dumps({"version": 2} | self.config(), sort_keys=True).encode()
        offsets = np.arange(count + 1, dtype=np.int64) * self.sample_bytes + 4 * (count + 2) + len(config)
        return np.uint32(count).tobytes() + offsets.astype("<u4").tobytes() + config


def _name(number: int) -> str:
    return f"shard.{number:05d}.mds"
