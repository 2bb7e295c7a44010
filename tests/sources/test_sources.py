"""Every container and compression gives the same records.

Parts depend only on the bytes, and damage is reported.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import resource
import shutil
import subprocess
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.containers import as_arrow, as_lines, as_parquet
from support.profiles import examples

from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.conversations.model import Conversation
from packcorpus.tasks.core.errors import DataError, InputMissing, PackError, Reject, StorageError, UsageError
from packcorpus.tasks.readers import json_array, lines, strict_json
from packcorpus.tasks.readers.container import RecordReader
from packcorpus.tasks.readers.containers import CONTAINERS, container_by_extension, container_named
from packcorpus.tasks.readers.lines import BOMB_BYTES, CHUNK
from packcorpus.tasks.readers.tables import Time
from packcorpus.tasks.sources import digests
from packcorpus.tasks.sources import parts as parts_module
from packcorpus.tasks.sources.model import Part, Source, SourceFile, found_layouts
from packcorpus.tasks.sources.parts import PartReader, find_parts, place_of
from packcorpus.tasks.sources.source_files import find_files

CORPORA = Path(__file__).parents[3] / "shared" / "corpora"
ALPACA = [
    {"instruction": f"Zähle bis {n}!\n", "input": "" if n % 3 else f'"{n}", bitte', "output": str(n)} for n in range(50)
]
MESSAGES = [
    {"messages": [{"role": "user", "content": f"{n}\u2028?"}, {"role": "assistant", "content": "ja"}]}
    for n in range(2500)
]


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def parts_of(path: Path, part_size: int = 1 << 26, **spec: Any) -> tuple[SourceFile, list[Part]]:
    ((file, parts),) = find_parts([Source(path=path.name, **spec)], path.parent, part_size)
    return file, parts


def records_of(path: Path, part_size: int = 1 << 26, **spec: Any) -> list[tuple[int, object]]:
    """Return (number within the file, record) of each record."""
    result, before = [], 0
    for part in parts_of(path, part_size, **spec)[1]:
        reader = PartReader(part)
        result += [(before + number, record) for number, record in reader]
        before += reader.records
    return result


def conversations_of(path: Path, part_size: int = 1 << 26) -> list[Conversation]:
    file, _ = parts_of(path, part_size)
    return [read_record(record, file.format) for _, record in records_of(path, part_size)]


def reader_of(path: Path, container: str) -> RecordReader:
    file = SourceFile(path, path.name, container, "", "text", (), path.stat().st_size, "", 0)
    return RecordReader(container_named(container), file)


def outline_of(record: object) -> list[str]:
    """Outline a record level by level, without recursion."""
    found, level = [], [record]
    while level:
        found.append(" ".join(str(sorted(item) if isinstance(item, dict) else type(item)) for item in level))
        level = [
            inner
            for item in level
            for inner in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
        ]
    return found


def rejects_of(path: Path, data: bytes, **spec: Any) -> list[tuple[int, str, str]]:
    spec.setdefault("format", "text")
    found = records_of(write(path, data), **spec)
    return [(number, record.reason, record.message) for number, record in found if isinstance(record, Reject)]


def fails(path: Path, data: bytes, error: type[PackError] = DataError, **spec: Any) -> str:
    with pytest.raises(error) as caught:
        records_of(write(path, data), **spec)
    message = str(caught.value)
    assert path.name in message
    return message


# -- containers and compression -------------------------------------------------------------------------------------


def feather_bytes(records: Sequence[dict[str, Any]]) -> bytes:
    out = io.BytesIO()
    feather: Any = pyarrow.feather
    feather.write_feather(pa.Table.from_pylist(list(records)), out, compression="zstd")
    return out.getvalue()


def csv_bytes(records: Sequence[dict[str, Any]], delimiter: str) -> bytes:
    rows = [list(records[0]), *(list(record.values()) for record in records)]
    quoted = [delimiter.join('"' + cell.replace('"', '""') + '"' if cell else "" for cell in row) for row in rows]
    return "\r\n".join(quoted).encode()


WAYS: dict[str, Callable[[Sequence[dict[str, Any]]], bytes]] = {
    "a.jsonl": as_lines,
    "a.ndjson": lambda records: b"\xef\xbb\xbf" + as_lines(records).replace(b"\n", b"\r\n").rstrip(b"\r\n"),
    "lines.json": lambda records: b"\n\n" + as_lines(records),
    "array.json": lambda records: json.dumps(records, indent=2).encode(),
    "compact.json": lambda records: b"\xef\xbb\xbf " + orjson.dumps(records) + b"\n",
    "a.parquet": as_parquet,
    "a.arrow": lambda records: as_arrow(records, pa.ipc.new_stream, 1700),
    "file.arrow": lambda records: as_arrow(records, pa.ipc.new_file, 1700),
    "a.feather": feather_bytes,
}
TABLE_WAYS: dict[str, Callable[[Sequence[dict[str, Any]]], bytes]] = {
    "a.csv": lambda records: csv_bytes(records, ","),
    "a.TSV": lambda records: b"\xef\xbb\xbf" + csv_bytes(records, "\t"),
}


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", [*WAYS, *TABLE_WAYS])
def test_every_container_gives_the_same_conversations(tmp_path: Path, name: str, compression: str) -> None:
    records = ALPACA if name in TABLE_WAYS else MESSAGES
    format = "alpaca" if name in TABLE_WAYS else "messages"
    data = {**WAYS, **TABLE_WAYS}[name](records)
    if compression == ".gz":  # two members
        data = gzip.compress(data[:1000]) + gzip.compress(data[1000:])
    elif compression == ".zst":  # two frames, the first without the size in its header
        stream = zstandard.ZstdCompressor().compressobj()
        data = stream.compress(data[:1000]) + stream.flush() + zstandard.compress(data[1000:])
    path = write(tmp_path / (name + compression), data)
    if compression and Path(name).suffix in (".parquet", ".arrow", ".feather"):
        with pytest.raises(DataError, match="already compressed internally; decompress it with"):
            parts_of(path)
        return
    assert parts_of(path)[0].format == format
    assert conversations_of(path) == [read_record(record, format) for record in records]
    assert [number for number, _ in records_of(path)] == list(
        range(2 * (name == "lines.json"), len(records) + 2 * (name == "lines.json"))
    )


def test_csv_cells(tmp_path: Path) -> None:
    data = 'prompt,completion\r\n"a\r\nb","say ""hi"""\r\n\r\né\r\n1,2,3\r\n'.encode() + b"\xe9,x\r\n"
    records = records_of(write(tmp_path / "a.csv", data))
    assert records[:2] == [
        (0, {"prompt": "a\r\nb", "completion": 'say "hi"'}),
        (1, {"prompt": "é", "completion": ""}),
    ]
    assert [
        (number, record.reason, record.message) for number, record in records[2:] if isinstance(record, Reject)
    ] == [
        (2, "bad_csv", "the row has 3 cells, the header has 2"),
        (
            3,
            "bad_utf8",
            "a byte at offset 0 of its line is not UTF-8; if the whole file has another encoding, set it, such as "
            "encoding: windows-1252",
        ),
    ]
    assert "line 3: unexpected end of data; is a quote left open?" in fails(tmp_path / "b.csv", b'text\na\n"b')
    assert 'two columns are named "a"' in fails(tmp_path / "c.csv", b"text,a,a\nx,y,z")


