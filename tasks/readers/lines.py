"""Decompress a stream of bytes, and split it into lines of bounded length.

file ─decompressed─→ read(n) ─line_blocks─→ ([b'{"text":"a"}', b'', b'{"text":"b"}'], False), ([b'{"tex'], True)
"""

from __future__ import annotations

import gzip
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
from isal import igzip, isal_zlib

from packcorpus.tasks.core.errors import DataError

Read = Callable[[int], bytes]

_DAMAGED: Any = isal_zlib.error  # its stub says that it is an instance

CHUNK = 1 << 18  # bytes read at once; with 1 MiB, records fall out of the cache and parse 5 to 25 % slower
HASH_CHUNK = 1 << 20  # bytes hashed at once; smaller ones cost more when two threads share the work
WINDOW = 1 << 14  # bytes of a sampling window; windows are short and many, because neighboring records are alike

BOM = b"\xef\xbb\xbf"
TOO_LONG = b"\n"  # replaces a line over the limit; no real line contains a line end


class Range(NamedTuple):
    """The bytes or row groups [start, stop) that one step reads, and their digest."""

    start: int
    stop: int
    sha256: str


def line_blocks(read: Read, limit: int) -> Iterator[tuple[list[bytes], bool]]:
    """Yield the lines of a stream without their line ends, in blocks.

    A block is (lines, False), or ([line], True) for a last line without a line end. A byte order mark at the start is
    skipped. A line of more than `limit` bytes is replaced by `TOO_LONG` and never held as a whole, so memory is bounded
    by `limit` plus two chunks.
    """
    pieces: list[bytes] = []  # of the unfinished line, joined only once so that long lines take linear time
    held, skipping, first = 0, False, True
    while chunk := read(CHUNK):
        if first:
            chunk, first = chunk.removeprefix(BOM), False
        lines = chunk.split(b"\n")
        tail = lines.pop()
        if lines:
            if skipping:
                lines[0] = TOO_LONG
            elif held:
                lines[0] = b"".join((*pieces, lines[0]))
            if limit < CHUNK or len(lines[0]) > limit:
                lines = [line if len(line) <= limit else TOO_LONG for line in lines]
            yield lines, False
            pieces, held, skipping = [], 0, False
        held += len(tail)
        skipping = held > limit
        if skipping:
            pieces.clear()
        else:
            pieces.append(tail)
    if held:
        yield [TOO_LONG if skipping else b"".join(pieces)], True


def end_of_line(source: BinaryIO, place: int, limit: int) -> int:
    """Return the offset after the line at `place`, at most about `limit` bytes later."""
    source.seek(place)
    while source.tell() - place <= limit and (some := source.readline(CHUNK)):
        if some.endswith(b"\n"):
            break
    return source.tell()


def read_ahead(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield chunks, each while another thread reads the next one."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, left := iter(chunks), b"")
        while chunk := coming.result():
            coming = thread.submit(next, left, b"")
            yield chunk


def split_at_lines(chunks: Iterable[bytes], part_size: int) -> tuple[str, list[Range]]:
    """Hash the bytes of a file, and split the file at line ends.

    Returns the SHA-256 of the file, and its ranges. A range ends with the first line that ends at or after
    the next multiple of `part_size`, so the bytes that follow do not affect its end. The first part needs no separate
    hash: up to its end, it is the whole file.
    """
    whole, piece = hashlib.sha256(), None
    cuts: list[Range] = []
    start, position, target = 0, 0, part_size
    # Hashing releases the GIL, so a second core hashes the whole file while this one hashes its parts.
    with ThreadPoolExecutor(1) as thread:
        for chunk in chunks:
            view, at = memoryview(chunk), 0
            hashing = None if piece is None else thread.submit(whole.update, view)
            while position + len(chunk) >= target:
                end = chunk.find(b"\n", max(target - 1 - position, 0)) + 1
                if not end:
                    break
                if piece is None:
                    whole.update(view[:end])
                    cuts.append(Range(start, position + end, whole.hexdigest()))
                    hashing = thread.submit(whole.update, view[end:])
                else:
                    piece.update(view[at:end])
                    cuts.append(Range(start, position + end, piece.hexdigest()))
                start, at, piece = position + end, end, hashlib.sha256()
                target = (start // part_size + 1) * part_size
            (whole if piece is None else piece).update(view[at:])
            if hashing:
                hashing.result()  # no chunk waits in memory
            position += len(chunk)
    if position > start or not cuts:
        cuts.append(Range(start, position, (whole if piece is None else piece).hexdigest()))
    return whole.hexdigest(), cuts


# A file is refused if it decompresses to more than BOMB_BYTES and more than BOMB_RATIO times its size: a bomb of a few
# megabytes would keep a run busy for hours. Chats decompress to 3 to 30 times their size.
BOMB_BYTES, BOMB_RATIO = 64 << 20, 200
DECOMPRESS = {"": "cat", "gz": "gunzip -c", "zst": "unzstd -c"}  # shell commands, for messages


class _SmallReads(io.RawIOBase):
    """A file of which isal reads little at once.

    So the place in the file is that of what is decompressed.
    """

    def __init__(self, file: BinaryIO):
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._file.read(min(len(buffer), CHUNK))
        buffer[: len(data)] = data
        return len(data)


def decompressed(file: BinaryIO, compression: str, name: str) -> Read:
    """Return a function that reads the decompressed bytes of an open file.

    `compression` is "", "gz", or "zst". The members or frames of a file are read as one text. The function raises
    DataError if the data is damaged, ends early, is followed by something else, or is a decompression bomb.
    """
    if not compression:
        return file.read
    # zstandard's own reader returns what it has if the data ends early, without an error; that of Arrow does not.
    # Arrow's reader of gzip refuses the zero bytes at the end of padded copies; that of isal, three times as fast as
    # Python's, does not.
    if compression == "gz":
        kind, stream = "gzip", igzip.IGzipFile(fileobj=_SmallReads(file), mode="rb")
    else:
        kind, stream = "zstandard", pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")
    whole = 0

    def read(size: int) -> bytes:
        nonlocal whole
        try:
            data: bytes = stream.read(size)
        except (OSError, EOFError, _DAMAGED) as error:
            if isinstance(error, OSError) and error.errno:  # of the disk
                raise
            place, text = f"{name}: near byte {file.tell():,}", str(error)
            if isinstance(error, EOFError) or "Truncated" in text:
                problem = f"the {kind} data ends early: truncated?"
            elif (isinstance(error, gzip.BadGzipFile) and "Not a gzipped" in text) or "Unknown frame" in text:
                problem = f"the {kind} data is followed by something else" if whole else f"not {kind} data"
            else:
                problem = f"the {kind} data is damaged ({text})"
            raise DataError("bad_compression", f"{place}: {problem}") from None
        whole += len(data)
        if whole > BOMB_BYTES and whole > BOMB_RATIO * file.tell():
            problem = f"decompresses to over {whole:,} bytes, {BOMB_RATIO} times its size: a decompression bomb?"
            advice = "If this is intended, decompress it and use the decompressed file"
            raise DataError("bomb", f"{name}: byte {file.tell():,}: {problem} {advice}")
        return data

    return read
