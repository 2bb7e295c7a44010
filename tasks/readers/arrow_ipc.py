"""Arrow IPC: streams one after another, or a file with a footer (Feather).

The first bytes distinguish them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.readers.container import File, RecordReader, Table
from packcorpus.tasks.readers.lines import Range
from packcorpus.tasks.readers.tables import TableContainer, cut_rows, readable, rows_between, wanted

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
            yield from rows_between(_batches(pa.PythonFile(file), reader.file.name), 0, reader.start, reader.stop)

    def cut(self, file: File, ranges: list[Range], part_size: int) -> list[Range]:
        """Cut the file where record batches reach `part_size` bytes, as they are stored.

        Larger batches are cut by rows.
        """
        if file.bytes < 2 * part_size:
            return ranges
        with readable(self.name, file.name), pa.memory_map(str(file.path)) as source:
            return cut_rows(ranges, part_size, sizes) if (sizes := _sizes(source)) else ranges

    def is_far(self, file: File, start: int, stop: int) -> bool:
        return True

    def copied_bytes(self, file: File, part_size: int) -> float:
        return float(file.bytes) * (file.bytes >= 2 * part_size)

    def column_names(self, file: File) -> list[str]:
        with readable(self.name, file.name), pa.memory_map(str(file.path)) as source:
            return list(_open(source, file.name).schema.names)

    @contextmanager
    def table(self, file: File) -> Iterator[Table]:
        """Open all batches as one group. Only the headers of mapped batches are read."""
        with readable(self.name, file.name), pa.memory_map(str(file.path)) as source:
            before, reach, batches = pa.total_allocated_bytes(), 1.0, []
            for batch in _batches(source, file.name):
                batches.append(batch.select(wanted(batch.schema.names, file)))
                if pa.total_allocated_bytes() - before > _DECOMPRESSED:  # compressed batches cannot be mapped
                    reach = min(_ALMOST, source.tell() / file.bytes)
                    break
            rows = sum(batch.num_rows for batch in batches)
            row_bytes = sum(batch.nbytes for batch in batches) / max(rows, 1)
            yield Table([rows], row_bytes, lambda group, at_most: iter(batches), reach)


def count_rows(path: Path, name: str) -> int:
    """Count the rows of a file by its headers. Raises DataError if it is damaged."""
    with readable(ArrowIpc.name, name), pa.memory_map(str(path)) as source:
        return sum(batch.num_rows for batch in _batches(source, name))


def _sizes(source: Any) -> list[tuple[int, int]]:
    """Return the rows and the stored bytes of each record batch.

    Returns nothing if a message is damaged. Nothing is decompressed. Metadata is a table of the FlatBuffers format:
    field 2 of a message is its header, and field 0 of the header of a record batch is the number of rows.
    """
    sizes = list[tuple[int, int]]()
    with suppress(pa.ArrowException, OSError, EOFError, struct.error):
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        count = pa.ipc.open_file(source).num_record_batches if is_file else -1
        source.seek(8 * is_file)
        while source.tell() < source.size() and not (is_file and sizes):
            for message in pa.ipc.MessageReader.open_stream(source):
                if message.type == "record batch":
                    metadata = message.metadata.to_pybytes()
                    header = _field(metadata, struct.unpack_from("<I", metadata)[0], 2)
                    rows = _field(metadata, header + struct.unpack_from("<I", metadata, header)[0], 0)
                    sizes.append((struct.unpack_from("<q", metadata, rows)[0], message.body.size))
        return sizes if count in (-1, len(sizes)) else []
    return []


def _field(data: bytes, table: int, number: int) -> int:
    """Return the place of a field of a FlatBuffers table. Raises struct.error."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    (offset,) = struct.unpack_from("<H", data, fields + 4 + 2 * number)
    if not offset:
        raise struct.error("the field is absent")
    return int(table + offset)


def _batches(source: Any, name: str) -> Iterator[Any]:
    """Yield all batches. Raises DataError if a stream has no end, or more follows."""
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
    """Return where the message at a place begins and ends; equal without a message."""
    source.seek(place)
    start = source.read(len(_CONTINUATION) + _LENGTH.size)
    mark = len(_CONTINUATION) * start.startswith(_CONTINUATION)
    length = start[mark : mark + _LENGTH.size]
    begin = place + mark + len(length)
    return begin, begin + (_LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else 0)


def _check_footer(source: Any, name: str) -> None:
    """Raise DataError if a footer does not follow the last message that it lists.

    If files were appended to each other, Arrow would read the first one by the footer of the last one. A footer is a
    table of the FlatBuffers format. Its fields 2 and 3 are lists of the places of messages.
    """
    source.seek(source.size() - _FOOTER_END.size)
    size, _ = _FOOTER_END.unpack(source.read())
    at = source.size() - _FOOTER_END.size - size
    source.seek(at)
    footer = source.read(size)
    (table,) = struct.unpack_from("<I", footer)
    fields = table - struct.unpack_from("<i", footer, table)[0]
    (end_of_fields,) = struct.unpack_from("<H", footer, fields)
    stop = 0
    for place in (fields + 8, fields + 10):
        offset = struct.unpack_from("<H", footer, place)[0] if place < fields + end_of_fields else 0
        if offset:
            blocks = table + offset + struct.unpack_from("<I", footer, table + offset)[0]
            for index in range(struct.unpack_from("<I", footer, blocks)[0]):
                stop = max(stop, sum(_BLOCK.unpack_from(footer, blocks + 4 + _BLOCK.size * index)))
    if not stop:  # no message follows the schema
        _, stop = _message_at(source, 8)
    source.seek(min(stop, at))
    between = source.read(min(at - stop, _PADDED_END)) if stop < at else b""
    if stop + len(between) != at or between.strip(_CONTINUATION + _END):
        raise _damaged(name, "holds several Arrow files, or other data before its footer; make one file of each")


def _damaged(name: str, problem: str) -> DataError:
    return DataError("unreadable_source", f"{name}: {problem}")
