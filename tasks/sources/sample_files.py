"""Sample records from all over files of any size, and estimate their number.

    [▓▓····▓▓·······▓▓···▓▓····▓▓]  ─sample_files─▶  Sample(records with their places, total, counted or estimated)
     first   one window per stretch    last

Files are often sorted, so the first records are not typical. Between its first and its last window, a file is divided
into stretches of equal length. One window of each stretch is read; its place depends on the file's name and size. A
record belongs to the window in which it starts, so a long record is as likely to be read as a short one. A file that
cannot be read from the middle (gzip, zstandard) is read from its start, up to STREAM bytes, and one of every n runs of
lines is kept. Each record has a weight: the number of records that it represents. The records of the first and the last
window represent only themselves.

A file that is smaller than its share of the budget is read completely, and its records are counted.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from tasks.core.errors import DataError, StorageError
from tasks.core.process import bounded_table
from tasks.readers.container import Record, RecordReader, Run, Table, Window
from tasks.readers.containers import container_named
from tasks.readers.lines import CHUNK, WINDOW
from tasks.readers.tables import rows_of
from tasks.sources.model import SourceFile

PASSED = 64 << 20  # bytes of one file that may be read to find record starts or, in a table, to reach rows


@dataclass(frozen=True, slots=True)
class Sample:
    """Records of a file, each with the number of records that it represents.

    `total` is the number of records in the file. It is exact if `counted` is set, or else estimated from bytes. `reach`
    is the share of the file that records could be drawn from; it is below 1 if a stream is too long. `stands_for` is 1,
    or more if the file represents other files that were not read; it is computed from the bytes of these files.
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
        """Return whether the records are all the records that the sample represents."""
        return self.counted and self.stands_for == 1 and len(self.records) == self.total

    @property
    def expected(self) -> float:
        """Return the number of records that the sample represents."""
        return self.total * self.stands_for

    def thinned(self, every: int) -> Sample:
        """Return a sample of every n-th record.

        Together, its records represent as many records as before.
        """
        return weighed(replace(self, records=self.records[::every], weights=self.weights[::every]))


def weighed(sample: Sample) -> Sample:
    """Scale the weights of a sample so that their sum is `expected`."""
    return replace(sample, weights=sample.weights * (sample.expected / max(sample.weights.sum(), 1e-9)))


def draw_of(file: SourceFile) -> random.Random:
    """Return a random generator that does not depend on the file's location.

    Use only its .random(): other methods may return different numbers in other releases of Python.
    """
    return random.Random(f"{file.path.name} {file.bytes}")


def window_sample(file: SourceFile, budget: int, window: Window) -> Sample:
    """Read about `budget` bytes of records in windows."""
    records: list[Record] = []
    weights: list[float] = []
    read, passed = 0.0, 0
    with file.open() as source:
        for start, stop, weight in places(file.bytes, budget, draw_of(file)):
            found, size = window(source, start, stop)
            records += found
            weights += [weight] * len(found)
            read += weight * size
            passed += source.tell() - stop
            if passed > PASSED:
                break
    return Sample(file, records, np.array(weights), sum(weights) * file.bytes / max(read, 1), counted=False)


