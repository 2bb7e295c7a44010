"""One file in its container → records, one after another.

    b'{"text":"a"}\n\n{"text":"b"}\n{"tex'  →  (0, {"text": "a"}), (2, {"text": "b"}), (3, Reject("bad_json", …))

| container | what is one record                        | how it is read                            | its number      |
|-----------|-------------------------------------------|-------------------------------------------|-----------------|
| jsonl     | what lies between two line ends           | 256 KiB at a time, any byte range         | its line        |
| json      | an element of the one array               | 256 KiB at a time, if elements look alike | its place       |
| csv, tsv  | a row, as strings; first row: the columns | line by line; a quoted line end belongs   | its place       |
| parquet   | a row                                     | slices of up to 1,000 rows or 32 MiB      | its place       |
| arrow     | a row; IPC stream or file, by its magic   | slices of up to 1,000 rows or 32 MiB      | its place       |

A record that cannot be parsed comes out as a `Reject` in its place: bad_json, bad_utf8, lone_surrogate, nul, too_deep,
duplicate_key, big_integer, too_long_record, bad_csv, bad_value. A file that cannot be read on raises DataError.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.core.errors import DataError, Reject
from tasks.core.printable import shown as quoted
from tasks.readers.compression import unpacked
from tasks.readers.csv_rows import csv_record
from tasks.readers.json_array import array_blocks, array_elements, read_whole
from tasks.readers.lines import TOO_LONG, Read, byte_range, line_blocks
from tasks.readers.memory_limit import bomb, bounded_table
from tasks.readers.strict_json import big_integer, decode_block, parse_record, same_strings
from tasks.readers.tables import first_line, rows_of

MAX_RECORD_BYTES = 16_000_000


_BATCH_ROWS = 1000


_BATCH_BYTES = 32 << 20


# A row above this number needs a byte of the file, or the file is a bomb.
_BOMB_ROWS = 200_000


# What is made of records in columns stays in the cache, mostly.
_BLOCK, _BLOCK_BYTES = 256, 1 << 20


# Numbers of records, and the records.
Block = tuple[Sequence[int], list[Any]]


# The same, and how many bytes they are, about.
_Read = tuple[Sequence[int], list[Any], int]


_ARROW_FILE_MAGIC = b"ARROW1"


class RecordReader:
    """Iterates over (number, record) of one file, or of a range of it.

    `start` and `stop` are bytes for an uncompressed jsonl, row groups for parquet, and ignored for all else. A record
    is whatever JSON or the table holds, or a Reject; its number counts from 0 at `start` (see the table above).
    `records` is final after the iteration: how many numbers the range spans, blank lines included. `name` is what
    messages call the file. Of a table only the columns in `columns` are read, unless it has none of them.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        container: str,
        compression: str,
        start: int,
        stop: int,
        max_record_bytes: int = MAX_RECORD_BYTES,
        columns: Iterable[str] = (),
        decode: Callable[[list[bytes]], list[Any] | None] = decode_block,
    ):
        self.decode = decode
        self.path, self.name, self.container, self.compression = path, name, container, compression
        self.start, self.stop, self.max_record_bytes = start, stop, max_record_bytes
        self.columns = frozenset(columns)
        self.records = 0
        self._position: Callable[[], int] = lambda: 0
        self._bounds = (0, 0)

    @property
    def share(self) -> float:
        """How much of the range is read, from 0 to 1: of its rows for parquet, else of the bytes on disk."""
        begin, end = self._bounds
        try:
            return min(1.0, (self._position() - begin) / max(end - begin, 1))
        except ValueError:  # the file is closed again
            return 1.0

    def __iter__(self) -> Iterator[tuple[int, object]]:
        for numbers, records in self.blocks():
            yield from zip(numbers, records, strict=True)

    def blocks(self) -> Iterator[Block]:
        """Numbers and records, up to _BLOCK of them and about _BLOCK_BYTES at a time, as they are at hand."""
        self.records = 0
        readers = {"jsonl": self._lines, "json": self._array, "csv": self._csv, "tsv": self._csv}
        for numbers, records, size in readers.get(self.container, self._table)():
            step = max(1, min(_BLOCK, _BLOCK_BYTES * len(records) // max(size, 1)))
            for top in range(0, len(records), step):
                yield numbers[top : top + step], records[top : top + step]

    # -- text -------------------------------------------------------------------------------------------------------

    def _lines(self) -> Iterator[_Read]:
        number = 0
        with self.path.open("rb") as file:
            for lines, unterminated in line_blocks(self._read(file), self.max_record_bytes):
                if not any(lines):  # blank, and perhaps millions
                    number += len(lines)
                    self.records = number
                    continue
                records = self.decode(lines)
                if records is not None:
                    yield range(number, number + len(records)), records, sum(map(len, lines))
                else:
                    filled = [index for index, line in enumerate(lines) if line == TOO_LONG or line.strip()]
                    found = [self._one_by_one(lines[index], unterminated) for index in filled]
                    yield [number + index for index in filled], found, sum(map(len, lines))
                number += len(lines)
                self.records = number

    def _one_by_one(self, line: bytes, unterminated: bool) -> object:
        return Reject("too_long_record", self._too_long()) if line == TOO_LONG else parse_record(line, unterminated)

    def _array(self) -> Iterator[_Read]:
        number = 0
        with self.path.open("rb") as file:
            for text in array_blocks(self._read(file), self.name):
                try:
                    records: Any = orjson.loads(text)
                except orjson.JSONDecodeError:
                    break
                if not same_strings(text, orjson.dumps(records)) or big_integer(text):
                    records = [parse_record(element, False) for element in array_elements(text, self.name)]
                yield range(number, number + len(records)), records, len(text)
                number += len(records)
                self.records = number
            else:
                return
        # Something is wrong, or a block was no block: find out in which record.
        with self.path.open("rb") as file:
            data = read_whole(self._read(file), self.name)
        self.records = number
        elements = islice(array_elements(data, self.name), number, None)
        yield from self._gathered((parse_record(element, False), len(element)) for element in elements)

    def _gathered(self, found: Iterator[tuple[object, int]]) -> Iterator[_Read]:
        """Records with their bytes, one after another, as blocks. What was read before an error comes before it."""
        held: list[object] = []
        size = 0
        error: DataError | None = None
        while True:
            try:
                record, added = next(found, (None, -1))
            except DataError as raised:
                error, added = raised, -1
            if added >= 0:
                held.append(record)
                size += added
            if held and (added < 0 or len(held) >= _BLOCK or size >= _BLOCK_BYTES):
                yield range(self.records, self.records + len(held)), held, size
                self.records += len(held)
                held, size = [], 0
            if error:
                raise error
            if added < 0:
                return

    def _csv(self) -> Iterator[_Read]:
        return self._gathered(self._csv_rows())

    def _csv_rows(self) -> Iterator[tuple[object, int]]:
        # the bound is one of the whole process; never lowered, for another reader may rely on it
        csv.field_size_limit(max(csv.field_size_limit(), self.max_record_bytes))
        delimiter = "\t" if self.container == "tsv" else ","
        damaged: list[int] = []
        with self.path.open("rb") as file:
            rows = csv.reader(self._csv_lines(self._read(file), damaged), delimiter=delimiter, strict=True)
            header: list[str] = []
            while True:
                try:
                    row = next(rows, None)
                except csv.Error as error:
                    raise DataError(
                        "bad_csv_file", f"{self.name}: line {rows.line_num}: {error}; is a quote left open?"
                    ) from None
                if row is None:
                    return
                if not header:
                    header = row
                    if len(set(header)) < len(header):
                        twice = next(name for name in header if header.count(name) > 1)
                        raise DataError("bad_csv_file", f"{self.name}: line 1: two columns are named {quoted(twice)}")
                elif row:
                    yield csv_record(header, row, damaged), sum(map(len, row))
                damaged.clear()

    def _csv_lines(self, read: Read, damaged: list[int]) -> Iterator[str]:
        """Decoded lines with their line ends. A line that is not UTF-8 adds the offset of its first bad byte to
        `damaged`, and goes on with surrogates in their place: it may be one of several lines of a record."""
        for lines, unterminated in line_blocks(read, self.max_record_bytes):
            for line in lines:
                if line == TOO_LONG:
                    raise DataError("too_long_line", f"{self.name}: {self._too_long()}")
                try:
                    text = line.decode()
                except UnicodeDecodeError as error:
                    damaged.append(error.start)
                    text = line.decode("utf-8", "surrogateescape")
                yield text if unterminated else text + "\n"

    def _too_long(self) -> str:
        return f"the line is longer than max_record_bytes, {self.max_record_bytes:,} bytes"

    def _read(self, file: BinaryIO) -> Read:
        self._position = file.tell
        if self.container == "jsonl" and not self.compression:
            self._bounds = (self.start, self.stop)
            return byte_range(file, self.start, self.stop)
        self._bounds = (0, self.path.stat().st_size)
        return unpacked(file, self.compression, self.name)

    # -- tables -----------------------------------------------------------------------------------------------------

    def _table(self) -> Iterator[_Read]:
        batches = self._parquet_batches() if self.container == "parquet" else self._arrow_batches()
        size = self.path.stat().st_size
        try:
            while (batch := self._bounded(lambda: next(batches, None), size)) is not None:
                if self.records + batch.num_rows > max(size, _BOMB_ROWS):
                    raise bomb(self.name, f"{self.records + batch.num_rows:,} rows or more in {size:,} bytes")
                row_bytes = batch.nbytes // max(batch.num_rows, 1) + 1
                step = max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes))
                for offset in range(0, batch.num_rows, step):
                    rows = self._bounded(partial(rows_of, batch.slice(offset, step)), size)
                    yield range(self.records, self.records + len(rows)), rows, len(rows) * row_bytes
                    self.records += len(rows)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                "unreadable_source", f"{self.name}: cannot be read as {self.container}: {first_line(error)}"
            ) from None

    def _bounded(self, work: Callable[[], Any], size: int) -> Any:
        with bounded_table(self.name, size, f"from record {self.records + 1:,} on, a batch"):
            return work()

    def _parquet_batches(self) -> Iterator[Any]:
        # no threads and no read-ahead: parts are what runs in parallel, and a row group may be large
        with pq.ParquetFile(self.path, pre_buffer=False) as file:
            groups = range(self.start, self.stop)
            facts = [file.metadata.row_group(group) for group in groups]
            rows = sum(group.num_rows for group in facts)
            row_bytes = sum(group.total_byte_size for group in facts) // max(rows, 1) + 1
            self._position = lambda: self.records
            self._bounds = (0, rows)
            yield from file.iter_batches(
                batch_size=max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes)),
                row_groups=list(groups),
                columns=self._wanted(file.schema_arrow.names),
                use_threads=False,
            )

    def _arrow_batches(self) -> Iterator[Any]:
        # not memory-mapped: a map of a file that somebody truncates kills the process
        with pa.OSFile(str(self.path), "rb") as file:
            is_file = file.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
            file.seek(0)
            self._position, self._bounds = file.tell, (0, file.size())
            reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
            wanted = self._wanted(reader.schema.names)
            for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
                yield batch.select(wanted)

    def _wanted(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self.columns] or list(names)
