"""Find the tokens of conversations in a token file.

    path, rows ─places_of─▶ the byte offset in the file at which the tokens of each row begin

A shard has pieces from nearly every token file, and a process writes many shards. Opening a token file with Arrow takes
0.3 ms, so what is found is remembered: for each record batch, its rows and two positions. The next shard only reads the
offsets of its rows, in 0.02 ms.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tasks.core.errors import StorageError
from tasks.storage.arrow import offsets_of
from tasks.storage.files import read_receipt

# Token files to remember, each with about 1 KB.
REMEMBERED = 4096


def places_of(path: Path, rows: np.ndarray) -> np.ndarray:
    """Return the byte offset of the first token of each row: int64[rows].

    `rows` are sorted. Only the record batches with one of them are opened. Raises ValueError or IndexError if the file
    differs from its receipt, or does not have these rows.
    """
    found = np.empty(len(rows), np.int64)
    handle = os.open(path, os.O_RDONLY)
    try:
        stat = os.fstat(handle)
        file = _remembered(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)
        edges = file.edges
        inside = np.searchsorted(rows, edges)
        numbers = np.flatnonzero(np.diff(inside)).tolist()
        for number, batch in zip(numbers, file.batches(numbers), strict=True):
            asked = slice(inside[number], inside[number + 1])
            offsets = np.frombuffer(os.pread(handle, 8 * (batch.rows + 1), batch.offsets), np.int64)
            found[asked] = batch.tokens + 4 * offsets[rows[asked] - edges[number]]
    finally:
        os.close(handle)
    if len(rows) and rows[-1] >= edges[-1]:
        raise IndexError(f"{path}: has {edges[-1]:,} conversations, but the plan refers to number {rows[-1]:,}")
    return found


class _Batch(NamedTuple):
    """The number of rows of a record batch, and where its values are in the file.

    `offsets` and `tokens` are the positions of the first of its offsets (int64) and of its tokens (int32).
    """

    rows: int
    offsets: int
    tokens: int


class _File:
    """What is known about a token file."""

    def __init__(self, path: Path):
        self._path = path
        self._batches: dict[int, _Batch] = {}
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            self.edges = offsets_of(rows_of_batches(path, reader))  # rows before each record batch, then the total
            if reader.num_record_batches == 1:
                self._add(0, reader.get_batch(0), source)

    def batches(self, numbers: Iterable[int]) -> list[_Batch]:
        if missing := [number for number in numbers if number not in self._batches]:
            with pa.memory_map(str(self._path)) as source, pa.ipc.open_file(source) as reader:
                for number in missing:
                    self._add(number, reader.get_batch(number), source)
        return [self._batches[number] for number in numbers]

    def _add(self, number: int, batch: pa.RecordBatch, source: pa.MemoryMappedFile) -> None:
        recorded = self.edges[number + 1] - self.edges[number]
        if batch.num_rows != recorded:
            raise ValueError(
                f"{self._path}: record batch {number} has {batch.num_rows:,} rows, but {recorded:,} are recorded"
            )
        source.seek(0)
        base = source.read_buffer(1).address
        _, offsets, _, values = batch.column("tokens").buffers()
        self._batches[number] = _Batch(batch.num_rows, offsets.address - base, values.address - base)


@lru_cache(maxsize=REMEMBERED)
def _remembered(path: Path, size: int, changed: int, inode: int) -> _File:
    """Return what is known about a file with this size, time of change, and inode."""
    return _File(path)


def rows_of_batches(path: Path, reader: pa.RecordBatchFileReader) -> list[int]:
    """Return the number of rows of each record batch.

    If there are several, the numbers come from the receipt next to the file. If it does not have them, all record
    batches are opened.
    """
    with suppress(StorageError, LookupError, TypeError):
        rows = read_receipt(path.with_suffix(".json"))["batches"] if reader.num_record_batches > 1 else ()
        if len(rows) == reader.num_record_batches:
            return list(rows)
    return [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]
