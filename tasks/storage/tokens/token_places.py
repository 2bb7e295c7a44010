"""Find the tokens of conversations in a token file.

    path, rows ─places_of─▶ the byte offset in the file at which the tokens of each row begin

A shard has pieces from nearly every token file, and a process writes many shards. Opening a token file with Arrow takes
0.3 ms, so what is found is remembered: for each record batch, its rows and two positions. The next shard only reads the
offsets of its rows, in 0.02 ms.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tasks.core.errors import StorageError
from tasks.storage.arrow import offsets_of
from tasks.storage.files import read_receipt

# Token files to remember, each with about 1 KB. All shards read the files in the same order, so replacing the oldest
# one would forget each file just before it is needed.
REMEMBERED = 1 << 14


def places_of(path: Path, rows: np.ndarray) -> np.ndarray:
    """Return the byte offset of the first token of each row: int64[rows].

    `rows` are sorted. Of a file with a receipt, only the record batches with one of them are opened. Raises ValueError
    if one of several record batches differs from the receipt, IndexError if the file does not have these rows, OSError
    if it cannot be read, and StorageError if it changes meanwhile.
    """
    found = np.empty(len(rows), np.int64)
    handle = os.open(path, os.O_RDONLY)
    try:
        file = _file(path, _state(os.fstat(handle)))
        found_in = batches_with(rows, file.edges)
        for (number, asked), batch in zip(found_in, file.batches([number for number, _ in found_in]), strict=True):
            offsets = np.frombuffer(os.pread(handle, 8 * batch.rows, batch.offsets), np.int64)
            found[asked] = batch.tokens + 4 * offsets[rows[asked] - file.edges[number]]
    finally:
        os.close(handle)
    require_rows(path, rows, file.edges)
    return found


def batches_with(rows: np.ndarray, edges: Sequence[int] | np.ndarray) -> list[tuple[int, slice]]:
    """Return the record batches that contain rows, each with a slice of `rows`.

    `rows` are sorted. `edges` has the rows before each record batch, then the total.
    """
    inside = np.searchsorted(rows, edges)
    return [
        (number, slice(*inside[number : number + 2].tolist())) for number in np.flatnonzero(np.diff(inside)).tolist()
    ]


def require_rows(path: Path, rows: np.ndarray, edges: Sequence[int] | np.ndarray) -> None:
    """Raise IndexError if a file does not have all of `rows`, which are sorted."""
    if len(rows) and rows[-1] >= edges[-1]:
        raise IndexError(f"{path}: has {edges[-1]:,} conversations, but the plan refers to number {rows[-1]:,}")


def require_recorded(path: Path, number: int, batch: pa.RecordBatch, recorded: int) -> None:
    """Raise ValueError if a record batch does not have the recorded rows."""
    if batch.num_rows != recorded:
        raise ValueError(f"{path}: record batch {number} has {batch.num_rows:,} rows, but {recorded:,} are recorded")


class _State(NamedTuple):
    """Facts that differ after a file was replaced or changed."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int


def _state(stat: os.stat_result) -> _State:
    return _State(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class _Batch(NamedTuple):
    """The number of rows of a record batch, and where its values are in the file.

    `offsets` and `tokens` are the positions of the first of its offsets (int64) and of its tokens (int32).
    """

    rows: int
    offsets: int
    tokens: int


class _File:
    """What is known about a token file in one state."""

    def __init__(self, path: Path, state: _State):
        self._path, self.state = path, state
        self._batches: dict[int, _Batch] = {}
        with self._open() as (source, reader):
            self.edges = offsets_of(rows_of_batches(path, reader))  # rows before each record batch, then the total
            if reader.num_record_batches == 1:
                self._add(0, reader.get_batch(0), source)

    def batches(self, numbers: Sequence[int]) -> list[_Batch]:
        if missing := [number for number in numbers if number not in self._batches]:
            with self._open() as (source, reader):
                for number in missing:
                    self._add(number, reader.get_batch(number), source)
        return [self._batches[number] for number in numbers]

    @contextmanager
    def _open(self) -> Iterator[tuple[pa.MemoryMappedFile, pa.RecordBatchFileReader]]:
        with pa.memory_map(str(self._path)) as source, pa.ipc.open_file(source) as reader:
            if _state(os.stat(self._path)) != self.state:
                raise StorageError("cannot_read", f"{self._path}: was replaced while it was read; run again")
            yield source, reader

    def _add(self, number: int, batch: pa.RecordBatch, source: pa.MemoryMappedFile) -> None:
        try:
            require_recorded(self._path, number, batch, self.edges[number + 1] - self.edges[number])
        except ValueError:
            _remembered.pop(self._path, None)  # the receipt may be repaired
            raise
        source.seek(0)
        base = source.read_buffer(1).address
        _, offsets, _, values = batch.column("tokens").buffers()
        self._batches[number] = _Batch(batch.num_rows, offsets.address - base, values.address - base)


_remembered: dict[Path, _File] = {}


def _file(path: Path, state: _State) -> _File:
    """Return what is known about a file, unless it has changed since."""
    known = _remembered.get(path)
    if known is None or known.state != state:
        known = _File(path, state)
        if path in _remembered or len(_remembered) < REMEMBERED:
            _remembered[path] = known
    return known


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
