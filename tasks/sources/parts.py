"""Hash source files, split them into parts, and read the parts.

    sources:                       chats/a.jsonl    200 MB ─→  Part(bytes 0..4,194,350) Part(4,194,350..8,388,712) …
      - path: chats/*.jsonl   ─→   chats/b.jsonl.gz  40 MB ─→  Part(0..40,000,000)
      - path: wiki.parquet         wiki.parquet     300 MB ─→  Part(row groups 0..1) Part(1..2) …
                                                                 │
                                                                 └ read_part ─→ (0, {"messages": …}), (1, …) …

A part is the range of a file that one step reads. Its start and end depend only on the bytes and the part size, and its
digest depends only on its content, so a line appended to a file changes only the last part. A file and its parts are
hashed in one pass.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from tasks.core.errors import DataError, UsageError
from tasks.core.notes import noted
from tasks.core.printable import in_bytes
from tasks.readers.container import MAX_RECORD_BYTES, Block, Decode, RecordReader
from tasks.readers.containers import container_named
from tasks.readers.strict_json import decode_block
from tasks.sources.digests.digest_cache import DigestCache, Hashed
from tasks.sources.digests.hash_files import HASH_CHUNK, hash_file, hash_objects
from tasks.sources.model import Part, Source, SourceFile
from tasks.sources.shares import WHOLE, Share
from tasks.sources.source_files import find_files
from tasks.storage.paths import Layout
from tasks.stores.copies import damaged_copy
from tasks.stores.threads import Stop

# Each part costs 7 ms of overhead, two files, and two lines of a list that every run reads.
MOST_PARTS = 2048

HASH_THREADS = 4  # as fast as most disks read


def find_parts(
    sources: Sequence[Source],
    folder: Path,
    part_size: int,
    layout: Layout | None = None,
    revisions: Mapping[int, str] | None = None,
    *,
    most_parts: int = MOST_PARTS,
    hash_chunk: int = HASH_CHUNK,
    cache: DigestCache | None = None,
    embedded: bool = False,
    share: Share = WHOLE,
    hash_first: Callable[[list[SourceFile], int, DigestCache], None] | None = None,
) -> list[tuple[SourceFile, list[Part]]]:
    """Find the files of `sources`, hash them, and split them into parts.

    `part_size` is in bytes. It is doubled until `most_parts` parts of this size can hold all files; each file has at
    least one part. Files that `cache` knows are not hashed. Among objects that are read in blocks, the objects of this
    `share` are hashed first. `hash_first` gets the files, the size of their parts, and `cache`. It may hash files on
    other machines, which write entries of the cache. Raises the errors of `find_files`, `hash_first`, and stores.
    """
    if part_size < 1:
        raise UsageError("bad_setting", f"part_size is {part_size}; expected 1 or more bytes")
    files = find_files(sources, folder, layout, revisions, embedded, cache, share)
    size = sum(file.bytes for file in files)
    # Because the size is doubled, a growing corpus keeps its parts until it is twice as large.
    while size > part_size * most_parts:
        part_size *= 2
    if hash_first and cache:
        hash_first(files, part_size, cache)
    remote = hash_objects([file for file in files if file.identity], part_size, cache, share)
    # Threads suffice because hashing releases the GIL. They end before a worker is forked.
    stop = Stop()
    split = partial(_split, part_size=part_size, check=stop.check, hash_chunk=hash_chunk, cache=cache, remote=remote)
    found = list[tuple[SourceFile, list[Part]]]()
    with (
        noted(lambda: f"hashing the sources, {in_bytes(size)}: {len(found):,} of {len(files):,} files done"),
        ThreadPoolExecutor(min(HASH_THREADS, os.cpu_count() or 1)) as threads,
    ):
        try:
            found.extend(threads.map(split, files))
            if cache:
                cache.prune()
            return found
        finally:
            stop.set()  # after an error or an interruption, the remaining files are not hashed


class PartReader(RecordReader):
    """Iterate over (number, record) of a part, like RecordReader.

    For JSON Lines, the number is the line within the part, counting blank lines. For other containers, it is the record
    within the part. Raises DataError if the rest of the file cannot be read, or if the file is not the one that was
    hashed.
    """

    def __init__(self, part: Part, max_record_bytes: int = MAX_RECORD_BYTES, decode: Decode = decode_block):
        container = container_named(part.file.container)
        super().__init__(container, part.file, part.start, part.stop, max_record_bytes, decode)
        self._source = part.file

    def blocks(self) -> Iterator[Block]:
        self._source.check_unchanged()
        try:
            yield from super().blocks()
        except OSError as error:
            self._source.check_unchanged()
            raise self._source.cannot_read(error) from None
        except DataError:
            self._source.check_unchanged()
            raise
        self._source.check_unchanged()


def read_part(part: Part, max_record_bytes: int = MAX_RECORD_BYTES, decode: Decode = decode_block) -> PartReader:
    """Return an iterable over the records of `part`.

    A JSON line of more than `max_record_bytes` becomes a Reject.
    """
    return PartReader(part, max_record_bytes, decode)


def place_of(part: Part, record: int) -> str:
    """Return FILE:LINE of a record, or FILE:RECORD if the file has no lines.

    `record` counts from 0 within its part. Use this for messages only: each call counts the records before the part.
    """
    before = container_named(part.file.container).records_before(part.file, part.start) if part.start else 0
    return f"{part.file.name}:{before + record + 1}"


def sizes_of(parts: Sequence[Part]) -> list[int]:
    """Return approximately how many bytes of its file each part has.

    All row groups of a table are assumed to have the same size.
    """
    spans = Counter[str]()
    for part in parts:
        spans[part.file.name] += part.stop - part.start
    return [part.file.bytes * (part.stop - part.start) // max(1, spans[part.file.name]) for part in parts]


def _split(
    file: SourceFile,
    part_size: int,
    check: Callable[[], None],
    hash_chunk: int,
    cache: DigestCache | None,
    remote: Mapping[str, Hashed],
) -> tuple[SourceFile, list[Part]]:
    """Hash a file unless its digests are known, and split it into parts.

    `check` ends the hashing by raising an error.
    """
    try:
        known = remote.get(file.name) or (cache.find(file, part_size) if cache else None)
        found = known or hash_file(file, part_size, cache, check, hash_chunk)
        file.check_unchanged()
        if file.arrived not in ("", found.sha256):
            raise damaged_copy(file.name, file.path)
        file = replace(file, sha256=found.sha256, blocks=found.blocks, record=found.record)
        container = container_named(file.container)
        return file, [Part(file, *range) for range in container.cut(file, found.ranges, part_size)]
    except OSError as error:
        raise file.cannot_read(error) from None
