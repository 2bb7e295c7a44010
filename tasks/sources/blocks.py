"""Hash a file or an object in blocks, and check each block when it is read again.

    bytes of a file ─HashedBlocks.passing─▶ the same bytes ─▶ SHA-256 of the file, of its parts
                                  └───────▶ BlockDigests ─CheckedBlocks─▶ bytes that were hashed, or an error
    s3://bucket/chats.jsonl ─If-Match─▶ blocks that a reader asks for ─▶ data/remote/<digest>/chats.jsonl, with holes

A file can change after it was hashed, and its size and times may be restored. So all bytes that become rows are
compared with the bytes that were hashed, block by block. Hashing and comparing each take 0.1 ms per MB.

A machine that tokenizes some parts of an object fetches only these parts, and keeps their blocks in a file with holes.
The content of a hole does not match its digest, so no record of the holes is needed, and several processes may fill
the same file at once. If the object is not hashed yet, for example while its start is read to find its format, the
process remembers the digests of the blocks that it has read.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh3_128_digest

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.storage.files import make_folder
from packcorpus.tasks.stores.bucket import open_store
from packcorpus.tasks.stores.store import Facts, changed, scratch_full
from packcorpus.tasks.stores.urls import split_url

BLOCK = 1 << 18  # bytes; files are also read in chunks of this size
DIGEST = 16  # bytes of a digest
AHEAD = 16  # blocks that are fetched at once when an object is read sequentially

# Digests of the blocks that this process has read of objects that were not hashed yet, so that these blocks are fetched
# only once. The key is the number of the block and the file that holds it. Each ETag of an object has its own file.
_read_before: dict[tuple[Path, int], bytes] = {}


@dataclass(frozen=True, slots=True)
class BlockDigests:
    """The joined digests of blocks of `size` bytes; the last block may be shorter."""

    size: int
    joined: bytes


class HashedBlocks:
    """Hash a stream in blocks. All chunks but the last hold a multiple of `size`."""

    def __init__(self, size: int = BLOCK):
        self._size = size
        self._joined = bytearray()

    def passing(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            view = memoryview(chunk)
            for start in range(0, len(chunk), self._size):
                self._joined += xxh3_128_digest(view[start : start + self._size])
            yield chunk

    @property
    def digests(self) -> BlockDigests:
        return BlockDigests(self._size, bytes(self._joined))


def open_checked(path: Path, name: str, size: int, digests: BlockDigests) -> BinaryIO:
    """Open a hashed file. Reading raises DataError if a block has changed."""
    return io.BufferedReader(CheckedBlocks(path.open("rb", buffering=0), name, size, digests), BLOCK)


def open_blocks(path: Path, url: str, facts: Facts, digests: BlockDigests | None, stop: int | None) -> BinaryIO:
    """Open an object for reading bytes.

    Pass `stop` to read all bytes up to it, so that blocks are fetched together. It is None for reading single places.
    """
    return io.BufferedReader(RemoteBlocks(path, url, facts, digests, stop), BLOCK)


class CheckedBlocks(io.RawIOBase):
    """The bytes of a file, each block compared with its digest before it is read."""

    def __init__(self, file: io.FileIO, name: str, size: int, digests: BlockDigests):
        self._file, self._source, self._size, self._digests = file, name, size, digests
        self._place = 0
        self._number, self._block = -1, memoryview(b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, origin: int = io.SEEK_SET) -> int:
        self._place = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[origin])
        return self._place

    def tell(self) -> int:
        if self.closed:
            raise ValueError("I/O operation on closed file")  # like other files
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._place >= self._size:
            return 0
        number, start = divmod(self._place, self._digests.size)
        if number != self._number:
            self._block, self._number = self._checked(number), number
        read = self._block[start : start + len(buffer)]
        buffer[: len(read)] = read
        self._place += len(read)
        return len(read)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _checked(self, number: int) -> memoryview:
        block = self._read(number)
        if not self._is_right(number, block):
            raise DataError("input_changed", f"{self._source}: changed while it was read; run again")
        return memoryview(block)

    def _read(self, number: int) -> bytes:
        start = number * self._digests.size
        self._file.seek(start)
        missing = min(self._digests.size, self._size - start)
        pieces = []
        while missing and (piece := self._file.read(missing)):
            pieces.append(piece)
            missing -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _is_right(self, number: int, block: bytes | memoryview) -> bool:
        at = number * DIGEST
        whole = len(block) == min(self._digests.size, self._size - number * self._digests.size)
        return whole and xxh3_128_digest(block) == self._digests.joined[at : at + DIGEST]


class RemoteBlocks(CheckedBlocks):
    """The bytes of an object. A missing block is fetched, with the next ones."""

    def __init__(self, path: Path, url: str, facts: Facts, digests: BlockDigests | None, stop: int | None):
        super().__init__(open_holes(path, facts.size), url, facts.size, digests or BlockDigests(BLOCK, b""))
        self._facts, self._path, self._stop = facts, path, stop
        self._hashed = digests is not None
        self._fetched: dict[int, memoryview] = {}
        self._last, self._ahead = -2, 1

    def _checked(self, number: int) -> memoryview:
        if number not in self._fetched:
            if self._is_right(number, block := self._read(number)):
                return memoryview(block)
            self._fetch(number)
        return self._fetched[number]

    def _fetch(self, number: int) -> None:
        size, url = self._digests.size, self._source
        if self._stop is None:
            count = self._ahead = min(2 * self._ahead, AHEAD) if number == self._last + 1 else 1
        else:
            count = min(max(1, -(-self._stop // size) - number), AHEAD)
        count = min(count, -(-self._size // size) - number)
        self._last, start = number + count - 1, number * size
        data = memoryview(read_object(url, self._facts, start, min(count * size, self._size - start)))
        blocks = {number + at: data[at * size : (at + 1) * size] for at in range(count)}
        for each, block in blocks.items():
            if not self._hashed:
                _read_before[self._path, each] = xxh3_128_digest(block)
            elif not self._is_right(each, block):
                raise changed(url)
        self._fetched = blocks
        _keep(self._file, start, data, url, self._path)

    def _is_right(self, number: int, block: bytes | memoryview) -> bool:
        if self._hashed:
            return super()._is_right(number, block)
        return _read_before.get((self._path, number)) == xxh3_128_digest(block)


def fetch_all(path: Path, url: str, facts: Facts, check: Callable[[], None]) -> Iterator[bytes]:
    """Yield all bytes of an object, and keep them in `path`. `check` may end it."""
    with open_holes(path, facts.size) as file:
        start = 0
        while start < facts.size:
            data: bytes | None = None
            if before := _read_before.get((path, start // BLOCK)):
                file.seek(start)
                data = file.read(min(BLOCK, facts.size - start))
            if not data or xxh3_128_digest(data) != before:
                check()
                data = read_object(url, facts, start, min(AHEAD * BLOCK, facts.size - start))
                _keep(file, start, data, url, path)
            yield data
            start += len(data)


def read_object(url: str, facts: Facts, start: int, length: int) -> bytes:
    """Return a range of an object. Raises the errors of stores: object_changed."""
    where = split_url(url)
    return open_store(f"{where.scheme}://{where.bucket}").read(where.key, facts, start, length)


def open_holes(path: Path, size: int) -> io.FileIO:
    """Open a file of `size` bytes for writing. What was never written is a hole."""
    make_folder(path.parent)
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b", buffering=0)
    if os.fstat(file.fileno()).st_size != size:
        os.ftruncate(file.fileno(), size)
    return file


def _keep(file: io.FileIO, start: int, data: bytes | memoryview, url: str, path: Path) -> None:
    try:
        file.seek(start)
        if file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise scratch_full(url, path.parent, len(data)) from None
