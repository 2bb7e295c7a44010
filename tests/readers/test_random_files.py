"""Files of every container that are cut, joined, or followed by other bytes.

records ─▶ file ─▶ compressed ─▶ joined, cut, followed ─┬─ refused with a code
                                                        └─ the records of an independent reader, and rejects
"""

from __future__ import annotations

import csv
import functools
import gzip
import io
import json
import re
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.containers import as_arrow, as_csv, as_lines
from support.profiles import examples

from packcorpus.tasks.core.errors import PackError, Reject
from packcorpus.tasks.sources.model import Source
from packcorpus.tasks.sources.parts import PartReader, find_parts

Record = dict[str, str]
REJECT = "a reject"


class Case(NamedTuple):
    """Files that are joined, and the damage of the whole.

    `options` are numbers that a writer of a container chooses its options from. `cut` is the share of bytes that is
    kept, or a negative number of bytes that is left out; 1.0 leaves out nothing.
    """

    container: str
    compression: str
    files: tuple[tuple[Record, ...], ...]
    options: int
    cut: float | int
    more: bytes
    part_size: int


# -- writers ----------------------------------------------------------------------------------------------------------


def _parquet(records: Sequence[Record], options: int) -> bytes:
    out = io.BytesIO()
    compression = ("snappy", "none", "zstd", "gzip")[options % 4]
    pq.write_table(
        pa.Table.from_pylist(list(records)), out, row_group_size=1 + options % 5, compression=compression,
        use_dictionary=options % 3 > 0, write_page_checksum=options % 2 > 0, write_statistics=options % 5 > 0,
    )  # fmt: skip
    return out.getvalue()


def _ipc(new: Callable[..., Any]) -> Callable[[Sequence[Record], int], bytes]:
    def write(records: Sequence[Record], options: int) -> bytes:
        chosen = pa.ipc.IpcWriteOptions(
            compression=(None, "zstd", "lz4")[options % 3], use_legacy_format=options % 7 == 0
        )
        return as_arrow(records, lambda out, schema: new(out, schema, options=chosen), 1 + options % 4)

    return write


def _json(records: Sequence[Record], options: int) -> bytes:
    return json.dumps(records, indent=(None, 1)[options % 2], ensure_ascii=options % 3 > 0).encode()


WRITERS: dict[str, tuple[str, Callable[[Sequence[Record], int], bytes]]] = {
    "jsonl": ("a.jsonl", lambda records, options: as_lines(records)),
    "json": ("a.json", _json),
    "csv": ("a.csv", lambda records, options: as_csv(records)),
    "tsv": ("a.tsv", lambda records, options: as_csv(records, "\t")),
    "parquet": ("a.parquet", _parquet),
    "stream": ("a.arrow", _ipc(pa.ipc.new_stream)),
    "file": ("a.arrow", _ipc(pa.ipc.new_file)),
}
TEXT = ("jsonl", "json", "csv", "tsv")
LAYOUT: dict[str, Any] = {
    "csv": {"delimiter": ",", "encoding": "utf-8"},
    "tsv": {"delimiter": "\t", "encoding": "utf-8"},
}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def data_of(case: Case) -> bytes:
    write = WRITERS[case.container][1]
    data = b"".join(COMPRESS[case.compression](write(records, case.options)) for records in case.files)
    kept = int(len(data) * case.cut) if isinstance(case.cut, float) else len(data) + case.cut
    return data[: max(0, kept)] + case.more


# -- independent readers ----------------------------------------------------------------------------------------------


def expected(case: Case, data: bytes) -> list[Any] | None:
    """Return the records of a file, with REJECT in place of each that cannot be read.

    Returns None if the file as a whole cannot be read.
    """
    if case.container not in TEXT:
        may_join = case.container == "stream" or len(case.files) == 1
        return [record for file in case.files for record in file] if may_join and data == data_of(whole(case)) else None
    try:
        return READERS[case.container](DECOMPRESS[case.compression](data))
    except (ValueError, EOFError, zlib.error, zstandard.ZstdError, csv.Error, OSError):
        return None


def whole(case: Case) -> Case:
    return case._replace(cut=1.0, more=b"")


def _unzstd(data: bytes) -> bytes:
    out = b""
    while data:
        frame = zstandard.ZstdDecompressor().decompressobj()
        out += frame.decompress(data)
        if not frame.eof:
            raise EOFError
        data = frame.unused_data
    return out