def test_parquet_is_cut_by_row_groups(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", as_parquet(MESSAGES, rows=300))
    _, parts = parts_of(path, part_size=20_000)
    metadata = pq.read_metadata(path)
    bounds = list(accumulate((metadata.row_group(group).num_rows for group in range(9)), initial=0))
    assert 1 < len(parts) < 9
    assert (parts[0].start, parts[-1].stop) == (0, len(MESSAGES))
    assert {part.stop for part in parts} <= {*bounds}
    assert all(left.stop == right.start for left, right in pairwise(parts))
    assert [read_record(record, "messages") for _, record in records_of(path, 20_000)] == conversations_of(path)


def test_only_known_columns_of_a_table_are_read(tmp_path: Path) -> None:
    # Python has no nanoseconds, so reading this column would fail.
    table = pa.table({"text": ["a"], "seen": pa.array([1], pa.timestamp("ns")), "kind": ["b"]})
    for name, write_table in (("a.parquet", pq.write_table), ("a.feather", pyarrow.feather.write_feather)):
        write_table(table, tmp_path / name)
        assert records_of(tmp_path / name) == [(0, {"text": "a"})]
        mapped = records_of(tmp_path / name, columns={"prompt": "text", "completion": "kind"})
        assert mapped == [(0, {"text": "a", "kind": "b"})]


def test_a_damaged_row_of_a_table_is_one_reject(tmp_path: Path) -> None:
    bad = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    pq.write_table(pa.table({"text": bad}), tmp_path / "a.parquet")
    records = records_of(tmp_path / "a.parquet")
    assert [(n, r.reason if isinstance(r, Reject) else r) for n, r in records] == [
        (0, {"text": "a"}),
        (1, "bad_utf8"),
        (2, {"text": "c"}),
    ]


def test_a_time_has_the_same_text_whatever_is_installed(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([1000, 1], pa.timestamp("ns"))}), tmp_path / "a.parquet")
    records = records_of(tmp_path / "a.parquet", format="text")
    assert [record for _, record in records] == [
        {"text": Time("1970-01-01 00:00:00.000001000")},
        {"text": Time("1970-01-01 00:00:00.000000001")},
    ]
    with pytest.raises(Reject, match="text: expected a string, found a value of type Time"):
        read_record(records[0][1], "text")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_damaged_table_fails(tmp_path: Path, name: str) -> None:
    data = WAYS[name](MESSAGES)
    assert f"cannot be read as {name[2:]}" in fails(tmp_path / name, data[: len(data) // 2])
    expected = {"a.parquet": "cannot be read as parquet", "a.arrow": "is not an Arrow file"}
    assert expected[name] in fails(tmp_path / name, b"x" * 100)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "unlike.json", "a.csv", "a.parquet"])
def test_a_block_is_limited_in_records_and_bytes(name: str, tmp_path: Path) -> None:
    small = [{"text": "a"}] * 3000
    large = [{"text": "b" * 200_000}] * 30
    for records in (small, large):
        path = tmp_path / name
        if name.endswith(".csv"):
            path.write_text("\n".join(["text", *(record["text"] for record in records)]))
        elif name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(records), path)
        elif name.endswith("l"):
            path.write_bytes(b"\n".join(map(orjson.dumps, records)))
        else:  # elements with the same start are read in blocks, others as a whole
            unlike = [{"text": "c"}, {"prompt": "", "text": "d"}] if name.startswith("unlike") else []
            path.write_bytes(orjson.dumps(unlike + records))
        [(_, parts)] = find_parts([Source(path=name, format="text")], tmp_path, 1 << 30)
        blocks = list(PartReader(parts[0]).blocks())
        found = [record for _, block in blocks for record in block]
        assert found[-len(records) :] == records
        assert [number for numbers, _ in blocks for number in numbers] == list(range(len(found)))
        assert max(len(block) for _, block in blocks) <= 256
        assert max(len(orjson.dumps(block)) for _, block in blocks) < 2 << 20
        assert len(blocks) < 40


def test_rows_before_a_damaged_one_come_first(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text\na\nb\nc,d\n"e')
    [(_, parts)] = find_parts([Source(path="a.csv", format="text")], tmp_path, 1 << 20)
    blocks = PartReader(parts[0]).blocks()
    numbers, records = next(blocks)
    with pytest.raises(DataError, match="is a quote left open"):
        next(blocks)
    assert list(numbers) == [0, 1, 2]
    assert records[:2] == [{"text": "a"}, {"text": "b"}]
    assert isinstance(records[2], Reject)


def test_one_unreadable_file_stops_the_hashing_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    read = []

    class Slow:
        def update(self, data: bytes) -> None:
            read.append(data)
            if data == b"a":
                begun.wait(300)
                raise OSError(5, "Input/output error")
            if data == b"b":
                begun.set()
            time.sleep(0.001)

    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n')
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "b"}\n' * 2000)
    monkeypatch.setattr(lines.hashlib, "sha256", Slow)
    monkeypatch.setattr(parts_module, "cores", lambda: 2)
    monkeypatch.setattr(digests, "HASH_CHUNK", 1)
    with pytest.raises(StorageError, match=r"a\.jsonl: cannot be read: Input/output error"):
        find_parts([Source(path="*.jsonl", format="text")], tmp_path, 1 << 20)
    assert len(read) < 14 * 2000, "b was read to its end"


# -- parts ----------------------------------------------------------------------------------------------------------

LINE = st.one_of(
    st.just(b""),
    st.just(b" \r"),
    st.builds(
        lambda text: orjson.dumps({"text": text}), st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
    ),
    st.just(b'{"text": "broken'),
    st.just(b'\xef\xbb\xbf{"text": "marked"}'),
    st.just(b'{"text": 1, "text": 2}'),
)


