"""Files of every kind are cut at any part size; each record is in one part."""

from __future__ import annotations

import gzip
import io
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import corpus_bytes
from support.containers import as_lines
from support.one_file import COMPRESS, one_file, write_arrow, write_parquet
from support.profiles import examples
from support.small_corpus import conversations, make_recipe, pack_corpus

from packcorpus.tasks import recipe as recipe_module
from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.inspection.unused import delete_unused, find_unused
from packcorpus.tasks.readers import json_array
from packcorpus.tasks.readers.container import Container
from packcorpus.tasks.sources import unpack
from packcorpus.tasks.sources.model import Part, Source
from packcorpus.tasks.sources.parts import PartReader, find_parts, place_of
from packcorpus.tasks.sources.unpack import is_far, packed, unpacked
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.tokenization.train_tokenizer import placed
from packcorpus.tasks.work import Plan, TokenizePart

TEXTS = st.text(st.sampled_from('ab ,"\\{}[]:\n\té漢🙂'), max_size=12) | st.sampled_from(
    ['},{"text":"', '"},{"text"', "\\", '\\"', "[1,2]", "],["]
)
VALUES = st.recursive(TEXTS | st.integers(-99, 99) | st.none(), lambda inner: st.lists(inner, max_size=3), max_leaves=4)
MORE = VALUES | st.lists(st.fixed_dictionaries({"text": TEXTS}))
RECORDS = st.fixed_dictionaries({"text": TEXTS}, optional={"more": MORE})
NUMBERS = st.integers(-99, 99)
OTHERS = st.fixed_dictionaries({"id": NUMBERS, "text": TEXTS}) | NUMBERS | TEXTS | st.lists(NUMBERS)
SPACES = st.text(st.sampled_from(" \n\t\r"), max_size=3)


def parts_of(folder: Path, name: str, data: bytes, part_size: int, format: str = "text") -> list[Part]:
    (folder / name).write_bytes(data)
    [(file, parts)] = find_parts([Source(path=name, format=format)], folder, part_size)
    assert parts[0].start == 0
    assert all(before.stop == after.start for before, after in pairwise(parts))
    assert all(part.file == file for part in parts)
    return parts


def records_in(part: Part) -> list[object]:
    return [record for _, record in PartReader(part)]


def read_all(folder: Path, name: str, data: bytes, part_size: int) -> list[object]:
    return [record for part in parts_of(folder, name, data, part_size) for record in records_in(part)]


def read_as_in_a_run(parts: Sequence[Part], folder: Path, done: set[int] | None = None) -> list[list[object]]:
    """Return the records of each part, unpacked, but not of parts in `done`."""
    ranges, found = packed(parts), []
    done = set() if done is None else done
    for part in parts:
        if part.start in done:
            continue
        with unpacked(part, ranges, folder / "unpacked" / "f", lambda other: other.start not in done) as here:
            assert (here.unpacked is not None) == is_far(part)
            found.append(records_in(here))
        done.add(part.start)
    assert not [path for path in (folder / "unpacked").rglob("*") if path.name != "unpacked"]
    return found


@st.composite
def arrays(draw: st.DrawFn) -> tuple[bytes, list[object]]:
    """Return the text of an array with any white space, and its elements."""
    elements = draw(st.lists(RECORDS | OTHERS, max_size=12) | st.lists(RECORDS, max_size=30))
    ascii, separators = draw(st.booleans()), draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    indent = draw(st.sampled_from([None, 0, 1]))
    texts = [json.dumps(value, ensure_ascii=ascii, separators=separators, indent=indent) for value in elements]
    space = st.just("") | SPACES
    text = f"{draw(space)}[{draw(space)}{f'{draw(space)},{draw(space)}'.join(texts)}{draw(space)}]{draw(space)}"
    return draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + text.encode(), elements


@settings(max_examples=examples(300), deadline=None)
@given(arrays(), st.integers(1, 300), st.sampled_from([1, 7, 64, 1 << 18]), st.sampled_from([1, 100, 1 << 20]))
def test_an_array_is_cut_between_elements(
    array: tuple[bytes, list[object]], part_size: int, chunk: int, ahead: int
) -> None:
    """Cuts do not depend on what is read at once; records keep their numbers.

    A block is at most what is read at once, so only those of the size of a part can be compared.
    """
    data, elements = array
    found = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        for chunk_size, ahead_size in ((chunk, ahead), (1 << 18, ahead)):
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(json_array, "CHUNK", chunk_size)
            patch.setattr(json_array, "_AHEAD", ahead_size)
            parts = parts_of(Path(name), "a.json", data, part_size)
            found.append([part[1:] for part in map(tuple_of, parts)])
            assert [record for part in parts for record in records_in(part)] == elements
            for part in parts:
                assert part.sha256 == sha256(data[part.start : part.stop]).hexdigest()
                for number, record in PartReader(part):
                    place = int(place_of(part, number).removeprefix("a.json:"))
                    assert record == elements[place - 1]
    assert parts[-1].stop == len(data)
    assert found[0] == found[1] or chunk < part_size


