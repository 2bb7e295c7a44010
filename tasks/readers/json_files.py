"""Read JSON Lines, from any byte, and JSON arrays, in blocks.

A session of an agent is JSON Lines that are one record together. A .json file that holds one object per line is read as
JSON Lines. An array is read 256 KiB at a time if its elements look alike.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import PurePath
from typing import BinaryIO

import msgspec
import orjson

from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.core.printable import shown
from packcorpus.tasks.readers.container import Container, File, Record, RecordReader, Rows, Run, Window, in_blocks
from packcorpus.tasks.readers.lines import (
    BOM,
    CHUNK,
    DECOMPRESS,
    TOO_LONG,
    WINDOW,
    Range,
    Read,
    end_of_line,
    line_blocks,
    split_at_lines,
)
from packcorpus.tasks.readers.strict_json import parse_record

SEEK_BLOCK = 1 << 20  # bytes in which line ends are counted at a time


class Jsonl(Container):
    name = "jsonl"
    extensions = (".jsonl", ".ndjson")
    is_text = True
    numbered_by = "line"
    record = "a line"

    def read(self, reader: RecordReader) -> Iterator[Rows]:
        number = 0
        with _open(reader) as read:
            for lines, unterminated in line_blocks(read, reader.max_record_bytes):
                if any(lines):  # otherwise all lines are blank, and there may be millions
                    records = reader.decode(lines)  # a block at once: three times as fast as line by line
                    if records is not None:
                        yield range(number, number + len(records)), records, sum(map(len, lines))
                    else:
                        filled = [index for index, line in enumerate(lines) if line == TOO_LONG or line.strip()]
                        found = [_parse(reader, lines[index], unterminated) for index in filled]
                        yield [number + index for index in filled], found, sum(map(len, lines))
                number += len(lines)
                reader.records = number

    def split(self, file: File, part_size: int, chunks: Iterable[bytes]) -> tuple[str, list[Range]]:
        if file.compression:
            return super().split(file, part_size, chunks)
        return split_at_lines(chunks, part_size)

    def records_before(self, file: File, start: int) -> int:
        before = 0
        with file.open() as lines:
            while (left := start - lines.tell()) > 0 and (chunk := lines.read(min(SEEK_BLOCK, left))):
                before += chunk.count(b"\n")
        return before

    def seek(self, file: File, number: int) -> tuple[int, int]:
        """Return the start and number of a line, or the size of the file beyond it."""
        if file.compression:
            return 0, 0
        left, position = number, 0
        with file.open() as lines:
            while left and (block := lines.read(SEEK_BLOCK)):
                if block.count(b"\n") >= left:
                    return position + len(block) - len(block.split(b"\n", left)[-1]), number
                left -= block.count(b"\n")
                position += len(block)
        return position, number

    def explain_unreadable(self, file: File, prefix: bytes) -> str:
        if prefix.startswith(b"["):
            return "starts like a JSON array instead of one object per line; rename it to .json"
        first, _, rest = prefix.partition(b"\n")
        if prefix.startswith(b"{") and first.rstrip().endswith((b"{", b"[", b",")) and rest.strip():
            made = shlex.quote(f"{PurePath(file.name.removesuffix(f'.{file.compression}')).stem}.lines.jsonl")
            command = f"{DECOMPRESS[file.compression]} {shlex.quote(file.name)} | jq -c . > {made}"
            return f"has objects that span several lines; put each on its own line with  {command}"
        return ""

    def window(self, file: File, max_record_bytes: int) -> Window:
        def window(source: BinaryIO, start: int, stop: int) -> tuple[list[Record], int]:
            begin = end_of_line(source, start - 1, max_record_bytes) if start else 0
            end = end_of_line(source, stop - 1, max_record_bytes)
            # The lines before `begin` have not been counted.
            origin = f"{file.name}, from byte {begin:,} line " if begin else f"{file.name}:"
            numbered = RecordReader(self, file, begin, end, max_record_bytes) if begin < stop else ()
            return [Record(f"{origin}{number + 1}", value) for number, value in numbered], max(0, end - begin)

        return window

    def runs(self, reader: RecordReader) -> Iterator[Run]:
        """Yield all lines in runs; a line is parsed only if its run is kept."""
        number = 0
        with _open(reader) as read:
            for lines, unterminated in line_blocks(read, reader.max_record_bytes):
                step = max(1, len(lines) * WINDOW // CHUNK)
                for first in range(0, len(lines), step):
                    run = lines[first : first + step]
                    size = sum(map(len, run))
                    count = sum(line == TOO_LONG or not (line == b"" or line.isspace()) for line in run)
                    yield Run(size, size + len(run), count, partial(_run, reader, run, number + first, unterminated))
                number += len(lines)


class Session(Container):
    """JSON Lines that are one session of an agent: one record, {"trace": [lines]}.

    A file is found to be a session by its content, never by its extension.
    """

    name = "session"
    extensions = ()
    is_text = True
    record = "the whole file"

    def read(self, reader: RecordReader) -> Iterator[Rows]:
        records: list[object] = []
        number = size = 0
        with reader.open_text() as read:
            for lines, unterminated in line_blocks(read, reader.max_record_bytes):
                for line in lines:
                    number += 1
                    size += len(line) + 1
                    if line == TOO_LONG or size > reader.max_record_bytes + 1:
                        limit = f"max_record_bytes, {reader.max_record_bytes:,} bytes"
                        yield range(1), [Reject("too_long_record", f"the session is longer than {limit}")], size
                        return
                    if not line or line.isspace():
                        continue
                    record = parse_record(line, unterminated)
                    if isinstance(record, Reject):
                        yield range(1), [Reject(record.reason, f"line {number}: {record.message}")], size
                        return
                    records.append(record)
        yield range(1), [{"trace": records}], size


@contextmanager
def _open(reader: RecordReader) -> Iterator[Read]:
    if reader.file.compression:
        with reader.open_text() as read:
            yield read
        return
    stop = reader.file.bytes if reader.stop is None else reader.stop
    with reader.file.open(reader.stop) as file:
        file.seek(reader.start)
        reader.position = file.tell
        yield lambda size: file.read(max(0, min(size, stop - file.tell())))


def _parse(reader: RecordReader, line: bytes, unterminated: bool) -> object:
    if line == TOO_LONG:
        return Reject("too_long_record", reader.too_long())
    return parse_record(line, unterminated)


def _run(reader: RecordReader, lines: list[bytes], first: int, unterminated: bool) -> list[Record]:
    return [
        Record(f"{reader.file.name}:{number}", _parse(reader, line, unterminated))
        for number, line in enumerate(lines, first + 1)
        if line == TOO_LONG or (line and not line.isspace())
    ]


ARRAY_LIMIT = 2 << 30  # bytes of a JSON array that has to be in memory as a whole
_SEARCHED = 16 << 20  # bytes of an array that are searched for the separator of its elements
_MEASURED = 64 << 20  # bytes of an array in which `largest_block` searches
_FIRST = 100  # records of an array that `first_records` yields
_JSON_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{},"]', re.DOTALL)


class JsonArray(Container):
    name = "json"
    extensions = (".json",)
    record = "an element of the top-level array"
    is_text = True

    def read(self, reader: RecordReader) -> Iterator[Rows]:
        name, number = reader.file.name, 0
        with reader.open_text() as read:
            for text in array_blocks(read, name):
                try:
                    elements = [bytes(raw) for raw in msgspec.json.decode(text, type=list[msgspec.Raw])]
                except (msgspec.DecodeError, RecursionError):
                    break
                records = reader.decode(elements)
                if records is None:
                    records = [parse_record(element, False) for element in elements]
                yield range(number, number + len(records)), records, len(text)
                number += len(records)
            else:
                return
        # The array is damaged, or a block was not valid JSON. Read element by element to find the bad record.
        with reader.open_text() as read:
            data = read_whole(read, name)
        rest = islice(array_elements(data, name), number, None)
        yield from in_blocks(((parse_record(element, False), len(element)) for element in rest), number)

    def resolve(self, file: File, prefix: bytes, is_record: Callable[[dict[str, object]], bool]) -> str:
        """Return json for an array, or jsonl for one object per line.

        Raises DataError if the file starts with neither, or if it is one object that is not one record on one line.
        """
        if prefix.startswith(b"["):
            return self.name
        if not prefix.startswith(b"{"):
            begins = shown(prefix[:20].decode("utf-8", "replace"))
            problem = f"is neither a JSON array nor one JSON object per line; it starts with {begins}"
            raise DataError("unknown_json", f"{file.name}: {problem}")
        reader = RecordReader(self, file)
        with reader.open_text() as read:
            blocks = line_blocks(read, reader.max_record_bytes)
            filled = (line for lines, _ in blocks for line in lines if line == TOO_LONG or line.strip())
            lines = list(islice(filled, 2))
        if len(lines) == 2 and _object(lines[0]) is not None:
            return Jsonl.name
        with reader.open_text() as read:
            value = _object(read_whole(read, file.name))
        if value is None:
            return Jsonl.name
        lists = [key for key, item in value.items() if isinstance(item, list)]
        if lists and not is_record(value):
            command = f"jq -c '.{lists[0]}[]' {file.name} > {PurePath(file.name).stem}.jsonl"
            raise DataError(
                "unknown_json",
                f"{file.name}: is one JSON object, not a list of records; its lists: {', '.join(map(shown, lists))}; "
                f"extract one of them with  {command}",
            )
        if len(lines) == 2:
            advice = "put [ and ] around it, or write one object per line"
            raise DataError("unknown_json", f"{file.name}: is one JSON object over several lines; {advice}")
        return Jsonl.name

    def first_records(self, file: File) -> Iterator[object]:
        """Yield the first 100 records.

        The array is read in growing steps, so up to about four times the bytes of the requested records are read.
        """
        with RecordReader(self, file).open_text() as read:
            prefix, whole, count = b"", False, 0
            while count < _FIRST and not whole:
                more = read(max(CHUNK, 3 * len(prefix)))
                prefix, whole = prefix + more, not more
                try:
                    for element in islice(array_elements(prefix, file.name), count, None):
                        count += 1
                        try:
                            yield orjson.loads(element)
                        except orjson.JSONDecodeError as error:
                            yield Reject("bad_json", error.msg)
                except DataError:  # for example because the array continues after the prefix
                    if whole:
                        raise

    def window(self, file: File, max_record_bytes: int) -> Window | None:
        """Return a function that reads elements from the middle of the array.

        It finds elements by the bytes that separate the first two elements. Returns None if they cannot be found.
        """
        with RecordReader(self, file).open_text() as read:
            _, separator = find_separator(read, file.name)
        if not separator:
            return None

        def window(source: BinaryIO, start: int, stop: int) -> tuple[list[Record], int]:
            source.seek(start)
            text = source.read(stop - start + len(separator) - 1)
            # An element belongs to the window in which the previous element ends.
            first = text.find(separator) if start else 0
            if first < 0:
                return [], 0
            last = -1
            while last < 0 and len(text) <= max_record_bytes + stop - start and (chunk := source.read(WINDOW)):
                searched = max(stop - start, len(text) - len(separator) + 1)
                text += chunk
                last = text.find(separator, searched)
            end = last + 1 if last >= 0 else len(text)
            block = b"[" + text[first + 1 : end].lstrip().removeprefix(b",") if start else text[:end]
            origin = f"{file.name}, from byte {start + first:,} record " if start else f"{file.name}:"
            try:
                elements = array_elements(block.removeprefix(BOM) + b"]" * (last >= 0), file.name)
                values = [parse_record(element, False) for element in elements]
            except DataError:  # the separator was inside an element
                return [], 0
            if sum(isinstance(value, Reject) for value in values) > len(values) / 2:
                return [], 0
            size = (last if last >= 0 else len(text)) - first
            return [Record(f"{origin}{number}", value) for number, value in enumerate(values, 1)], size

        return window


def _object(text: bytes) -> dict[str, object] | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def read_whole(read: Read, name: str, prefix: bytes = b"") -> bytes:
    """Return `prefix` and all that follows. Raises DataError beyond ARRAY_LIMIT."""
    chunks, size = [prefix], len(prefix)
    while size <= ARRAY_LIMIT and (chunk := read(CHUNK)):
        chunks.append(chunk)
        size += len(chunk)
    if size > ARRAY_LIMIT:
        raise DataError(
            "too_large_json",
            f"{name}: JSON that is not one record per line must fit in memory as a whole, but this file has over "
            f"{ARRAY_LIMIT:,} bytes; convert it to one record per line with  jq -c '.[]' FILE.json > FILE.jsonl",
        )
    return b"".join(chunks).removeprefix(BOM)


def array_blocks(read: Read, name: str) -> Iterator[bytes]:
    """Yield an array as several smaller arrays, so that memory is bounded.

    A block ends at the bytes that separate the first two elements. They include the first key of the second element. If
    these bytes occur inside an element, the block is not valid JSON, and parsing it fails. If they do not occur any
    more, the rest of the array is one block.
    """
    text, separator = find_separator(read, name)
    while separator:
        end = text.rfind(separator)
        if end > 0:
            yield text[: end + 1] + b"]"
            text = b"[" + text[end + 1 :].lstrip().removeprefix(b",")
        chunk = read(CHUNK)
        if not chunk or len(text) > _SEARCHED:
            separator = b""
        text += chunk
    yield read_whole(read, name, text)


def largest_block(file: File) -> int:
    """Return the bytes of the largest block of an array, from its first 64 MB."""
    largest = seen = 0
    with suppress(DataError), RecordReader(JsonArray(), file).open_text() as read:
        for block in array_blocks(read, file.name):
            largest, seen = max(largest, len(block)), seen + len(block)
            if seen > _MEASURED:
                break
    return largest


def find_separator(read: Read, name: str) -> tuple[bytes, bytes]:
    """Return the start of an array and the separator of its first two elements.

    The separator runs from the last byte of the first element through the first string of the second. It is b"" if
    there is no second element.
    """
    text = separator = b""
    while not separator and len(text) < _SEARCHED and (chunk := read(max(CHUNK, 3 * len(text)))):
        text = (text + chunk).removeprefix(BOM).lstrip()
        with suppress(DataError, ValueError):
            first, second = islice(array_elements(text, name), 2)
            begin = text.index(first) + len(first)
            string = second.find(b'"', second.find(b'"') + 1) + 1
            separator = text[begin - 1 : text.index(second, begin) + string]
    return text, separator


def array_elements(data: bytes, name: str) -> Iterator[bytes]:
    """Yield the text of each element of a JSON array.

    Elements are found only by brackets, commas, and strings, so a bad element costs one record and not the file. Raises
    DataError if the array is not closed, or is followed by something else.
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
                    place = f"byte {len(data) - len(rest):,}"
                    raise DataError("bad_json_array", f"{name}: {place}: the JSON array is followed by something else")
                return
    problem = f"the JSON array is not closed after the start of record {count + 1:,}: truncated?"
    raise DataError("bad_json_array", f"{name}: {problem}")
