"""A sample has records from all parts of a file, but reads few bytes.

It counts the records, or estimates their number.
"""

from __future__ import annotations

import gzip
import io
import os
import random
import re
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.containers import as_arrow, as_csv, as_lines, as_parquet
from support.profiles import examples

from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.readers.containers import container_named
from packcorpus.tasks.sources.model import Source, SourceFile
from packcorpus.tasks.sources.sample_files import MOST_FILES, Sample, places, sample_files
from packcorpus.tasks.sources.source_files import find_files

LIMIT = 1 << 20


def records(count: int, seed: int = 0, longest: int = 400) -> list[dict[str, str]]:
    """Return records of different lengths, the shortest first."""
    source = random.Random(seed)
    sizes = sorted(int(longest * source.uniform(0.1, 1)) for _ in range(count))
    return [
        {"instruction": f'{number}: "a", [b]\n{{c}}', "output": "x, y\n" * (size // 5)}
        for number, size in enumerate(sizes)
    ]


WRITERS: dict[str, Callable[[list[dict[str, str]]], bytes]] = {
    "a.jsonl": as_lines,
    "a.json": lambda found: orjson.dumps(found),
    "indented.json": lambda found: orjson.dumps(found, option=orjson.OPT_INDENT_2),
    "a.csv": as_csv,
    "a.parquet": lambda found: as_parquet(found, max(1, len(found) // 30)),
    "stream.arrow": lambda found: as_arrow(found, pa.ipc.new_stream, 100),
    "file.arrow": lambda found: as_arrow(found, pa.ipc.new_file, 100),
    "a.jsonl.gz": lambda found: gzip.compress(as_lines(found), 1),
    "a.jsonl.zst": lambda found: zstandard.compress(as_lines(found), 1),
    "a.json.gz": lambda found: gzip.compress(orjson.dumps(found), 1),
    "a.csv.gz": lambda found: gzip.compress(as_csv(found), 1),
}


def file_of(folder: Path, name: str, data: bytes) -> SourceFile:
    (folder / name).write_bytes(data)
    [file] = find_files([Source(path=name)], folder)
    return file


def sample_of(folder: Path, name: str, data: bytes, budget: int) -> Sample:
    [sample] = sample_files([file_of(folder, name, data)], budget, LIMIT)
    return sample


# -- any container ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_a_sample_comes_from_all_parts_of_a_sorted_file_and_represents_it(tmp_path: Path, name: str) -> None:
    written = records(20_000)
    data = WRITERS[name](written)
    sample = sample_of(tmp_path, name, data, 400_000)
    known = {record["instruction"]: record["output"] for record in written}
    numbers = []
    for place, value in sample.records:
        assert isinstance(value, dict), value
        assert known[value["instruction"]] == value["output"]
        numbers.append(int(value["instruction"].split(":")[0]))
        assert place.startswith(name)
    assert len(set(numbers)) == len(numbers), "a record is drawn once"
    assert 500 < len(numbers) < 19_000
    assert sample.total == pytest.approx(20_000, rel=0.02)
    assert sample.counted == (sample.total == 20_000)
    assert min(numbers) < 1000
    assert max(numbers) > 19_000
    mean = sum(len(record["output"]) for record in written) / len(written)
    sizes = [len(known[written[number]["instruction"]]) for number in numbers]
    drawn = sum(size * weight for size, weight in zip(sizes, sample.weights, strict=True)) / sample.weights.sum()
    assert drawn == pytest.approx(mean, rel=0.06), "short records come first, and the mean is that of all"
    [again] = sample_files([sample.file], 400_000, LIMIT)
    assert again.records == sample.records


@pytest.mark.parametrize("name", WRITERS)
def test_a_small_file_is_read_as_a_whole(tmp_path: Path, name: str) -> None:
    written = records(300)
    sample = sample_of(tmp_path, name, WRITERS[name](written), 10_000_000)
    assert sample.whole
    assert [value for _, value in sample.records] == written
    assert [place for place, _ in sample.records] == [f"{name}:{number}" for number in range(1, 301)]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
@settings(deadline=None, max_examples=examples(40))
@given(
    sizes=st.lists(st.integers(0, 300), min_size=3, max_size=40),
    cuts=st.lists(st.tuples(st.integers(0, 60), st.integers(-1, 1)), min_size=1, max_size=8),
)
def test_adjacent_windows_yield_each_record_once(sizes: list[int], cuts: list[tuple[int, int]], kind: str) -> None:
    written = [{"text": f'{number} "a",\n' + "é" * size, "key": "b"} for number, size in enumerate(sizes)]
    with tempfile.TemporaryDirectory() as name:
        data = {"jsonl": as_lines, "json": orjson.dumps, "csv": as_csv}[kind](written)
        file = file_of(Path(name), f"a.{kind}", data)
        with file.path.open("rb") as source:
            window = container_named(kind).window(file, LIMIT)
            if window is None:
                return
            # Cut at and near the ends of records.
            ends = [end.end() for end in re.finditer(rb"\n|\},", data)] or [1]
            near = (ends[number % len(ends)] + off for number, off in cuts)
            edges = sorted({0, file.bytes, *(cut for cut in near if 0 < cut < file.bytes)})
            found: list[object] = []
            for start, stop in pairwise(edges):
                found += [value for _, value in window(source, start, stop)[0]]
    assert found == written


@given(st.integers(1, 1 << 40), st.integers(1000, 1 << 24))
def test_windows_are_ordered_disjoint_and_reach_both_ends(size: int, budget: int) -> None:
    found = places(size, budget, random.Random("x"))
    assert found[0][0] == 0
    assert found[-1][1] == size
    assert all(start <= stop and weight >= 1 for start, stop, weight in found)
    assert all(a[1] <= b[0] for a, b in pairwise(found))
    assert sum(stop - start for start, stop, _ in found) <= budget + 3
    assert sum((stop - start) * weight for start, stop, weight in found) == pytest.approx(size)


def test_rejects_have_their_line_and_a_long_line_is_not_read_as_a_whole(tmp_path: Path) -> None:
    data = b'{"text": "a"}\n{"text": \n\n' + b'{"text": "' + b"x" * 3_000_000 + b'"}\n{"text": "b"}\n'
    [sample] = sample_files([file_of(tmp_path, "a.jsonl", data)], 50_000, 100_000)
    reasons = {place: value.reason for place, value in sample.records if isinstance(value, Reject)}
    assert reasons["a.jsonl:2"] == "bad_json"
    assert reasons["a.jsonl:4"] == "too_long_record"
    packed = sample_of(tmp_path, "b.jsonl.gz", gzip.compress(data), 50_000)
    assert {place for place, value in packed.records if isinstance(value, Reject)} == {"b.jsonl.gz:2", "b.jsonl.gz:4"}


# -- many files, and large files -------------------------------------------------------------------------------------


def test_some_of_many_files_are_read_and_represent_all(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number:03}.jsonl").write_bytes(as_lines(records(20, number)))
    files = find_files([Source(path="*.jsonl")], tmp_path)
    samples = sample_files(files, 1 << 20, LIMIT)
    assert len(samples) == MOST_FILES
    assert (samples[0].file, samples[-1].file) == (files[0], files[-1])
    assert sum(sample.weights.sum() for sample in samples) == pytest.approx(4000, rel=0.02)
    assert not any(sample.whole for sample in samples if sample.stands_for != 1)


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="nothing counts the bytes that are read here")
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_little_of_a_large_file_is_read(tmp_path: Path, name: str) -> None:
    written = records(20_000, longest=4000)
    data = WRITERS[name](written)
    file = file_of(tmp_path, name, data)
    before = bytes_read()
    [sample] = sample_files([file], 500_000, LIMIT)
    assert bytes_read() - before < 3_000_000 < len(data) / 8
    assert sample.total == pytest.approx(20_000, rel=0.05)


@pytest.mark.slow
def test_a_long_stream_is_read_in_part_and_its_reach_reported(tmp_path: Path) -> None:
    source = random.Random(1)
    written = [{"instruction": source.randbytes(250).hex(), "output": "b"} for _ in range(20_000)]
    for name in ("a.jsonl.gz", "a.csv.gz"):
        file = file_of(tmp_path, name, WRITERS[name](written))
        [sample] = sample_files([file], 100_000, LIMIT, stream=1 << 22)
        assert 0.05 < sample.reach < 0.9
        assert not sample.counted
        assert sample.total == pytest.approx(20_000, rel=0.2)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    data = gzip.compress(as_lines(records(3000)))
    file = file_of(tmp_path, "a.jsonl.gz", data)
    file.path.write_bytes(data[:-2000])
    with pytest.raises(DataError, match=r"^a\.jsonl\.gz: .*ends early"):
        sample_files([file], 10_000, LIMIT)


def test_a_table_that_is_a_bomb_is_refused(tmp_path: Path) -> None:
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array(["a" * (1 << 20)]))
    out = io.BytesIO()
    pq.write_table(pa.table({"instruction": text}), out, store_schema=False, dictionary_pagesize_limit=1 << 30)
    (tmp_path / "a.parquet").write_bytes(out.getvalue())
    [file] = find_files([Source(path="a.parquet", format="alpaca")], tmp_path)
    with pytest.raises(
        DataError, match=r"a\.parquet: a sample takes over 64\d MiB of memory: damaged, or a decompression bomb\?"
    ):
        sample_files([file], 1 << 20, LIMIT)


def test_the_sample_does_not_depend_on_the_location_of_a_file(tmp_path: Path) -> None:
    drawn = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        text = "".join(f'{{"messages": [{{"role": "user", "content": "{number}"}}]}}\n' for number in range(9_000))
        (tmp_path / folder / "chat.jsonl").write_text(text)
        [file] = find_files([Source(path=f"{folder}/chat.jsonl")], tmp_path)
        [sample] = sample_files([file], 60_000, LIMIT)
        drawn.append([record.value for record in sample.records])
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) < 4_000


def test_each_entry_of_the_config_is_sampled(tmp_path: Path) -> None:
    """Each entry of the config is sampled, and represented only by its own files.

    Two entries have one file each, between entries with 100 files.
    """
    specs = []
    for entry, count in enumerate((100, 1, 1, 100)):
        (tmp_path / f"{entry}").mkdir()
        for number in range(count):
            text = '{"messages": [{"role": "user", "content": "a"}]}\n' * (entry + 1)
            (tmp_path / f"{entry}" / f"{number:03}.jsonl").write_text(text)
        specs.append(Source(path=f"{entry}"))
    samples = sample_files(find_files(specs, tmp_path), 1 << 20, LIMIT)
    expected = [0.0] * 4
    for sample in samples:
        expected[sample.file.entry] += sample.expected
    assert expected == pytest.approx([100 * 1, 1 * 2, 1 * 3, 100 * 4])