def tuple_of(part: Part) -> tuple[Any, ...]:
    return part.file.name, part.start, part.stop, part.sha256


def test_elements_that_look_alike_are_cut_without_counting_brackets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_array, "_JSON_TOKEN", None)
    records = [{"text": f"{number} " + "},{" * (number % 9), "more": [{"id": number}]} for number in range(3000)]
    for indent in (None, 2):
        parts = parts_of(tmp_path, "a.json", json.dumps(records, indent=indent).encode(), 4096)
        assert len(parts) > 20
        assert [record for part in parts for record in records_in(part)] == records


@pytest.mark.parametrize("part_size", [1, 40, 1000])
def test_a_bad_element_is_one_reject(part_size: int, tmp_path: Path) -> None:
    texts = [json.dumps({"text": f"{number}, " * 9}) for number in range(20)]
    texts[7] = texts[7].replace('"text"', "text")
    parts = parts_of(tmp_path, "a.json", f"[{', '.join(texts)}]".encode(), part_size)
    found = [(place_of(part, number), record) for part in parts for number, record in PartReader(part)]
    assert [place for place, record in found if isinstance(record, Reject)] == ["a.json:8"]
    assert [place for place, _ in found] == [f"a.json:{number}" for number in range(1, 21)]


@pytest.mark.parametrize("part_size", [1, 100, 1 << 20])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_an_array_that_is_not_closed_names_the_record(part_size: int, ending: str, tmp_path: Path) -> None:
    data = json.dumps([{"text": "a" * 30}] * 50).encode()
    for end, record in (((len(data) - 20), 50), (len(data) - 1, 50), (data.rindex(b",") + 1, 50), (1, 1), (60, 2)):
        for cut in (data[:end], data[:end] + b" \n"):
            packed_text = gzip.compress(cut) if ending else cut
            with pytest.raises(DataError, match=f"not closed after the start of record {record}: truncated"):
                read_all(tmp_path, f"a.json{ending}", packed_text, part_size)
    with pytest.raises(DataError, match=rf"byte {len(data) + 1:,}: the JSON array is followed by something else"):
        read_all(tmp_path, "a.json", data + b" x", part_size)


def test_another_value_changes_only_the_parts_from_there_on(tmp_path: Path) -> None:
    records = [{"text": f"{number} " * 20} for number in range(200)]
    before = parts_of(tmp_path, "a.json", json.dumps(records).encode(), 1024)
    after = parts_of(tmp_path, "a.json", json.dumps([*records[:150], {"text": "b"}, *records[151:]]).encode(), 1024)
    same = [left.sha256 for left in before if left.stop < before[-1].stop * 149 // 200]
    assert len(same) > 10
    assert same == [part.sha256 for part in after[: len(same)]]


# -- compressed files --------------------------------------------------------------------------------------------------


@settings(max_examples=examples(120), deadline=None)
@given(
    st.lists(st.lists(RECORDS, max_size=12), min_size=1, max_size=4),
    st.sampled_from([".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst"]),
    st.integers(1, 120),
    st.sets(st.integers(0, 40), max_size=6),
)
def test_a_compressed_file_is_cut_where_its_text_would_be(
    groups: list[list[dict[str, Any]]], ending: str, part_size: int, done: set[int]
) -> None:
    """Each member of gzip and each frame of Zstandard ends anywhere in the text."""
    records = [record for group in groups for record in group] or [{"text": "a"}]
    text = as_lines(records) if ".jsonl" in ending else json.dumps(records).encode()
    bounds = [len(text) * number // len(groups) for number in range(len(groups) + 1)]
    compress = COMPRESS[Path(ending).suffix]
    data = b"".join(compress(text[start:stop]) for start, stop in pairwise(bounds))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = parts_of(folder, f"a{Path(ending).stem}", text, part_size)
        parts = parts_of(folder, f"a{ending}", data, part_size)
        if len(data) > part_size and len(plain) > 1:
            assert [tuple_of(part)[1:] for part in parts] == [tuple_of(part)[1:] for part in plain]
        else:
            assert [(part.start, part.stop) for part in parts] == [(0, len(data))]
        expected = [records_in(part) for part in parts]
        assert [record for of_part in expected for record in of_part] == records
        assert read_as_in_a_run(parts, folder) == expected
        skipped = {part.start for number, part in enumerate(parts) if number in done}
        kept = [of_part for part, of_part in zip(parts, expected, strict=True) if part.start not in skipped]
        assert read_as_in_a_run(parts, folder, skipped) == kept
        for part, of_part in zip(parts, plain, strict=True) if len(parts) == len(plain) > 1 else ():
            assert place_of(part, 3).split(":")[1] == place_of(of_part, 3).split(":")[1]


def test_a_part_of_a_compressed_file_may_end_at_the_size_of_the_file(tmp_path: Path) -> None:
    """Only its digest shows that it is not the whole file."""
    rest = as_lines([{"text": f"{number}, " * 9} for number in range(9)])
    firsts = (as_lines([{"text": "a" * size}]) for size in range(50, 1000))
    first, data = next((first, data) for first in firsts if len(data := COMPRESS[".gz"](first + rest)) == len(first))
    parts = parts_of(tmp_path, "a.jsonl.gz", data, 40)
    assert parts[0].stop == len(first) == len(data)
    assert [len(records_in(part)) for part in parts] == [1] * 10


def test_a_file_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"text": f"{number} " * 20} for number in range(400)]
    made, unpack_file = list[int](), Container.unpack

    def counted(container: Container, file: Any, ranges: Any, create: Any) -> None:
        made.append(len(ranges))
        unpack_file(container, file, ranges, create)

    monkeypatch.setattr(Container, "unpack", counted)
    parts = parts_of(tmp_path, "a.jsonl.gz", gzip.compress(as_lines(records)), 1024)
    assert len(parts) > 20
    assert [record for of_part in read_as_in_a_run(parts, tmp_path) for record in of_part] == records
    assert made == [len(parts)]


