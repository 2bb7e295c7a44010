"""Parquet: a part is a range of row groups."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import pyarrow.parquet as pq

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.readers.container import File, RecordReader, Table
from packcorpus.tasks.readers.lines import CHUNK, Range
from packcorpus.tasks.readers.tables import BATCH_BYTES, BATCH_ROWS, TableContainer, readable, wanted

_MAGIC = b"PAR1"  # the first and the last bytes of a file


class Parquet(TableContainer):
    name = "parquet"
    extensions = (".parquet",)
    is_compressed = True

    def batches(self, reader: RecordReader) -> Iterator[Any]:
        # no threads and no read-ahead, because parts run in parallel and a row group may be large
        with reader.file.open() as source, pq.ParquetFile(source, pre_buffer=False) as file:
            groups = range(file.metadata.num_row_groups)[reader.start : reader.stop]
            _, row_bytes = _size(file.metadata, groups)
            yield from file.iter_batches(
                batch_size=max(1, min(BATCH_ROWS, BATCH_BYTES // (int(row_bytes) + 1))),
                row_groups=list(groups),
                use_threads=False,
            )

    def column_names(self, file: File) -> list[str]:
        return list(self._metadata(file).schema.to_arrow_schema().names)

    def cut(self, file: File, ranges: list[Range], part_size: int) -> list[Range]:
        """Cut the file where row groups reach `part_size` uncompressed bytes."""
        [whole] = ranges
        metadata = self._metadata(file)
        ranges, start, size = [], 0, 0
        for index in range(metadata.num_row_groups):
            size += metadata.row_group(index).total_byte_size
            if size >= part_size or index == metadata.num_row_groups - 1:
                sha256 = hashlib.sha256(f"{whole.sha256} {start} {index + 1}".encode()).hexdigest()
                ranges.append(Range(start, index + 1, sha256))
                start, size = index + 1, 0
        return ranges

    def records_before(self, file: File, start: int) -> int:
        return _size(self._metadata(file), range(start))[0]

    def first_records(self, file: File) -> Iterator[object]:
        self._metadata(file)
        return super().first_records(file)

    @contextmanager
    def table(self, file: File) -> Iterator[Table]:
        with readable(self.name, file.name), pq.ParquetFile(file.path, pre_buffer=False) as table:
            groups = range(table.metadata.num_row_groups)
            columns = wanted(table.schema_arrow.names, file)

            def batches(group: int, at_most: float) -> Iterator[Any]:
                passed = 0
                for batch in table.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False):
                    yield batch
                    passed += batch.nbytes
                    if passed > at_most:
                        return

            rows = [table.metadata.row_group(group).num_rows for group in groups]
            yield Table(rows, _size(table.metadata, groups)[1], batches)

    def _metadata(self, file: File) -> pq.FileMetaData:
        with readable(self.name, file.name), file.open() as source:
            metadata = pq.read_metadata(source)
            if _holds_another(source, metadata, file.bytes):
                problem = "several Parquet files are appended to each other; make one file of each"
                raise DataError("unreadable_source", f"{file.name}: {problem}")
        if not metadata.num_rows:
            raise DataError("empty_source", f"{file.name}: contains no records")
        return metadata


def _size(metadata: pq.FileMetaData, groups: range) -> tuple[int, float]:
    """Return the rows of row groups, and the uncompressed bytes of a row."""
    facts = [metadata.row_group(group) for group in groups]
    rows = sum(group.num_rows for group in facts)
    return rows, sum(group.total_byte_size for group in facts) / max(rows, 1)


def _holds_another(source: BinaryIO, metadata: pq.FileMetaData, size: int) -> bool:
    """Return whether another file begins between the last column and the footer.

    The footer of the last file would be used for the first one. Only indexes belong in this place.
    """
    stop = 0
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        for column in (group.column(index) for index in range(group.num_columns)):
            start = min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
            stop = max(stop, start + column.total_compressed_size)
    footer = size - len(_MAGIC) - 4 - metadata.serialized_size
    source.seek(stop)
    last = b""
    while source.tell() < footer and (some := source.read(min(CHUNK, footer - source.tell()))):
        if 2 * _MAGIC in last + some:
            return True
        last = some[1 - 2 * len(_MAGIC) :]
    return False
