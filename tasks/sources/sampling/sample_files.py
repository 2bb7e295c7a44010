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

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tasks.core.errors import DataError, StorageError
from tasks.core.memory_limit import bounded_table
from tasks.readers.container import Record, RecordReader
from tasks.readers.containers import container_named
from tasks.sources.model import SourceFile
from tasks.sources.sampling.sample import Sample, weighed
from tasks.sources.sampling.sample_streams import STREAM, stream_sample
from tasks.sources.sampling.sample_tables import table_sample
from tasks.sources.sampling.sample_windows import window_sample

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
