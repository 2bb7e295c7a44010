"""Hash source files, split them into parts, and read the parts.

    sources:                       chats/a.jsonl    200 MB ─→  Part(bytes 0..4,194,350) Part(4,194,350..8,388,712) …
      - path: chats/*.jsonl   ─→   chats/b.jsonl.gz  40 MB ─→  Part(bytes 0..4,194,410 of the text) …
      - path: wiki.parquet         wiki.parquet     300 MB ─→  Part(rows 0..1,210) Part(1,210..2,420) …
                                                                 │
                                                                 └ PartReader ─→ (0, {"messages": …}), (1, …) …

A part is the range of a file that one step reads. Its start and end depend only on the bytes and the part size, and its
digest depends only on its content, so a line appended to a file changes only the last part. A file and its parts are
hashed in one pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from packcorpus.tasks.core.errors import DataError, UsageError
from packcorpus.tasks.core.messages import noted
from packcorpus.tasks.core.printable import in_bytes
from packcorpus.tasks.core.process import cores
from packcorpus.tasks.readers.container import MAX_RECORD_BYTES, Block, Decode, RecordReader
from packcorpus.tasks.readers.containers import container_named
from packcorpus.tasks.readers.strict_json import decode_block
from packcorpus.tasks.sources.digests import DigestCache, hash_file
from packcorpus.tasks.sources.model import Part, Source, SourceFile
from packcorpus.tasks.sources.source_files import find_files
from packcorpus.tasks.sources.unpack import may_be_far
from packcorpus.tasks.storage.layout import Layout
from packcorpus.tasks.stores.store import Stop, damaged_copy, run_all

# Each part costs 7 ms of overhead, two files, and two lines of a list that every run reads.
MOST_PARTS = 2048
HASH_THREADS = 4  # as fast as most disks read
HASH_OBJECTS = 8  # objects in buckets that are fetched and hashed at once


def find_parts(
    sources: Sequence[Source],
    folder: Path,
    part_size: int,
    layout: Layout | None = None,
    revisions: Mapping[int, str] | None = None,
    cache: DigestCache | None = None,
    group_key: str = "",
    pairs: str = "chosen",
) -> list[tuple[SourceFile, list[Part]]]:
    """Find the files of `sources`, hash them, and split them into parts.

    `part_size` is in bytes. It is doubled until MOST_PARTS parts of this size can hold all files; each file has at
    least one part. Files that `cache` knows are not hashed. Raises the errors of `find_files` and stores.
    """
    if part_size < 1:
        raise UsageError("bad_setting", f"part_size is {part_size}; expected 1 or more bytes")
    files = find_files(sources, folder, layout, revisions, cache, group_key, pairs)
    size = sum(file.bytes for file in files)
    # Because the size is doubled, a growing corpus keeps its parts until it is twice as large.
    while size > part_size * MOST_PARTS:
        part_size *= 2
    stop, done = Stop(), dict[int, tuple[SourceFile, list[Part]]]()

    def split(number: int) -> None:
        stop.check()
        file = files[number]
        try:
            hashed = (cache and cache.find(file, part_size)) or hash_file(file, part_size, cache, stop.check)
            file.check_unchanged()
            if file.arrived not in ("", hashed.sha256):
                raise damaged_copy(file.name, file.path)
            file = replace(file, sha256=hashed.sha256, blocks=hashed.blocks)
            ranges = container_named(file.container).cut(file, hashed.ranges, part_size)
        except OSError as error:
            raise file.cannot_read(error) from None
        done[number] = file, [Part(file, *range) for range in ranges]

    # Threads suffice because hashing releases the GIL. They end before a worker is forked.
    count = HASH_OBJECTS if any(file.identity for file in files) else min(HASH_THREADS, cores())
    with noted(lambda: f"hashing the sources, {in_bytes(size)}: {len(done):,} of {len(files):,} files done"):
        run_all(split, range(len(files)), count, stop.set)
    if cache:
        cache.prune()
    return [done[number] for number in range(len(files))]


class PartReader(RecordReader):
    """Iterate over (number, record) of a part, like RecordReader.

    For JSON Lines, the number is the line within the part, counting blank lines. For other containers, it is the record
    within the part. Raises DataError if the rest of the file cannot be read, or if the file is not the one that was
    hashed.
    """

    def __init__(self, part: Part, max_record_bytes: int = MAX_RECORD_BYTES, decode: Decode = decode_block):
        file, start, stop = part.file, part.start, part.stop
        container, end = container_named(file.container), None if part.is_whole and may_be_far(file) else stop
        if part.unpacked:
            stat = part.unpacked.stat()
            if name := container.unpacked_as:
                container, start, stop, end = container_named(name), 0, stop - start, None
            file = replace(
                file, path=part.unpacked, container=container.name, compression="", bytes=stat.st_size,
                mtime_ns=stat.st_mtime_ns, identity="", blocks=None,
            )  # fmt: skip
        self._source, self._stop = file, stop
        super().__init__(container, file, start, end, max_record_bytes, decode)

    def share(self) -> float:
        """Return the share of the part that was read so far, or 0 for a table."""
        return (self.position() - self.start) / max(1, self._stop - self.start)

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


def place_of(part: Part, record: int) -> str:
    """Return FILE:LINE of a record, or FILE:RECORD if the file has no lines.

    `record` counts from 0 within its part. Use this for messages only: each call counts the records before the part.
    """
    before = container_named(part.file.container).records_before(part.file, part.start) if part.start else 0
    return f"{part.file.name}:{before + record + 1}"


def sizes_of(parts: Sequence[Part]) -> list[int]:
    """Return about how many bytes of its file each part has."""
    spans = Counter[str]()
    for part in parts:
        spans[part.file.name] += part.stop - part.start
    return [part.file.bytes * (part.stop - part.start) // max(1, spans[part.file.name]) for part in parts]


class Share(NamedTuple):
    """Share `number` of `shares`, counted from 1, of work that machines divide.

        costs 4 1 1 4 2   ─Share(1, 3)─▶ 4     ─Share(2, 3)─▶ 1 1     ─Share(3, 3)─▶ 4 2

    A share is a range of neighboring items, because the data that they read is also close together.
    """

    number: int
    shares: int

    def of(self, costs: Sequence[int]) -> list[int]:
        """Return the indices of the items whose middle is in this share."""
        ends = list(accumulate(costs, initial=0))[1:]
        total = 2 * max(1, sum(costs))
        middles = [(2 * end - cost) * self.shares // total for end, cost in zip(ends, costs, strict=True)]
        return [index for index, middle in enumerate(middles) if min(middle, self.shares - 1) == self.number - 1]


WHOLE = Share(1, 1)