DECOMPRESS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.decompress, ".zst": _unzstd}


def _lines(data: bytes) -> list[Any]:
    return [_line(line) for line in data.split(b"\n") if line.strip()]


def _line(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except ValueError:
        return REJECT


def _array(data: bytes) -> list[Any]:
    found = json.loads(data.decode())
    if not isinstance(found, list):
        raise ValueError
    return found


_ESCAPED = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8


def _table(delimiter: str) -> Callable[[bytes], list[Any]]:
    def read(data: bytes) -> list[Any]:
        text = io.StringIO(data.decode(errors="surrogateescape"), newline="")
        header, *rows = [row for row in csv.reader(text, delimiter=delimiter, strict=True) if row]
        if rows:
            "".join(header).encode()  # the names of columns are UTF-8

        def record(row: list[str], is_cut: bool) -> Any:
            # A second header shows that files are joined. A program may leave out empty cells at the end of a row.
            fits = (len(row) == len(header) or (len(row) < len(header) and not is_cut)) and row != header
            row = row + [""] * (len(header) - len(row))
            return dict(zip(header, row, strict=True)) if fits and not _ESCAPED.search("".join(row)) else REJECT

        is_cut = not data.endswith((b"\n", b"\r"))
        return [record(row, is_cut and number == len(rows)) for number, row in enumerate(rows, 1)]

    return read


READERS = {"jsonl": _lines, "json": _array, "csv": _table(","), "tsv": _table("\t")}

# -- the check --------------------------------------------------------------------------------------------------------


@functools.cache
def _place() -> Path:
    _KEPT.append(tempfile.TemporaryDirectory(prefix="test_random_files_"))
    return Path(_KEPT[-1].name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def read(name: str, case: Case) -> list[object] | PackError:
    """Return the records of a file, or the error that refuses it."""
    source = Source(path=name, format="prompt_completion", **LAYOUT.get(case.container, {}))
    try:
        [(_, parts)] = find_parts([source], _place(), case.part_size)
        return [record for part in parts for _, record in PartReader(part)]
    except PackError as error:
        return error


def check(case: Case) -> str:
    """Check that a file is refused or read as a whole, and return the outcome."""
    data = data_of(case)
    name = WRITERS[case.container][0] + case.compression
    (_place() / name).write_bytes(data)
    there = expected(case, data)
    records = read(name, case)
    if isinstance(records, PackError):
        assert str(records).startswith(name), str(records)
        assert there is None or data != data_of(whole(case)), f"refused: {records}"
        return f"refused: {records.reason}"
    here = [REJECT if isinstance(record, Reject) else record for record in records]
    assert here == there, f"read {here}, but there is {there}"
    return "read with rejects" if REJECT in here else "read"


TEXTS = st.text(st.sampled_from("ab1 ,;\t\n\"'{}[]:\\é漢🙂"), max_size=12)
RECORDS = st.lists(st.fixed_dictionaries({"prompt": TEXTS, "completion": TEXTS}), min_size=1, max_size=12).map(tuple)
CUTS = st.just(1.0) | st.floats(0, 1) | st.integers(-24, -1)
MORE = st.just(b"") | st.sampled_from([b"\0", b"\0" * 8, b"\n", b"more", b"ARROW1", b"PAR1", b"]", b"\xff\xff\xff\xff"])
MORE |= st.binary(max_size=12)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    container = draw(st.sampled_from(list(WRITERS)))
    compression = draw(st.sampled_from(list(COMPRESS))) if container in TEXT else ""
    files = tuple(draw(st.lists(RECORDS, min_size=1, max_size=3)))
    sizes = draw(st.sampled_from([1, 30, 200, 1 << 20]))
    return Case(container, compression, files, draw(st.integers(0, 419)), draw(CUTS), draw(MORE), sizes)


TWO = (({"prompt": "q", "completion": "a"},), ({"prompt": "other", "completion": "b"},))


@settings(max_examples=examples(300), suppress_health_check=list(HealthCheck))
@example(Case("parquet", "", TWO, 0, 1.0, b"", 1 << 20))
@example(Case("stream", "", TWO, 0, -8, b"", 1 << 20))
@given(cases())
def test_a_file_is_read_as_a_whole_or_refused(case: Case) -> None:
    check(case)
