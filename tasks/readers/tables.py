"""Convert Arrow record batches to records, within a limit on memory.

Up to 1,000 rows or 32 MiB are converted at a time, as in arrow_values/values.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow as pa

from tasks.core.errors import DataError, Reject
from tasks.core.printable import shown
from tasks.core.process import bomb, bounded_table
from tasks.readers.arrow_values import Converter, is_usual
from tasks.readers.container import Container, File, RecordReader, Rows

BATCH_ROWS, BATCH_BYTES = 1000, 32 << 20  # of a slice that is converted to records at once

# A table with more rows than this, and with more rows than bytes, is refused as a bomb.
_BOMB_ROWS = 200_000


class TableContainer(Container):
    """A container whose rows a library reads as Arrow record batches."""

    def batches(self, reader: RecordReader) -> Iterator[Any]:
        """Yield the record batches of `reader.file` with all columns.

        The batches cover [reader.start, reader.stop).
        """
        raise NotImplementedError

    def column_names(self, file: File) -> list[str]:
        """Return the names of all columns."""
        raise NotImplementedError

    def read(self, reader: RecordReader) -> Iterator[Rows]:
        file, number, converter = reader.file, 0, Converter()
        batches = self.batches(reader)

        def bounded(work: Any) -> Any:
            with bounded_table(file.name, file.bytes, f"from record {number + 1:,} on, a batch"):
                return work()

        with readable(self.name, file.name):
            while (batch := bounded(lambda: next(batches, None))) is not None:
                if number + batch.num_rows > max(file.bytes, _BOMB_ROWS):
                    raise bomb(file.name, f"{number + batch.num_rows:,} rows or more in {file.bytes:,} bytes")
                columns = set(wanted(batch.schema.names, file))
                for index, name in enumerate(batch.schema.names):
                    if name not in columns and (count := bounded(partial(present, batch.column(index)))):
                        reader.unread[name] += count
                batch = batch.select([index for index, name in enumerate(batch.schema.names) if name in columns])
                row_bytes = batch.nbytes // max(batch.num_rows, 1) + 1
                step = max(1, min(BATCH_ROWS, BATCH_BYTES // row_bytes))
                for offset in range(0, batch.num_rows, step):
                    rows = bounded(partial(rows_of, batch.slice(offset, step), converter))
                    reader.null_fields = converter.left_out
                    yield range(number, number + len(rows)), rows, len(rows) * row_bytes
                    number += len(rows)


@contextmanager
def readable(container: str, name: str) -> Iterator[None]:
    """Replace the errors of Arrow by a DataError that names the file."""
    try:
        yield
    except MemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataError("unreadable_source", f"{name}: cannot be read as {container}: {_first_line(error)}") from None


def wanted(names: Collection[str], file: File) -> list[str]:
    """Return the columns of a table that are read.

    They are the columns that have a meaning, or all columns if none has a meaning. Raises DataError if two columns have
    the same name, read or not, as a header of a CSV file does.
    """
    if len({*names}) < len(names):
        twice, _ = Counter(names).most_common(1)[0]
        raise DataError("unreadable_source", f"{file.name}: two columns are named {shown(twice)}; rename one of them")
    columns = file.wanted_columns
    return [name for name in names if name in columns] or list(names)


def present(column: Any) -> int:
    """Count the values of a column that are neither null nor an empty string or list."""
    import pyarrow.compute as pc  # takes 30 ms, and only tables with unread columns need it

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if any(is_text(kind) for is_text in _TEXTS):
        lengths = pc.binary_length(column)
    elif any(is_list(kind) for is_list in _LISTS):
        lengths = pc.list_value_length(column)
    else:
        return len(column) - int(column.null_count)
    return int(pc.sum(pc.greater(lengths, 0)).as_py() or 0)


_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
_LISTS = (pa.types.is_list, pa.types.is_large_list)


def rows_of(batch: Any, converter: Converter | None = None) -> list[object]:
    """Return the rows of an Arrow batch.

    A row that Python cannot represent becomes a Reject.
    """
    converter = converter or Converter()
    before = converter.left_out
    try:
        if all(map(is_usual, batch.columns)):
            rows: list[object] = batch.to_pylist()
            return rows
        columns = [converter.values(column) for column in batch.columns]
    except UnicodeDecodeError as error:
        reject = Reject("bad_utf8", f"a string is not UTF-8 at byte {error.start}")
    except Reject as error:
        reject = error
    except (ValueError, OverflowError) as error:
        reject = Reject("bad_value", _first_line(error))
    else:
        names = batch.schema.names
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    converter.left_out = before
    if batch.num_rows == 1:
        return [reject]
    return [row for index in range(batch.num_rows) for row in rows_of(batch.slice(index, 1), converter)]


def _first_line(error: BaseException) -> str:
    """Return the first line of a library's message, without the advice below it."""
    return (str(error).splitlines() or [type(error).__name__])[0]
