"""Decompress a file in bounded memory.

    file ─decompressed─→ read(n) ─line_blocks─→ ([b'{"text":"a"}', b'', b'{"text":"b"}'], False), ([b'{"tex'], True)

`read(n)` returns n bytes, and fewer only at the end. At most 32 MiB of decompressed data are in memory at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import BinaryIO

import zstandard

from tasks.core.errors import DataError
from tasks.readers.lines import CHUNK, Read

# A file is refused if it decompresses to more than BOMB_BYTES and more than BOMB_RATIO times its size: a bomb of a few
# megabytes would keep a run busy for hours. Chats decompress to 3 to 30 times their size.
BOMB_BYTES, BOMB_RATIO = 64 << 20, 200

DECOMPRESS = {"": "cat", "gz": "gunzip -c", "zst": "unzstd -c"}  # shell commands, for messages

_ZSTD_FEED = 1024

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def decompressed(file: BinaryIO, compression: str, name: str) -> Read:
    """Return a function that reads the decompressed bytes of an open file.

    `compression` is "", "gz", or "zst". The function raises DataError if the data is damaged, ends early, is followed
    by something else, or is a decompression bomb. The message contains `name` and the offset in the compressed file.
    """
    if not compression:
        return file.read
    pieces = _gunzip(file, name) if compression == "gz" else _unzstd(file, name)
    rest, whole = bytearray(), 0

    def read(size: int) -> bytes:
        nonlocal whole
        while len(rest) < size:
            piece = next(pieces, None)
            if piece is None:
                break
            rest.extend(piece)
            whole += len(piece)
            if whole > BOMB_BYTES and whole > BOMB_RATIO * file.tell():
                raise DataError(
                    "bomb",
                    f"{name}: byte {file.tell():,}: decompresses to over {whole:,} bytes, {BOMB_RATIO} times its "
                    "size: a decompression bomb? If this is intended, decompress it and use the decompressed file",
                )
        data = bytes(rest[:size])
        del rest[:size]
        return data

    return read


def _gunzip(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Decompress consecutive gzip members (RFC 1952).

    Zero bytes may follow the last member, as in padded copies.
    """
    begin, data, members = 0, file.read(CHUNK), 0  # begin: offset of `data` in the file
    while data:
        if not data.startswith(b"\x1f\x8b"[: len(data)]):
            if not members:
                raise DataError("bad_compression", f"{name}: byte 0: not gzip data")
            if data.strip(b"\0"):
                raise DataError(
                    "bad_compression", f"{name}: byte {begin:,}: the gzip data is followed by something else"
                )
            begin, data = begin + len(data), file.read(CHUNK)
            continue
        decompressor = zlib.decompressobj(wbits=31)
        while not decompressor.eof:
            try:
                piece = decompressor.decompress(data, CHUNK)
            except zlib.error as error:
                raise DataError(
                    "bad_compression", f"{name}: near byte {begin:,}: the gzip data is damaged ({error})"
                ) from None
            left = decompressor.unused_data if decompressor.eof else decompressor.unconsumed_tail
            begin, data = begin + len(data) - len(left), left
            if piece:
                yield piece
            if not data and not decompressor.eof:
                data = file.read(CHUNK)
                if not data and not piece:  # as long as it returns data, zlib may hold more
                    raise DataError("bad_compression", f"{name}: byte {begin:,}: the gzip data ends early: truncated?")
        members += 1
        data = data or file.read(CHUNK)


def _unzstd(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Decompress consecutive zstandard frames (RFC 8878).

    The input is fed 1 KiB at a time, because the output of a call is not bounded: a block of 4 bytes decompresses to
    up to 128 KiB, so 1 KiB yields up to 32 MiB. This is 15 % slower than 64 KiB at a time.
    """
    begin, data, at, frames = 0, file.read(CHUNK), 0, 0  # begin: offset of `data` in the file
    while at < len(data):
        if len(data) - at < 4:
            begin, data, at = begin + at, data[at:] + file.read(CHUNK), 0
        magic = data[at : at + 4]
        skippable = magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5
        if magic != _ZSTD_MAGIC[: len(magic)] and not skippable:
            problem = "the zstandard data is followed by something else" if frames else "not zstandard data"
            raise DataError("bad_compression", f"{name}: byte {begin + at:,}: {problem}")
        decompressor = zstandard.ZstdDecompressor().decompressobj()
        while not decompressor.eof:
            if at == len(data):
                begin, data, at = begin + at, file.read(CHUNK), 0
                if not data:
                    raise DataError(
                        "bad_compression", f"{name}: byte {begin:,}: the zstandard data ends early: truncated?"
                    )
            feed = data[at : at + _ZSTD_FEED]
            try:
                piece = decompressor.decompress(feed)
            except zstandard.ZstdError as error:
                place = f"{name}: near byte {begin + at:,}"
                raise DataError("bad_compression", f"{place}: the zstandard data is damaged ({error})") from None
            at += len(feed) - len(decompressor.unused_data)
            if piece:
                yield piece
        frames += 1
        if at == len(data):
            begin, data, at = begin + at, file.read(CHUNK), 0
