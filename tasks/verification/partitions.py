"""Distribute many rows of numbers over partitions in a temporary file.

    block, block, …  ─add─▶  temporary file: each block, sorted by partition  ─read─▶  all rows of one partition

Memory is bounded by one block, one partition, and 4 bytes for each block and partition. These bytes add up to 60 MB
for a billion rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import numpy as np

from packcorpus.tasks.core.errors import StorageError

IN_MEMORY = 32 << 20  # bytes kept in memory; beyond that, all rows go to a temporary file
BLOCK = 16 << 20  # bytes sorted at a time; each block has an overhead of 4 bytes for every partition


class Partitions:
    """Rows of a structured type in numbered partitions, in the order of `add`."""

    def __init__(self, count: int, kind: np.dtype):
        self.count, self._kind = count, kind
        self._file = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115 - closed by __exit__
        # For each block in the file: rows before the block, and int32[count + 1], its rows before each partition.
        self._edges: list[tuple[int, np.ndarray]] = []
        self._rows = 0
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._bytes = 0  # of the waiting rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the temporary file and drop all rows."""
        self._file.close()
        self._edges.clear()
        self._waiting.clear()

    def add(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        """Append each row to a partition; raise StorageError if the disk is full."""
        if len(rows):
            self._waiting.append((numbers, rows))
            self._bytes += rows.nbytes
        if self._bytes >= BLOCK:
            self._write()

    def add_by_hash(self, hashes: np.ndarray, rows: np.ndarray) -> None:
        """Append each row to the partition chosen by the upper half of its uint64 hash."""
        self.add((hashes >> np.uint64(32)).astype(np.int64) * self.count >> 32, rows)

    def _write(self) -> None:
        """Write the waiting rows as one block: a partition is a few long runs."""
        if not self._waiting:
            return
        numbers, rows = (np.concatenate(columns) for columns in zip(*self._waiting, strict=True))
        self._waiting.clear()
        self._bytes = 0
        order = np.argsort(numbers, kind="stable")
        edges = np.searchsorted(numbers[order], np.arange(self.count + 1)).astype(np.int32)
        self._edges.append((self._rows, edges))
        with _scratch():
            self._file.write(rows[order].tobytes())
        self._rows += len(rows)

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield all rows of each partition."""
        self._write()
        size = self._kind.itemsize
        for number in range(self.count):
            pieces = [np.empty(0, self._kind)]
            with _scratch():
                for before, edges in self._edges:
                    first, last = edges[number : number + 2].tolist()
                    if first < last:
                        self._file.seek((before + first) * size)
                        pieces.append(np.frombuffer(self._file.read((last - first) * size), self._kind))
            yield np.concatenate(pieces)


@contextmanager
def _scratch() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            "cannot_write",
            f"{tempfile.gettempdir()}: temporary files cannot be written: {error.strerror or error}; set TMPDIR to a "
            "folder with more space (about 75 bytes per conversation)",
        ) from error
