"""Distribute rows of numbers over partitions, in a temporary file if they are many.

    block, block, …  ─add─▶  temporary file: each block, sorted by partition  ─read─▶  all rows of one partition

Memory is bounded by one block and one partition, however many rows there are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import numpy as np

from tasks.core.errors import StorageError

IN_MEMORY = 32 << 20  # bytes that are kept in memory; more go to a temporary file


class Partitions:
    """Rows of a structured type in numbered partitions, in each of them in the order in which they were added."""

    def __init__(self, count: int, kind: np.dtype):
        self.count, self._kind = count, kind
        self._file = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115 - closed by __exit__
        self._edges: list[np.ndarray] = []  # of each block: int64[count + 1], rows of the file before each partition
        self._rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the file, and forget all rows."""
        self._file.close()
        self._edges.clear()

    def add(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        """Append rows, each to the partition of its number. Raises StorageError if the disk is full."""
        if not len(rows):
            return
        order = np.argsort(numbers, kind="stable")
        self._edges.append(self._rows + np.searchsorted(numbers[order], np.arange(self.count + 1)))
        with _scratch():
            self._file.write(rows[order].tobytes())
        self._rows += len(rows)

    def read(self, number: int) -> np.ndarray:
        """Return all rows of a partition."""
        size = self._kind.itemsize
        pieces = [np.empty(0, self._kind)]
        with _scratch():
            for edges in self._edges:
                first, last = edges[number : number + 2].tolist()
                if first < last:
                    self._file.seek(first * size)
                    pieces.append(np.frombuffer(self._file.read((last - first) * size), self._kind))
        return np.concatenate(pieces)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.read(number) for number in range(self.count))


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
