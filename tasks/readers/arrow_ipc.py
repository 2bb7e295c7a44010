"""Arrow IPC: streams one after another, or a file with a footer (Feather).

The first bytes distinguish them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.core.errors import DataError
from tasks.readers.container import File, RecordReader, Table
from tasks.readers.tables import TableContainer, readable, wanted

_FILE_MAGIC = b"ARROW1"

_FOOTER_END = struct.Struct("<i6s")  # the length of the footer, and the magic bytes again

_BLOCK = struct.Struct("<qi4xq")  # the offset of a message, the length of its metadata, and the length of its body

_LENGTH = struct.Struct("<i")  # of a message; before it, files written since 2019 have this mark:
_CONTINUATION = b"\xff\xff\xff\xff"

_END = _LENGTH.pack(0)  # of a stream

_PADDED_END = 128  # maximum bytes between the last message of a file and its footer

_DECOMPRESSED = 64 << 20  # bytes of compressed batches that are decompressed for a sample

_ALMOST = 0.99  # maximum share of a file that counts as read if its end is not reached


class ArrowIpc(TableContainer):
    name = "arrow"
    extensions = (".arrow", ".feather")

    def batches(self, reader: RecordReader) -> Iterator[Any]:
        # not memory-mapped, because the process would be killed if a mapped file was truncated
        with reader.file.open() as file:
            reader.track(file.tell, 0, reader.file.bytes)
            yield from _batches(pa.PythonFile(file), reader.file.name)

    def column_names(self, file: File) -> list[str]:
        with readable(self.name, file.name), pa.memory_map(str(file.path)) as source:
            return list(_open(source, file.name).schema.names)

    @contextmanager
    def table(self, file: File) -> Iterator[Table]:
        with readable(self.name, file.name), pa.memory_map(str(file.path)) as source:
            yield _MappedBatches(source, file)


class _MappedBatches:
    """All record batches of a file, as one group.

    The file is memory-mapped: if no row is drawn from a batch, only its header is read.
    """

    def __init__(self, source: Any, file: File):
        before, self.reach = pa.total_allocated_bytes(), 1.0
        self._batches = []
        for batch in _batches(source, file.name):
            self._batches.append(batch.select(wanted(batch.schema.names, file)))
            if pa.total_allocated_bytes() - before > _DECOMPRESSED:  # compressed batches cannot be mapped
                self.reach = min(_ALMOST, source.tell() / file.bytes)
                break
        self.rows = [sum(batch.num_rows for batch in self._batches)]
        self.row_bytes = sum(batch.nbytes for batch in self._batches) / max(self.rows[0], 1)

    def batches(self, group: int, at_most: float) -> Iterator[Any]:
        return iter(self._batches)


def count_rows(path: Path, name: str) -> int:
    """Return the number of rows of a file, from the headers of its batches.

    Raises DataError if the file is damaged.
    """
    with readable(ArrowIpc.name, name), pa.memory_map(str(path)) as source:
        return sum(batch.num_rows for batch in _batches(source, name))


def _batches(source: Any, name: str) -> Iterator[Any]:
    """Yield all batches of an open file.

    Raises DataError if a stream lacks its end marker, or if something else follows.
    """
    reader, rows = _open(source, name), 0
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        _check_footer(source, name)
        yield from map(reader.get_batch, range(reader.num_record_batches))
        return
    begin = 0
    while True:
        before = source.tell()
        for batch in reader:
            yield batch
            rows, before = rows + batch.num_rows, source.tell()
        stop = source.tell()
        source.seek(begin)
        end = _CONTINUATION + _END if source.read(len(_CONTINUATION)) == _CONTINUATION else _END
        source.seek(stop - len(end))
        if source.read(len(end)) != end or stop == before:
            raise _damaged(
                name,
                f"the Arrow stream has no end marker after record {rows:,}: truncated? Write it again, and close its "
                "writer",
            )
        if stop == source.size():
            return
        begin = stop
        reader = _open(source, name)


def _open(source: Any, name: str) -> Any:
    """Open the file, or the stream at the current place, with a reader of pyarrow."""
    place = source.tell()
    start = source.read(8)
    source.seek(place)
    if not place and start.startswith(_FILE_MAGIC):
        source.seek(max(0, source.size() - len(_FILE_MAGIC)))
        if source.read() != _FILE_MAGIC:
            raise _damaged(name, "does not end like an Arrow file: truncated, or followed by something else?")
        return pa.ipc.open_file(source)
    if start.startswith(b"FEA1"):
        raise _damaged(
            name,
            'is a Feather file of version 1; convert it with  python -c "import pyarrow.feather as f; '
            f"f.write_feather(f.read_table({name!r}), 'converted.feather')\"",
        )
    begin, stop = _message_at(source, place)
    source.seek(place)
    if not begin < stop <= source.size():  # Arrow would allocate any length
        problem = f"byte {place:,}: the Arrow stream is followed by something else" if place else "is not an Arrow file"
        raise _damaged(name, problem)
    return pa.ipc.open_stream(source)


def _message_at(source: Any, place: int) -> tuple[int, int]:
    """Return where the message at a place begins, after its length, and where it ends.

    Both are equal if there is no message.
    """
    source.seek(place)
    start = source.read(len(_CONTINUATION) + _LENGTH.size)
    mark = len(_CONTINUATION) * start.startswith(_CONTINUATION)
    length = start[mark : mark + _LENGTH.size]
    begin = place + mark + len(length)
    return begin, begin + (_LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else 0)


def _check_footer(source: Any, name: str) -> None:
    """Raise DataError if a footer does not follow the last message that it lists.

    If files were appended to each other, Arrow would read the first one by the footer of the last one.
    """
    source.seek(source.size() - _FOOTER_END.size)
    size, _ = _FOOTER_END.unpack(source.read())
    footer = source.size() - _FOOTER_END.size - size
    source.seek(footer)
    stop = _end_of_blocks(source.read(size))
    if not stop:  # no message follows the schema
        _, stop = _message_at(source, 8)
    source.seek(min(stop, footer))
    between = source.read(min(footer - stop, _PADDED_END)) if stop < footer else b""
    if stop + len(between) != footer or between.strip(_CONTINUATION + _END):
        raise _damaged(name, "holds several Arrow files, or other data before its footer; make one file of each")


def _end_of_blocks(footer: bytes) -> int:
    """Return the end of the last message that a footer lists, or 0 if it lists none.

    A footer is a table of the FlatBuffers format. Its fields 2 and 3 are lists of the places of messages.
    """
    (table,) = struct.unpack_from("<I", footer)
    fields = table - struct.unpack_from("<i", footer, table)[0]
    (size,) = struct.unpack_from("<H", footer, fields)
    stop = 0
    for place in (fields + 8, fields + 10):
        offset = struct.unpack_from("<H", footer, place)[0] if place < fields + size else 0
        if offset:
            blocks = table + offset + struct.unpack_from("<I", footer, table + offset)[0]
            for index in range(struct.unpack_from("<I", footer, blocks)[0]):
                stop = max(stop, sum(_BLOCK.unpack_from(footer, blocks + 4 + _BLOCK.size * index)))
    return stop


def _damaged(name: str, problem: str) -> DataError:
    return DataError("unreadable_source", f"{name}: {problem}")
