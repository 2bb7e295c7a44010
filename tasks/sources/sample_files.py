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

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from tasks.core.errors import StorageError
from tasks.readers.memory_limit import bounded_table
from tasks.sources.model import SourceFile
from tasks.sources.sample import Sample, weighed, whole_file
from tasks.sources.sample_streams import line_stream_sample, stream_sample
from tasks.sources.sample_tables import arrow_sample, parquet_sample
from tasks.sources.sample_windows import ArrayWindow, CsvWindow, find_separator, jsonl_window, window_sample

MOST_FILES = 64  # that are read, beside one of each entry; each of the others is taken to be like one of them


# What is packed holds more than its bytes; its share of the budget grows with it.
UNPACKED = 4


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
        found.append(weighed(sample))
    return found


def _kind(file: SourceFile) -> tuple[object, ...]:
    return file.container, file.compression, file.format, file.columns


def _unpacked_size(file: SourceFile) -> int:
    return file.bytes * (UNPACKED if file.compression or file.container == "parquet" else 1)


def _sample(file: SourceFile, budget: int, limit: int) -> Sample:
    if file.container in ("parquet", "arrow"):
        with bounded_table(file.name, file.bytes, "a sample"):
            return parquet_sample(file, budget) if file.container == "parquet" else arrow_sample(file, budget)
    if file.compression:
        return (
            line_stream_sample(file, budget, limit) if file.container == "jsonl" else stream_sample(file, budget, limit)
        )
    if file.bytes <= budget:
        return whole_file(file, limit)
    if file.container == "jsonl":
        return window_sample(file, budget, limit, jsonl_window)
    if file.container == "json":
        with file.path.open("rb") as source:
            between = find_separator(source, file.name)
        sample = window_sample(file, budget, limit, ArrayWindow(between)) if between else None
    else:
        sample = window_sample(file, budget, limit, CsvWindow(file, limit))
    # Where no record can be found from the middle of the file, those at its begin.
    return sample if sample and sample.records else stream_sample(file, budget, limit)


def _spread(count: int, most: int) -> list[int]:
    """Up to `most` numbers of range(count), evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({number * (count - 1) // (most - 1) for number in range(most)})