def places(size: int, budget: int, draw: random.Random) -> list[tuple[int, int, float]]:
    """Return (start, stop, weight) of each window, in order.

    The weight is the number of windows that the window represents. The first window begins at the start of the file,
    and the last window ends at its end. Between them, there is one window for each stretch.
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


STREAM = 128 << 20  # bytes of one file that are decompressed at most, in half a second

_ALMOST = 0.99  # maximum share of a file that counts as read if its end is not reached


class _Runs:
    """Keep one of every n runs within a budget, plus the first and the last run."""

    def __init__(self, budget: int, draw: random.Random):
        self.budget = budget
        self.draw = draw
        self.every = 1
        self.count = 0
        self.chosen = 0  # number of the chosen run among the current n
        self.size = 0
        self.kept: list[tuple[int, Run]] = []
        self.ends: list[tuple[int, Run]] = []

    def add(self, run: Run) -> None:
        one = (self.count, run)
        self.ends = [*self.ends[:1], one]
        if self.count % self.every == 0:
            self.chosen = self.count + int(self.draw.random() * self.every)
        if self.count == self.chosen:
            self.kept.append(one)
            self.size += run.size
        self.count += 1
        while len(self.kept) > 3 and self.size > self.budget:
            self.every *= 2
            pairs = [self.kept[at : at + 2] for at in range(0, len(self.kept), 2)]
            self.kept = [pair[int(self.draw.random() * len(pair))] for pair in pairs]
            self.size = sum(run.size for _, run in self.kept)
            self.chosen = -1 if self.count % self.every else self.chosen

    def all(self) -> list[tuple[Run, float]]:
        """Return the kept runs in order, each with the number of runs it represents."""
        runs = {number: (run, 1.0) for number, run in self.ends}
        runs |= {number: (run, float(self.every)) for number, run in self.kept}
        return [runs[number] for number in sorted(runs)]


def stream_sample(file: SourceFile, budget: int, max_record_bytes: int, stream: int = STREAM) -> Sample:
    """Read a file from its start, up to the cost of `stream` bytes.

    All records of a file within the budget are kept.
    """
    runs = _Runs(budget, draw_of(file))
    count = cost = 0
    reach = 1.0
    container = container_named(file.container)
    reader = RecordReader(container, file, max_record_bytes=max_record_bytes)
    for run in container.runs(reader):
        if cost > stream:
            # On average, half of the last chunk is not counted yet: CHUNK / 4 of the file, or less.
            reach = min(_ALMOST, max(reader.position() - CHUNK / 4, CHUNK / 4) / file.bytes)
            break
        runs.add(run)
        count += run.number
        cost += run.cost
    drawn = [(record, weight) for run, weight in runs.all() for record in run.records()]
    weights = np.array([weight for _, weight in drawn])
    return Sample(file, [record for record, _ in drawn], weights, count / reach, counted=reach == 1, reach=reach)


def table_sample(file: SourceFile, table: Table, budget: int) -> Sample:
    """Read about `budget` bytes of rows.

    The rows come from every group of rows, or from groups that are spread over the table.
    """
    records, weights = list[Record](), list[float]()
    draw = draw_of(file)
    rows = table.rows
    share = min(1.0, budget / max(table.row_bytes * sum(rows), 1))
    # Draw one group of rows from each stretch of the table. It stands for all groups of its stretch.
    most = len(rows) if share == 1 else min(len(rows), max(8, budget // (4 * WINDOW)))
    edges = [len(rows) * number // most for number in range(most + 1)]
    chosen = [(top + int(draw.random() * (bottom - top)), float(bottom - top)) for top, bottom in pairwise(edges)]
    for group, stands_for in chosen:
        first = number = sum(rows[:group])
        batches: list[tuple[int, Any]] = []
        for batch in table.batches(group, math.inf if share == 1 else PASSED / len(chosen)):
            batches.append((number, batch))
            number += batch.num_rows
        own = _slices(file, batches, share * stands_for * rows[group] / max(number - first, 1), draw)
        records += own
        weights += [stands_for * rows[group] / max(len(own), 1)] * len(own)
    total = sum(rows) / table.reach
    return Sample(file, records, np.array(weights), total, counted=table.reach == 1, reach=table.reach)


def _slices(file: SourceFile, batches: list[tuple[int, Any]], share: float, draw: random.Random) -> list[Record]:
    """Return a share of the rows of each batch, from a random place.

    A share of 1 or more is all rows.
    """
    found = []
    for number, batch in batches:
        count = min(batch.num_rows, math.ceil(batch.num_rows * share))
        start = int(draw.random() * (batch.num_rows - count + 1))
        for place, value in enumerate(rows_of(batch.slice(start, count)), number + start + 1):
            found.append(Record(f"{file.name}:{place}", value))
    return found


MOST_FILES = 64  # maximum number of files to read, plus one of each entry; similar files represent the rest

DECOMPRESSED = 4  # assumed ratio of decompressed to compressed bytes, for the shares of the budget


def sample_files(
    files: Sequence[SourceFile],
    budget: int,
    max_record_bytes: int,
    *,
    most_files: int = MOST_FILES,
    stream: int = STREAM,
    skip_unreadable: bool = False,
) -> list[Sample]:
    """Sample `files`, and return the samples in the order of the files.

    Up to `most_files` files are read, spread evenly, plus one file of each entry of the config if there are at most as
    many entries. Together they take at most 1.5 × `budget` bytes. The same files always produce the same samples.
    Raises DataError or StorageError if a file cannot be read; with `skip_unreadable`, such a file is skipped.
    """
    firsts = {file.entry: number for number, file in reversed([*enumerate(files)])}
    chosen = sorted({*_spread(len(files), most_files), *(firsts.values() if len(firsts) <= most_files else ())})
    stands_for = dict.fromkeys(chosen, 0)
    for number, file in enumerate(files):
        own = [other for other in chosen if files[other].entry == file.entry]
        like = [other for other in own or chosen if _kind(files[other]) == _kind(file)] or own or chosen
        stands_for[like[min(bisect_left(like, number), len(like) - 1)]] += file.bytes
    sizes = {}
    for number in chosen:
        file = files[number]
        packed = file.compression or container_named(file.container).is_compressed
        sizes[number] = file.bytes * (DECOMPRESSED if packed else 1)
    found = []
    for number in chosen:
        file = files[number]
        # Shares are proportional to size, but each file gets at least an equal share of half the budget.
        share = max(budget // (2 * len(chosen)), budget * sizes[number] // sum(sizes.values()))
        try:
            sample = _sample(file, share, max_record_bytes, stream)
        except (DataError, OSError) as error:
            if skip_unreadable:
                continue
            if isinstance(error, DataError):
                raise
            raise StorageError("cannot_read", f"{file.name}: cannot be read: {error.strerror or error}") from None
        if stands_for[number] != file.bytes:
            sample = replace(sample, stands_for=stands_for[number] / max(file.bytes, 1))
        found.append(weighed(sample))
    return found


def _kind(file: SourceFile) -> tuple[object, ...]:
    return file.container, file.compression, file.format, file.columns, str(file.reading)


def _sample(file: SourceFile, budget: int, max_record_bytes: int, stream: int) -> Sample:
    container = container_named(file.container)
    if (opened := container.table(file)) is not None:
        with bounded_table(file.name, file.bytes, "a sample"), opened as table:
            return table_sample(file, table, budget)
    if not file.compression:
        if file.bytes <= budget:
            return _whole(file, max_record_bytes)
        window = container.window(file, max_record_bytes)
        sample = window_sample(file, budget, window) if window else None
        if sample and sample.records:
            return sample
    # The file can only be read from its start.
    return stream_sample(file, budget, max_record_bytes, stream)


def _whole(file: SourceFile, max_record_bytes: int) -> Sample:
    reader = RecordReader(container_named(file.container), file, max_record_bytes=max_record_bytes)
    records = [Record(f"{file.name}:{number + 1}", value) for number, value in reader]
    return Sample(file, records, np.ones(len(records)), len(records), counted=True)


def _spread(count: int, most: int) -> list[int]:
    """Return up to `most` evenly spread numbers of range(count).

    The first and the last number are among them.
    """
    if count <= most:
        return list(range(count))
    return sorted({number * (count - 1) // (most - 1) for number in range(most)})
