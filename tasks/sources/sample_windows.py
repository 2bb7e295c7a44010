"""Sample text files in windows spread over the file."""

from __future__ import annotations

import csv
import io
import random
import re
from typing import Any, BinaryIO

import numpy as np

from tasks.core.errors import DataError, Reject
from tasks.readers.json_array import array_elements, between_elements
from tasks.readers.lines import BOM, CHUNK
from tasks.readers.strict_json import parse_record
from tasks.sources.model import SourceFile
from tasks.sources.sample import PASSED, WINDOW, Record, Sample, draw_of, open_reader


def places(size: int, budget: int, draw: random.Random) -> list[tuple[int, int, float]]:
    """[start, stop) of the windows, in order, and how many of its like each stands for.

    The first begins where the file does, the last ends where it ends; of every stretch between there is one.
    """
    window = min(WINDOW, budget // 3)
    count = max(1, budget // window - 2)
    inner = max(0, size - 2 * window)
    found = [(0, min(window, size), 1.0)]
    for number in range(count):
        top, bottom = window + inner * number // count, window + inner * (number + 1) // count
        start = top + int(draw.random() * max(0, bottom - top - window))
        if bottom > top:
            found.append((start, min(start + window, bottom), max(1.0, (bottom - top) / window)))
    if size > window:
        found.append((max(window, size - window), size, 1.0))
    return found


def window_sample(file: SourceFile, budget: int, limit: int, window: Any) -> Sample:
    """`window(file, source, start, stop, limit)` gives the records that begin in [start, stop), and their bytes."""
    records: list[Record] = []
    weights: list[float] = []
    read, passed = 0.0, 0
    with file.path.open("rb") as source:
        for start, stop, weight in places(file.bytes, budget, draw_of(file)):
            found, size = window(file, source, start, stop, limit)
            records += found
            weights += [weight] * len(found)
            read += weight * size
            passed += source.tell() - stop
            if passed > PASSED:
                break
    return Sample(file, records, np.array(weights), sum(weights) * file.bytes / max(read, 1), counted=False)


def _line_end(source: BinaryIO, place: int, limit: int) -> int:
    """Where the line that `place` lies in ends, its end included; not sought for further than `limit`."""
    source.seek(place)
    while source.tell() - place <= limit and (some := source.readline(CHUNK)):
        if some.endswith(b"\n"):
            break
    return source.tell()


def jsonl_window(file: SourceFile, source: BinaryIO, start: int, stop: int, limit: int) -> tuple[list[Record], int]:
    begin = _line_end(source, start - 1, limit) if start else 0
    end = _line_end(source, stop - 1, limit)
    # A place in a file whose lines nobody counted.
    origin = f"{file.name}, from byte {begin:,} line " if begin else f"{file.name}:"
    numbered = open_reader(file, begin, end, limit) if begin < stop else ()
    return [Record(f"{origin}{number + 1}", value) for number, value in numbered], max(0, end - begin)


def find_separator(source: BinaryIO, name: str) -> bytes:
    """What stands between the first two elements of an array, with the first key of the second; nothing if unknown."""
    text = between = b""
    while not between and len(text) < PASSED // 4 and (chunk := source.read(max(CHUNK, 3 * len(text)))):
        text = (text + chunk).removeprefix(BOM).lstrip()
        between = between_elements(text, name)
    return between


class ArrayWindow:
    """Elements of a JSON array: between two places where the bytes are those between its first two elements."""

    def __init__(self, between: bytes):
        self.between = between

    def __call__(
        self, file: SourceFile, source: BinaryIO, start: int, stop: int, limit: int
    ) -> tuple[list[Record], int]:
        source.seek(start)
        text = source.read(stop - start + len(self.between) - 1)
        # An element belongs to where the one before it ends.
        first = text.find(self.between) if start else 0
        if first < 0:
            return [], 0
        last = -1
        while last < 0 and len(text) <= limit + stop - start and (chunk := source.read(WINDOW)):
            seen = max(stop - start, len(text) - len(self.between) + 1)
            text += chunk
            last = text.find(self.between, seen)
        block = text[first + 1 : last + 1] if last >= 0 else text[first + 1 :]
        block = b"[" + block.lstrip().removeprefix(b",") + (b"]" if last >= 0 else b"")
        if not start:
            block = text[: last + 1] + b"]" if last >= 0 else text
        origin = f"{file.name}, from byte {start + first:,} record " if start else f"{file.name}:"
        try:
            elements = [parse_record(element, False) for element in array_elements(block.removeprefix(BOM), file.name)]
        except DataError:  # no place between elements after all
            return [], 0
        if sum(isinstance(element, Reject) for element in elements) > len(elements) / 2:
            return [], 0
        size = (last if last >= 0 else len(text)) - first
        return [Record(f"{origin}{number}", value) for number, value in enumerate(elements, 1)], size


class CsvWindow:
    """Rows of CSV: from the first line on at which all that follows are rows with as many cells as the header.

    A line within a quoted cell may look like a row, but where that cell ends no row begins. A file with quotes in cells
    that are not quoted has no such lines.
    """

    def __init__(self, file: SourceFile, limit: int):
        self.delimiter = "\t" if file.container == "tsv" else ","
        with file.path.open("rb") as source:
            self.begin = 3 * source.read(3).startswith(BOM)
            source.seek(self.begin)
            text = source.read(CHUNK).decode("utf-8", "replace")
        self.header = next(csv.reader(io.StringIO(text), delimiter=self.delimiter), [])
        cell = rb'(?:"(?:[^"]|"")*+"|[^"\r\n%s]*+)' % self.delimiter.encode()
        more = rb"(?:%s%s){%d}" % (self.delimiter.encode(), cell, len(self.header) - 1)
        self.row = re.compile(rb"%s%s(?:\r?\n|\Z)" % (cell, more))
        csv.field_size_limit(max(csv.field_size_limit(), limit))

    def __call__(
        self, file: SourceFile, source: BinaryIO, start: int, stop: int, limit: int
    ) -> tuple[list[Record], int]:
        start = start or self.begin
        begin = _line_end(source, start - 1, limit) if start > self.begin else self.begin
        for ahead in (WINDOW, CHUNK):  # for the end of the last row
            source.seek(begin)
            text = source.read(max(0, stop - begin) + ahead)
            rows = self._rows(text, stop - begin, whole=begin + len(text) == file.bytes)
            if rows:
                size = rows[-1][1] - rows[0][0]
                origin = f"{file.name}, from byte {begin:,} record " if start > self.begin else f"{file.name}:"
                own = [text[top:bottom] for top, bottom in rows][start == self.begin :]  # the header is no record
                return [Record(f"{origin}{n}", self._record(row)) for n, row in enumerate(own, 1) if row.strip()], size
        return [], 0

    def _rows(self, text: bytes, stop: int, whole: bool) -> list[tuple[int, int]]:
        """[begin, end) of every row that begins before `stop`, from the first line on behind which only rows stand."""
        first = 0
        while first < stop:
            rows: list[tuple[int, int]] = []
            at = first
            while at < stop and (found := self.row.match(text, at)) and (whole or found.end() < len(text)):
                rows.append(found.span())
                at = found.end()
            if at >= stop or at == len(text):
                return rows
            # Where one of these lines begins no row, neither does another: all of them lead to this place.
            first = text.find(b"\n", at, stop) + 1
            if not first:
                break
        return []

    def _record(self, row: bytes) -> object:
        try:
            cells = next(csv.reader(io.StringIO(row.decode(), newline=""), delimiter=self.delimiter, strict=True))
        except UnicodeDecodeError as error:
            return Reject("bad_utf8", f"a byte at offset {error.start} of the row is not UTF-8")
        return dict(zip(self.header, cells, strict=True))
