"""Cut a JSON array into its elements without parsing them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from tasks.core.errors import DataError
from tasks.readers.lines import BOM, CHUNK, Read

ARRAY_LIMIT = 2 << 30  # bytes of a JSON array that has to be in memory as a whole


_LOOKED_AT = 16 << 20  # bytes of an array, without an end of an element that is like the first one's


_JSON_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{},"]', re.DOTALL)


def read_whole(read: Read, name: str, begun: bytes = b"") -> bytes:
    """`begun` and all bytes that follow it, without a byte order mark. Raises DataError beyond `ARRAY_LIMIT`."""
    chunks, size = [begun], len(begun)
    while size <= ARRAY_LIMIT and (chunk := read(CHUNK)):
        chunks.append(chunk)
        size += len(chunk)
    if size > ARRAY_LIMIT:
        raise DataError(
            "too_large_json",
            f"{name}: JSON that is not one record a line has to be in memory as a whole, and this is over "
            f"{ARRAY_LIMIT:,} bytes; write one record a line, with  jq -c '.[]' FILE.json > FILE.jsonl",
        )
    return b"".join(chunks).removeprefix(BOM)


def array_blocks(read: Read, name: str) -> Iterator[bytes]:
    """The array as several, one after another, so that it need not be in memory as a whole.

    A block ends where the bytes are those that stand between the first two elements, the first key of the second
    included. Nothing says that such a place is not inside an element; but then the block is not valid JSON, which
    whoever parses it will see. An array whose elements do not look alike comes out as a whole from there on.
    """
    text = between = b""
    while not between and len(text) < _LOOKED_AT and (chunk := read(max(CHUNK, 3 * len(text)))):
        text = (text + chunk).removeprefix(BOM).lstrip()
        between = between_elements(text, name)
    while between:
        end = text.rfind(between)
        if end > 0:
            yield text[: end + 1] + b"]"
            text = b"[" + text[end + 1 :].lstrip().removeprefix(b",")
        chunk = read(CHUNK)
        if not chunk or len(text) > _LOOKED_AT:
            between = b""
        text += chunk
    yield read_whole(read, name, text)


def between_elements(text: bytes, name: str) -> bytes:
    """From the last byte of the first element through the first string of the second; nothing if there are not two."""
    try:
        first, second = islice(array_elements(text, name), 2)
    except (DataError, ValueError):
        return b""
    begin = text.index(first) + len(first)
    end = text.index(second, begin)
    through = second.find(b'"', second.find(b'"') + 1) + 1
    return text[begin - 1 : end + through]


def array_elements(data: bytes, name: str) -> Iterator[bytes]:
    """The text of every element of a JSON array, found by its brackets, commas and strings alone.

    So one bad element costs one record and not the file. Raises DataError when the array does not close, or when
    something follows it.
    """
    depth, begin, count = 0, 0, 0
    for token in _JSON_TOKEN.finditer(data):
        at = token.start()
        byte = data[at : at + 1]
        if byte == b'"':
            if token.end() == at + 1:
                break
        elif byte in b"[{":
            depth += 1
            if depth == 1:
                begin = at + 1
        elif byte == b"," and depth == 1:
            yield data[begin:at].strip()
            begin, count = at + 1, count + 1
        elif byte in b"]}":
            depth -= 1
            if depth == 0:
                last = data[begin:at].strip()
                if count or last:
                    yield last
                rest = data[at + 1 :].lstrip()
                if rest:
                    raise DataError(
                        "bad_json_array", f"{name}: byte {len(data) - len(rest):,}: something follows the JSON array"
                    )
                return
    raise DataError(
        "bad_json_array", f"{name}: the JSON array does not close after record {count + 1:,} begins: truncated?"
    )
