"""Read JSON Lines, from any byte, in blocks.

A session of an agent is JSON Lines that are one record together.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import PurePath
from typing import BinaryIO

from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.readers.container import Container, File, Record, RecordReader, Rows, Run, Window
from packcorpus.tasks.readers.lines import (
    CHUNK,
    DECOMPRESS,
    TOO_LONG,
    WINDOW,
    Range,
    end_of_line,
    line_blocks,
    split_at_lines,
)
from packcorpus.tasks.readers.strict_json import parse_record

SEEK_BLOCK = 1 << 20  # bytes in which line ends are counted at a time


class Jsonl(Container):
    name = "jsonl"
    extensions = (".jsonl", ".ndjson")
    is_text = is_cut = True
    numbered_by = "line"
    record = "a line"

    def read(self, reader: RecordReader) -> Iterator[Rows]:
        number = 0
        with reader.open_text() as read:
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

    def split_text(self, file: File, part_size: int, chunks: Iterable[bytes]) -> tuple[str, list[Range]]:
        return split_at_lines(chunks, part_size)

    def records_before(self, file: File, start: int) -> int:
        before = 0
        with RecordReader(self, file, 0, start).open_text() as read:
            while chunk := read(SEEK_BLOCK):
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
        with reader.open_text() as read:
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
