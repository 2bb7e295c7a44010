"""Read CSV and TSV: a record of strings per row; the first one names the columns.

The encoding and the delimiter are found at the start of the file:

    b"Gr\\xfc\\xdfe;…"  ─find_encoding─▶  "windows-1252"  ─as_utf8─▶  b"Gr\\xc3\\xbc\\xc3\\x9fe;…"

`""` stands for UTF-8, with or without a byte order mark. Only UTF-16, UTF-32, and Western European text in windows-1252
are recognized. Any other encoding has to be set in the config. Files are read line by line, and a quoted cell may
contain line ends.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import BinaryIO

from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.core.printable import counted, shown, suggest
from packcorpus.tasks.readers.container import Container, File, Record, RecordReader, Rows, Window, in_blocks
from packcorpus.tasks.readers.lines import BOM, CHUNK, TOO_LONG, WINDOW, Read, end_of_line, line_blocks

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
    """Return the UTF-16 or UTF-32 encoding (by iconv) that the start shows, or ""."""
    return next((name for name, first in WIDE_ENCODINGS.items() if re.match(first, start, re.DOTALL)), "")


def check_encoding(name: str) -> str:
    """Return the usual name of an encoding, or "auto". Raises ValueError."""
    if name == "auto":
        return name
    usual = ""
    with suppress(LookupError):
        usual = codecs.lookup(name).name.removesuffix("-sig") if name.isascii() and "\0" not in name else ""
    if usual not in _KNOWN:
        hint = suggest(name, _TYPICAL) or f"; typical are {', '.join(_TYPICAL)}"
        raise ValueError(f"{shown(name)} is not a known encoding{hint}")
    return re.sub(r"^cp125", "windows-125", usual)


def find_encoding(start: bytes) -> str | None:
    """Return the encoding of a file by its start; "" is UTF-8, None is not clear.

    A file that is UTF-8 except for a few bytes is UTF-8.
    """
    if wide := wide_encoding(start):
        return check_encoding(wide)
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    text = decoder.decode(start)  # the last character may be incomplete
    bad, other = len(re.findall("[\udc80-\udcff]", text)), len(re.findall("[^\0-\x7f\udc80-\udcff]", text))
    if other >= bad:
        return ""
    # In Western European text, letters beyond ASCII are few and rarely next to each other.
    runs = re.findall(rb"[\x80-\xff]+", start)
    count, letters = sum(map(len, runs)), len(re.findall(rb"[A-Za-z\x80-\xff]", start))
    is_western = (
        not re.search(rb"[\x81\x8d\x8f\x90\x9d]", start)  # bytes without a meaning in windows-1252
        and 4 * sum(len(run) for run in runs if len(run) < 3) >= 3 * count
        and 4 * count <= letters
        and 20 * len(_BETWEEN_LETTERS.findall(start)) <= count
    )
    return "windows-1252" if 10 * other < bad and is_western else None


def decoded_start(start: bytes, encoding: str, name: str) -> str:
    """Return the start of a file as text. Raises DataError for another encoding."""
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
    """Return a function that reads a file as UTF-8. It raises DataError.

    A byte that is invalid in the encoding becomes bytes that are invalid in UTF-8.
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


DELIMITERS = (",", ";", "\t", "|")
_ROWS = 20  # number of rows that are read to find the delimiter


def check_delimiter(value: str) -> str:
    """Return a delimiter as one character, or "auto". Raises ValueError."""
    if value in ("tab", "\\t"):
        return "\t"
    if value == "auto" or (len(value) == 1 and value.isascii() and not value.isalnum() and value not in '"\r\n\0'):
        return value
    raise ValueError(
        f"{shown(value)} is not a delimiter; use `tab` or a single character that is not a letter or digit, such as ';'"
    )


def find_delimiter(text: str, usual: str, is_known: Callable[[list[str]], bool]) -> str:
    """Return the delimiter of a file that starts with `text`.

    `is_known` returns whether the cells of a header are the keys of a format. Raises ValueError if several delimiters
    are equally likely.
    """
    _allow_cells(len(text))
    tables: dict[str, list[list[str]]] = {}
    for delimiter in dict.fromkeys((usual, *DELIMITERS)):
        with suppress(csv.Error):
            rows = list(islice(_rows_of(text, delimiter), _ROWS))
            if rows and len(rows[0]) > 1:  # several columns
                tables[delimiter] = rows
    likely = [delimiter for delimiter, rows in tables.items() if is_known(rows[0])]
    # Rows of a table have equally many cells. The last row may be incomplete.
    likely = likely or [
        delimiter for delimiter, rows in tables.items() if all(len(row) in (0, len(rows[0])) for row in rows[1:-1])
    ]
    if usual in likely or not likely:
        return usual
    if len(likely) > 1:
        raise ValueError(f"its cells may be separated by {' or '.join(map(name_of, likely))}")
    return likely[0]


def name_of(delimiter: str) -> str:
    """Return the name of a delimiter in messages and as a value of the setting."""
    return "tab" if delimiter == "\t" else f"'{delimiter}'"


_OTHER_ENCODING = "; if the whole file has another encoding, set it, such as encoding: windows-1252"


