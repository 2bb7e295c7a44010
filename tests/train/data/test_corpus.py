"""open_corpus finds a corpus by any name, and rejects everything else."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from support.commands import ROOT
from support.packed_rows import LENGTH, PACKED, folder_of, pack_small, random_rows, shards_of, sign, write_rows
from support.small_corpus import conversations, make_recipe, pack_corpus

from packcorpus.tasks.core.errors import DataError, InputMissing, PackError, UsageError
from packcorpus.tasks.storage.layout import RowLayout
from packcorpus.tasks.storage.schemas import row_schema
from packcorpus.tasks.storage.shards import read_verified
from packcorpus.train.data.corpus import open_corpus, use_corpus

NAME = "train-00000-of-00001.arrow"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_small(tmp_path_factory.mktemp("made"))


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """The manifest of a copy that tests may damage."""
    root = made.parent.parent
    shutil.copytree(root, tmp_path / "copy")
    return tmp_path / "copy" / made.relative_to(root)


def rejected(path: Path, kind: type[PackError] = DataError, **settings: Any) -> str:
    with pytest.raises(kind) as caught:
        open_corpus(path, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_way_to_name_a_corpus_opens_the_same_one(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(made)
    published, own, whole = map(open_corpus, (made, folder / "manifest.json", folder))
    assert published == own == whole == open_corpus(str(made))
    assert (published.format_version, published.sequence_length, published.isolated) == ("3.0", LENGTH, True)
    assert (published.name, published.folder, published.notes) == ("small", folder, ())
    assert published.manifest is not None
    assert published.key == published.manifest.key
    monkeypatch.chdir(made.parent.parent)
    (made.parent.parent / "small").mkdir(exist_ok=True)  # such as a folder of its sources
    for name in ("small", made.stem, published.key[:12]):
        assert open_corpus(name).key == published.key
    for split, facts in published.manifest.splits.items():
        assert published.rows(split) == facts.rows > 0
        assert [dataclasses.asdict(s) for s in published.splits[split]] == [s.model_dump() for s in facts.shards]
    assert len(published.splits["train"]) > 1


def test_shards_without_a_manifest_give_the_same_corpus(made: Path, copy: Path) -> None:
    with_manifest = open_corpus(made)
    folder = folder_of(copy)
    (folder / "manifest.json").unlink()
    alone = open_corpus(folder)
    assert (alone.key, alone.sequence_length, alone.isolated) == (with_manifest.key, LENGTH, True)
    assert (alone.format_version, alone.manifest, alone.name) == ("3.0", None, folder.name)
    without_digests = {
        split: [dataclasses.replace(s, sha256=None) for s in shards] for split, shards in with_manifest.splits.items()
    }
    assert alone.splits == without_digests
    assert "no digests" in alone.notes[0]


def test_conversations_are_found_with_and_without_a_manifest(tmp_path: Path) -> None:
    path = pack_small(tmp_path, packing=False)
    corpus = open_corpus(path)
    assert (corpus.format_version, corpus.isolated) == ("2.0", False)
    folder = folder_of(path)
    (folder / "manifest.json").unlink()
    alone = open_corpus(folder)
    assert (alone.format_version, alone.key, alone.sequence_length) == ("2.0", corpus.key, LENGTH)


def test_an_incomplete_corpus_is_rejected(copy: Path) -> None:
    folder, shards = folder_of(copy), shards_of(copy)
    (folder / "manifest.json").unlink()
    for shard in shards:
        kept = shard.read_bytes()
        shard.unlink()
        assert shard.name in rejected(folder, InputMissing)
        shard.write_bytes(kept)
    shutil.copy(shards[0], folder / "train-00000-of-00009.arrow")
    assert "of one run" in rejected(folder)


@pytest.mark.parametrize("kind", ["another key", "another length"])
def test_shards_of_two_corpora_are_rejected(kind: str, tmp_path: Path) -> None:
    length = LENGTH if kind == "another key" else LENGTH + 1
    for number, size, key in ((0, LENGTH, "a" * 64), (1, length, ("b" if kind == "another key" else "a") * 64)):
        metadata = PACKED | {"sequence_length": str(size), "manifest_key": key}
        write_rows(tmp_path / f"train-0000{number}-of-00002.arrow", random_rows(3, size), metadata)
    message = rejected(tmp_path)
    assert "train-00001-of-00002.arrow" in message
    assert "belongs to a different corpus" in message


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ({"format_version": "4.0"}, "format_version=4.0"),
        ({"huggingface": '{"info": {}}'}, "huggingface="),
        ({}, "metadata none"),
        ({"format_version": "2.0", "sequence_length": "64"}, "input_ids: list<"),
        ({"format_version": "3.0", "sequence_length": "many"}, "sequence_length=many"),
    ],
)
def test_another_format_is_rejected_with_what_was_found(metadata: dict[str, str], found: str, tmp_path: Path) -> None:
    write_rows(tmp_path / NAME, random_rows(2), metadata)
    message = rejected(tmp_path)
    assert NAME in message
    assert found in message


def test_missing_columns_and_other_types_are_rejected(tmp_path: Path) -> None:
    rows = random_rows(2)
    for name in ("attention_mask", "labels"):
        write_rows(tmp_path / NAME, {key: values for key, values in rows.items() if key != name})
        assert f"has no {name}" in rejected(tmp_path)
    write_rows(tmp_path / NAME, rows | {"labels": rows["labels"] / 2})
    assert "labels is list<item: double>" in rejected(tmp_path)


def test_rows_without_positions_are_rejected_unless_allowed(tmp_path: Path) -> None:
    rows = random_rows(5)
    del rows["position_ids"]
    write_rows(tmp_path / NAME, rows)
    message = rejected(tmp_path)
    assert NAME in message
    assert "see each other" in message
    assert "allow_unisolated: true" in message
    corpus = open_corpus(tmp_path, allow_unisolated=True)
    assert (corpus.isolated, corpus.rows("train"), corpus.format_version) == (False, 5, "3.0")


def test_a_manifest_does_not_excuse_rows_without_positions(copy: Path) -> None:
    corpus = open_corpus(copy)
    for split in corpus.splits:
        for shard in shards_of(copy, split):
            with pa.OSFile(str(shard)) as file:
                table = pa.ipc.open_stream(file).read_all().drop_columns("position_ids")
            with pa.OSFile(str(shard), "w") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
    sign(copy)
    assert "allow_unisolated: true" in rejected(copy)
    assert not open_corpus(copy, allow_unisolated=True).isolated


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.list_(pa.int64()), pa.large_list(pa.int16())])
def test_rows_of_another_tool_need_no_length_and_no_key(kind: pa.DataType, tmp_path: Path) -> None:
    rows = random_rows(5)
    write_rows(tmp_path / NAME, rows | {"source": np.ones((5, 3), int)}, {"format_version": "3.0"}, kind)
    corpus = open_corpus(tmp_path)
    assert (corpus.sequence_length, corpus.rows("train"), corpus.isolated) == (LENGTH, 5, True)
    assert corpus == open_corpus(tmp_path)
    assert len(bytes.fromhex(corpus.key)) == 32
    rows["input_ids"][0, 0] += 1
    write_rows(tmp_path / NAME, rows, {"format_version": "3.0"}, kind)
    assert open_corpus(tmp_path).key != corpus.key
    write_rows(tmp_path / NAME, rows, {"format_version": "3.0", "manifest_key": "../../x"}, kind)
    assert len(bytes.fromhex(open_corpus(tmp_path).key)) == 32


def test_the_manifest_of_another_tool_is_ignored(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(orjson.dumps({"format_version": "3.0", "shards": [NAME]}))
    message = rejected(manifest)
    assert "'3.0'" in message
    assert "folder of their shards" in message
    write_rows(tmp_path / NAME, random_rows(2))
    corpus = open_corpus(tmp_path)
    assert corpus.manifest is None
    assert f"{manifest}: belongs to another tool" in corpus.notes[0]
    manifest.write_text("[]")
    assert "not a packcorpus manifest" in rejected(manifest)


def test_an_edited_manifest_is_rejected(copy: Path) -> None:
    whole = copy.read_bytes()
    copy.write_bytes(whole.replace(b'"seed": 42', b'"seed": 43'))
    assert "was edited or damaged" in rejected(copy)
    copy.write_bytes(whole.replace(b'"format_version": "3.0"', b'"format_version": "4.0"'))
    assert "format_version is '4.0'" in rejected(copy)
    copy.write_bytes(whole.replace(b"\n", b" "))
    assert "was edited or damaged" in rejected(copy)
    copy.write_bytes(whole[:-9])
    assert f"is not JSON: unexpected end of data, so it is not a manifest; run: packcorpus repair {copy}" in rejected(
        copy
    )


def test_a_shard_of_another_corpus_is_rejected_despite_its_digest(copy: Path) -> None:
    shard = shards_of(copy)[1]
    columns = random_rows(2)
    key = open_corpus(copy).key
    schema = row_schema(RowLayout((LENGTH,)), LENGTH, "c" * 64)
    arrays = [pa.array(columns[f.name].tolist(), f.type) for f in schema]
    for metadata, renamed, found in (
        (schema.metadata, False, "manifest_key=cccc"),
        (row_schema(RowLayout((LENGTH,)), LENGTH, key).metadata, True, "columns "),
    ):
        fields = [pa.field("x" if renamed and f.name == "labels" else f.name, f.type, f.nullable) for f in schema]
        table = pa.table(arrays, schema=pa.schema(fields, metadata))
        with pa.OSFile(str(shard), "w") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
        sign(copy)
        message = rejected(copy)
        assert str(shard) in message
        assert found in message


def test_the_manifest_of_another_corpus_is_named_and_not_a_damaged_file(copy: Path, tmp_path: Path) -> None:
    key, folder = open_corpus(copy).key, folder_of(copy)
    other = pack_corpus(
        make_recipe(tmp_path / "other", conversations(70, seed=5), name="small", sequence_length=LENGTH)
    )
    shutil.copy(other, folder / "manifest.json")
    wrong = f"{folder / 'manifest.json'}: is the manifest of a different corpus, small {open_corpus(other).key[:12]}; "
    shards = f"the shards in this folder belong to {key[:12]}; "
    assert rejected(folder) == f"{wrong}{shards}run: packcorpus repair {copy}"
    moved = shutil.move(folder, tmp_path / "moved")
    message = rejected(Path(moved))
    assert message.startswith(f"{moved}/manifest.json: is the manifest of a different corpus")
    assert message.endswith("copy the manifest.json of that corpus into the folder, or copy the folder again")


@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_damaged_column_name_is_rejected(with_manifest: bool, copy: Path) -> None:
    """The name is no longer UTF-8, which pyarrow reports only on reading it."""
    shard = shards_of(copy)[0]
    folder = shard.parent
    shard.write_bytes(shard.read_bytes().replace(b"position_ids", b"positio\xee_ids"))
    if with_manifest:
        assert str(shard) in rejected(copy)
    else:
        (folder / "manifest.json").unlink()
        assert str(shard) in rejected(folder)


def test_links_are_rejected(copy: Path, tmp_path: Path) -> None:
    shard = shards_of(copy)[0]
    shard.rename(tmp_path / "elsewhere.arrow")
    shard.symlink_to(tmp_path / "elsewhere.arrow")
    message = rejected(copy)
    (shard.parent / "manifest.json").unlink()
    for found in (message, rejected(shard.parent)):
        assert str(shard) in found
        assert "is a symbolic link" in found


def test_a_truncated_shard_is_rejected_even_between_two_batches(tmp_path: Path) -> None:
    """Without a manifest, only the end of the Arrow stream reveals it."""
    shard = tmp_path / NAME
    write_rows(shard, random_rows(6))
    whole = shard.read_bytes()
    with pa.memory_map(str(shard)) as file:
        reader = pa.ipc.open_stream(file)
        reader.read_next_batch()
        between = file.tell()
    assert between < len(whole) - 8
    shard.write_bytes(whole[:between])
    assert pa.ipc.open_stream(shard.read_bytes()).read_all().num_rows == 2, "pyarrow sees the cut: drop our check"
    assert "is truncated" in rejected(tmp_path)
    for size in (0, 3, 100, len(whole) // 2, len(whole) - 9, len(whole) - 1):
        shard.write_bytes(whole[:size])
        assert NAME in rejected(tmp_path)


def test_anything_but_a_corpus_is_rejected(tmp_path: Path, made: Path) -> None:
    assert "no such manifest" in rejected(tmp_path / "gone.json", InputMissing)
    assert "train-00000-of-00001.arrow" in rejected(tmp_path)
    assert str(folder_of(made)) in rejected(shards_of(made)[0], UsageError)
    (tmp_path / NAME).write_bytes(b"ARROW1\0\0" + bytes(64))
    assert NAME in rejected(tmp_path)


def test_without_digests_the_size_is_still_checked(tmp_path: Path) -> None:
    write_rows(tmp_path / NAME, random_rows(2))
    corpus = open_corpus(tmp_path)
    write_rows(tmp_path / NAME, random_rows(3))
    for mapped in (False, True):
        with pytest.raises(DataError, match=f"{NAME}: has .* bytes"):
            read_verified(corpus.folder, corpus.splits["train"][0], mapped)


def test_opening_a_corpus_loads_no_torch(made: Path) -> None:
    code = "import sys; from packcorpus.train.data.corpus import open_corpus as read; read(sys.argv[1]); "
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(made)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_command_line_names_one_corpus_or_takes_the_latest(made: Path) -> None:
    root = made.parent.parent

    def used(corpus: str | None, manifest: str | None = None) -> Path:
        paths = [path and Path(path) for path in (corpus, manifest)]
        options = SimpleNamespace(corpus=paths[0], manifest=paths[1], root=root)
        use_corpus(options)  # type: ignore[arg-type]
        assert (options.corpus, options.root) == (None, root)
        return options.manifest

    assert used(None) == used("small") == used(made.stem) == used(None, "small") == used(str(made)) == made
    assert used(str(folder_of(made))) == folder_of(made)
    with pytest.raises(UsageError, match=r"small and --manifest other: name one corpus"):
        used("small", "other")
    with pytest.raises(InputMissing, match="no such manifest"):
        used("dcotor")
