"""Decompress a file in bounded memory.

    file ─decompressed─→ read(n) ─line_blocks─→ ([b'{"text":"a"}', b'', b'{"text":"b"}'], False), ([b'{"tex'], True)

`read(n)` returns n bytes, and fewer only at the end.
"""

from __future__ import annotations

import gzip
import zlib
from typing import BinaryIO

import pyarrow as pa

from tasks.core.errors import DataError
from tasks.readers.lines import Read

# A file is refused if it decompresses to more than BOMB_BYTES and more than BOMB_RATIO times its size: a bomb of a few
# megabytes would keep a run busy for hours. Chats decompress to 3 to 30 times their size.
BOMB_BYTES, BOMB_RATIO = 64 << 20, 200

DECOMPRESS = {"": "cat", "gz": "gunzip -c", "zst": "unzstd -c"}  # shell commands, for messages

KINDS = {"gz": "gzip", "zst": "zstandard"}


def decompressed(file: BinaryIO, compression: str, name: str) -> Read:
    """Return a function that reads the decompressed bytes of an open file.

    `compression` is "", "gz", or "zst". The members or frames of a file are read as one text. The function raises
    DataError if the data is damaged, ends early, is followed by something else, or is a decompression bomb. The message
    contains `name` and the offset in the compressed file.
    """
    if not compression:
        return file.read
    # zstandard's own reader returns what it has if the data ends early, without an error; that of Arrow does not.
    # Arrow's reader of gzip refuses the zero bytes at the end of padded copies; that of Python does not.
    stream = (
        gzip.GzipFile(fileobj=file, mode="rb")
        if compression == "gz"
        else pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")
    )
    kind, whole = KINDS[compression], 0

    def read(size: int) -> bytes:
        nonlocal whole
        try:
            data: bytes = stream.read(size)
        except (OSError, EOFError, zlib.error) as error:
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
            raise DataError(
                "bomb",
                f"{name}: byte {file.tell():,}: decompresses to over {whole:,} bytes, {BOMB_RATIO} times its "
                "size: a decompression bomb? If this is intended, decompress it and use the decompressed file",
            )
        return data

    return read
