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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.core.process import bounded_table
from packcorpus.tasks.readers.container import Record, RecordReader, Run, Table, Window
from packcorpus.tasks.readers.containers import container_named
from packcorpus.tasks.readers.lines import CHUNK, WINDOW
from packcorpus.tasks.readers.tables import rows_of
from packcorpus.tasks.sources.model import SourceFile

STREAM = 128 << 20  # bytes of one file that are decompressed at most, in half a second
_ALMOST = 0.99  # maximum share of a file that counts as read if its end is not reached
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
        """Return a sample of every n-th record that represents as many records as before."""
        return weighed(replace(self, records=self.records[::every], weights=self.weights[::every]))


def weighed(sample: Sample) -> Sample:
    """Scale the weights of a sample so that their sum is `expected`."""
    return replace(sample, weights=sample.weights * (sample.expected / max(sample.weights.sum(), 1e-9)))


def _draw_of(file: SourceFile) -> random.Random:
    """Return a random generator that does not depend on the file's location.

    Use only its .random(): other methods may return different numbers in other releases of Python.
    """
    return random.Random(f"{file.path.name} {file.bytes}")


def _window_sample(file: SourceFile, budget: int, window: Window) -> Sample:
    """Read about `budget` bytes of records in windows."""
    records, weights = list[Record](), list[float]()
    read, passed = 0.0, 0
    with file.open() as source:
        for start, stop, weight in places(file.bytes, budget, _draw_of(file)):
            own, size = window(source, start, stop)
            records += own
            weights += [weight] * len(own)
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
    windows = [(0, min(window, size), 1.0)]
    for number in range(count):
        top, bottom = window + inner * number // count, window + inner * (number + 1) // count
        start = top + int(draw.random() * max(0, bottom - top - window))
        if bottom > top:
            windows.append((start, min(start + window, bottom), max(1.0, (bottom - top) / window)))
    if size > window:
        windows.append((max(window, size - window), size, 1.0))
    return windows


def _stream_sample(file: SourceFile, budget: int, max_record_bytes: int, stream: int) -> Sample:
    """Read a file from its start, and keep one of every n runs of its records.

    The first and the last run are kept, too, and all records of a file within the budget.
    """
    draw, reach = _draw_of(file), 1.0
    kept: list[tuple[int, Run]] = []
    ends: list[tuple[int, Run]] = []
    every, chosen, size, count, cost = 1, 0, 0, 0, 0  # `chosen` is the number of the chosen run among the current n
    container = container_named(file.container)
    reader = RecordReader(container, file, max_record_bytes=max_record_bytes)
    for number, run in enumerate(container.runs(reader)):
        if cost > stream:
            # On average, half of the last chunk is not counted yet: CHUNK / 4 of the file, or less.
            reach = min(_ALMOST, max(reader.position() - CHUNK / 4, CHUNK / 4) / file.bytes)
            break
        count, cost = count + run.number, cost + run.cost
        ends = [*ends[:1], (number, run)]
        if number % every == 0:
            chosen = number + int(draw.random() * every)
        if number == chosen:
            kept.append((number, run))
            size += run.size
        while len(kept) > 3 and size > budget:
            every *= 2
            pairs = [kept[at : at + 2] for at in range(0, len(kept), 2)]
            kept = [pair[int(draw.random() * len(pair))] for pair in pairs]
            size = sum(run.size for _, run in kept)
            chosen = -1 if (number + 1) % every else chosen
    runs = {number: (run, 1.0) for number, run in ends} | {number: (run, float(every)) for number, run in kept}
    drawn = [(record, runs[number][1]) for number in sorted(runs) for record in runs[number][0].records()]
    weights = np.array([weight for _, weight in drawn])
    return Sample(file, [record for record, _ in drawn], weights, count / reach, counted=reach == 1, reach=reach)


def _table_sample(file: SourceFile, table: Table, budget: int) -> Sample:
    """Read about `budget` bytes of rows from groups that are spread over the table.

    A share of the rows of each batch is read, from a random place.
    """
    records, weights = list[Record](), list[float]()
    draw, rows = _draw_of(file), table.rows
    share = min(1.0, budget / max(table.row_bytes * sum(rows), 1))
    # Draw one group of rows from each stretch of the table. It stands for all groups of its stretch.
    most = len(rows) if share == 1 else min(len(rows), max(8, budget // (4 * WINDOW)))
    edges = [len(rows) * number // most for number in range(most + 1)]
    chosen = [(top + int(draw.random() * (bottom - top)), float(bottom - top)) for top, bottom in pairwise(edges)]
    for group, stands_for in chosen:
        batches = partial(table.batches, group, math.inf if share == 1 else PASSED / len(chosen))
        # A batch is read twice rather than kept.
        passed = rows[group] if share == 1 else sum(batch.num_rows for batch in batches())
        own_share = share * stands_for * rows[group] / max(passed, 1)
        number, before = sum(rows[:group]), len(records)
        for batch in batches():
            count = min(batch.num_rows, math.ceil(batch.num_rows * own_share))
            start = int(draw.random() * (batch.num_rows - count + 1))
            for place, value in enumerate(rows_of(batch.slice(start, count)), number + start + 1):
                records.append(Record(f"{file.name}:{place}", value))
            number += batch.num_rows
        drawn = len(records) - before
        weights += [stands_for * rows[group] / max(drawn, 1)] * drawn
    total = sum(rows) / table.reach
    return Sample(file, records, np.array(weights), total, counted=table.reach == 1, reach=table.reach)


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
    spread: Collection[int] = range(len(files))
    if len(files) > most_files:  # the first and the last file are among them
        spread = {number * (len(files) - 1) // (most_files - 1) for number in range(most_files)}
    chosen = sorted({*spread, *(firsts.values() if len(firsts) <= most_files else ())})
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
    samples = []
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
            raise file.cannot_read(error) from None
        if stands_for[number] != file.bytes:
            sample = replace(sample, stands_for=stands_for[number] / max(file.bytes, 1))
        samples.append(weighed(sample))
    return samples


def _kind(file: SourceFile) -> tuple[object, ...]:
    return file.container, file.compression, file.format, file.columns, str(file.reading)


def _sample(file: SourceFile, budget: int, max_record_bytes: int, stream: int) -> Sample:
    container = container_named(file.container)
    if (opened := container.table(file)) is not None:
        with bounded_table(file.name, file.bytes, "a sample"), opened as table:
            return _table_sample(file, table, budget)
    if not file.compression:
        if file.bytes <= budget:
            reader = RecordReader(container, file, max_record_bytes=max_record_bytes)
            records = [Record(f"{file.name}:{number + 1}", value) for number, value in reader]
            return Sample(file, records, np.ones(len(records)), len(records), counted=True)
        window = container.window(file, max_record_bytes)
        sample = _window_sample(file, budget, window) if window else None
        if sample and sample.records:
            return sample
    return _stream_sample(file, budget, max_record_bytes, stream)  # it can only be read from its start