@settings(max_examples=examples(150), deadline=None)
@given(lines=st.lists(LINE, min_size=1, max_size=30), part_size=st.integers(1, 400), end=st.booleans(), extra=LINE)
def test_parts_add_up_to_the_whole(lines: list[bytes], part_size: int, end: bool, extra: bytes) -> None:
    data = b'{"text":"first"}\n' + b"\n".join(lines) + (b"\n" if end else b"")
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "a.jsonl", data)
        file, parts = parts_of(path, part_size)

        assert file.sha256 == sha256(data).hexdigest()
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == len(data)
        assert all(part.start < part.stop for part in parts)
        assert all(part.sha256 == sha256(data[part.start : part.stop]).hexdigest() for part in parts)
        for part in parts[:-1]:  # each part ends at the first line end at or after a multiple of the part size
            before = part.start // part_size * part_size + part_size
            assert data[part.stop - 1 : part.stop] == b"\n"
            assert part.stop >= before
            assert b"\n" not in data[max(before, part.start + 1) - 1 : part.stop - 1]

        def comparable(found: list[tuple[int, object]]) -> list[object]:
            return [(n, (r.reason, r.message) if isinstance(r, Reject) else r) for n, r in found]

        whole = comparable(records_of(path, 1 << 30))
        assert comparable(records_of(path, part_size)) == whole
        numbers = [number for number, line in enumerate(data.split(b"\n")) if line.strip()]
        assert [number for number, _ in records_of(path, part_size)] == numbers

        if end:
            write(path, data + extra + b"\n")
            _, longer = parts_of(path, part_size)
            kept = len(parts) - 1
            assert [part.sha256 for part in longer[:kept]] == [part.sha256 for part in parts[:kept]]


def test_records_counts_blank_lines_at_the_end(tmp_path: Path) -> None:
    _, (part,) = parts_of(write(tmp_path / "a.jsonl", b'\n{"text":"a"}\n\r\n\n'))
    reader = PartReader(part)
    assert [number for number, _ in reader] == [1]
    assert reader.records == 4
    assert [number for number, _ in reader] == [1]  # it can be read again
    assert reader.records == 4


def test_parts_across_the_chunks_of_hashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = as_lines(MESSAGES)
    path = write(tmp_path / "a.jsonl", data)
    expected = parts_of(path, 10_000)
    assert len(expected[1]) == len(data) // 10_000 + 1
    monkeypatch.setattr(digests, "HASH_CHUNK", 777)
    assert find_parts([Source(path="a.jsonl")], tmp_path, 10_000) == [expected]


# -- records that cannot be parsed ----------------------------------------------------------------------------------

GOOD = b'{"text":"a"}'
BAD_LINES = [
    (b'{"text":"\xff"}', "bad_utf8", "byte 0xff at offset 9 of the record is not UTF-8"),
    (b'{"text":"\\ud800"}', "lone_surrogate", "column"),
    (b'{"text":"a\0"}', "nul", "the record contains a NUL byte at offset 10"),
    (b'{"text":NaN}', "bad_json", "column 9: NaN is not JSON"),
    (b'{"text":-Infinity}', "bad_json", "Infinity is not JSON"),
    (b'{"text":' + b"9" * 5000 + b"}", "bad_json", "column 9: "),
    (b'{"text":"a",}', "bad_json", "column 12: "),
    (b"[" * 100_000 + b"]" * 100_000, "too_deep", "nested too deeply"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "too_deep", "nested too deeply"),
    (b'{"text":"a","text":"b"}', "duplicate_key", 'duplicate key "text" in an object'),
    (b'{"a":[{"b" :1,"b" :2}]}', "duplicate_key", 'duplicate key "b" in an object'),
    (b'{"a":1,"b":{"a":2},"\\u0061":3}', "duplicate_key", 'duplicate key "a" in an object'),
    (
        b'{"a":"\\u0022: ","b":' + b"[" * 300 + b'{"c":1,"c":1}' + b"]" * 300 + b"}",
        "duplicate_key",
        'duplicate key "c"',
    ),
]


