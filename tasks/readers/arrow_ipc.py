"""Arrow IPC: a stream or a file (Feather), distinguished by its first bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from tasks.readers.container import File, RecordReader, Table
from tasks.readers.tables import TableContainer, readable, wanted

_FILE_MAGIC = b"ARROW1"

_DECOMPRESSED = 64 << 20  # bytes of compressed batches that are decompressed for a sample

_ALMOST = 0.99  # maximum share of a file that counts as read if its end is not reached


class ArrowIpc(TableContainer):
    name = "arrow"
    extensions = (".arrow", ".feather")

    def batches(self, reader: RecordReader) -> Iterator[Any]:
        # not memory-mapped, because the process would be killed if a mapped file was truncated
        with reader.file.open() as file:
            reader.track(file.tell, 0, reader.file.bytes)
            yield from _batches(file)

    def column_names(self, file: File) -> list[str]:
        with readable(self, file), pa.memory_map(str(file.path)) as source:
            return list(_open(source).schema.names)

    @contextmanager
    def table(self, file: File) -> Iterator[Table]:
        with readable(self, file), pa.memory_map(str(file.path)) as source:
            yield _MappedBatches(source, file)


class _MappedBatches:
    """All record batches of a file, as one group.

    The file is memory-mapped: if no row is drawn from a batch, only its header is read.
    """

    def __init__(self, source: Any, file: File):
        before, self.reach = pa.total_allocated_bytes(), 1.0
        self._batches = []
        for batch in _batches(source):
            self._batches.append(batch.select(wanted(batch.schema.names, file)))
            if pa.total_allocated_bytes() - before > _DECOMPRESSED:  # compressed batches cannot be mapped
                self.reach = min(_ALMOST, source.tell() / file.bytes)
                break
        self.rows = [sum(batch.num_rows for batch in self._batches)]
        self.row_bytes = sum(batch.nbytes for batch in self._batches) / max(self.rows[0], 1)

    def batches(self, group: int, at_most: float) -> Iterator[Any]:
        return iter(self._batches)


def _batches(source: Any) -> Iterator[Any]:
    reader = _open(source)
    is_file = isinstance(reader, pa.ipc.RecordBatchFileReader)
    yield from map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader


def _open(source: Any) -> Any:
    is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    source.seek(0)
    return pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
