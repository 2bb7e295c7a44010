"""Define containers, and read the records of a file or of a range of it.

    b'{"text":"a"}\n\n{"text":"b"}\n{"tex'  →  (0, {"text": "a"}), (2, {"text": "b"}), (3, Reject("bad_json", …))

A record that cannot be parsed is a `Reject` in its place: bad_json, bad_utf8, lone_surrogate, nul, too_deep,
duplicate_key, big_integer, too_long_record, bad_csv, bad_value. DataError is raised if the rest of a file cannot be
read.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, NamedTuple, Protocol

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.readers.lines import CHUNK, HASH_CHUNK, Range, Read, decompressed, read_ahead
from packcorpus.tasks.readers.strict_json import decode_block

MAX_RECORD_BYTES = 16_000_000

# A block of records should stay in the CPU cache.
BLOCK, BLOCK_BYTES = 256, 1 << 20
_MEASURED = 16 << 20  # bytes of a text that show how well it is compressed
RUN = 100  # records of a run, if a container has no cheaper way to form runs

Block = tuple[Sequence[int], list[Any]]
"""Numbers of records, and the records."""

Rows = tuple[Sequence[int], list[Any], int]
"""Numbers of records, the records, and their approximate size in bytes."""

Decode = Callable[[list[bytes]], list[Any] | None]
"""Decode the JSON records of one block, or return None if `parse_record` has to parse each of them."""


class File(Protocol):
    """The facts about a source file that a container needs, as in `SourceFile`."""

    @property
    def path(self) -> Path: ...
    @property
    def name(self) -> str: ...  # the name in messages
    @property
    def compression(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def wanted_columns(self) -> frozenset[str]: ...
    @property
    def delimiter(self) -> str: ...  # "" for the usual one
    @property
    def encoding(self) -> str: ...  # "" for UTF-8
    def open(self, stop: int | None = None) -> BinaryIO: ...


class Record(NamedTuple):
    """A sampled record or its Reject, and its place, such as "chats.jsonl:17"."""

    place: str
    value: object


class Run(NamedTuple):
    """Neighboring records of a file that is read from its start.

    `size` is their approximate size in bytes, `cost` the cost of reading them, in bytes of uncompressed text, and
    `number` how many they are.
    """

    size: int
    cost: int
    number: int
    records: Callable[[], list[Record]]


Create = Callable[[Path], AbstractContextManager[IO[bytes]]]
"""Create a file that exists once the block ends."""

Window = Callable[[BinaryIO, int, int], tuple[list[Record], int]]
"""Return the records that begin in bytes [start, stop) of an open file, and their size in bytes."""


class Table(NamedTuple):
    """A table that is open for sampling.

    `rows` has the number of rows of each group. `batches` yields the Arrow batches of a group; it may stop after a
    number of bytes. `reach` is the share of the file that the groups cover.
    """

    rows: Sequence[int]
    row_bytes: float
    batches: Callable[[int, float], Iterator[Any]]
    reach: float = 1.0


class Container:
    """A file layout, with methods that identify, split, read, and sample a file.

    A subclass must set `name` and `extensions` and implement `read` (tables: `TableContainer.batches`). By default a
    file is identified by its extension, is not cut, and is sampled from its start.
    """

    name: str  # stored in manifests and content keys
    extensions: tuple[str, ...]
    is_text = False  # UTF-8 text: may be compressed as .gz or .zst
    is_cut = False  # text: `split_text` cuts it
    is_compressed = False  # values are compressed within the file
    unpacked_as = ""  # the container of unpacked parts, if it is another one
    numbered_by: Literal["line", "record"] = "record"
    record = "a row"  # description of one record, for the documentation

    def read(self, reader: RecordReader) -> Iterator[Rows]:
        """Yield the records of `reader.file` in [reader.start, reader.stop).

        Records are numbered from 0 at `reader.start`. A stop of None is the end of the file. Raises DataError if the
        rest of the file cannot be read.
        """
        raise NotImplementedError

    def column_names(self, file: File) -> list[str]:
        """Return the names of all columns; only a table has columns."""
        return []

    # -- parts ------------------------------------------------------------------------------------------------------

    def split(self, file: File, part_size: int, chunks: Iterable[bytes]) -> tuple[str, list[Range]]:
        """Return the SHA-256 of a file, given its bytes, and the ranges of its parts.

        The end of a range must depend only on the bytes before it and on `part_size`. The ranges of a compressed file
        are those of its text, unless it is one part. Raises DataError if the text cannot be read.
        """
        if not file.compression:
            return self.split_text(file, part_size, chunks)
        whole = hashlib.sha256()
        if self.is_cut and file.bytes > part_size:
            stream = _Passing(chunks, whole.update)
            with io.BufferedReader(stream, CHUNK) as source:
                read = decompressed(source, file.compression, file.name)
                _, ranges = self.split_text(file, part_size, read_ahead(iter(partial(read, HASH_CHUNK), b"")))
            if len(ranges) > 1:
                return whole.hexdigest(), ranges
        else:
            for chunk in chunks:
                whole.update(chunk)
        return whole.hexdigest(), [Range(0, file.bytes, whole.hexdigest())]

    def split_text(self, file: File, part_size: int, chunks: Iterable[bytes]) -> tuple[str, list[Range]]:
        """Return the SHA-256 of a text, and the ranges of its parts, as `split`."""
        digest = hashlib.sha256()
        for chunk in chunks:
            digest.update(chunk)
        return digest.hexdigest(), [Range(0, file.bytes, digest.hexdigest())]

    def cut(self, file: File, ranges: list[Range], part_size: int) -> list[Range]:
        """Divide the ranges of a hashed file further, at places that its content shows."""
        return ranges

    def is_far(self, file: File, start: int, stop: int) -> bool:
        """Return whether a range that is not the whole file is far from its start.

        It is reached only by reading what is before it.
        """
        return bool(file.compression)

    def copied_bytes(self, file: File, part_size: int) -> float:
        """Return about how many bytes `unpack` would copy of a file."""
        if not (file.compression and self.is_cut and file.bytes > part_size):
            return 0.0
        reader, size = RecordReader(self, file), 0
        with reader.open_text() as read:
            while size < _MEASURED and (chunk := read(CHUNK)):
                size += len(chunk)
            return file.bytes * size / max(1, reader.position())

    def unpack(self, file: File, ranges: Sequence[tuple[int, int, Path]], create: Create) -> None:
        """Copy ranges of a file to files, reading it once, from its start.

        The ranges are in order. Each file has the decompressed bytes of a range at their place; before them is a hole.
        """
        with RecordReader(self, file).open_text() as read:
            at = 0
            for start, stop, path in ranges:
                while at < start and (skipped := read(min(CHUNK, start - at))):
                    at += len(skipped)
                with create(path) as out:
                    out.seek(start)
                    while at < stop and (chunk := read(min(CHUNK, stop - at))):
                        at += out.write(chunk)

    def records_before(self, file: File, start: int) -> int:
        """Return how many numbers precede the start of a range, for places."""
        return 0

    def seek(self, file: File, number: int) -> tuple[int, int]:
        """Return a range start at or before record `number`, and the number there."""
        return 0, 0

    # -- identification ---------------------------------------------------------------------------------------------

    def resolve(self, file: File, prefix: bytes, is_record: Callable[[dict[str, object]], bool]) -> str:
        """Return the name of the container that the content of a file has.

        `prefix` is the decompressed start of the file. `is_record` returns whether an object has the keys of a known
        format. Raises DataError if the content does not fit the extension.
        """
        return self.name

    def explain_unreadable(self, file: File, prefix: bytes) -> str:
        """Return why no first record is an object, or "" if `prefix` does not show it."""
        return ""

    def first_records(self, file: File) -> Iterator[object]:
        """Yield records from the start of a file, reading no more than needed."""
        return (record for _, record in RecordReader(self, file))

    # -- sampling ---------------------------------------------------------------------------------------------------

    def window(self, file: File, max_record_bytes: int) -> Window | None:
        """Return a function that reads in the middle of an uncompressed file, or None."""
        return None

    def table(self, file: File) -> AbstractContextManager[Table] | None:
        """Open a table for sampling; return None if the container has no groups of rows."""
        return None

    def runs(self, reader: RecordReader) -> Iterator[Run]:
        """Yield all records from the start of a file in runs."""
        numbered = iter(reader)
        while run := list(islice(numbered, RUN)):
            records = [Record(f"{reader.file.name}:{number + 1}", value) for number, value in run]
            # The size is the length of all strings, at any depth, plus 100 for each other value.
            size, left = 0, [value for _, value in run]
            while left:
                item = left.pop()
                if isinstance(item, dict):
                    left += item.values()
                elif isinstance(item, list):
                    left += item
                else:
                    size += len(item) if isinstance(item, str) else 100
            yield Run(size, 4 * size, len(run), partial(list, records))  # parsing costs about 4 × as much


class RecordReader:
    """Iterate over (number, record) of a file or of a range of it.

    A record is any JSON value or table row, or a Reject. Its number counts from 0 at `start`. After the iteration,
    `records` is the number of lines or records in the range, counting blank lines. If a table has wanted columns, only
    these columns are read, and `unread` counts the values of the other columns. `null_fields` counts the null fields of
    structs, which are left out of the records of a table. `decode` replaces the decoder of JSON records.
    """

    def __init__(
        self,
        container: Container,
        file: File,
        start: int = 0,
        stop: int | None = None,
        max_record_bytes: int = MAX_RECORD_BYTES,
        decode: Decode = decode_block,
    ):
        self.container, self.file, self.start, self.stop = container, file, start, stop
        self.max_record_bytes, self.decode = max_record_bytes, decode
        self.records = self.null_fields = 0
        self.unread: Counter[str] = Counter()
        self.position: Callable[[], int] = lambda: 0  # bytes of a text file read so far

    def __iter__(self) -> Iterator[tuple[int, object]]:
        for numbers, records in self.blocks():
            yield from zip(numbers, records, strict=True)

    def blocks(self) -> Iterator[Block]:
        """Yield numbers and records in blocks of about BLOCK_BYTES bytes."""
        self.records = 0
        for numbers, records, size in self.container.read(self):
            step = max(1, min(BLOCK, BLOCK_BYTES * len(records) // max(size, 1)))
            for first in range(0, len(records), step):
                yield numbers[first : first + step], records[first : first + step]
            if numbers:
                self.records = max(self.records, numbers[-1] + 1)

    @contextmanager
    def open_text(self) -> Iterator[Read]:
        """Open the range of a text; return a function that reads it, decompressed."""
        file = self.file
        with file.open(None if file.compression else self.stop) as source:
            self.position = source.tell
            if file.compression:
                read, at, stop = decompressed(source, file.compression, file.name), 0, self.stop
                while at < self.start and (skipped := read(min(CHUNK, self.start - at))):
                    at += len(skipped)
            else:
                read, stop = source.read, file.bytes if self.stop is None else self.stop
                source.seek(self.start)
            left = math.inf if stop is None else stop - self.start

            def read_range(size: int) -> bytes:
                nonlocal left
                data = read(int(max(0, min(size, left))))
                left -= len(data)
                return data

            yield read if stop is None else read_range

    def too_long(self) -> str:
        return f"the line is longer than max_record_bytes, {self.max_record_bytes:,} bytes"


def in_blocks(records: Iterable[tuple[object, int]], first: int = 0) -> Iterator[Rows]:
    """Group (record, bytes) pairs into Rows, also those that precede an error."""
    held: list[object] = []
    size, error = 0, None
    try:
        for record, added in records:
            held.append(record)
            size += added
            if len(held) >= BLOCK or size >= BLOCK_BYTES:
                yield range(first, first + len(held)), held, size
                first, held, size = first + len(held), [], 0
    except DataError as raised:
        error = raised
    if held:
        yield range(first, first + len(held)), held, size
    if error:
        raise error


class _Passing(io.RawIOBase):
    """The chunks of a file as a stream. Each chunk is passed to `take` first."""

    def __init__(self, chunks: Iterable[bytes], take: Callable[[bytes], None]):
        self._chunks, self._take = iter(chunks), take
        self._rest, self._place = memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest and (chunk := next(self._chunks, b"")):
            self._take(chunk)
            self._rest = memoryview(chunk)
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        self._place += size
        return size