@pytest.mark.parametrize(
    ("line", "code", "message"), BAD_LINES, ids=[f"{code}-{n}" for n, (_, code, _) in enumerate(BAD_LINES)]
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.zst"])
def test_a_bad_record_is_one_reject(tmp_path: Path, name: str, line: bytes, code: str, message: str) -> None:
    data = b"[" + b",\n".join([GOOD, line, GOOD]) + b"]" if name == "a.json" else b"\n".join([GOOD, line, GOOD])
    ((number, found, text),) = rejects_of(
        tmp_path / name, zstandard.compress(data) if name.endswith("zst") else data, format="auto"
    )
    assert (number, found) == (1, code)
    assert message in text
    assert len(records_of(tmp_path / name)) == 3


@pytest.mark.parametrize(
    "line",
    [
        b'{"text" : "\\u0022: \\":", "b": {"text": "\\u003a"}}',
        b'{"text":"{\\"a\\":1}"}',
        b'{"a":"\xe2\x80\xa8","b":[{"text":"1"},{"text":"2"}]}',
        b'{"n":0.12345678901234567890123}',
        b'{"a":' * 300 + b"1" + b"}" * 300,
        b'{"b" :{"a" :1},"a" :2}',
        b'{"a" :[' * 500 + b"1" + b"]}" * 500,
        b'{"a" :{"a" :1},"\\"a" :["a","a"],"[{" :2}',
    ],
)
def test_a_record_without_duplicate_keys_is_accepted(tmp_path: Path, line: bytes) -> None:
    for name, data in (("a.jsonl", line + b"\r\n"), ("a.json", b"[" + line + b"]")):
        ((number, record),) = records_of(write(tmp_path / name, data), format="text")
        # Compare texts, because == would recurse more deeply than Python allows.
        assert (number, outline_of(record)) == (0, outline_of(orjson.loads(line)))


def test_a_last_line_that_ends_early(tmp_path: Path) -> None:
    hint = "the last line ends early: truncated?"
    ((number, code, message),) = rejects_of(tmp_path / "a.jsonl", GOOD + b'\n{"text":"b')
    assert (number, code) == (1, "bad_json")
    assert hint in message
    ((_, _, message),) = rejects_of(tmp_path / "a.jsonl", GOOD + b'\n{"text":"b\n')
    assert hint not in message
    assert rejects_of(tmp_path / "a.jsonl", GOOD + b"\n" + GOOD) == []


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("length", [1001, 5_000_000])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_line_that_is_too_long(tmp_path: Path, place: int, length: int, end: bytes) -> None:
    lines = [b'{"text":"%d"}' % n for n in range(3)]
    lines[place] = b'{"text":"' + b"x" * (length - 11) + b'"}'
    _, (part,) = parts_of(write(tmp_path / "a.jsonl", b"\n".join(lines) + end), format="text")
    assert all(isinstance(record, dict) for _, record in PartReader(part, length))
    reader = PartReader(part, 1000)
    found = [(number, record.reason if isinstance(record, Reject) else record) for number, record in reader]
    assert found == [(n, "too_long_record" if n == place else {"text": str(n)}) for n in range(3)]
    assert reader.records == 3


@pytest.mark.slow
def test_a_long_line_is_unpacked_in_bounded_memory(tmp_path: Path) -> None:
    size = BOMB_BYTES - 1000
    for name, data in (
        ("a.jsonl.gz", gzip.compress(b"\n" * 10 + b" " * size, 1)),
        ("a.jsonl.zst", zstandard.compress(b"\n" * 10 + b" " * size)),
    ):
        _, (part,) = parts_of(write(tmp_path / name, GZ_GOOD[name[-3:]] + data), format="text")
        tracemalloc.start()
        try:
            found = [record.reason if isinstance(record, Reject) else record for _, record in PartReader(part)]
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert found == [{"text": "a"}, "too_long_record"]
        assert peak < 100 << 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_file_that_unpacks_to_200_times_its_size_is_refused_beyond_64_mib(name: str, tmp_path: Path) -> None:
    pack = gzip.compress if name.endswith("gz") else zstandard.compress
    filler = pack((b" " * 1023 + b"\n") * ((BOMB_BYTES + CHUNK) >> 10))  # blank lines
    message = fails(tmp_path / name, GZ_GOOD[name[-3:]] + filler, format="text")
    assert re.search(
        r": byte [\d,]+: decompresses to over \d+,\d+,\d+ bytes, 200 times its size: a decompression bomb\?", message
    )
    noise = os.urandom(400_000).hex().encode() + b"\n"
    found = records_of(write(tmp_path / name, GZ_GOOD[name[-3:]] + pack(noise) + filler), format="text")
    assert [number for number, _ in found] == [0, 1]


def bombs(folder: Path) -> dict[str, Path]:
    """Write small tables that would need gigabytes or hours.

    Memory that the tests before have freed may be used again without a new allocation that the system could refuse. For
    a text of over 32 MiB, malloc always asks the system.
    """
    again = pa.DictionaryArray.from_arrays(pa.array(np.zeros(50_000, np.int32)), pa.array(["a" * (33 << 20)]))
    tables = {"a value again and again": again, "rows of nothing": pa.nulls(5_000_000)}
    found = {}
    for name, column in tables.items():
        table = pa.table({"text": column})
        found[f"{name}, parquet"] = path = folder / f"{len(found)}.parquet"
        pq.write_table(
            table, path, compression="zstd", store_schema=False, dictionary_pagesize_limit=1 << 30,
            write_statistics=False,
        )  # fmt: skip
        found[f"{name}, arrow"] = path = folder / f"{len(found)}.arrow"
        with pa.ipc.new_stream(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
            file.write_table(table)
    return found


@pytest.mark.slow
def test_a_table_that_is_a_bomb_is_refused_before_it_is_in_memory(tmp_path: Path) -> None:
    for name, path in bombs(tmp_path).items():
        assert path.stat().st_size < 100_000, name
        limits, begin = resource.getrlimit(resource.RLIMIT_DATA), time.process_time()
        with pytest.raises(
            DataError, match=rf"{path.name}: .*: damaged, or a decompression bomb\? If this is intended"
        ) as raised:
            for _ in reader_of(path, path.suffix[1:]):
                pass
        assert raised.value.reason == "bomb"
        assert time.process_time() - begin < 10, name
        assert resource.getrlimit(resource.RLIMIT_DATA) == limits


GZ_GOOD = {".gz": gzip.compress(GOOD + b"\n"), "zst": zstandard.compress(GOOD + b"\n")}


# -- files that cannot be read --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_damaged_compression_is_reported_with_its_offset(tmp_path: Path, name: str) -> None:
    plain = os.urandom(400_000).hex().encode() + b"\n"
    packed = gzip.compress(plain, mtime=0) if name.endswith("gz") else zstandard.compress(plain)
    kind = "gzip" if name.endswith("gz") else "zstandard"
    for cut in (len(packed) - 1, len(packed) // 2):
        message = fails(tmp_path / name, packed[:cut], format="text")
        assert f"byte {cut:,}: the {kind} data ends early: truncated?" in message
    message = fails(tmp_path / name, packed + b"more garbage", format="text")
    assert f"byte {len(packed + b'more garbage'):,}: the {kind} data is followed by something else" in message
    assert f"not {kind} data" in fails(tmp_path / name, GOOD, format="text")
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 255
    if kind == "gzip":  # zstandard frames that are compressed in one call have no checksum
        assert "damaged" in fails(tmp_path / name, bytes(flipped), format="text")
    assert len(records_of(write(tmp_path / "b.jsonl.gz", gzip.compress(GOOD) + b"\0" * 999))) == 1


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a b.json.gz", "a.jsonl.zst"])
def test_utf16_is_refused_with_a_command_that_converts_it(tmp_path: Path, name: str, encoding: str) -> None:
    data = GOOD.decode().encode(encoding)
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(name).suffix, bytes)
    problem, command = fails(tmp_path / name, pack(data)).split("; convert it with  ")
    assert problem == f"{name}: is {encoding.upper().replace('-LE', 'LE').replace('-BE', 'BE')}"
    tool = command.split()[0]
    if shutil.which(tool) and shutil.which("iconv"):
        subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
        [made] = tmp_path.glob("*.utf8.*")
        assert made.read_bytes() == GOOD
        assert container_by_extension(made.name)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\n \n", "contains no records"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), "contains no records"),
        ("a.json", b"[]", "contains no records"),
        ("a.csv", b"text\n", "contains no records"),
        ("a.parquet", as_parquet(ALPACA[:0]), "contains no records"),
        ("a.json", b'[{"text":"a"}, {"text', "the JSON array is not closed after the start of record 2: truncated?"),
        ("a.json", b'[{"text":"a"}] x', "byte 15: the JSON array is followed by something else"),
        (
            "a.json",
            b'{"data": [{"text": "a"}]}',
            """its lists: "data"; extract one of them with  jq -c '.data[]'""",
        ),
        ("a.json", b'{"v": 1,\n "rows": []\n}', 'is one JSON object, not a list of records; its lists: "rows"'),
        ("a.json", b'{"text":\n "a"}', "is one JSON object over several lines; put [ and ] around it"),
        ("a.json", b'"text"', "is neither a JSON array nor one JSON object per line"),
        (
            "a.jsonl",
            b'[\n {\n  "text": "a"\n }\n]',
            "starts like a JSON array instead of one object per line; rename it to .json",
        ),
        ("a.csv", b"x,y\n1,2", "columns in the first row: x, y; formats tried: messages"),
        ("a.jsonl", b'{"x": 1}\n{"y": 2}', "keys found: x, y; formats tried: messages, sharegpt, alpaca, dolly"),
        ("a.txt", b"text", "unknown extension; known are .jsonl .ndjson .json .parquet"),
        ("a", b"text", "unknown extension"),
    ],
)
def test_files_that_fail(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    assert message in fails(tmp_path / name, data)


def test_a_json_object_of_one_line_is_a_record(tmp_path: Path) -> None:
    assert len(records_of(write(tmp_path / "a.json", b'{"messages": []}\n'))) == 1
    assert len(records_of(write(tmp_path / "b.json", GOOD))) == 1
    long = orjson.dumps({"text": "x" * 1_000_000})
    assert len(records_of(write(tmp_path / "c.json", long + b"\n" + GOOD))) == 2
    found = records_of(
        write(tmp_path / "d.json", b'{"text":\n' + GOOD)
    )  # the first line is damaged, and the second is not
    assert [isinstance(record, Reject) for _, record in found] == [True, False]


def test_byte_order_marks_are_skipped(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + GOOD + b"\n" + b"\xef\xbb\xbf" + GOOD
    for size in (1, 100):
        assert records_of(write(tmp_path / "a.jsonl", data), part_size=size) == [(0, {"text": "a"}), (1, {"text": "a"})]


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "a.jsonl")

    write(tmp_path / "a.jsonl", GOOD)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StorageError, match=r"a\.jsonl: cannot be read: Permission denied"):
        parts_of(tmp_path / "a.jsonl")


