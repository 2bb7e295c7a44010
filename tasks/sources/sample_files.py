"""A source file → some of its records, from everywhere in it, and how many it holds: for files of any size.

    [▓▓····▓▓·······▓▓···▓▓····▓▓]  ─sample_files─▶  Sample(records with their places, total, counted or estimated)
     first   one place drawn in each stretch   last

Files are often sorted, so the first records say little. Between its first and its last window a file is cut into
stretches of one length, and of each a window is read, whose place follows from the file's name and size. A record
belongs to the window in which it begins, so that a long one is as likely to be read as a short one. What cannot be
entered in the middle (gzip, zstandard) is read on from its begin, up to STREAM bytes, and of every n runs of lines one
is kept. Each record has a weight: how many it stands for. The first and the last window stand for themselves alone.

A file that is smaller than its share of the budget is read as a whole, and counted.
"""

from __future__ import annotations

import csv
import io
import math
import random
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.conversations.formats import COLUMNS
from tasks.core.errors import DataError, Reject, StorageError
from tasks.readers.compression import BOM, CHUNK, TOO_LONG, Read, line_blocks, unpacked
from tasks.readers.memory_limit import bounded_table
from tasks.readers.record_reader import (
    RecordReader,
    array_elements,
    between_elements,
    first_line,
    parse_record,
    rows_of,
)
from tasks.sources.source_files import SourceFile

WINDOW = 1 << 14  # bytes; many short ones: neighbours are alike
MOST_FILES = 64  # that are read, beside one of each entry; each of the others is taken to be like one of them
STREAM = 128 << 20  # bytes that are unpacked of one file: half a second
PASSED = 64 << 20  # bytes that are read of one file to find where records begin, and of a table to reach its rows
# What is packed holds more than its bytes; its share of the budget grows with it.
UNPACKED = 4
ALMOST = 0.99  # the share of a file that is read, where it did not come to its end


class Record(NamedTuple):
    """A record, or the Reject that it is, and where it stands: "chats.jsonl:17", as rejects.jsonl has it."""

    place: str
    value: object


@dataclass(frozen=True, slots=True)
class Sample:
    """Records of a file and the weight of each: how many records of the sources it stands for.

    `total` is how many records the file holds, `counted` or estimated from its bytes. `reach` is the share of the file
    that records could be drawn from, below 1 where a stream is too long. `stands_for` is 1, and more where the file
    speaks for others that were not read, by their bytes.
    """

    file: SourceFile
    records: list[Record]
    weights: np.ndarray  # float64[records], with a sum of total × stands_for
    total: float
    counted: bool
    reach: float = 1.0
    stands_for: float = 1.0

    @property
    def whole(self) -> bool:
        """Whether the records are all that there are."""
        return self.counted and self.stands_for == 1 and len(self.records) == self.total

    @property
    def expected(self) -> float:
        """Records that the sample stands for."""
        return self.total * self.stands_for

    def thinned(self, every: int) -> Sample:
        """With every n-th of its records, which stand for the same."""
        return _weighed(replace(self, records=self.records[::every], weights=self.weights[::every]))


def _weighed(sample: Sample) -> Sample:
    """With weights in the same proportion and of the right sum."""
    return replace(sample, weights=sample.weights * (sample.expected / max(sample.weights.sum(), 1e-9)))


