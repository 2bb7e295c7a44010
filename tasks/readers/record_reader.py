"""One file in its container → records, one after another.

    b'{"text":"a"}\\n\\n{"text":"b"}\\n{"tex'  →  (0, {"text": "a"}), (2, {"text": "b"}), (3, Reject("bad_json", …))

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
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from tasks.conversations.fields import big_integer, duplicate_key
from tasks.conversations.fields import shown as quoted
from tasks.core.errors import DataError, Reject
from tasks.readers.compression import BOM, CHUNK, TOO_LONG, Read, byte_range, line_blocks, unpacked
from tasks.readers.memory_limit import bomb, bounded_table

EXTENSIONS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".tsv": "tsv",
}
COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
TEXT_CONTAINERS = ("jsonl", "json", "csv", "tsv")

MAX_RECORD_BYTES = 16_000_000
ARRAY_LIMIT = 2 << 30  # bytes of a JSON array that has to be in memory as a whole
_LOOKED_AT = 16 << 20  # bytes of an array, without an end of an element that is like the first one's
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
_KEY_END = np.uint16(int.from_bytes(b'":', "little"))
_JSON_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{},"]', re.DOTALL)
_NOT_A_NUMBER = re.compile(r"-?(?:NaN|Infinity|inf)\b", re.IGNORECASE)


def container_of(name: str) -> tuple[str, str] | None:
    """(container, compression) by the extension of `name`, compression "" for none; None if it is not known."""
    stem, compression = name.lower(), ""
    for extension, known in COMPRESSIONS.items():
        if stem.endswith(extension):
            stem, compression = stem.removesuffix(extension), known
    container = EXTENSIONS.get(Path(stem).suffix)
    return None if container is None else (container, compression)


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
    ):
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
                try:  # a block at once, which is three times as fast as its lines one by one
                    records = list(map(orjson.loads, lines))
                    block = b"\n".join(lines)
                    exact = _key_ends(block) == _count_keys(records) and not big_integer(block)
                except orjson.JSONDecodeError:
                    exact = False
                if exact:
                    yield range(number, number + len(records)), records, len(block)
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
                if _key_ends(text) != _count_keys(records) or big_integer(text):
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
                    yield _csv_record(header, row, damaged), sum(map(len, row))
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


# -- JSON -----------------------------------------------------------------------------------------------------------


def read_whole(read: Read, name: str, begun: bytes = b"") -> bytes:
    """`begun` and all bytes that follow it, without a byte order mark. Raises DataError beyond `ARRAY_LIMIT`."""
    chunks, size = [begun], len(begun)
    while size <= ARRAY_LIMIT and (chunk := read(CHUNK)):
        chunks.append(chunk)
        size += len(chunk)
    if size > ARRAY_LIMIT:
        raise DataError(
            "too_large_json",
            f"{name}: JSON that is not one record a line has to be in memory as a whole, and this is over "
            f"{ARRAY_LIMIT:,} bytes; write one record a line, with  jq -c '.[]' FILE.json > FILE.jsonl",
        )
    return b"".join(chunks).removeprefix(BOM)


def array_blocks(read: Read, name: str) -> Iterator[bytes]:
    """The array as several, one after another, so that it need not be in memory as a whole.

    A block ends where the bytes are those that stand between the first two elements, the first key of the second
    included. Nothing says that such a place is not inside an element; but then the block is not valid JSON, which
    whoever parses it will see. An array whose elements do not look alike comes out as a whole from there on.
    """
    text = between = b""
    while not between and len(text) < _LOOKED_AT and (chunk := read(max(CHUNK, 3 * len(text)))):
        text = (text + chunk).removeprefix(BOM).lstrip()
        between = between_elements(text, name)
    while between:
        end = text.rfind(between)
        if end > 0:
            yield text[: end + 1] + b"]"
            text = b"[" + text[end + 1 :].lstrip().removeprefix(b",")
        chunk = read(CHUNK)
        if not chunk or len(text) > _LOOKED_AT:
            between = b""
        text += chunk
    yield read_whole(read, name, text)


def between_elements(text: bytes, name: str) -> bytes:
    """From the last byte of the first element through the first string of the second; nothing if there are not two."""
    try:
        first, second = islice(array_elements(text, name), 2)
    except (DataError, ValueError):
        return b""
    begin = text.index(first) + len(first)
    end = text.index(second, begin)
    through = second.find(b'"', second.find(b'"') + 1) + 1
    return text[begin - 1 : end + through]


def array_elements(data: bytes, name: str) -> Iterator[bytes]:
    """The text of every element of a JSON array, found by its brackets, commas and strings alone.

    So one bad element costs one record and not the file. Raises DataError when the array does not close, or when
    something follows it.
    """
    depth, begin, count = 0, 0, 0
    for token in _JSON_TOKEN.finditer(data):
        at = token.start()
        byte = data[at : at + 1]
        if byte == b'"':
            if token.end() == at + 1:
                break
        elif byte in b"[{":
            depth += 1
            if depth == 1:
                begin = at + 1
        elif byte == b"," and depth == 1:
            yield data[begin:at].strip()
            begin, count = at + 1, count + 1
        elif byte in b"]}":
            depth -= 1
            if depth == 0:
                last = data[begin:at].strip()
                if count or last:
                    yield last
                rest = data[at + 1 :].lstrip()
                if rest:
                    raise DataError(
                        "bad_json_array", f"{name}: byte {len(data) - len(rest):,}: something follows the JSON array"
                    )
                return
    raise DataError(
        "bad_json_array", f"{name}: the JSON array does not close after record {count + 1:,} begins: truncated?"
    )


def parse_record(text: bytes, unterminated: bool) -> object:
    """The record in `text`, or why there is none. `unterminated`: the file ends with it, and without a line end.

    A byte order mark is skipped wherever a line begins with it, as in files that were put together: if only the first
    of a file were, it would matter whether a part begins there.
    """
    text = text.removeprefix(BOM)
    try:
        record = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return _reject(text, error, unterminated)
    if big := big_integer(text):
        return Reject("big_integer", big)
    twice = duplicate_key(text) if _key_ends(text) != _count_keys(record) else ""
    return Reject("duplicate_key", twice) if twice else record


def _key_ends(text: bytes) -> int:
    """How often `":` stands in `text`. As 16-bit numbers, 15 times as fast as bytes.count."""
    found = 0
    for at in range(0, len(text) - 1, CHUNK):
        for start in (at, at + 1):
            pairs = np.frombuffer(text, "<u2", min(CHUNK, len(text) - start) // 2, start)
            found += int(np.count_nonzero(pairs == _KEY_END))
    return found


def _count_keys(value: object) -> int:
    """How often `":` stands in compact JSON of `value`, after keys and within strings; -1 where that cannot be told.

    orjson keeps the last of two equal keys without a word. To find that out, count `":` in the text and in what was
    read from it: they differ when a key was lost, and also when the text has a space before a colon or writes a quote
    as \\u0022, which `duplicate_key` then sorts out. This costs half as much as parsing; a parser that reports them
    costs five times as much. (Where a lost key and a spaced colon make up for each other, it is not seen.)
    """
    try:
        return _key_ends(orjson.dumps(value))
    except orjson.JSONEncodeError:  # nested deeper than orjson writes
        return -1


def _reject(text: bytes, error: orjson.JSONDecodeError, unterminated: bool) -> Reject:
    """Why `text` is no JSON. `unterminated`: it is the last line of its file and has no line end."""
    try:
        decoded = text.decode()
    except UnicodeDecodeError as bad:
        return Reject("bad_utf8", f"byte 0x{text[bad.start]:02x} at offset {bad.start} of the record is not UTF-8")
    if b"\0" in text:
        return Reject("nul", f"the record holds a NUL byte at offset {text.index(0)}")
    place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno} of the record, column {error.colno}"
    if "surrogate" in error.msg:
        return Reject("lone_surrogate", f"{place}: half of a surrogate pair, which is no character ({error.msg})")
    if "depth" in error.msg or "recursion" in error.msg.lower():
        return Reject("too_deep", f"{place}: the record is nested too deeply")
    if match := _NOT_A_NUMBER.match(decoded, error.pos):
        return Reject("bad_json", f"{place}: {match.group()} is not JSON")
    if "infinity" in error.msg:
        return Reject("bad_json", f"{place}: a number that large would be rounded; write it as a string")
    if unterminated:
        return Reject("bad_json", f"{place}: {error.msg}; the last line ends early: truncated?")
    return Reject("bad_json", f"{place}: {error.msg}")


# -- rows -----------------------------------------------------------------------------------------------------------


def _csv_record(header: list[str], row: list[str], damaged: list[int]) -> object:
    if len(row) > len(header):
        return Reject("bad_csv", f"the row has {len(row)} cells, the header has {len(header)}")
    if damaged:
        return Reject("bad_utf8", f"a byte at offset {damaged[0]} of its line is not UTF-8")
    row += [""] * (len(header) - len(row))
    return dict(zip(header, row, strict=True))


def rows_of(batch: Any) -> list[object]:
    """The rows of an Arrow batch; one that Python cannot hold is a Reject.

    Times become text: as values they would depend on whether pandas is installed (Python has no nanoseconds).
    """
    for index, field in enumerate(batch.schema):
        if pa.types.is_timestamp(field.type) or pa.types.is_time(field.type):
            batch = batch.set_column(index, field.name, batch.column(index).cast(pa.string()))
    try:
        rows: list[object] = batch.to_pylist()
        return rows
    except UnicodeDecodeError as error:
        reject = Reject("bad_utf8", f"a string is not UTF-8 at byte {error.start}")
    except (ValueError, OverflowError) as error:
        reject = Reject("bad_value", first_line(error))
    if batch.num_rows == 1:
        return [reject]
    return [row for index in range(batch.num_rows) for row in rows_of(batch.slice(index, 1))]


def first_line(error: BaseException) -> str:
    """What a library says, without the lines of advice that follow."""
    return (str(error).splitlines() or [type(error).__name__])[0]
