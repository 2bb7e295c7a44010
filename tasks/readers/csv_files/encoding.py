"""Find the encoding of a text file from its beginning, and read it as UTF-8.

    b"Gr\xfc\xdfe;…"  ─find_encoding─▶  "windows-1252"  ─as_utf8─▶  b"Gr\xc3\xbc\xc3\x9fe;…"

"" stands for UTF-8, with or without a byte order mark. Only UTF-16, UTF-32, and Western European text in windows-1252
are recognized. Any other encoding has to be set in the config.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from contextlib import contextmanager

from tasks.core.errors import DataError
from tasks.core.printable import shown, suggest
from tasks.readers.lines import CHUNK, Read

WIDE_ENCODINGS = {
    "UTF-32": rb"\xff\xfe\0\0|\0\0\xfe\xff", "UTF-32LE": rb"[^\0]\0\0\0", "UTF-32BE": rb"\0\0\0[^\0]",
    "UTF-16": rb"\xff\xfe|\xfe\xff", "UTF-16LE": rb"[^\0]\0[^\0]\0", "UTF-16BE": rb"\0[^\0]\0[^\0]",
}  # fmt: skip
"""The first bytes of a file in each encoding: a byte order mark, or ASCII in wide characters."""

_WIDE = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")

# Names of Python's codecs. Its other codecs do not encode text, or the meaning of their bytes is ambiguous.
_KNOWN = {
    "utf-8", *_WIDE, *(f"cp{1250 + number}" for number in range(9)), *(f"iso8859-{1 + number}" for number in range(16)),
    "cp437", "cp850", "cp852", "cp866", "koi8-r", "koi8-u", "mac-roman", "mac-cyrillic",
    "gb18030", "gbk", "gb2312", "big5", "shift_jis", "cp932", "cp949", "euc_jp", "euc_kr",
}  # fmt: skip

_TYPICAL = ("utf-8", "utf-16", "windows-1252", "windows-1250", "windows-1251", "iso8859-1", "shift_jis", "gb18030")

# In windows-1252, these bytes are symbols and rare letters. Between letters, they indicate another encoding.
_BETWEEN_LETTERS = re.compile(rb"[A-Za-z][\x8a\x8c\x8e\x9a\x9c\x9e\x9f\xa1-\xb3\xb5\xb6\xb8-\xbf][a-z]")


def wide_encoding(start: bytes) -> str:
    """Return the UTF-16 or UTF-32 encoding that the first bytes show, or "".

    The name is the name that iconv uses.
    """
    return next((name for name, first in WIDE_ENCODINGS.items() if re.match(first, start, re.DOTALL)), "")


def check_encoding(name: str) -> str:
    """Return the usual name of an encoding, or "auto" unchanged.

    Raises ValueError with the closest known name if the encoding is not known.
    """
    if name == "auto":
        return name
    try:
        found = codecs.lookup(name).name if name.isascii() and "\0" not in name else ""
    except LookupError:
        found = ""
    found = "utf-8" if found == "utf-8-sig" else found
    if found not in _KNOWN:
        hint = suggest(name, _TYPICAL) or f"; typical are {', '.join(_TYPICAL)}"
        raise ValueError(f"{shown(name)} is not a known encoding{hint}")
    return re.sub(r"^cp125", "windows-125", found)


def find_encoding(start: bytes) -> str | None:
    """Return the encoding of a file that starts with these bytes.

    "" is UTF-8, and None means that the encoding is not clear. A file that is UTF-8 except for a few bytes is UTF-8.
    """
    if wide := wide_encoding(start):
        return check_encoding(wide)
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    text = decoder.decode(start)  # the last character may be incomplete
    bad, other = len(re.findall("[\udc80-\udcff]", text)), len(re.findall("[^\0-\x7f\udc80-\udcff]", text))
    if other >= bad:
        return ""
    return "windows-1252" if 10 * other < bad and _is_western(start) else None


def _is_western(text: bytes) -> bool:
    """Return whether bytes that are not UTF-8 look like windows-1252.

    In such text, letters beyond ASCII are few and rarely next to each other.
    """
    runs = re.findall(rb"[\x80-\xff]+", text)
    count, letters = sum(map(len, runs)), len(re.findall(rb"[A-Za-z\x80-\xff]", text))
    alone = sum(len(run) for run in runs if len(run) < 3)
    return (
        not re.search(rb"[\x81\x8d\x8f\x90\x9d]", text)
        and 4 * alone >= 3 * count
        and 4 * count <= letters
        and 20 * len(_BETWEEN_LETTERS.findall(text)) <= count
    )


def decoded_start(start: bytes, encoding: str, name: str) -> str:
    """Return the beginning of a file as text, without a byte order mark.

    Raises DataError if it cannot be decoded.
    """
    with _decoding(encoding, name):
        return codecs.getincrementaldecoder(encoding or "utf-8")("replace").decode(start).removeprefix("\ufeff")


@contextmanager
def _decoding(encoding: str, name: str) -> Iterator[None]:
    try:
        yield
    except UnicodeError as error:
        reason = getattr(error, "reason", str(error))
        if "BOM" in reason:  # the words before it differ between versions of Python
            reason = f"no byte order mark; use {encoding}-le or {encoding}-be"
        raise DataError("wrong_encoding", f"{name}: is not {encoding}: {reason}; set another encoding") from None


def as_utf8(read: Read, encoding: str, name: str) -> Read:
    """Return a function that reads a file of this encoding as UTF-8.

    A byte that is invalid in the encoding becomes bytes that are invalid in UTF-8. The function raises DataError with
    the name of the file if it cannot continue.
    """
    if not encoding:
        return read
    # Neither error handler produces text that could be mistaken for a character of the file.
    decoder = codecs.getincrementaldecoder(encoding)("surrogatepass" if encoding in _WIDE else "surrogateescape")
    rest, ended = bytearray(), False

    def read_utf8(size: int) -> bytes:
        nonlocal ended
        while len(rest) < size and not ended:
            chunk = read(CHUNK)
            ended = not chunk
            with _decoding(encoding, name):
                rest.extend(decoder.decode(chunk, final=ended).encode("utf-8", "surrogatepass"))
        data = bytes(rest[:size])
        del rest[:size]
        return data

    return read_utf8