def test_another_process_continues_where_unpacking_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"text": f"{number} " * 20} for number in range(400)]
    parts = parts_of(tmp_path, "a.jsonl.gz", gzip.compress(as_lines(records)), 1024)
    create, made = unpack.scratch_file, list[Path]()

    def failing(path: Path) -> Any:
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append(path)
        return create(path)

    with monkeypatch.context() as patch:
        patch.setattr(unpack, "scratch_file", failing)
        with pytest.raises(KeyboardInterrupt):
            read_as_in_a_run(parts, tmp_path)
    copies = sorted((tmp_path / "unpacked" / "f").iterdir())
    assert len(copies) == 5
    copies[2].write_bytes(b"")  # as a power failure may leave it
    made.clear()
    monkeypatch.setattr(unpack, "scratch_file", lambda path: (made.append(path), create(path))[1])
    assert [record for of_part in read_as_in_a_run(parts, tmp_path) for record in of_part] == records
    assert len(made) == len(parts) - 4


def test_a_damaged_file_and_a_bomb_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = gzip.compress(as_lines([{"text": f"{number}"} for number in range(9000)]))
    with pytest.raises(DataError, match=r"^a.jsonl.gz: near byte .*: the gzip data is damaged") as raised:
        parts_of(tmp_path, "a.jsonl.gz", data[:9000] + b"\0" * 50 + data[9050:], 1024)
    assert raised.value.reason == "bad_compression"
    with pytest.raises(DataError, match="ends early: truncated"):
        parts_of(tmp_path, "a.jsonl.gz", data[:9000], 1024)
    with pytest.raises(DataError, match="a decompression bomb") as raised:
        parts_of(tmp_path, "b.jsonl.gz", gzip.compress((b'{"text": "%s"}\n' % (b"a" * 1000)) * 100_000), 1024)
    assert raised.value.reason == "bomb"


# -- tables ------------------------------------------------------------------------------------------------------------


TABLES: list[tuple[str, Callable[[pa.Table, io.BytesIO, int], None]]] = [
    ("a.parquet", write_parquet),
    ("a.arrow", write_arrow(pa.ipc.new_stream, None)),
    ("a.arrow", write_arrow(pa.ipc.new_stream, "lz4")),
    ("a.feather", write_arrow(pa.ipc.new_file, None)),
    ("a.feather", write_arrow(pa.ipc.new_file, "zstd")),
]


@settings(max_examples=examples(200), deadline=None)
@given(
    st.sampled_from(TABLES),
    st.lists(st.fixed_dictionaries({"text": TEXTS, "id": st.integers(0, 9)}), min_size=1, max_size=60),
    st.integers(1, 70),
    st.integers(1, 900),
    st.sets(st.integers(0, 60), max_size=6),
)
def test_groups_of_rows_of_any_size_are_cut_by_rows(
    table: tuple[str, Callable[[pa.Table, io.BytesIO, int], None]],
    rows: list[dict[str, Any]],
    group: int,
    part_size: int,
    done: set[int],
) -> None:
    file_name, write = table
    write(pa.Table.from_pylist(rows), out := io.BytesIO(), group)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = parts_of(folder, file_name, out.getvalue(), part_size)
        texts = [{"text": row["text"]} for row in rows]
        if not parts[0].is_whole:
            assert parts[-1].stop == len(rows)
        assert len({part.sha256 for part in parts}) == len(parts)
        expected = [records_in(part) for part in parts]
        assert [record for of_part in expected for record in of_part] == texts
        assert read_as_in_a_run(parts, folder) == expected
        skipped = {part.start for part in parts if part.start in done}
        kept = [of_part for part, of_part in zip(parts, expected, strict=True) if part.start not in skipped]
        assert read_as_in_a_run(parts, folder, skipped) == kept
        assert [place_of(part, 0) for part in parts] == [f"{file_name}:{part.start + 1}" for part in parts]


