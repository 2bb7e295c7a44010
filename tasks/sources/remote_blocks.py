"""Read an object of a bucket in blocks, and keep the blocks in a file with holes.

    s3://bucket/chats.jsonl ─If-Match─▶ blocks that a reader asks for ─▶ data/remote/<digest>/chats.jsonl, with holes

A machine that tokenizes some parts of a file fetches only these parts. If the object is hashed, each block is compared
with its digest (readers/hashed_blocks.py). The content of a hole does not match the digest, so no record of the holes
is needed, and several processes may fill the same file at once. If the object is not hashed yet, for example while its
start is read to find its format, the process remembers the digests of the blocks that it has read.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh3_128_digest

from tasks.readers.hashed_blocks import BLOCK, BlockDigests, CheckedBlocks
from tasks.storage.files import make_folder
from tasks.stores.bucket import open_store
from tasks.stores.store import Facts, changed, scratch_full
from tasks.stores.urls import split_url

AHEAD = 16  # blocks that are fetched at once when a file is read sequentially

# Digests of the blocks that this process has read of objects that were not hashed yet, so that these blocks are fetched
# only once. The key is the number of the block and the file that holds it. Each ETag of an object has its own file.
_read_before: dict[tuple[Path, int], bytes] = {}


def read_object(url: str, facts: Facts, start: int, length: int) -> bytes:
    """Return a range of bytes of an object.

    Raises the errors of stores, such as object_changed if the object has changed.
    """
    where = split_url(url)
    return open_store(f"{where.scheme}://{where.bucket}").read(where.key, facts, start, length)


def fetch_all(path: Path, url: str, facts: Facts, check: Callable[[], None]) -> Iterator[bytes]:
    """Yield all bytes of an object, and keep them in `path`.

    `check` is called before each request and can end the iteration by raising an error.
    """
    with open_holes(path, facts.size) as file:
        start = 0
        while start < facts.size:
            data = _again(file, path, start // BLOCK, min(BLOCK, facts.size - start))
            if not data:
                check()
                data = read_object(url, facts, start, min(AHEAD * BLOCK, facts.size - start))
                _keep(file, start, data, url, path)
            yield data
            start += len(data)


def open_blocks(path: Path, url: str, facts: Facts, digests: BlockDigests | None, stop: int | None) -> BinaryIO:
    """Open an object for reading bytes.

    Pass `stop` to read all bytes up to it, so that blocks are fetched together. It is None for reading single places.
    """
    return io.BufferedReader(RemoteBlocks(path, url, facts, digests, stop), BLOCK)


class RemoteBlocks(CheckedBlocks):
    """The bytes of an object.

    A block that is missing in `path` is fetched together with the blocks that will probably be read next.
    """

    def __init__(self, path: Path, url: str, facts: Facts, digests: BlockDigests | None, stop: int | None):
        super().__init__(open_holes(path, facts.size), url, facts.size, digests or BlockDigests(BLOCK, b""))
        self._url, self._facts, self._path, self._stop = url, facts, path, stop
        self._hashed = digests is not None
        self._fetched: dict[int, memoryview] = {}
        self._last, self._ahead = -2, 1

    def _checked(self, number: int) -> memoryview:
        if number in self._fetched:
            return self._fetched[number]
        if self._is_right(number, block := self._read(number)):
            return memoryview(block)
        self._fetch(number)
        return self._fetched[number]

    def _fetch(self, number: int) -> None:
        size = self._digests.size
        count = -(-self._size // size) - number
        if self._stop is not None:
            count = min(count, max(1, -(-self._stop // size) - number), AHEAD)
        else:
            self._ahead = min(2 * self._ahead, AHEAD) if number == self._last + 1 else 1
            count = min(count, self._ahead)
        self._last = number + count - 1
        start = number * size
        data = memoryview(read_object(self._url, self._facts, start, min(count * size, self._size - start)))
        self._fetched = {number + at: data[at * size : (at + 1) * size] for at in range(count)}
        if not self._hashed:
            _read_before.update({(self._path, each): xxh3_128_digest(block) for each, block in self._fetched.items()})
        elif not all(self._is_right(each, block) for each, block in self._fetched.items()):
            raise changed(self._url)
        _keep(self._file, start, data, self._url, self._path)

    def _is_right(self, number: int, block: bytes | memoryview) -> bool:
        if self._hashed:
            return super()._is_right(number, block)
        return _read_before.get((self._path, number)) == xxh3_128_digest(block)


def open_holes(path: Path, size: int) -> io.FileIO:
    """Open a file of `size` bytes for reading and writing.

    Bytes that were never written are holes.
    """
    make_folder(path.parent)
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b", buffering=0)
    if os.fstat(file.fileno()).st_size != size:
        os.ftruncate(file.fileno(), size)
    return file


def _again(file: io.FileIO, path: Path, number: int, length: int) -> bytes:
    """Return a block that this process has read before, or b"".

    The result is b"" if this process has not read the block, or if the file has other bytes.
    """
    if (path, number) not in _read_before:
        return b""
    file.seek(number * BLOCK)
    data = file.read(length)
    return data if _read_before[path, number] == xxh3_128_digest(data) else b""


def _keep(file: io.FileIO, start: int, data: bytes | memoryview, url: str, path: Path) -> None:
    try:
        file.seek(start)
        if file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise scratch_full(url, path.parent, len(data)) from None
