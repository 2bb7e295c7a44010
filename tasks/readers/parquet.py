"""Parquet: a part is a range of rows, of whole row groups if they are small."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, BinaryIO

import pyarrow.parquet as pq

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.readers.container import File, RecordReader, Table
from packcorpus.tasks.readers.lines import BOMB_RATIO, CHUNK, Range
from packcorpus.tasks.readers.tables import (
    BATCH_BYTES,
    BATCH_ROWS,
    TableContainer,
    cut_rows,
    readable,
    rows_between,
    wanted,
)

_BUFFER = 1 << 20  # bytes of a column that are read at once; without it, whole columns are read
_MAGIC = b"PAR1"  # the first and the last bytes of a file


class Parquet(TableContainer):
    name = "parquet"
    extensions = (".parquet",)
    is_compressed = True

    def batches(self, reader: RecordReader) -> Iterator[Any]:
        # no threads and no read-ahead, because parts run in parallel and a row group may be large
        with reader.file.open() as source, pq.ParquetFile(source, pre_buffer=False, buffer_size=_BUFFER) as file:
            bounds, stop = _bounds(file.metadata), reader.stop
            stop = bounds[-1] if stop is None else stop
            groups = [
                group for group, (first, last) in enumerate(pairwise(bounds)) if first < stop and last > reader.start
            ]
            batches = file.iter_batches(
                batch_size=max(1, min(BATCH_ROWS, BATCH_BYTES // (int(_row_bytes(file.metadata, groups)) + 1))),
                row_groups=groups,
                use_threads=False,
            )
            yield from rows_between(batches, bounds[groups[0]] if groups else 0, reader.start, stop)

    def column_names(self, file: File) -> list[str]:
        return list(self._metadata(file).schema.to_arrow_schema().names)

    def cut(self, file: File, ranges: list[Range], part_size: int) -> list[Range]:
        """Cut the file where row groups reach `part_size` uncompressed bytes.

        Larger row groups are cut by rows.
        """
        metadata = self._metadata(file)
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        # A damaged file may claim any size.
        most = BOMB_RATIO * file.bytes
        return cut_rows(ranges, part_size, [(group.num_rows, min(group.total_byte_size, most)) for group in groups])

    def is_far(self, file: File, start: int, stop: int) -> bool:
        bounds = _bounds(self._metadata(file))
        return start not in bounds or stop not in bounds

    def copied_bytes(self, file: File, part_size: int) -> float:
        metadata = self._metadata(file)
        sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
        return float(sum(size for size in sizes if size >= 2 * part_size))

    def first_records(self, file: File) -> Iterator[object]:
        self._metadata(file)
        return super().first_records(file)

    @contextmanager
    def table(self, file: File) -> Iterator[Table]:
        with readable(self.name, file.name), pq.ParquetFile(file.path, pre_buffer=False, buffer_size=_BUFFER) as table:
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
            yield Table(rows, _row_bytes(table.metadata, groups), batches)

    def _metadata(self, file: File) -> pq.FileMetaData:
        with readable(self.name, file.name), file.open() as source:
            metadata = pq.read_metadata(source)
            if _holds_another(source, metadata, file.bytes):
                problem = "several Parquet files are appended to each other; make one file of each"
                raise DataError("unreadable_source", f"{file.name}: {problem}")
        if not metadata.num_rows:
            raise DataError("empty_source", f"{file.name}: contains no records")
        return metadata


def _bounds(metadata: pq.FileMetaData) -> list[int]:
    """Return the first row of each row group, and the number of all rows."""
    rows = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    return list(accumulate(rows, initial=0))


def _row_bytes(metadata: pq.FileMetaData, groups: Iterable[int]) -> float:
    """Return the uncompressed bytes of a row of row groups."""
    facts = [metadata.row_group(group) for group in groups]
    return sum(group.total_byte_size for group in facts) / max(1, sum(group.num_rows for group in facts))


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
