"""MosaicML streaming (MDS): rows of fixed size.

A shard is u32 samples, u32[samples + 1] offsets, the config as JSON, and the samples; a sample is its columns, sorted
by name. All columns here have a fixed size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tasks.exports.model import FOLDER, ExportFormat, Note, OutputFolder, Part, Reader, Settings, ShardJob
from tasks.exports.rows import Rows
from tasks.storage.manifest import Manifest

COLUMNS = ("input_ids", "labels", "position_ids")
SHARD_BYTES = 1 << 26  # at most, and at least one row; offsets have 32 bits


class Mds(ExportFormat):
    name = "mds"
    trainer = "MosaicML `streaming`, Composer"
    rows_kept = True
    aligned = True
    shifted = "the model"
    bounds = "`position_ids`"
    layout = "`index.json`, `shard.*.mds`: `input_ids`, `labels`, `position_ids`"
    reader = Reader("mosaicml-streaming", "0.13.0", "streaming.StreamingDataset")

    def write_shard(self, job: ShardJob, batches: Iterator[Rows], part: Part, out: OutputFolder) -> None:
        length, shards = job.manifest.sequence_length, job.manifest.splits[job.split].shards
        files = [_rows_of_files(shard.rows, length) for shard in shards]
        first = sum(len(rows) for rows in files[: job.number])
        samples = _Samples(batches)
        for number, count in enumerate(files[job.number], first):
            with out.file(f"{job.split}/{_name(number)}") as file:
                file.write(_head(count, length))
                for block in samples.take(count):
                    file.write(block)
        samples.end()

    def close_split(self, manifest: Manifest, split: str, parts: Sequence[Part], out: OutputFolder) -> None:
        length = manifest.sequence_length
        counts = [count for part in parts for count in _rows_of_files(part.rows, length)]
        written = {file.path: file for file in out.files}
        shards = []
        for number, count in enumerate(counts):
            file = written[f"{split}/{_name(number)}"]
            data = {"basename": _name(number), "bytes": file.bytes, "hashes": {"sha256": file.sha256}}
            shards.append({"samples": count, "raw_data": data, "zip_data": None, "version": 2} | _config(length))
        out.write(f"{split}/index.json", json.dumps({"version": 2, "shards": shards}, sort_keys=True).encode())

    def settings(self, manifest: Manifest, parts: Sequence[Part]) -> Settings:
        return {"StreamingDataset": {"local": FOLDER, "split": "train", "shuffle": True, "batch_size": 1}}

    def notes(self, manifest: Manifest, parts: Sequence[Part]) -> list[Note]:
        text = (
            "the fine-tuning loader of llm-foundry takes input_ids as a prompt and labels as its response, so it "
            "cannot hold these labels; read the columns with StreamingDataset in a loop of your own"
        )
        return [Note("labels", text)]


class _Samples:
    """The samples of a shard, taken some at a time."""

    def __init__(self, batches: Iterator[Rows]):
        self._batches = batches
        self._rest = np.empty((0, 0), np.int32)

    def take(self, count: int) -> Iterator[np.ndarray]:
        while count:
            if not len(self._rest):
                rows = next(self._batches)
                self._rest = np.hstack([rows.ids, rows.labels, rows.positions]).astype("<i4", copy=False)
            block, self._rest = self._rest[:count], self._rest[count:]
            count -= len(block)
            yield np.ascontiguousarray(block)

    def end(self) -> None:
        """Read to the end of the shard, where its rows are counted."""
        assert next(self._batches, None) is None, "rows are left"


def _rows_of_files(rows: int, length: int) -> list[int]:
    """Return the rows of each file that a shard becomes."""
    most = max(1, SHARD_BYTES // (4 * length * len(COLUMNS)))
    return [min(most, rows - top) for top in range(0, rows, most)]


def _name(number: int) -> str:
    return f"shard.{number:05d}.mds"


def _config(length: int) -> dict[str, Any]:
    return {
        "format": "mds",
        "compression": None,
        "hashes": ["sha256"],
        "size_limit": SHARD_BYTES,
        "column_names": list(COLUMNS),
        "column_encodings": [f"ndarray:int32:{length}"] * len(COLUMNS),
        "column_sizes": [4 * length] * len(COLUMNS),
    }


def _head(count: int, length: int) -> bytes:
    """Return what precedes the samples of a file."""
    config = json.dumps({"version": 2} | _config(length), sort_keys=True).encode()
    offsets = np.arange(count + 1, dtype=np.int64) * (4 * length * len(COLUMNS)) + 4 * (count + 2) + len(config)
    return np.uint32(count).tobytes() + offsets.astype("<u4").tobytes() + config