class Csv(Container):
    name = "csv"
    extensions = (".csv",)
    record = "a row; the first row is the header"
    is_text = True
    delimiter = ","

    def read(self, reader: RecordReader) -> Iterator[Rows]:
        return in_blocks(self._rows(reader))

    def _rows(self, reader: RecordReader) -> Iterator[tuple[object, int]]:
        _allow_cells(reader.max_record_bytes)
        name = reader.file.name
        lines = _Lines()
        delimiter, encoding = reader.file.delimiter or self.delimiter, reader.file.encoding
        with reader.open_text() as file:
            rows = csv.reader(lines.decoded(reader, as_utf8(file, encoding, name)), delimiter=delimiter, strict=True)
            header: list[str] = []
            while True:
                try:
                    row = next(rows, None)
                except csv.Error as error:
                    problem = f"line {rows.line_num}: {error}; is a quote left open?"
                    raise DataError("bad_csv_file", f"{name}: {problem}") from None
                if row is None:
                    return
                if not header:
                    header = row
                    if len(set(header)) < len(header):
                        twice = next(column for column in header if header.count(column) > 1)
                        raise DataError("bad_csv_file", f"{name}: line 1: two columns are named {shown(twice)}")
                elif row:
                    yield _record(header, row, lines, encoding), sum(map(len, row))
                lines.damaged.clear()

    def window(self, file: File, max_record_bytes: int) -> Window | None:
        """Return a function that reads rows from the middle of the file.

        Reading begins at the first line from which on all lines are rows with as many cells as the header. A line
        within a quoted cell may look like a row, but no row starts where that cell ends. A file with quotes in unquoted
        cells has no such line. Returns None if the encoding is not UTF-8.
        """
        if file.encoding:
            return None
        character = file.delimiter or self.delimiter
        with file.open() as source:
            begin = 3 * source.read(3).startswith(BOM)
            source.seek(begin)
            header = next(_rows_of(source.read(CHUNK).decode("utf-8", "replace"), character), [])
        delimiter = re.escape(character).encode()
        cell = rb'(?:"(?:[^"]|"")*+"|[^"\r\n%s]*+)' % delimiter
        row = re.compile(rb"%s(?:%s%s){%d}(?:\r?\n|\Z)" % (cell, delimiter, cell, len(header) - 1))
        _allow_cells(max_record_bytes)

        def parse(line: bytes) -> object:
            try:
                cells = next(_rows_of(line.decode(), character, strict=True))
            except UnicodeDecodeError as error:
                return Reject("bad_utf8", f"a byte at offset {error.start} of the row is not UTF-8{_OTHER_ENCODING}")
            return _record(header, cells, _Lines(), "")

        def window(source: BinaryIO, start: int, stop: int) -> tuple[list[Record], int]:
            start = start or begin
            top = end_of_line(source, start - 1, max_record_bytes) if start > begin else begin
            for ahead in (WINDOW, CHUNK):  # for the end of the last row
                source.seek(top)
                text = source.read(max(0, stop - top) + ahead)
                if spans := _row_spans(row, text, stop - top, whole=top + len(text) == file.bytes):
                    origin = f"{file.name}, from byte {top:,} record " if start > begin else f"{file.name}:"
                    rows = [text[first:last] for first, last in spans][start == begin :]  # the header is not a record
                    records = [Record(f"{origin}{n}", parse(line)) for n, line in enumerate(rows, 1) if line.strip()]
                    return records, spans[-1][1] - spans[0][0]
            return [], 0

        return window


class Tsv(Csv):
    name = "tsv"
    extensions = (".tsv",)
    delimiter = "\t"


def _allow_cells(size: int) -> None:
    """Allow cells of this size, never smaller ones: another reader may need it."""
    csv.field_size_limit(max(csv.field_size_limit(), size))


def _rows_of(text: str, delimiter: str, strict: bool = False) -> Iterator[list[str]]:
    return csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=strict)


class _Lines:
    """The lines of a file as text.

    `damaged` has the offset of the first bad byte of each line of the current row that is not UTF-8. `unterminated`
    means that the current line is the last one, and has no line end.
    """

    def __init__(self) -> None:
        self.damaged: list[int] = []
        self.unterminated = False

    def decoded(self, reader: RecordReader, read: Read) -> Iterator[str]:
        """Yield lines with their line ends.

        In a line that is not UTF-8, surrogates replace the bad bytes. The line is still yielded, because it may be one
        of several lines of a record.
        """
        for lines, self.unterminated in line_blocks(read, reader.max_record_bytes):
            for line in lines:
                if line == TOO_LONG:
                    raise DataError("too_long_line", f"{reader.file.name}: {reader.too_long()}")
                try:
                    text = line.decode()
                except UnicodeDecodeError as error:
                    self.damaged.append(error.start)
                    text = line.decode("utf-8", "surrogateescape")
                yield text if self.unterminated else text + "\n"


def _record(header: list[str], row: list[str], lines: _Lines, encoding: str) -> object:
    if len(row) > len(header) or (lines.unterminated and len(row) < len(header)):
        cut = "; the last line ends early: truncated?" * (len(row) < len(header))
        return Reject("bad_csv", f"the row has {counted(len(row), 'cell')}, the header has {len(header)}{cut}")
    if lines.damaged:
        if encoding:
            return Reject("bad_utf8", f"the row is not {encoding}; set another encoding, or fix the row")
        return Reject("bad_utf8", f"a byte at offset {lines.damaged[0]} of its line is not UTF-8{_OTHER_ENCODING}")
    if row == header:
        return Reject("bad_csv", "the row repeats the header; remove it, or make a file of each if several were joined")
    row += [""] * (len(header) - len(row))
    return dict(zip(header, row, strict=True))


def _row_spans(row: re.Pattern[bytes], text: bytes, stop: int, whole: bool) -> list[tuple[int, int]]:
    """Return [start, stop) of the rows before `stop` from which on only rows follow."""
    first = 0
    while first < stop:
        spans: list[tuple[int, int]] = []
        at = first
        while at < stop and (match := row.match(text, at)) and (whole or match.end() < len(text)):
            spans.append(match.span())
            at = match.end()
        if at >= stop or at == len(text):
            return spans
        # All lines since `first` lead to this place, so none of them starts a row. Try the next line.
        first = text.find(b"\n", at, stop) + 1
        if not first:
            break
    return []
