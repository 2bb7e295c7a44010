"""Read an object of a bucket in blocks, and keep the blocks that were read in a file with holes.

    s3://bucket/chats.jsonl ─If-Match─▶ blocks that a reader asks for ─▶ data/remote/<digest>/chats.jsonl, with holes

A machine that tokenizes some parts of a file thus fetches these parts and no others. What was hashed before is compared
with the digests of its blocks (readers/hashed_blocks.py), so a hole is a block that has another digest: there is
nothing else to record, and processes may fill the same file at once. What was not hashed yet is read from the object
each time: the start of a file, which shows its format.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from tasks.readers.hashed_blocks import BLOCK, BlockDigests, CheckedBlocks
from tasks.storage.files import make_folder
from tasks.stores.mirror import open_once
from tasks.stores.receive import changed, scratch_full
from tasks.stores.store import Facts
from tasks.stores.urls import split_url

AHEAD = 16  # blocks that are fetched at once, when a file is read from one end to the other


def read_object(url: str, facts: Facts, start: int, length: int) -> bytes:
    """Return bytes of an object. Raises what a store raises, object_changed if it is another one now."""
    where = split_url(url)
    return open_once(f"{where.scheme}://{where.bucket}").read(where.key, facts, start, length)


@lru_cache(maxsize=16)
def _read_once(url: str, facts: Facts, start: int, length: int) -> bytes:
    """Return a block of an object that was not hashed: several questions are asked of the start of a file."""
    return read_object(url, facts, start, length)


def fetch_all(path: Path, url: str, facts: Facts, check: Callable[[], None]) -> Iterator[bytes]:
    """Yield a whole object, and keep it in `path`. `check` is called before each request, and may end it."""
    with open_holes(path, facts.size) as file:
        for start in range(0, facts.size, AHEAD * BLOCK):
            check()
            data = read_object(url, facts, start, min(AHEAD * BLOCK, facts.size - start))
            _keep(file, start, data, url, path)
            yield data


def open_blocks(path: Path, url: str, facts: Facts, digests: BlockDigests | None, stop: int | None) -> BinaryIO:
    """Open an object, to read all bytes from some place to `stop`, or some of them."""
    return io.BufferedReader(RemoteBlocks(path, url, facts, digests, stop), BLOCK)


class RemoteBlocks(CheckedBlocks):
    """The bytes of an object. A block that is not in `path` is fetched, with those that will be asked for next."""

    def __init__(self, path: Path, url: str, facts: Facts, digests: BlockDigests | None, stop: int | None):
        super().__init__(open_holes(path, facts.size), url, facts.size, digests or BlockDigests(BLOCK, b""))
        self._url, self._facts, self._path, self._stop = url, facts, path, stop
        self._hashed = digests is not None
        self._fetched: dict[int, memoryview] = {}
        self._last, self._ahead = -2, 1

    def _checked(self, number: int) -> memoryview:
        if number in self._fetched:
            return self._fetched[number]
        if self._hashed and self._is_right(number, block := self._read(number)):
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
        read = read_object if self._hashed or count > 1 else _read_once
        data = memoryview(read(self._url, self._facts, start, min(count * size, self._size - start)))
        self._fetched = {number + at: data[at * size : (at + 1) * size] for at in range(count)}
        if self._hashed:
            if not all(self._is_right(each, block) for each, block in self._fetched.items()):
                raise changed(self._url)
            _keep(self._file, start, data, self._url, self._path)


def open_holes(path: Path, size: int) -> io.FileIO:
    """Open a file of this size to read and write it; what was never written is a hole."""
    make_folder(path.parent)
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b", buffering=0)
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