def test_streams_that_follow_each_other_are_cut_together(tmp_path: Path) -> None:
    rows = [{"text": f"{number:,} " * 20} for number in range(600)]
    write_arrow(pa.ipc.new_stream, None)(pa.Table.from_pylist(rows), out := io.BytesIO(), 50)
    parts = parts_of(tmp_path, "a.arrow", out.getvalue() * 2, 5_000)
    assert len(parts) > 10
    assert [record for of_part in read_as_in_a_run(parts, tmp_path) for record in of_part] == rows * 2


def test_a_row_group_is_cut_into_parts_of_the_part_size(tmp_path: Path) -> None:
    rows = [{"text": f"{number:,} " * 20} for number in range(5000)]
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out, use_dictionary=False)
    size = pq.read_metadata(io.BytesIO(out.getvalue())).row_group(0).total_byte_size
    parts = parts_of(tmp_path, "a.parquet", out.getvalue(), 10_000)
    assert len(parts) == size // 10_000
    assert max(part.stop - part.start for part in parts) - min(part.stop - part.start for part in parts) <= 1


# -- a corpus ----------------------------------------------------------------------------------------------------------


def _rows(manifest: Path) -> list[list[int]]:
    facts = load_manifest(manifest)
    shards = [
        manifest.parents[1] / facts.corpus / shard.path for split in facts.splits.values() for shard in split.shards
    ]
    return [
        [*ids, *labels]
        for shard in shards
        for batch in pa.ipc.open_stream(shard.read_bytes())
        for ids, labels in zip(*(batch.column(name).to_pylist() for name in ("input_ids", "labels")), strict=True)
    ]


KINDS = (".json", ".parquet", ".arrow", ".jsonl.gz", ".jsonl.zst", ".json.gz")


@pytest.mark.parametrize("kind", KINDS)
def test_a_corpus_has_the_rows_of_the_same_records_in_jsonl(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_module, "SOURCE_BYTES_PER_SHARD", 1 << 30)  # one shard of each
    records = conversations(300)
    expected = _rows(pack_corpus(one_file(tmp_path / "jsonl", ".jsonl", records)))
    recipe = one_file(tmp_path / "other", kind, records)
    assert len(recipe.parts) > 8
    assert _rows(pack_corpus(recipe)) == expected
    folder = tmp_path / "other/data/unpacked"
    assert not folder.exists() or not [*folder.iterdir()]


@pytest.mark.parametrize("kind", [".parquet", ".jsonl.gz"])
def test_lost_tokens_are_made_again(kind: str, tmp_path: Path) -> None:
    recipe = one_file(tmp_path, kind, conversations(300))
    before = corpus_bytes(pack_corpus(recipe))
    for step in TokenizePart.all_of(recipe)[3::4]:
        step.outputs()[0].unlink()
    recipe.published.unlink()
    Plan(recipe).outputs()[-1].unlink()
    pack_corpus(recipe)
    assert corpus_bytes(recipe.published) == before
    assert not [*(tmp_path / "data/unpacked").iterdir()]


def test_a_tokenizer_is_trained_on_a_file_that_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = one_file(tmp_path, ".jsonl.gz", conversations(300))
    opened = list[Part]()
    init = PartReader.__init__
    monkeypatch.setattr(
        PartReader, "__init__", lambda self, part, *rest: (opened.append(part), init(self, part, *rest))[1]
    )
    places = [place() for _, _, place in placed(recipe.parts, 1 << 20)]
    assert places == [f"data.jsonl.gz:{number}" for number in range(1, 301)]
    assert len(opened) == 1


def test_copies_that_a_killed_run_has_left_are_cleaned(tmp_path: Path) -> None:
    pack_corpus(make_recipe(tmp_path, conversations(20)))
    folder = tmp_path / "data/unpacked" / ("0" * 64)
    folder.mkdir(parents=True)
    for name in ("0-100", "100-200"):
        (folder / name).write_bytes(b"a" * 100)
    (folder.parent / f"{folder.name}.lock").touch()
    usage = find_unused(tmp_path)
    [kind] = [kind for kind in usage.kinds if kind.name == "unpacked"]
    assert (kind.unused.files, kind.unused.bytes, kind.used.files) == (3, 200, 0)
    delete_unused(usage)
    assert not [*folder.parent.iterdir()]
