"""Files of every container that do not end where they should.

Each is an error or a reject, or all its records are read. `FILE_ENDS` in docs/generate.py describes the cases.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from support.containers import WRITERS, as_arrow, as_lines, as_parquet

from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.readers.containers import container_named
from packcorpus.tasks.sources.model import Source
from packcorpus.tasks.sources.parts import PartReader, find_parts
from packcorpus.tasks.sources.source_files import find_files

RECORDS = [{"prompt": f"q{number}", "completion": f"a{number}"} for number in range(6)]
OTHERS = [{"prompt": f"other {number}", "completion": "x"} for number in range(6)]


def file_of(records: list[dict[str, str]]) -> bytes:
    return as_arrow(records, pa.ipc.new_file, 2)


def stream_of(records: list[dict[str, str]], **options: Any) -> bytes:
    return as_arrow(records, lambda out, schema: pa.ipc.new_stream(out, schema, **options), 2)


def dictionary_stream(records: list[dict[str, str]]) -> bytes:
    """Return a stream whose texts are in a dictionary, a message of its own."""
    out = io.BytesIO()
    table = pa.Table.from_pylist(records)
    table = table.set_column(0, "prompt", table["prompt"].dictionary_encode())
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


OLD = pa.ipc.IpcWriteOptions(use_legacy_format=True, metadata_version=pa.ipc.MetadataVersion.V4)
FILES: dict[str, tuple[str, Callable[[list[dict[str, str]]], bytes]]] = {
    "jsonl": ("a.jsonl", as_lines),
    "json": ("a.json", WRITERS["json"]),
    "csv": ("a.csv", WRITERS["csv"]),
    "tsv": ("a.tsv", WRITERS["tsv"]),
    "parquet": ("a.parquet", as_parquet),
    "stream": ("a.arrow", stream_of),
    "old stream": ("a.arrow", lambda records: stream_of(records, options=OLD)),
    "dictionary stream": ("a.arrow", dictionary_stream),
    "file": ("a.arrow", file_of),
    "gz": ("a.jsonl.gz", lambda records: gzip.compress(as_lines(records))),
    "zst": ("a.jsonl.zst", lambda records: zstandard.compress(as_lines(records))),
}


def read(folder: Path, name: str, data: bytes, format: str = "prompt_completion") -> list[object]:
    (folder / name).write_bytes(data)
    [(_, parts)] = find_parts([Source(path=name, format=format)], folder, 1 << 20)
    return [record for part in parts for _, record in PartReader(part)]


def problem(folder: Path, name: str, data: bytes) -> str:
    with pytest.raises(DataError) as raised:
        read(folder, name, data)
    assert str(raised.value).startswith(name)
    return raised.value.reason


@pytest.mark.parametrize("kind", ["jsonl", "stream", "old stream", "dictionary stream", "gz", "zst"])
def test_another_file_that_follows_is_read(kind: str, tmp_path: Path) -> None:
    name, write = FILES[kind]
    assert read(tmp_path, name, write(RECORDS) + write(OTHERS)) == [*RECORDS, *OTHERS]


@pytest.mark.parametrize("kind", ["json", "parquet", "file"])
@pytest.mark.parametrize("second", [OTHERS, OTHERS[:3], RECORDS])
def test_another_file_that_follows_is_an_error(kind: str, second: list[dict[str, str]], tmp_path: Path) -> None:
    name, write = FILES[kind]
    reason = "bad_json_array" if kind == "json" else "unreadable_source"
    assert problem(tmp_path, name, write(RECORDS) + write(second)) == reason


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_the_header_of_a_file_that_follows_is_a_reject(kind: str, tmp_path: Path) -> None:
    name, write = FILES[kind]
    found = read(tmp_path, name, write(RECORDS) + write(OTHERS))
    assert [record.reason if isinstance(record, Reject) else record for record in found] == [
        *RECORDS, "bad_csv", *OTHERS,
    ]  # fmt: skip


@pytest.mark.parametrize("more", [b"more", b"\0\0\0\0\0\0\0\0"])
@pytest.mark.parametrize("kind", FILES)
def test_something_else_that_follows_is_an_error_or_a_reject(kind: str, more: bytes, tmp_path: Path) -> None:
    name, write = FILES[kind]
    data = write(RECORDS) + more
    if kind == "gz" and not more.strip(b"\0"):
        assert read(tmp_path, name, data) == RECORDS, "gzip allows padding"
    elif kind in ("jsonl", "csv", "tsv"):
        *records, last = read(tmp_path, name, data)
        assert records == RECORDS
        assert isinstance(last, Reject)
    else:
        reasons = {"json": "bad_json_array", "gz": "bad_compression", "zst": "bad_compression"}
        assert problem(tmp_path, name, data) == reasons.get(kind, "unreadable_source")


@pytest.mark.parametrize("kind", FILES)
def test_no_record_is_lost_silently_wherever_a_file_is_cut(kind: str, tmp_path: Path) -> None:
    name, write = FILES[kind]
    whole = write(RECORDS)
    for size in range(len(whole) // 2, len(whole)):
        try:
            found = read(tmp_path, name, whole[:size])
        except DataError:
            continue
        is_text = kind in ("jsonl", "csv", "tsv")
        at_a_line = is_text and b"\n" in whole[size - 1 : size + 1]
        in_the_last_cell = kind in ("csv", "tsv") and whole[:size].split(b"\n")[-1].count(
            b"\t" if kind == "tsv" else b","
        )
        assert at_a_line or in_the_last_cell or isinstance(found[-1], Reject) or found == RECORDS, (size, found)


@pytest.mark.parametrize("kind", ["stream", "old stream", "dictionary stream"])
def test_a_stream_without_its_end_marker_is_an_error(kind: str, tmp_path: Path) -> None:
    name, write = FILES[kind]
    end = 4 if kind == "old stream" else 8
    with pytest.raises(DataError, match=r"a\.arrow: the Arrow stream has no end marker after record 6: truncated\?"):
        read(tmp_path, name, write(RECORDS)[:-end])
    with pytest.raises(DataError, match=r"no end marker after record 12"):
        read(tmp_path, name, write(RECORDS) + write(OTHERS)[:-end])


def test_all_streams_of_a_file_are_sampled(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(stream_of(RECORDS) + stream_of(RECORDS))
    [file] = find_files([Source(path="a.arrow")], tmp_path)
    opened = container_named("arrow").table(file)
    assert opened is not None
    with opened as table:
        assert list(table.rows) == [12]
    (tmp_path / "a.arrow").write_bytes(stream_of(RECORDS)[:-8])
    opened = container_named("arrow").table(file)
    assert opened is not None
    with pytest.raises(DataError, match="no end marker"), opened:
        pass


def test_a_file_of_version_1_of_feather_is_named_with_a_command(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.feather: is a Feather file of version 1; convert it with  python -c"):
        read(tmp_path, "a.feather", b"FEA1\0\0\0\0" + bytes(200) + b"FEA1")


@pytest.mark.parametrize("data", [as_parquet(RECORDS), as_lines(RECORDS), b"x" * 100, b"abc", b"\x7f" * 50])
def test_a_file_that_is_not_arrow_is_no_bomb(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^a\.arrow: is not an Arrow file$"):
        read(tmp_path, "a.arrow", data)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("twice", ["completion", "id"])
def test_two_columns_of_one_name_are_an_error_even_if_they_are_not_read(name: str, twice: str, tmp_path: Path) -> None:
    column = pa.array(["x"])
    table = pa.Table.from_arrays([column] * 4, names=["prompt", "completion", "id", twice])
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_stream(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(DataError, match=f'two columns are named "{twice}"; rename one of them'):
        read(tmp_path, name, (tmp_path / name).read_bytes())


def test_a_date_or_a_time_is_not_the_text_of_an_answer(tmp_path: Path) -> None:
    """A number is not one, either."""
    number = pa.array([7])
    for kind in (pa.timestamp("us"), pa.timestamp("ns", "UTC"), pa.time64("us"), pa.date64(), pa.decimal128(20, 0)):
        value = number.cast(kind)
        pq.write_table(pa.table({"prompt": ["q"], "completion": value}), tmp_path / "a.parquet")
        [(file, [part])] = find_parts([Source(path="a.parquet")], tmp_path, 1 << 20)
        [(_, record)] = PartReader(part)
        with pytest.raises(Reject, match="completion"):
            file.conversation(record)
