"""Hash source files, cut them into parts, and read the parts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow.parquet as pq

from tasks.conversations.formats import COLUMNS
from tasks.core.errors import DataError, StorageError, UsageError
from tasks.readers.record_reader import MAX_RECORD_BYTES, Block, RecordReader
from tasks.readers.strict_json import decode_block
from tasks.readers.tables import parquet_metadata
from tasks.sources.model import Part, SourceFile, SourceSpec
from tasks.sources.source_files import find_files

# Luigi's cost per task grows with their number (13 ms at 500, 31 ms at 2,000).
MOST_PARTS = 512


_HASH_CHUNK = 1 << 20


HASH_THREADS = 4  # as fast as most disks read


def find_parts(
    specs: Sequence[SourceSpec], folder: Path, part_size: int, outputs: Sequence[Path] = ()
) -> list[tuple[SourceFile, list[Part]]]:
    """The files of `specs` as `find_files` has them, read once for their digests; each with its parts.

    `part_size` is in bytes; it is doubled until MOST_PARTS of them hold all (each file is one part at least).
    Raises what `find_files` raises.
    """
    if part_size < 1:
        raise UsageError("bad_setting", f"part_size is {part_size}; expected 1 or more bytes")
    files = find_files(specs, folder, outputs)
    # By doubling, so that a corpus that grows keeps its parts until it is twice as large.
    while sum(source.bytes for source in files) > part_size * MOST_PARTS:
        part_size *= 2
    # Threads, for digests are taken without Python's lock; they have ended before a worker is forked.
    stop = Event()
    with ThreadPoolExecutor(min(HASH_THREADS, os.cpu_count() or 1)) as threads:
        try:
            return list(threads.map(partial(_hash_and_cut, part_size=part_size, stop=stop), files))
        finally:
            stop.set()  # nobody who interrupts waits for the files that are left


class PartReader(RecordReader):
    """Iterates over (number, record) of a part. For jsonl the number is the line within the part, blank lines
    counted; for all else the record within the part. Both from 0. A record that cannot be parsed is a Reject.

    `records` is how many lines or records the part spans, once the iteration has ended. Raises DataError when the
    file cannot be read on, or is not the one that was hashed.
    """

    def __init__(self, part: Part, max_record_bytes: int = MAX_RECORD_BYTES, decode: Any = decode_block):
        file = part.file
        wanted = {*COLUMNS, *(theirs for _, theirs in file.columns)}
        super().__init__(
            *(file.path, file.name, file.container, file.compression, part.start, part.stop, max_record_bytes, wanted),
            decode=decode,
        )
        self.file = file

    def blocks(self) -> Iterator[Block]:
        _check_unchanged(self.file)
        try:
            yield from super().blocks()
        except OSError as error:
            _check_unchanged(self.file)
            raise StorageError("cannot_read", f"{self.file.name}: cannot be read: {error.strerror or error}") from None
        except DataError:
            _check_unchanged(self.file)
            raise
        _check_unchanged(self.file)


def read_part(part: Part, max_record_bytes: int = MAX_RECORD_BYTES, decode: Any = decode_block) -> PartReader:
    """The records of `part`, to be iterated over; a jsonl line of more than `max_record_bytes` is a Reject."""
    return PartReader(part, max_record_bytes, decode)


def _check_unchanged(file: SourceFile) -> None:
    try:
        stat = file.path.stat()
    except OSError:
        raise DataError("input_changed", f"{file.name}: vanished while it was read; run again") from None
    if (stat.st_size, stat.st_mtime_ns) != (file.bytes, file.mtime_ns):
        raise DataError("input_changed", f"{file.name}: changed while it was read; run again")


def place_of(part: Part, record: int) -> str:
    """FILE:LINE of a record that is number `record` of its part, from 0; FILE:RECORD where the file has no lines.

    For messages: the lines before the part are counted anew.
    """
    before = 0
    if part.start and part.file.container == "parquet":
        metadata = parquet_metadata(part.file.path, part.file.name)
        before = sum(metadata.row_group(group).num_rows for group in range(part.start))
    elif part.start:
        with part.file.path.open("rb") as file:
            while (left := part.start - file.tell()) > 0 and (chunk := file.read(min(_HASH_CHUNK, left))):
                before += chunk.count(b"\n")
    return f"{part.file.name}:{before + record + 1}"


def _hash_and_cut(source: SourceFile, part_size: int, stop: Event) -> tuple[SourceFile, list[Part]]:
    """Raises CancelledError where `stop` was set."""
    try:
        return _hashed_and_cut(source, part_size, stop)
    except OSError as error:
        raise StorageError("cannot_read", f"{source.name}: cannot be read: {error.strerror or error}") from None


def _hashed_and_cut(source: SourceFile, part_size: int, stop: Event) -> tuple[SourceFile, list[Part]]:
    cuts: list[tuple[int, int, str]]
    if source.container == "jsonl" and not source.compression:
        digest, cuts = _hash_lines(source.path, part_size, stop)
    else:
        digest, _ = _hash_lines(source.path, source.bytes + 1, stop)
        cuts = [(0, source.bytes, digest)]
        if source.container == "parquet":
            groups = _group(parquet_metadata(source.path, source.name), part_size)
            cuts = [(*group, sha256(f"{digest} {group[0]} {group[1]}".encode()).hexdigest()) for group in groups]
    source = replace(source, sha256=digest)
    _check_unchanged(source)
    return source, [Part(source, *cut) for cut in cuts]


def _hash_lines(path: Path, part_size: int, stop: Event) -> tuple[str, list[tuple[int, int, str]]]:
    """(sha256 of the file, [(start, stop, sha256), …]) in one pass.

    A part ends with the first line that ends at or after k times part_size, for k = 1, 2, …: what follows has no say in
    where it ends. The first part costs no hashing of its own, for until it ends it is all of the file.
    """
    whole, piece = sha256(), None
    cuts: list[tuple[int, int, str]] = []
    start, position, target = 0, 0, part_size
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            if stop.is_set():
                raise CancelledError
            view, at = memoryview(chunk), 0
            while position + len(chunk) >= target:
                end = chunk.find(b"\n", max(target - 1 - position, 0)) + 1
                if not end:
                    break
                whole.update(view[at:end])
                if piece is None:
                    cuts.append((start, position + end, whole.hexdigest()))
                else:
                    piece.update(view[at:end])
                    cuts.append((start, position + end, piece.hexdigest()))
                start, at, piece = position + end, end, sha256()
                target = (start // part_size + 1) * part_size
            whole.update(view[at:])
            if piece is not None:
                piece.update(view[at:])
            position += len(chunk)
    if position > start or not cuts:
        cuts.append((start, position, (whole if piece is None else piece).hexdigest()))
    return whole.hexdigest(), cuts


def _group(metadata: pq.FileMetaData, part_size: int) -> list[tuple[int, int]]:
    """Row groups [start, stop), as few as reach `part_size` bytes (unpacked)."""
    groups, start, size = [], 0, 0
    for index in range(metadata.num_row_groups):
        size += metadata.row_group(index).total_byte_size
        if size >= part_size or index == metadata.num_row_groups - 1:
            groups.append((start, index + 1))
            start, size = index + 1, 0
    return groups
