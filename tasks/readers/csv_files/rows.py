"""CSV and TSV: one record of strings per row; the first row names the columns.

Files are read line by line. A quoted cell may contain line ends.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from typing import BinaryIO

from tasks.core.errors import DataError, Reject
from tasks.core.printable import counted, shown
from tasks.readers.container import Container, File, Record, RecordReader, Rows, Window, in_blocks
from tasks.readers.csv_files.encoding import as_utf8
from tasks.readers.lines import BOM, CHUNK, TOO_LONG, WINDOW, Read, end_of_line, line_blocks

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
        _raise_field_limit(reader.max_record_bytes)
        name = reader.file.name
        lines = _Lines()
        delimiter, encoding = reader.file.delimiter or self.delimiter, reader.file.encoding
        with reader.open_text() as file:
            read = as_utf8(file, encoding, name)
            rows = csv.reader(lines.decoded(reader, read), delimiter=delimiter, strict=True)
            header: list[str] = []
            while True:
                try:
                    row = next(rows, None)
                except csv.Error as error:
                    raise DataError(
                        "bad_csv_file", f"{name}: line {rows.line_num}: {error}; is a quote left open?"
                    ) from None
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
            text = source.read(CHUNK).decode("utf-8", "replace")
        header = next(csv.reader(io.StringIO(text), delimiter=character), [])
        delimiter = re.escape(character).encode()
        cell = rb'(?:"(?:[^"]|"")*+"|[^"\r\n%s]*+)' % delimiter
        row = re.compile(rb"%s(?:%s%s){%d}(?:\r?\n|\Z)" % (cell, delimiter, cell, len(header) - 1))
        _raise_field_limit(max_record_bytes)

        def window(source: BinaryIO, start: int, stop: int) -> tuple[list[Record], int]:
            start = start or begin
            top = end_of_line(source, start - 1, max_record_bytes) if start > begin else begin
            for ahead in (WINDOW, CHUNK):  # for the end of the last row
                source.seek(top)
                text = source.read(max(0, stop - top) + ahead)
                spans = _row_spans(row, text, stop - top, whole=top + len(text) == file.bytes)
                if spans:
                    size = spans[-1][1] - spans[0][0]
                    origin = f"{file.name}, from byte {top:,} record " if start > begin else f"{file.name}:"
                    rows = [text[first:last] for first, last in spans][start == begin :]  # the header is not a record
                    found = ((number, line) for number, line in enumerate(rows, 1) if line.strip())
                    return [
                        Record(f"{origin}{number}", _parse(header, line, character)) for number, line in found
                    ], size
            return [], 0

        return window


class Tsv(Csv):
    name = "tsv"
    extensions = (".tsv",)
    delimiter = "\t"


def _raise_field_limit(size: int) -> None:
    """Allow cells of this size.

    The limit is global to the process. It is never lowered, because another reader may need it.
    """
    csv.field_size_limit(max(csv.field_size_limit(), size))


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


def _parse(header: list[str], row: bytes, delimiter: str) -> object:
    try:
        cells = next(csv.reader(io.StringIO(row.decode(), newline=""), delimiter=delimiter, strict=True))
    except UnicodeDecodeError as error:
        return Reject("bad_utf8", f"a byte at offset {error.start} of the row is not UTF-8{_OTHER_ENCODING}")
    return _record(header, cells, _Lines(), "")


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
    """Return [start, stop) of each row that starts before `stop`.

    The rows begin at the first line from which on only rows follow.
    """
    first = 0
    while first < stop:
        spans: list[tuple[int, int]] = []
        at = first
        while at < stop and (found := row.match(text, at)) and (whole or found.end() < len(text)):
            spans.append(found.span())
            at = found.end()
        if at >= stop or at == len(text):
            return spans
        # All lines since `first` lead to this place, so none of them starts a row. Try the next line.
        first = text.find(b"\n", at, stop) + 1
        if not first:
            break
    return []