TRICKY = st.sampled_from(['"', "\\", ":", "\\u0022", "u0022", "a", "é", "\x7f", "\n"])
TEXTS = st.lists(TRICKY, max_size=6).map("".join)
VALUES = st.recursive(
    TEXTS | st.none() | st.integers(0, 9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_equal_keys_are_always_found_and_other_records_are_exact(
    value: object, ascii: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    assert strict_json.is_exact(text.encode(), value) or "u0022" in text
    for twice in (
        f'{{"a": 1, "b": {text}, "a": 2}}',
        f'{{"\\u0061": {text}, "a" : 2}}',
        f'[{{"": {text}, "": "\\\\"}}]',
    ):
        assert not strict_json.is_exact(twice.encode(), orjson.loads(twice))
        reject = strict_json.parse_record(twice.encode(), False)
        assert isinstance(reject, Reject)
        assert reject.reason == "duplicate_key"


@pytest.mark.parametrize("count", range(9))
def test_escaped_quotation_marks_do_not_make_up_for_a_lost_key(count: int) -> None:
    for text in (b'{"text":"%s","text":"x"}', b'{"text":"x","text":"%s"}'):
        text %= rb"\u0022" * count
        assert not strict_json.is_exact(text, orjson.loads(text))
        assert strict_json.decode_block([text]) is None
        assert str(strict_json.parse_record(text, False)) == 'duplicate key "text" in an object'


SAID = st.sampled_from(["a", '},{"text"', '"},{"text":"', "},\n  {", "[", "]", '"', "\\"]) | st.text(max_size=3)
ELEMENTS = st.fixed_dictionaries({"text": SAID}, optional={"more": st.lists(st.fixed_dictionaries({"text": SAID}))})


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(ELEMENTS | st.fixed_dictionaries({"n": SAID}) | st.integers(0, 99) | SAID, max_size=12),
    st.sampled_from([None, 0, 2]),
    st.sampled_from(["", " \n", "]", "{}", '{"text":', ","]),
    st.sampled_from([8, 20, 64]),
)
def test_an_array_read_in_blocks_equals_one_read_as_a_whole(
    elements: list[object], indent: int | None, behind: str, block: int
) -> None:
    data = json.dumps(elements, indent=indent).encode()
    for text in (data, data + behind.encode(), data[:-1] + behind.encode(), data.replace(b'"a"', b"a")):
        found = []
        for size in (block, 1 << 20):
            with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
                for name, value in (("CHUNK", size), ("_AHEAD", size)):
                    patch.setattr(json_array, name, value)
                path = write(Path(folder) / "a.json", text)
                reader = reader_of(path, "json")
                seen: list[object] = []
                try:
                    seen += [(number, str(record)) for number, record in reader]
                    seen.append(reader.records)
                except DataError as error:
                    seen.append(str(error))
            found.append(seen)
        assert found[0] == found[1]


@pytest.mark.slow
def test_a_large_array_is_not_held_as_a_whole(tmp_path: Path) -> None:
    data = orjson.dumps(MESSAGES * 40, option=orjson.OPT_INDENT_2)
    path = write(tmp_path / "a.json", data)
    reader = reader_of(path, "json")
    tracemalloc.start()
    try:
        assert sum(1 for _ in reader) == len(MESSAGES) * 40
        assert tracemalloc.get_traced_memory()[1] < 12 << 20 < len(data)
    finally:
        tracemalloc.stop()


def test_an_array_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_array, "ARRAY_LIMIT", 1000)
    assert "jq -c '.[]'" in fails(tmp_path / "a.json", b'[{"text":"' + b"x" * 1000 + b'"}]')


def test_the_format_is_that_of_the_first_record_with_one(tmp_path: Path) -> None:
    long = {"text": "x" * 1_000_000}
    odd: list[object] = [5, {"x": 1}, None] * 20
    for name, data in (
        ("a.jsonl", as_lines([*odd, long])),
        ("a.json", orjson.dumps([*odd, long])),
        ("b.json", orjson.dumps([long])),
    ):
        assert parts_of(write(tmp_path / name, data))[0].format == "text"
    assert "first 100 records" in fails(tmp_path / "b.jsonl", as_lines([5] * 100 + [{"text": ""}]))
    assert parts_of(write(tmp_path / "c.jsonl", b"5\n"), format="oasst")[0].format == "oasst"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.jsonl.gz"])
@pytest.mark.parametrize("when", ["before", "while", "gone"])
def test_a_file_that_changes(tmp_path: Path, name: str, when: str) -> None:
    make = {**WAYS, "a.json": WAYS["array.json"]}[name.removesuffix(".gz")]
    data, other = make(MESSAGES), make(MESSAGES[:-1] + ALPACA[:1])
    if name.endswith(".gz"):
        data, other = gzip.compress(data), gzip.compress(other)
    path = write(tmp_path / name, data)
    _, (part,) = parts_of(path)
    numbers = iter(PartReader(part))
    read: Callable[[Iterator[object]], object] = next
    if when == "while":
        next(numbers)
        read = list
    if when == "gone":
        path.unlink()
    else:
        write(path, other)
        os.utime(path, ns=(part.file.mtime_ns + 1, part.file.mtime_ns + 1))
    with pytest.raises(DataError, match=f"{name}: (changed|disappeared) while it was read; run again"):
        read(numbers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["a.jsonl", "array.json", "a.csv", "a.parquet", "a.arrow", "a.jsonl.gz", "a.jsonl.zst"]
)
@pytest.mark.parametrize("modified_after", [0, 1, 2500])
def test_bytes_that_were_not_hashed_are_never_read(tmp_path: Path, name: str, modified_after: int) -> None:
    """Bytes that were not hashed are never returned.

    One bit of the file is flipped in place, and the times of the file are restored.
    """
    text = name.removesuffix(".gz").removesuffix(".zst")
    digests = [b"".join(sha256(b"%d %d" % (n, k)).hexdigest().encode() for k in range(4)).decode() for n in range(6000)]
    data = {**WAYS, **TABLE_WAYS}[text]([{"instruction": "?", "input": "", "output": digest} for digest in digests])
    if text != name:
        data = gzip.compress(data) if name.endswith("gz") else zstandard.compress(data)
    path = write(tmp_path / name, data)
    times = path.stat()
    _, parts = parts_of(path, 1 << 18)
    expected = [record for part in parts for _, record in PartReader(part)]
    assert len(expected) == len(digests)

    def flip() -> None:
        with path.open("r+b") as file:
            file.seek(len(data) - len(data) // 20)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    found: list[object] = []

    def read() -> None:
        for part in parts:
            for _, record in PartReader(part):
                found.append(record)
                if len(found) == modified_after:
                    flip()

    if not modified_after:
        flip()
    with pytest.raises(DataError, match=f"{name}: changed while it was read; run again"):
        read()
    assert found == expected[: len(found)]
    flip()
    assert [record for part in parts for _, record in PartReader(part)] == expected


# -- finding files --------------------------------------------------------------------------------------------------


def names_of(folder: Path, *paths: str) -> list[str]:
    return [file.name for file, _ in find_parts([Source(path=path) for path in paths], folder, 1 << 26)]


def test_files_globs_and_folders(tmp_path: Path) -> None:
    for name in ("c/b.jsonl", "c/a.jsonl", "c/Z.json", "c/sub/d.csv", "c/.hidden.txt", "c/.git/x.txt", "c/ä.jsonl"):
        write(tmp_path / name, b"text\nx" if name.endswith("csv") else GOOD)
    assert names_of(tmp_path, "c") == ["c/Z.json", "c/a.jsonl", "c/b.jsonl", "c/sub/d.csv", "c/ä.jsonl"]
    assert names_of(tmp_path / "c", ".") == ["Z.json", "a.jsonl", "b.jsonl", "sub/d.csv", "ä.jsonl"]
    assert names_of(tmp_path / "c", "../c/[ab].jsonl", "./Z.json") == ["../c/a.jsonl", "../c/b.jsonl", "Z.json"]
    assert names_of(tmp_path, "**/*.csv", "c/*.jsonl") == ["c/sub/d.csv", "c/a.jsonl", "c/b.jsonl", "c/ä.jsonl"]
    assert names_of(tmp_path, f"{tmp_path}/c/b*") == [f"{tmp_path}/c/b.jsonl"]
    # A file is read once, at its first place.
    assert names_of(tmp_path, "c/b.jsonl", "c/*.jsonl", "c") == [
        "c/b.jsonl",
        "c/a.jsonl",
        "c/ä.jsonl",
        "c/Z.json",
        "c/sub/d.csv",
    ]
    os.symlink(tmp_path / "c", tmp_path / "c" / "loop")
    os.symlink(tmp_path / "c" / "a.jsonl", tmp_path / "link.jsonl")
    assert names_of(tmp_path, "c") == ["c/Z.json", "c/a.jsonl", "c/b.jsonl", "c/sub/d.csv", "c/ä.jsonl"]
    assert names_of(tmp_path, "link.jsonl", "c/a.jsonl") == ["link.jsonl"]
    write(tmp_path / "odd[1].jsonl", GOOD)
    assert names_of(tmp_path, "odd[1].jsonl") == ["odd[1].jsonl"]


def test_the_same_file_read_in_two_ways(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", GOOD)
    same = [Source(path="a.jsonl"), Source(path="./a.jsonl", format="text"), Source(path="*.jsonl")]
    assert len(find_parts(same, tmp_path, 100)) == 1
    with pytest.raises(
        UsageError, match=r"is the same file as a\.jsonl, .* differently: as text and as alpaca; remove"
    ):
        find_parts([Source(path="a.jsonl"), Source(path="*.jsonl", format="alpaca")], tmp_path, 100)
    with pytest.raises(UsageError, match=r"as text and as text with columns \{text: text\}"):
        find_parts([Source(path="a.jsonl"), Source(path="a.jsonl", columns={"text": "text"})], tmp_path, 100)
    named = Source(path="a.jsonl", roles={"user": ["Kunde", "gast"]}, ignore=["images"])
    with pytest.raises(UsageError, match=r"as text with roles \{user: \[Kunde, gast\]\}, ignore \[images\]; remove"):
        find_parts([Source(path="a.jsonl"), named], tmp_path, 100)
    with pytest.raises(UsageError, match=r"differently: as text and as text with weight 2\.5, limit 7; remove"):
        find_parts([Source(path="*.jsonl"), Source(path="a.jsonl", weight=2.5, limit=7)], tmp_path, 100)


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("c/chat.jsonl", InputMissing, "no such file or folder; did you mean chats.jsonl?"),
        ("cc/chats.jsonl", InputMissing, "no such file or folder; did you mean c?"),
        ("c/*.csv", InputMissing, "the glob matches no file in "),
        ("*", InputMissing, "the glob matches only folders"),
        ("empty", InputMissing, "the folder contains no files"),
        (
            "c",
            DataError,
            "6 of 7 files have an unknown extension: 0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 1 more",
        ),
        ("c/*", DataError, "use a glob that excludes them"),
        (
            "c/5.txt",
            DataError,
            f"known are {' '.join(extension for one in CONTAINERS for extension in one.extensions)}, text files also",
        ),
        ("https://example.org/a.jsonl", UsageError, "https:// is not supported; use one of s3://"),
        ("s3://bucket/a.jsonl", UsageError, "only local files can be read"),
    ],
)
def test_paths_that_fail(tmp_path: Path, path: str, error: type[PackError], message: str) -> None:
    write(tmp_path / "c/chats.jsonl", GOOD)
    for n in range(6):
        write(tmp_path / f"c/{n}.txt", b"x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(error) as caught:
        find_parts([Source(path=path)], tmp_path, 100)
    assert str(caught.value).startswith(path)
    assert message in str(caught.value)


def test_bad_settings(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(
        UsageError, match='columns: "instructions" is not a column of packcorpus; did you mean instruction'
    ):
        parts_of(tmp_path / "a.jsonl", columns={"instructions": "x"})
    with pytest.raises(
        UsageError, match=r'"frage" is .*; packcorpus names go on the left: columns: \{question: frage\}$'
    ):
        parts_of(tmp_path / "a.jsonl", columns={"frage": "question"})
    with pytest.raises(UsageError, match="part_size is 0"):
        parts_of(tmp_path / "a.jsonl", part_size=0)


def test_a_data_set_that_was_filtered_before_it_was_saved_is_whole(tmp_path: Path) -> None:
    """The library keeps the number of rows from before the filter."""
    from datasets import load_dataset

    write(tmp_path / "a.jsonl", b"\n".join(orjson.dumps({"text": str(number)}) for number in range(9)))
    loaded = load_dataset(
        "json", data_files=str(tmp_path / "a.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    loaded.select([2, 3, 5, 7]).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    found = find_files([Source(path="saved")], tmp_path)
    assert [file.path.name for file in found] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    [note] = found_layouts(found, [Source(path="saved")])
    assert note.startswith("saved: all 4 rows are read; its dataset_info.json says 9")


def test_a_saved_data_set(tmp_path: Path) -> None:
    def save(folder: Path, order: list[str]) -> None:
        for index, name in enumerate(order):
            write(folder / name, as_arrow([{"text": f"{index}"}], pa.ipc.new_stream))
        write(folder / "dataset_info.json", b"{}")
        write(folder / "state.json", orjson.dumps({"_data_files": [{"filename": name} for name in order]}))

    save(tmp_path / "saved" / "train", ["data-1.arrow", "data-0.arrow"])
    write(tmp_path / "saved" / "train" / "cache-12.arrow", b"not one of its files")
    assert names_of(tmp_path, "saved/train") == ["saved/train/data-1.arrow", "saved/train/data-0.arrow"]
    assert names_of(tmp_path, "saved") == ["saved/train/data-1.arrow", "saved/train/data-0.arrow"]
    write(tmp_path / "saved" / "dataset_dict.json", b'{"splits": ["train", "test"]}')
    with pytest.raises(
        DataError, match="saved: is a saved dataset with the splits train, test; use one of them, such as saved/train"
    ):
        names_of(tmp_path, "saved")
    info = b'{"splits": {"train": {"num_examples": %d}, "test": {"num_examples": 9}}}'
    state = {"_data_files": [{"filename": "data-1.arrow"}, {"filename": "data-0.arrow"}], "_split": "train"}
    write(tmp_path / "saved/train/state.json", orjson.dumps(state))
    for rows, notes in (
        (1, []),  # concatenate_datasets keeps the number of one of them
        (2, []),
        (3, ["saved/train: all 2 rows are read; its dataset_info.json says 3, which is the number before filter, "
             "select, or train_test_split"]),
    ):  # fmt: skip
        write(tmp_path / "saved/train/dataset_info.json", info % rows)
        files = find_files([Source(path="saved/train")], tmp_path)
        assert [file.name for file in files] == ["saved/train/data-1.arrow", "saved/train/data-0.arrow"]
        assert found_layouts(files, [Source(path="saved/train")]) == notes
    whole = (tmp_path / "saved/train/data-0.arrow").read_bytes()
    write(tmp_path / "saved/train/data-0.arrow", whole[:-8])
    with pytest.raises(DataError, match=r"saved/train/data-0\.arrow: the Arrow stream has no end marker"):
        names_of(tmp_path, "saved/train")
    (tmp_path / "saved/train/data-0.arrow").unlink()
    with pytest.raises(InputMissing, match=r"saved/train/data-0\.arrow: is listed in state\.json, but is missing"):
        names_of(tmp_path, "saved/train")
    write(tmp_path / "saved/train/state.json", b'{"_data_files": [{"filename": "../x.arrow"}]}')
    with pytest.raises(DataError, match="expected names of files in this folder"):
        names_of(tmp_path, "saved/train")


# -- real data ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not CORPORA.is_dir(), reason="needs ../shared/corpora")
@pytest.mark.parametrize(
    ("name", "format", "count"),
    [
        ("gsm8k_train.jsonl", "prompt_completion", 7473),
        ("gpteacher_roleplay.json", "alpaca", 3146),
        ("llamafactory_alpaca_en_demo.json", "alpaca", 999),
        ("llamafactory_glaive_toolcall_en_demo.json", "sharegpt", 300),
        ("fastchat_dummy.json", "sharegpt", 500),
        ("t0_prompts.jsonl.gz", "prompt_completion", 13649),
    ],
)
def test_real_files_are_identified_and_read_without_a_reject(name: str, format: str, count: int) -> None:
    assert parts_of(CORPORA / name)[0].format == format
    assert len(conversations_of(CORPORA / name, part_size=1 << 20)) == count


def test_parts_grow_if_there_would_be_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "MOST_PARTS", 8)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "some words of text"}\n' * 400)
    [(_, parts)] = find_parts([Source(path="a.jsonl")], tmp_path, 16)
    assert 4 <= len(parts) <= 9
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]


def test_a_tab_is_a_delimiter_only_in_a_tsv(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,n\nx\ty,1\n")
    (tmp_path / "a.tsv").write_text("text\tn\nx,y\t1\n")
    for name, container, text in (("a.csv", "csv", "x\ty"), ("a.tsv", "tsv", "x,y")):
        [(file, [part])] = find_parts([Source(path=name)], tmp_path, 1 << 20)
        assert file.container == container
        assert [record for _, record in PartReader(part)] == [{"text": text, "n": "1"}]


@pytest.mark.parametrize("path", ["in", "in/*.jsonl"])
def test_a_broken_link_is_not_ignored(tmp_path: Path, path: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "in" / "b.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"b\.jsonl: is a symbolic link to .*/nowhere, which leads nowhere"):
        find_parts([Source(path=path)], tmp_path, 1 << 20)


@pytest.mark.parametrize("path", ["loop.jsonl", "*.jsonl", "loop.jsonl/a.jsonl"])
def test_a_link_to_itself_is_named_as_such(tmp_path: Path, path: str) -> None:
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    with pytest.raises(DataError, match=r"loop\.jsonl.* is a symbolic link to loop\.jsonl, which leads nowhere"):
        find_parts([Source(path=path)], tmp_path, 1 << 20)


@pytest.mark.parametrize("path", ["**/*.jsonl", ".", "[{a}]*.jsonl"])
def test_a_long_search_shows_what_it_does(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = threading.Event()
    notes: list[str] = []
    monkeypatch.setattr("packcorpus.tasks.core.messages.FIRST_AFTER", 0.01)
    monkeypatch.setattr("packcorpus.tasks.core.messages._show", lambda note: (notes.append(note), shown.set()))
    scan = os.scandir

    def slow(folder: Any) -> Any:
        """Delay the search until the progress was shown."""
        assert shown.wait(120)
        return scan(folder)

    write(tmp_path / "a.jsonl", GOOD)
    monkeypatch.setattr(os, "scandir", slow)
    find_parts([Source(path=path)], tmp_path, 1 << 20)
    assert notes[0] == f"note: {path}: still searching, 0 files found so far; if it takes too long, narrow the path"


# -- integers ---------------------------------------------------------------------------------------------------------

WIDE = (-(1 << 63) - 1, 1 << 64, 10**40, -(10**300))
FITS = (-(1 << 63), (1 << 64) - 1, 10**19, -(10**18), 0)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_an_integer_that_would_be_rounded_is_rejected_and_no_other_number(tmp_path: Path, name: str) -> None:
    def line(number: object, text: str) -> str:
        return f'{{"text": "{text}", "id": {number}}}'

    good = [line(n, "x" * i) for i, n in enumerate((*FITS, f"0.{'1' * 30}", f"1.5e{'0' * 20}1", "1e30", f'"{10**30}"'))]
    good.append(line(1, f'\\" {10**30} \\\\'))
    lines = [line for pair in zip(good, (line(n, "y") for n in (*WIDE, *WIDE, *WIDE)), strict=False) for line in pair]
    whole = "\n".join(lines) if name == "a.jsonl" else f"[{','.join(lines)}]"
    (tmp_path / name).write_text(whole + "\n")
    [(_, [part])] = find_parts([Source(path=name)], tmp_path, 1 << 20)
    found = [record for _, record in PartReader(part)]
    assert found[::2] == [json.loads(line) for line in good]
    assert {record.reason for record in found[1::2] if isinstance(record, Reject)} == {"big_integer"}
    assert all(isinstance(record, Reject) for record in found[1::2])


def test_the_place_of_a_record_is_its_line_in_the_file_not_in_its_part(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "{number}"}}\n' + "\n" * (number % 3) for number in range(60)))
    lines = path.read_text().splitlines()
    table = pa.table({"text": [str(number) for number in range(60)]})
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=7)
    for name in ("a.jsonl", "b.parquet"):
        _, parts = parts_of(tmp_path / name, 100)
        assert len(parts) > 3
        for part in parts:
            for record, value in PartReader(part, 1000):
                line = int(place_of(part, record).removeprefix(f"{name}:"))
                assert value == ({"text": str(line - 1)} if name == "b.parquet" else json.loads(lines[line - 1]))


@pytest.mark.parametrize(
    ("content", "reason", "expected"),
    [
        (
            '{"text": "Grüße"}\n'.encode("cp1252") * 3,
            "wrong_encoding",
            r"^a.jsonl: is not UTF-8 .*iconv -f WINDOWS-1252",
        ),
        (
            b'{\n  "text": "x"\n}\n' * 3,
            "unknown_json",
            r"has objects that span several lines; .*  cat a.jsonl \| jq -c",
        ),
        (b'[\n  {"text": "x"\n}]\n', "unknown_json", r"starts like a JSON array .*; rename it to .json$"),
        (
            b'{"text": "x", "text": "y"}\n',
            "duplicate_key",
            r'^a.jsonl: its only record: duplicate key "text" in an object; fix it, or set `format`',
        ),
        (b'{"text": "x"\n', "bad_json", r"^a.jsonl: its only record: column 13: "),
        (b'{"text": "x",\n', "bad_json", r"^a.jsonl: its only record: column 14: "),
        (
            b'{"text": "x"]\n' * 3,
            "bad_json",
            r"^a.jsonl: none of its first 3 records can be read; the first problem: column 13: ",
        ),
        (b'{"text": "\\ud800"}\n', "lone_surrogate", r"^a.jsonl: its only record: "),
        (
            b'{"Question": "x", "Final Answer": "y", "Answer": "z"}\n',
            "unknown_format",
            r"did you mean  columns: \{question: Question, answer: Answer\}  \?$",
        ),
        (b'{"a b": "x", "Output": "y", "query": "z"}\n', "unknown_format", r"\{prompt: query, completion: Output\}"),
        (
            b'{"dialog": [{"who": "Agent", "Text": "x", "at": "y"}]}\n',
            "unknown_format",
            r"columns: \{messages: dialog, role: who, content: Text\}",
        ),
        (b'{"spalte": "x", "wert": "y"}\n', "unknown_format", r"keys found: spalte, wert; formats tried: messages"),
    ],
)
def test_an_unknown_format_is_explained(tmp_path: Path, content: bytes, reason: str, expected: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=expected) as error:
        parts_of(tmp_path / "a.jsonl")
    assert error.value.reason == reason


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            {"prompt": "user_query", "completion": "bot_replies"},
            "a.jsonl: columns: completion: no key `bot_replies`; did you mean bot_reply?; "
            "keys found: user_query, bot_reply",
        ),
        ({"messages": "msgs"}, "a.jsonl: columns: messages: no key `msgs`; keys found: user_query, bot_reply"),
    ],
)
def test_a_missing_column_is_named(tmp_path: Path, columns: dict[str, str], expected: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"user_query": "x", "bot_reply": "y"}\n')
    with pytest.raises(DataError) as error:
        parts_of(tmp_path / "a.jsonl", columns=columns)
    assert (error.value.reason, str(error.value)) == ("unknown_format", expected)


def test_columns_of_a_file_that_needs_none_should_be_removed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"messages": []}\n')
    with pytest.raises(DataError, match=r"no key `msgs`; .*; without columns it is read as messages: remove columns$"):
        parts_of(tmp_path / "a.jsonl", columns={"messages": "msgs"})


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_custom_decoder_is_used_and_falls_back_to_strict_parsing(name: str, tmp_path: Path) -> None:
    lines = [b'{"text":"a"}', b'{"text":"b","text":"c"}', b'{"text":"d"}']
    data = b"\n".join(lines) if name == "a.jsonl" else b"[" + b", ".join(lines) + b"]"
    _, (part,) = parts_of(write(tmp_path / name, data))
    assert [record for _, record in PartReader(part, decode=lambda texts: [*texts])] == lines
    found = [record for _, record in PartReader(part, decode=lambda texts: None)]
    assert (found[0], str(found[1]), found[2]) == (
        {"text": "a"},
        'duplicate key "text" in an object',
        {"text": "d"},
    )
