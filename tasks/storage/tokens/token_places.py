"""Find the tokens of conversations in a token file.

    path, rows ─places_of─▶ the byte offset in the file at which the tokens of each row begin

A shard has pieces from nearly every token file, and a process writes many shards. Opening a token file with Arrow takes
0.3 ms, so what is found is remembered: for each record batch, its rows and two positions. The next shard only reads the
offsets of its rows, in 0.02 ms.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tasks.core.errors import StorageError
from tasks.storage.arrow import offsets_of

# Token files to remember, each with about 1 KB. All shards read the files in the same order, so replacing the oldest
# one would forget each file just before it is needed.
REMEMBERED = 1 << 14


def places_of(path: Path, rows: np.ndarray) -> np.ndarray:
    """Return the byte offset of the first token of each row: int64[rows].

    `rows` are sorted. Raises IndexError if the file does not have these rows, OSError if it cannot be read, and
    StorageError if it changes meanwhile.
    """
    found = np.empty(len(rows), np.int64)
    handle = os.open(path, os.O_RDONLY)
    try:
        file = _file(path, _state(os.fstat(handle)))
        for number, asked in batches_with(path, rows, file.edges):
            first, last = file.edges[number : number + 2].tolist()
            offsets = np.frombuffer(os.pread(handle, 8 * (last - first), file.offsets[number]), np.int64)
            found[asked] = file.tokens[number] + 4 * offsets[rows[asked] - first]
    finally:
        os.close(handle)
    return found


def batches_with(path: Path, rows: np.ndarray, edges: np.ndarray) -> list[tuple[int, slice]]:
    """Return the record batches that contain rows, each with a slice of `rows`.

    `rows` are sorted. `edges` has the rows before each record batch, then the total. Raises IndexError if the file does
    not have all of `rows`.
    """
    if len(rows) and rows[-1] >= edges[-1]:
        raise IndexError(f"{path}: has {edges[-1]:,} conversations, but the plan refers to number {rows[-1]:,}")
    inside = np.searchsorted(rows, edges)
    return [
        (number, slice(*inside[number : number + 2].tolist())) for number in np.flatnonzero(np.diff(inside)).tolist()
    ]


class _File(NamedTuple):
    """What is known about a token file in one state.

    `edges` has the rows before each record batch, then the total. For each record batch, `offsets` and `tokens` are the
    positions in the file of the first of its offsets (int64) and of its tokens (int32).
    """

    state: tuple[int, ...]
    edges: np.ndarray
    offsets: Sequence[int]
    tokens: Sequence[int]


def _state(stat: os.stat_result) -> tuple[int, ...]:
    """Return facts that differ after a file was replaced or changed."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


_remembered: dict[Path, _File] = {}


def _file(path: Path, state: tuple[int, ...]) -> _File:
    """Return what is known about a file, unless it has changed since."""
    known = _remembered.get(path)
    if known is not None and known.state == state:
        return known
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        if _state(os.stat(path)) != state:
            raise StorageError("cannot_read", f"{path}: was replaced while it was read; run again")
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        source.seek(0)
        base = source.read_buffer(1).address
        buffers = [batch.column("tokens").buffers() for batch in batches]
        offsets = [of_offsets.address - base for _, of_offsets, _, _ in buffers]
        tokens = [of_tokens.address - base for _, _, _, of_tokens in buffers]
        found = _File(state, offsets_of([batch.num_rows for batch in batches]), offsets, tokens)
    if path in _remembered or len(_remembered) < REMEMBERED:
        _remembered[path] = found
    return found
