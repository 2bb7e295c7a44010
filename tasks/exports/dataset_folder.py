"""Folders for `datasets.load_from_disk`: Arrow streams and a few small JSON files.

    <folder>/dataset_dict.json                       the splits
    <folder>/<split>/data-00000-of-00004.arrow …     mapped, not copied
    <folder>/<split>/state.json, dataset_info.json   the files; the columns follow from them

The folder opens as a DatasetDict, and the folder of a split as a Dataset. Writing them needs no Hugging Face library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tasks.exports.model import ExportFormat, OutputFolder, Part, ShardJob
from tasks.storage.arrow import offsets_of, to_arrow
from tasks.storage.files import to_json
from tasks.storage.manifest import Manifest
from tasks.storage.shards import RowBatch


def lists(values: np.ndarray, lengths: np.ndarray) -> pa.Array:
    """Return a column that divides the values into lists of the given lengths."""
    return pa.ListArray.from_arrays(to_arrow(offsets_of(lengths).astype(np.int32)), to_arrow(values))


class DatasetFolder(ExportFormat):
    """A format that is a folder of datasets. Subclasses define `columns`."""

    def columns(self, rows: RowBatch, manifest: Manifest) -> dict[str, pa.Array]:
        """Return the columns of some rows."""
        raise NotImplementedError

    def splits_loaded(self, splits: Sequence[str]) -> Sequence[str]:
        """Return the splits of the DatasetDict; the folders of others can be opened one by one."""
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
