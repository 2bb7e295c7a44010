"""Statistics of rows, and rows.arrow, which contains them for a whole corpus.

    manifest ─┬─read_statistics─────▶ RowStatistics of each shard
              └─statistics_of_split─▶ RowStatistics of a split, or of its first rows

The statistics describe the cost of a row in 20 bytes, without the shards. rows.arrow is an Arrow IPC stream with a
record batch for each shard, in the order of the manifest. Corpora without packing and corpora of earlier versions have
no rows.arrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from tasks.core.errors import DataError
from tasks.storage.arrow import to_arrow, to_numpy
from tasks.storage.corpus_folder import check_unchanged, listed_file, reading
from tasks.storage.manifest import Manifest, repair_hint
from tasks.storage.schemas import ROWS_SCHEMA

ROWS = "rows.arrow"


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Statistics of rows: the columns of schemas.ROWS_SCHEMA."""

    squares: np.ndarray  # int64
    longest: np.ndarray  # int32
    segments: np.ndarray  # int32
    trained: np.ndarray  # int32

    @classmethod
    def zeros(cls, rows: int) -> Self:
        return cls(*(np.zeros(rows, str(field.type)) for field in ROWS_SCHEMA))

    @classmethod
    def joined(cls, parts: Iterable[RowStatistics]) -> Self:
        every: list[RowStatistics] = [cls.zeros(0), *parts]
        columns = zip(*(part.columns() for part in every), strict=True)
        return cls(*(np.concatenate(column) for column in columns))

    def __len__(self) -> int:
        return len(self.squares)

    def columns(self) -> list[np.ndarray]:
        return [getattr(self, field.name) for field in fields(self)]

    def take(self, chosen: slice | np.ndarray) -> Self:
        """Return the statistics of chosen rows, in their order."""
        return type(self)(*(column[chosen] for column in self.columns()))

    def batch(self) -> pa.RecordBatch:
        return pa.record_batch([to_arrow(column) for column in self.columns()], ROWS_SCHEMA)

    def sums(self) -> dict[str, int]:
        """Return the sums that a manifest records for a split (facts.RowSums)."""
        found = {field.name: int(getattr(self, field.name).sum(dtype=np.int64)) for field in fields(self)}
        return found | {"longest": int(self.longest.max(initial=0))}


def add_sums(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """Return the sums over the rows of both arguments."""
    longest = max(one["longest"], other["longest"])
    return {name: one[name] + value for name, value in other.items()} | {"longest": longest}


def has_statistics(manifest: Manifest) -> bool:
    return any(file.path == ROWS for file in manifest.files)


def read_statistics(manifest: Manifest, folder: Path) -> Iterator[tuple[str, RowStatistics]]:
    """Check rows.arrow, and yield the split and the statistics of each shard, in their order."""
    file = listed_file(manifest, folder, ROWS)
    check_unchanged(folder, file)
    path = folder / file.path

    def wrong(found: str) -> DataError:
        return DataError("bad_index", f"{path}: has {found}; {repair_hint(folder)}")

    with reading(path, folder), pa.OSFile(str(path)) as source, pa.ipc.open_stream(source) as reader:
        if not reader.schema.equals(ROWS_SCHEMA, check_metadata=True):
            raise wrong("unexpected columns")
        batches = iter(reader)
        for split, shard in ((name, shard) for name, own in manifest.splits.items() for shard in own.shards):
            batch: Any = next(batches, None)
            if batch is None or batch.num_rows != shard.rows:
                found = "no record batch" if batch is None else f"{batch.num_rows:,} records"
                raise wrong(f"{found} for the {shard.rows:,} rows of {shard.path}")
            batch.validate(full=True)
            yield split, RowStatistics(*(to_numpy(batch.column(name)) for name in ROWS_SCHEMA.names))
        if next(batches, None) is not None:
            raise wrong("more record batches than the corpus has shards")


def statistics_of_split(manifest: Manifest, folder: Path, split: str, most: int | None = None) -> RowStatistics | None:
    """Return the statistics of a split, or of its first `most` rows; None without rows.arrow."""
    if not has_statistics(manifest):
        return None
    parts, rows = list[RowStatistics](), 0
    for name, of_shard in read_statistics(manifest, folder):
        if name == split:
            parts.append(of_shard)
            rows += len(of_shard)
            if most is not None and rows >= most:
                break
    return RowStatistics.joined(parts).take(slice(0, most))
