"""Convert Arrow record batches to records within a limit on memory.

struct     a dict without the fields that are null: a table gives every struct the keys of all rows
map        a dict with all its keys
JSON       the value of the text, parsed strictly
float32    the float with the shortest text that means it: 0.1, not 0.10000000149011612
date, time, decimal    a `Written`, which has the text of the value
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import types

from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.core.printable import shown
from packcorpus.tasks.core.process import bomb, bounded_table
from packcorpus.tasks.readers.container import Container, Create, File, RecordReader, Rows
from packcorpus.tasks.readers.lines import Range
from packcorpus.tasks.readers.strict_json import parse_record

BATCH_ROWS, BATCH_BYTES = 1000, 32 << 20  # of a slice that is converted to records at once

# A table with more rows than this, and with more rows than bytes, is refused as a bomb.
_BOMB_ROWS = 200_000


@dataclass(frozen=True, slots=True)
class Written:
    """A value that JSON has no type for, and its text."""

    text: str


class Date(Written): ...


class Time(Written): ...


class Decimal(Written): ...


def text_of_written(value: object) -> str:
    """Return the text of a `Written`, for an encoder of JSON, or raise TypeError."""
    if isinstance(value, Written):
        return value.text
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


def _is_list(kind: Any) -> bool:
    return types.is_list(kind) or types.is_large_list(kind)


def _written(kind: Any) -> type[Written] | None:
    if types.is_date(kind):
        return Date
    if types.is_timestamp(kind) or types.is_time(kind):
        return Time
    return Decimal if types.is_decimal(kind) else None


class Converter:
    """Convert arrays, and count the null fields of structs that are left out."""

    def __init__(self) -> None:
        self.left_out = 0

    def values(self, array: Any) -> list[Any]:
        """Return the values. Raises ValueError for a name twice, Reject for bad JSON."""
        kind = array.type
        if is_usual(array):
            pass
        elif types.is_dictionary(kind):
            return self.values(array.dictionary_decode())
        elif isinstance(kind, pa.JsonType):
            return list(map(_parsed, self.values(array.storage)))
        elif types.is_struct(kind):
            return self._objects(array)
        elif types.is_map(kind):
            return self._maps(array)
        elif _is_list(kind):
            return _sliced(self.values(_inner(array)), array)
        elif types.is_fixed_size_list(kind) or types.is_list_view(kind) or types.is_large_list_view(kind):
            rest = iter(self.values(array.flatten()))
            lengths = array.value_lengths().to_pylist()
            return [None if length is None else list(islice(rest, length)) for length in lengths]
        elif types.is_float32(kind) or types.is_float16(kind):
            numbers = array.to_numpy(zero_copy_only=False)
            return [float(str(x)) if ok else None for x, ok in zip(numbers, _valid(array), strict=True)]
        elif written := _written(kind):
            return [None if text is None else written(text) for text in array.cast(pa.string()).to_pylist()]
        values: list[Any] = array.to_pylist()
        return values

    def _objects(self, array: Any) -> list[Any]:
        names = [field.name for field in array.type]
        if len({*names}) < len(names):  # pyarrow's message does not name it
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two fields of a struct are named {shown(twice)}")
        children = array.flatten()  # a field of a null struct is null
        absent = sum(child.null_count - array.null_count for child in children)
        self.left_out += absent
        rows = zip(*map(self.values, children), strict=True) if names else iter([()] * len(array))
        if not absent and not array.null_count:
            return [dict(zip(names, row, strict=True)) for row in rows]
        return [
            {name: value for name, value in zip(names, row, strict=True) if value is not None} if valid else None
            for row, valid in zip(rows, _valid(array), strict=True)
        ]

    def _maps(self, array: Any) -> list[Any]:
        first, stop = array.offsets[0].as_py(), array.offsets[-1].as_py()
        keys, items = (self.values(column.slice(first, stop - first)) for column in (array.keys, array.items))
        objects: list[Any] = []
        for pairs in _sliced(list(zip(keys, items, strict=True)), array):
            objects.append(None if pairs is None else dict(pairs))
            if pairs is not None and len(objects[-1]) < len(pairs):
                names = [key for key, _ in pairs]
                twice = next(key for key in names if names.count(key) > 1)
                raise ValueError(f"a map has the key {shown(twice)} twice")
        return objects


def is_usual(array: Any) -> bool:
    """Return whether pyarrow converts an array in the same way, which is faster."""
    kind = array.type
    if types.is_struct(kind):
        children = array.flatten()
        is_full = all(child.null_count == array.null_count for child in children)
        return is_full and len({field.name for field in kind}) == len(children) and all(map(is_usual, children))
    if _is_list(kind):
        return is_usual(_inner(array))
    is_converted = types.is_nested(kind) or types.is_dictionary(kind) or isinstance(kind, pa.JsonType)
    return not (is_converted or types.is_float32(kind) or types.is_float16(kind) or _written(kind))


def _inner(array: Any) -> Any:
    """Return the values of all lists of an array, one after another."""
    first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
    return array.values.slice(first, last - first)


def _sliced(inner: list[Any], array: Any) -> list[Any]:
    """Cut the values of all lists of an array into lists; an invalid list is None."""
    offsets = array.offsets.to_pylist()
    first = offsets[0]
    bounds = zip(offsets, offsets[1:], _valid(array), strict=False)
    return [inner[start - first : stop - first] if is_valid else None for start, stop, is_valid in bounds]


def _valid(array: Any) -> Iterator[bool]:
    """Return which elements of an array are not null."""
    # Arrow computes the flags with a module that takes 30 ms to import.
    return iter(array.is_valid().to_pylist()) if array.null_count else iter([True] * len(array))


def _parsed(text: str | None) -> Any:
    value = None if text is None else parse_record(text.encode(), False)
    if isinstance(value, Reject):
        raise Reject(value.reason, f"a value of the type JSON: {value.message}")
    return value


class TableContainer(Container):
    """A container whose rows a library reads as Arrow record batches."""

    unpacked_as = "arrow"

    def batches(self, reader: RecordReader) -> Iterator[Any]:
        """Yield the record batches in [reader.start, reader.stop), with all columns."""
        raise NotImplementedError

    def records_before(self, file: File, start: int) -> int:
        return start

    def seek(self, file: File, number: int) -> tuple[int, int]:
        return number, number

    def unpack(self, file: File, ranges: Sequence[tuple[int, int, Path]], create: Create) -> None:
        """Copy ranges of rows to Arrow streams."""
        at, batch, batches = ranges[0][0], None, self.batches(RecordReader(self, file, ranges[0][0], ranges[-1][1]))
        for start, stop, path in ranges:
            with create(path) as out, ExitStack() as stack:
                writer = None
                while at < stop:
                    if batch is None:
                        what = f"from record {at + 1:,} on, a batch"
                        with readable(self.name, file.name), bounded_table(file.name, file.bytes, what):
                            batch = next(batches, None)
                        if batch is None:
                            raise DataError("unreadable_source", f"{file.name}: has only {at:,} records: truncated?")
                    rows = min(batch.num_rows, (start if at < start else stop) - at)
                    if at >= start:
                        writer = writer or stack.enter_context(pa.ipc.new_stream(out, batch.schema))
                        writer.write_batch(batch.slice(0, rows))
                    at, batch = at + rows, batch.slice(rows) if rows < batch.num_rows else None

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
                columns = wanted(batch.schema.names, file)
                read = set(columns)
                for name in batch.schema.names:
                    if name not in read and (count := bounded(partial(present, batch.column(name)))):
                        reader.unread[name] += count
                batch = batch.select(columns)
                row_bytes = batch.nbytes // max(batch.num_rows, 1) + 1
                step = max(1, min(BATCH_ROWS, BATCH_BYTES // row_bytes))
                for offset in range(0, batch.num_rows, step):
                    rows = bounded(partial(rows_of, batch.slice(offset, step), converter))
                    reader.null_fields = converter.left_out
                    yield range(number, number + len(rows)), rows, len(rows) * row_bytes
                    number += len(rows)


def cut_rows(ranges: list[Range], part_size: int, groups: Iterable[tuple[int, int]]) -> list[Range]:
    """Return ranges of rows of about `part_size` bytes, given (rows, bytes) of groups.

    Small groups are joined, and large ones are cut. A file that is one part keeps its digest.
    """
    [whole], stops, size, stop = ranges, [0], 0, 0
    for rows, size_of_group in groups:
        pieces = max(1, min(size_of_group // part_size, rows))
        if pieces > 1 and size:
            stops.append(stop)
            size = 0
        stops += [stop + rows * number // pieces for number in range(1, pieces)]
        size, stop = size + size_of_group // pieces, stop + rows
        if size >= part_size or pieces > 1:
            stops.append(stop)
            size = 0
    stops += [stop] * (stops[-1] < stop)
    if len(stops) == 2:
        return [Range(0, stop, whole.sha256)]
    return [
        Range(start, end, hashlib.sha256(f"{whole.sha256} rows {start} {end}".encode()).hexdigest())
        for start, end in pairwise(stops)
    ]


def rows_between(batches: Iterable[Any], first: int, start: int, stop: int | None) -> Iterator[Any]:
    """Yield the rows [start, stop) of batches that begin with row `first`."""
    for batch in batches:
        top = max(first, start)
        bottom = first + batch.num_rows if stop is None else min(first + batch.num_rows, stop)
        if top < bottom:
            yield batch.slice(top - first, bottom - top)
        first += batch.num_rows
        if stop is not None and first >= stop:
            return


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
    """Return the columns of a table that have a meaning, or all if none has one.

    Raises DataError if two columns have the same name, read or not, as a header of a CSV file does.
    """
    if len({*names}) < len(names):
        twice, _ = Counter(names).most_common(1)[0]
        raise DataError("unreadable_source", f"{file.name}: two columns are named {shown(twice)}; rename one of them")
    columns = file.wanted_columns
    return [name for name in names if name in columns] or list(names)


def present(column: Any) -> int:
    """Count the values of a column that are neither null nor an empty string or list."""
    import pyarrow.compute as pc  # takes 30 ms, and only tables with unread columns need it

    kind = column.type
    if types.is_dictionary(kind):
        return present(column.dictionary_decode())
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        lengths = pc.binary_length(column)
    elif _is_list(kind):
        lengths = pc.list_value_length(column)
    else:
        return len(column) - int(column.null_count)
    return int(pc.sum(pc.greater(lengths, 0)).as_py() or 0)


def rows_of(batch: Any, converter: Converter | None = None) -> list[object]:
    """Return the rows of a batch; one that Python cannot represent is a Reject."""
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