def sample_files(files: Sequence[SourceFile], budget: int, max_record_bytes: int) -> list[Sample]:
    """Samples of `files` (of MOST_FILES of them, evenly chosen, and one of each of as many entries of the config), in
    their order; 1.5 × `budget` bytes at most.

    The same for the same files. Raises DataError or StorageError where one cannot be read.
    """
    firsts = {file.entry: number for number, file in reversed([*enumerate(files)])}
    chosen = sorted({*_spread(len(files), MOST_FILES), *(firsts.values() if len(firsts) <= MOST_FILES else ())})
    stands_for = dict.fromkeys(chosen, 0)
    for number, file in enumerate(files):
        own = [other for other in chosen if files[other].entry == file.entry]
        like = [other for other in own or chosen if _kind(files[other]) == _kind(file)] or own or chosen
        stands_for[like[min(bisect_left(like, number), len(like) - 1)]] += file.bytes
    sizes = {number: _unpacked_size(files[number]) for number in chosen}
    found = []
    for number in chosen:
        file = files[number]
        # By size, but no file goes without: half of the budget again is dealt out evenly.
        share = max(budget // (2 * len(chosen)), budget * sizes[number] // sum(sizes.values()))
        try:
            sample = _sample(file, share, max_record_bytes)
        except OSError as error:
            raise StorageError("cannot_read", f"{file.name}: cannot be read: {error.strerror or error}") from None
        if stands_for[number] != file.bytes:
            sample = replace(sample, stands_for=stands_for[number] / max(file.bytes, 1))
        found.append(_weighed(sample))
    return found


def _kind(file: SourceFile) -> tuple[object, ...]:
    return file.container, file.compression, file.format, file.columns


def _unpacked_size(file: SourceFile) -> int:
    return file.bytes * (UNPACKED if file.compression or file.container == "parquet" else 1)


def _sample(file: SourceFile, budget: int, limit: int) -> Sample:
    if file.container in ("parquet", "arrow"):
        with bounded_table(file.name, file.bytes, "a sample"):
            return _parquet(file, budget) if file.container == "parquet" else _arrow(file, budget)
    if file.compression:
        return _line_stream(file, budget, limit) if file.container == "jsonl" else _stream(file, budget, limit)
    if file.bytes <= budget:
        return _whole(file, limit)
    if file.container == "jsonl":
        return _windows(file, budget, limit, _jsonl_window)
    if file.container == "json":
        with file.path.open("rb") as source:
            between = _between(source, file.name)
        sample = _windows(file, budget, limit, _ArrayWindow(between)) if between else None
    else:
        sample = _windows(file, budget, limit, _CsvWindow(file, limit))
    # Where no record can be found from the middle of the file, those at its begin.
    return sample if sample and sample.records else _stream(file, budget, limit)


def _reader(file: SourceFile, start: int, stop: int, limit: int) -> _Reader:
    wanted = {*COLUMNS, *(theirs for _, theirs in file.columns)}
    return _Reader(file.path, file.name, file.container, file.compression, start, stop, limit, wanted)


class _Reader(RecordReader):
    """Knows how far into the file it is."""

    opened: BinaryIO

    def _read(self, file: BinaryIO) -> Read:
        self.opened = file
        return super()._read(file)


def _whole(file: SourceFile, limit: int) -> Sample:
    records = [Record(f"{file.name}:{number + 1}", value) for number, value in _reader(file, 0, file.bytes, limit)]
    return Sample(file, records, np.ones(len(records)), len(records), counted=True)


# -- windows ---------------------------------------------------------------------------------------------------------


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


def _windows(file: SourceFile, budget: int, limit: int, window: Any) -> Sample:
    """`window(file, source, start, stop, limit)` gives the records that begin in [start, stop), and their bytes."""
    records: list[Record] = []
    weights: list[float] = []
    read, passed = 0.0, 0
    with file.path.open("rb") as source:
        for start, stop, weight in places(file.bytes, budget, _draw(file)):
            found, size = window(file, source, start, stop, limit)
            records += found
            weights += [weight] * len(found)
            read += weight * size
            passed += source.tell() - stop
            if passed > PASSED:
                break
    return Sample(file, records, np.array(weights), sum(weights) * file.bytes / max(read, 1), counted=False)


def _draw(file: SourceFile) -> random.Random:
    """The same wherever the file lies. Of its numbers only .random() is the same in every release."""
    return random.Random(f"{file.path.name} {file.bytes}")


def _line_end(source: BinaryIO, place: int, limit: int) -> int:
    """Where the line that `place` lies in ends, its end included; not sought for further than `limit`."""
    source.seek(place)
    while source.tell() - place <= limit and (some := source.readline(CHUNK)):
        if some.endswith(b"\n"):
            break
    return source.tell()


def _jsonl_window(file: SourceFile, source: BinaryIO, start: int, stop: int, limit: int) -> tuple[list[Record], int]:
    begin = _line_end(source, start - 1, limit) if start else 0
    end = _line_end(source, stop - 1, limit)
    # A place in a file whose lines nobody counted.
    origin = f"{file.name}, from byte {begin:,} line " if begin else f"{file.name}:"
    numbered = _reader(file, begin, end, limit) if begin < stop else ()
    return [Record(f"{origin}{number + 1}", value) for number, value in numbered], max(0, end - begin)


def _between(source: BinaryIO, name: str) -> bytes:
    """What stands between the first two elements of an array, with the first key of the second; nothing if unknown."""
    text = between = b""
    while not between and len(text) < PASSED // 4 and (chunk := source.read(max(CHUNK, 3 * len(text)))):
        text = (text + chunk).removeprefix(BOM).lstrip()
        between = between_elements(text, name)
    return between


class _ArrayWindow:
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


class _CsvWindow:
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


# -- streams ---------------------------------------------------------------------------------------------------------


class _Runs:
    """Of what is added, one of every n, drawn, as many as the budget allows; and the first and the last."""

    def __init__(self, budget: int, draw: random.Random):
        self.budget = budget
        self.draw = draw
        self.every = 1
        self.count = 0
        self.chosen = 0  # of the n at hand
        self.size = 0
        self.kept: list[tuple[int, int, Any]] = []  # number, size, run
        self.ends: list[tuple[int, int, Any]] = []

    def add(self, size: int, run: Any) -> None:
        one = (self.count, size, run)
        self.ends = [*self.ends[:1], one]
        if self.count % self.every == 0:
            self.chosen = self.count + int(self.draw.random() * self.every)
        if self.count == self.chosen:
            self.kept.append(one)
            self.size += size
        self.count += 1
        while len(self.kept) > 3 and self.size > self.budget:
            self.every *= 2
            pairs = [self.kept[at : at + 2] for at in range(0, len(self.kept), 2)]
            self.kept = [pair[int(self.draw.random() * len(pair))] for pair in pairs]
            self.size = sum(size for _, size, _ in self.kept)
            self.chosen = -1 if self.count % self.every else self.chosen

    def all(self) -> list[tuple[Any, float]]:
        """Each run that was kept, in order, and how many it stands for."""
        runs = {number: (run, 1.0) for number, _, run in self.ends}
        runs |= {number: (run, float(self.every)) for number, _, run in self.kept}
        return [runs[number] for number in sorted(runs)]


def _line_stream(file: SourceFile, budget: int, limit: int) -> Sample:
    """Of packed JSONL: lines are counted, and parsed where they are kept."""
    runs = _Runs(budget, _draw(file))
    number = filled = size = 0
    open_end = False
    with file.path.open("rb") as source:
        for lines, unterminated in line_blocks(unpacked(source, file.compression, file.name), limit):
            open_end = unterminated
            step = max(1, len(lines) * WINDOW // CHUNK)
            for first in range(0, len(lines), step):
                run = lines[first : first + step]
                runs.add(sum(map(len, run)), (number + first, run))
                size += sum(map(len, run)) + len(run)
            number += len(lines)
            filled += sum(line == TOO_LONG or not (line == b"" or line.isspace()) for line in lines)
            if size > STREAM:
                break
        ended = size <= STREAM
        reach = 1.0 if ended else _reach(source, file)
    too_long = Reject("too_long_record", f"the line is longer than max_record_bytes, {limit:,} bytes")
    records, weights = list[Record](), list[float]()
    for (first, run), weight in runs.all():
        for at, line in enumerate(run, first + 1):
            if line == TOO_LONG or (line and not line.isspace()):
                value = too_long if line == TOO_LONG else parse_record(line, open_end and at == number)
                records.append(Record(f"{file.name}:{at}", value))
                weights.append(weight)
    return Sample(file, records, np.array(weights), filled / reach, counted=ended, reach=reach)


def _stream(file: SourceFile, budget: int, limit: int) -> Sample:
    """Of other packed text, and of text in which no record can be found from the middle: all is parsed."""
    runs = _Runs(budget, _draw(file))
    count = size = 0
    reader = _reader(file, 0, file.bytes, limit)
    numbered = iter(reader)
    while size <= STREAM // 4 and (run := list(islice(numbered, 100))):
        length = sum(len(value) if isinstance(value, str) else 100 for _, r in run for value in _values(r))
        runs.add(length, run)
        size += length
        count += len(run)
    ended = next(numbered, None) is None
    reach = 1.0 if ended else _reach(reader.opened, file)
    drawn = [(number, value, weight) for run, weight in runs.all() for number, value in run]
    records = [Record(f"{file.name}:{number + 1}", value) for number, value, _ in drawn]
    weights = np.array([weight for _, _, weight in drawn])
    return Sample(file, records, weights, count / reach, counted=ended, reach=reach)


def _reach(source: BinaryIO, file: SourceFile) -> float:
    """How much of a packed file is unpacked: a chunk less than was taken in."""
    return min(ALMOST, max(source.tell() - CHUNK, CHUNK / 2) / file.bytes)


def _values(record: object) -> Iterator[object]:
    """The strings of a record, at any depth."""
    if isinstance(record, dict):
        for value in record.values():
            yield from _values(value)
    elif isinstance(record, list):
        for value in record:
            yield from _values(value)
    else:
        yield record


# -- tables ----------------------------------------------------------------------------------------------------------


def _spread(count: int, most: int) -> list[int]:
    """Up to `most` numbers of range(count), evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({number * (count - 1) // (most - 1) for number in range(most)})


def _drawn(count: int, most: int, draw: random.Random) -> list[tuple[int, float]]:
    """Up to `most` numbers of range(count), one of each stretch, and how many each stands for."""
    most = min(count, most)
    edges = [count * number // most for number in range(most + 1)]
    return [(top + int(draw.random() * (bottom - top)), float(bottom - top)) for top, bottom in pairwise(edges)]


def _parquet(file: SourceFile, budget: int) -> Sample:
    records, weights = list[Record](), list[float]()
    draw = _draw(file)
    try:
        with pq.ParquetFile(file.path, pre_buffer=False) as table:
            metadata = table.metadata
            groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
            rows = [group.num_rows for group in groups]
            row_bytes = sum(group.total_byte_size for group in groups) / max(sum(rows), 1)
            share = min(1.0, budget / max(row_bytes * sum(rows), 1))
            chosen = _drawn(len(rows), len(rows) if share == 1 else max(8, budget // (4 * WINDOW)), draw)
            names = [name for name in table.schema_arrow.names if name in _wanted(file)] or None
            for group, stands_for in chosen:
                batches: list[tuple[int, Any]] = []
                first = number = sum(rows[:group])
                passed = 0
                for batch in table.iter_batches(1000, row_groups=[group], columns=names, use_threads=False):
                    batches.append((number, batch))
                    number += batch.num_rows
                    passed += batch.nbytes
                    if share < 1 and passed > PASSED / len(chosen):
                        break
                own = _slices(file, batches, share * stands_for * rows[group] / max(number - first, 1), draw)
                weight = stands_for * rows[group]
                records += own
                weights += [weight / max(len(own), 1)] * len(own)
    except MemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataError("unreadable_source", f"{file.name}: cannot be read as parquet: {first_line(error)}") from None
    return Sample(file, records, np.array(weights), sum(rows), counted=True)


def _arrow(file: SourceFile, budget: int) -> Sample:
    """Mapped: of a batch that is not chosen only its header is read."""
    try:
        with pa.memory_map(str(file.path)) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            names = [name for name in reader.schema.names if name in _wanted(file)] or reader.schema.names
            before = pa.total_allocated_bytes()
            batches: list[tuple[int, Any]] = []
            number = size = 0
            ended = True
            for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
                batches.append((number, batch.select(names)))
                number += batch.num_rows
                size += batches[-1][1].nbytes
                ended = pa.total_allocated_bytes() - before <= PASSED
                if not ended:  # what is packed inside is unpacked, and no map
                    break
            reach = 1.0 if ended else min(ALMOST, source.tell() / file.bytes)
            records = _slices(file, batches, min(1.0, budget / max(size, 1)), _draw(file))
    except MemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataError("unreadable_source", f"{file.name}: cannot be read as arrow: {first_line(error)}") from None
    return Sample(file, records, np.ones(len(records)), number / reach, counted=ended, reach=reach)


def _wanted(file: SourceFile) -> set[str]:
    return {*COLUMNS, *(theirs for _, theirs in file.columns)}


def _slices(file: SourceFile, batches: list[tuple[int, Any]], share: float, draw: random.Random) -> list[Record]:
    """A share of the rows of each batch, from a place that is drawn; all of them where it is 1 or more."""
    found = []
    for number, batch in batches:
        count = min(batch.num_rows, math.ceil(batch.num_rows * share))
        start = int(draw.random() * (batch.num_rows - count + 1))
        for place, value in enumerate(rows_of(batch.slice(start, count)), number + start + 1):
            found.append(Record(f"{file.name}:{place}", value))
    return found
