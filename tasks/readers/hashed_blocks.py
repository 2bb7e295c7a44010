"""Hash a file in blocks, and check each block when it is read again.

    bytes of a file ─HashedBlocks.passing─▶ the same bytes ─▶ SHA-256 of the file, of its parts
                                  └───────▶ BlockDigests ─CheckedBlocks─▶ bytes that were hashed, or an error

A file can change after it was hashed, and its size and times may be restored. So all bytes that become rows are
compared with the bytes that were hashed, block by block. Hashing and comparing each take 0.1 ms per MB.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh3_128_digest

from tasks.core.errors import DataError

BLOCK = 1 << 18  # bytes; files are also read in chunks of this size

DIGEST = 16  # bytes of a digest


@dataclass(frozen=True, slots=True)
class BlockDigests:
    """The digests of all blocks of a file, joined.

    Each block has `size` bytes; the last block may be shorter.
    """

    size: int
    joined: bytes


class HashedBlocks:
    """Hash the bytes of a stream in blocks of `size` bytes.

    The size of each chunk, except the last, must be a multiple of `size`.
    """

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
    """Open a file of `size` bytes whose blocks were hashed.

    Reading raises DataError, with `name` in the message, if a block has changed since.
    """
    return io.BufferedReader(CheckedBlocks(path.open("rb", buffering=0), name, size, digests), BLOCK)


class CheckedBlocks(io.RawIOBase):
    """The bytes of a file, which are checked when they are read.

    Each block is compared with its digest before any of its bytes is returned.
    """

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
        found = self._block[start : start + len(buffer)]
        buffer[: len(found)] = found
        self._place += len(found)
        return len(found)

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
