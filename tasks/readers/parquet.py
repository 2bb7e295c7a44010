"""Parquet: a part is a range of row groups."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import pyarrow.parquet as pq

from tasks.core.errors import DataError
from tasks.readers.container import File, Range, RecordReader, Table
from tasks.readers.lines import CHUNK
from tasks.readers.tables import BATCH_BYTES, BATCH_ROWS, TableContainer, readable, wanted

_MAGIC = b"PAR1"  # the first and the last bytes of a file


class Parquet(TableContainer):
    name = "parquet"
    extensions = (".parquet",)
    is_compressed = True

    def batches(self, reader: RecordReader) -> Iterator[Any]:
        # no threads and no read-ahead, because parts run in parallel and a row group may be large
        with reader.file.open() as source, pq.ParquetFile(source, pre_buffer=False) as file:
            groups = range(file.metadata.num_row_groups)[reader.start : reader.stop]
            facts = [file.metadata.row_group(group) for group in groups]
            rows = sum(group.num_rows for group in facts)
            row_bytes = sum(group.total_byte_size for group in facts) // max(rows, 1) + 1
            read = 0
            reader.track(lambda: read, 0, rows)
            for batch in file.iter_batches(
                batch_size=max(1, min(BATCH_ROWS, BATCH_BYTES // row_bytes)),
                row_groups=list(groups),
                use_threads=False,
            ):
                yield batch
                read += batch.num_rows

    def column_names(self, file: File) -> list[str]:
        return list(self._metadata(file).schema.to_arrow_schema().names)

    def cut(self, file: File, ranges: list[Range], part_size: int) -> list[Range]:
        """Cut the file into ranges of row groups.

        A range has as few row groups as reach `part_size` uncompressed bytes.
        """
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
        metadata = self._metadata(file)
        return sum(metadata.row_group(group).num_rows for group in range(start))

    def first_records(self, file: File) -> Iterator[object]:
        self._metadata(file)
        yield from super().first_records(file)

    @contextmanager
    def table(self, file: File) -> Iterator[Table]:
        with readable(self.name, file.name), pq.ParquetFile(file.path, pre_buffer=False) as table:
            yield _RowGroups(table, wanted(table.schema_arrow.names, file))

    def _metadata(self, file: File) -> pq.FileMetaData:
        with readable(self.name, file.name), file.open() as source:
            metadata = pq.read_metadata(source)
            if _holds_another(source, metadata, file.bytes):
                problem = "several Parquet files are appended to each other; make one file of each"
                raise DataError("unreadable_source", f"{file.name}: {problem}")
        if not metadata.num_rows:
            raise DataError("empty_source", f"{file.name}: contains no records")
        return metadata


def _holds_another(source: BinaryIO, metadata: pq.FileMetaData, size: int) -> bool:
    """Return whether another file begins between the last column and the footer.

    The footer of the last file would be used for the first one. Only indexes belong in this place.
    """
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    columns = [group.column(index) for group in groups for index in range(group.num_columns)]
    stop = max(
        (
            min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
            + column.total_compressed_size
            for column in columns
        ),
        default=0,
    )
    footer = size - len(_MAGIC) - 4 - metadata.serialized_size
    source.seek(max(stop, 0))
    last = b""
    while source.tell() < footer and (some := source.read(min(CHUNK, footer - source.tell()))):
        if 2 * _MAGIC in last + some:
            return True
        last = some[1 - 2 * len(_MAGIC) :]
    return False


class _RowGroups:
    reach = 1.0

    def __init__(self, table: pq.ParquetFile, columns: list[str]):
        groups = [table.metadata.row_group(group) for group in range(table.metadata.num_row_groups)]
        self.rows = [group.num_rows for group in groups]
        self.row_bytes = sum(group.total_byte_size for group in groups) / max(sum(self.rows), 1)
        self._table, self._columns = table, columns

    def batches(self, group: int, at_most: float) -> Iterator[Any]:
        passed = 0
        for batch in self._table.iter_batches(BATCH_ROWS, row_groups=[group], columns=self._columns, use_threads=False):
            yield batch
            passed += batch.nbytes
            if passed > at_most:
                return
