"""A file's bytes, packed or not → chunks and lines, in bounded memory.

    file ── unpacked ──→ read(n) ── line_blocks ──→ ([b'{"text":"a"}', b'', b'{"text":"b"}'], False), ([b'{"tex'], True)

`read(n)` gives n bytes, and fewer only at the end. Whatever a packed file unpacks to, no more than 32 MiB of it are
held at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import BinaryIO

import zstandard

from tasks.core.errors import DataError
from tasks.readers.lines import CHUNK, Read

# A packed file that unpacks to more than this many bytes, and to this many times its own size, is refused: a bomb of a
# few megabytes would keep a run busy for hours. Chats unpack to 3 to 30 times their size.
BOMB_BYTES, BOMB_RATIO = 64 << 20, 200


UNPACK = {"": "cat", "gz": "gunzip -c", "zst": "unzstd -c"}  # shell commands, for messages

_ZSTD_FEED = 1024

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def unpacked(file: BinaryIO, compression: str, shown: str) -> Read:
    """Reads the unpacked bytes of an open file; `compression` is "", "gz" or "zst".

    The returned function raises DataError, with the name `shown` and the place in the packed file, when the data is
    damaged, ends early, is followed by something else, or is a bomb.
    """
    if not compression:
        return file.read
    pieces = _gunzip(file, shown) if compression == "gz" else _unzstd(file, shown)
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
                    f"{shown}: byte {file.tell():,}: unpacks to over {whole:,} bytes, {BOMB_RATIO} times its size: a "
                    "bomb? Where it is meant so, unpack it and name the unpacked file",
                )
        data = bytes(rest[:size])
        del rest[:size]
        return data

    return read


def _gunzip(file: BinaryIO, shown: str) -> Iterator[bytes]:
    """gzip members, one after another (RFC 1952); zero bytes may follow the last one, as padded copies have them."""
    begin, data, members = 0, file.read(CHUNK), 0  # begin: where `data` lies in the file
    while data:
        if not data.startswith(b"\x1f\x8b"[: len(data)]):
            if not members:
                raise DataError("bad_compression", f"{shown}: byte 0: this is not gzip data")
            if data.strip(b"\0"):
                raise DataError(
                    "bad_compression", f"{shown}: byte {begin:,}: something that is not gzip follows the gzip data"
                )
            begin, data = begin + len(data), file.read(CHUNK)
            continue
        unpacker = zlib.decompressobj(wbits=31)
        while not unpacker.eof:
            try:
                piece = unpacker.decompress(data, CHUNK)
            except zlib.error as error:
                raise DataError(
                    "bad_compression", f"{shown}: near byte {begin:,}: the gzip data is damaged ({error})"
                ) from None
            left = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
            begin, data = begin + len(data) - len(left), left
            if piece:
                yield piece
            if not data and not unpacker.eof:
                data = file.read(CHUNK)
                if not data and not piece:  # as long as there is a piece, zlib may hold more
                    raise DataError("bad_compression", f"{shown}: byte {begin:,}: the gzip data ends early: truncated?")
        members += 1
        data = data or file.read(CHUNK)


def _unzstd(file: BinaryIO, shown: str) -> Iterator[bytes]:
    """zstandard frames, one after another (RFC 8878).

    Fed 1 KiB at a time, because the output of a call has no bound of its own: a block of 4 bytes unpacks to 128 KiB
    at most, so 1 KiB gives up to 32 MiB. That costs 15 % of the speed that 64 KiB would have.
    """
    begin, data, at, frames = 0, file.read(CHUNK), 0, 0  # begin: where `data` lies in the file
    while at < len(data):
        if len(data) - at < 4:
            begin, data, at = begin + at, data[at:] + file.read(CHUNK), 0
        magic = data[at : at + 4]
        skippable = magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5
        if magic != _ZSTD_MAGIC[: len(magic)] and not skippable:
            what = (
                "something that is not zstandard follows the zstandard data" if frames else "this is not zstandard data"
            )
            raise DataError("bad_compression", f"{shown}: byte {begin + at:,}: {what}")
        unpacker = zstandard.ZstdDecompressor().decompressobj()
        while not unpacker.eof:
            if at == len(data):
                begin, data, at = begin + at, file.read(CHUNK), 0
                if not data:
                    raise DataError(
                        "bad_compression", f"{shown}: byte {begin:,}: the zstandard data ends early: truncated?"
                    )
            feed = data[at : at + _ZSTD_FEED]
            try:
                piece = unpacker.decompress(feed)
            except zstandard.ZstdError as error:
                where = f"{shown}: near byte {begin + at:,}"
                raise DataError("bad_compression", f"{where}: the zstandard data is damaged ({error})") from None
            at += len(feed) - len(unpacker.unused_data)
            if piece:
                yield piece
        frames += 1
        if at == len(data):
            begin, data, at = begin + at, file.read(CHUNK), 0
