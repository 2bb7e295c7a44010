"""Damage to shards and the index gives one message and one fix for all readers.

Shards and the index are opened in one place.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.packed_rows import folder_of, pack_small, sign

from packcorpus.tasks.core.errors import PackError
from packcorpus.tasks.inspection.rows import read_row
from packcorpus.tasks.report.figures import read_figures
from packcorpus.tasks.report.rows import samples
from packcorpus.tasks.storage.facts import Shard
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.storage.shards import open_index, open_shard, read_rows, shard_schema
from packcorpus.tasks.verification.verify import verify
from packcorpus.train.data.corpus import open_corpus


@pytest.fixture(scope="module", params=[True, False], ids=["packed", "format 2.0"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_small(tmp_path_factory.mktemp("made"), packing=request.param)


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made.parent.parent, tmp_path / "copy")
    return tmp_path / "copy" / "manifests" / made.name


def first_shard(path: Path) -> tuple[Manifest, Path, Shard]:
    manifest = load_manifest(path)
    return manifest, folder_of(path), manifest.splits["train"].shards[0]


def batches_of(path: Path) -> list[pa.RecordBatch]:
    return list(pa.ipc.open_stream(path.read_bytes()))


def write(path: Path, batches: list[pa.RecordBatch], schema: pa.Schema) -> None:
    with pa.OSFile(str(path), "w") as file, pa.ipc.new_stream(file, schema) as writer:
        for batch in batches:
            writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))


def test_rows_are_read_by_number_as_they_were_written(made: Path) -> None:
    manifest, folder, shard = first_shard(made)
    table = pa.Table.from_batches(batches_of(folder / shard.path))
    with open_shard(manifest, folder, shard, verified=True) as batches:
        assert pa.Table.from_batches(batches, shard_schema(manifest)).equals(table, check_metadata=True)
    numbers = [0, 1, shard.rows - 1]
    found = list(read_rows(manifest, folder, shard, numbers))
    assert [number for number, _ in found] == numbers
    assert list(read_rows(manifest, folder, shard, [])) == []
    for (_, row), expected in zip(found, table.take(numbers).to_pylist(), strict=True):
        assert {name: list(v) if isinstance(v, np.ndarray) else v for name, v in row.items()} == expected
    with open_index(manifest, folder, verified=True) as reader:
        assert reader.read_all().equals(pa.Table.from_batches(batches_of(folder / "index.arrow")))


# Changes to a shard that every reader must refuse. The manifest has the size and SHA-256 of the changed shard.


def other_length(path: Path, schema: pa.Schema) -> None:
    metadata = {**schema.metadata, b"sequence_length": b"32"}
    write(path, batches_of(path), schema.with_metadata(metadata))


def other_key(path: Path, schema: pa.Schema) -> None:
    write(path, batches_of(path), schema.with_metadata({**schema.metadata, b"manifest_key": b"0" * 64}))


def other_columns(path: Path, schema: pa.Schema) -> None:
    write(path, batches_of(path), schema.set(0, schema.field(0).with_name("other")))


def fewer_rows(path: Path, schema: pa.Schema) -> None:
    write(path, batches_of(path)[:-1], schema)


def cut_off(path: Path, schema: pa.Schema) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES: list[tuple[Callable[[Path, pa.Schema], None], str, str]] = [
    (other_length, "foreign_shard", r"does not belong to this corpus \(metadata .*sequence_length=32"),
    (other_key, "foreign_shard", r"does not belong to this corpus \(metadata .*manifest_key=0000"),
    (other_columns, "foreign_shard", r"does not belong to this corpus \(columns other: "),
    (fewer_rows, "wrong_count", r"holds \d+ rows, but \d+ are recorded"),
    (cut_off, "unreadable_file", r"cannot be read: "),
]


def open_everything(path: Path) -> Iterator[Callable[[], object]]:
    """Yield a call of each reader of shards."""
    manifest, folder, shard = first_shard(path)
    last = shard.rows - 1

    def all_batches(verified: bool) -> None:
        with open_shard(manifest, folder, shard, verified) as batches:
            for _ in batches:
                pass

    yield lambda: all_batches(False)
    yield lambda: all_batches(True)
    yield lambda: list(read_rows(manifest, folder, shard, [last]))
    yield lambda: read_row(manifest, folder, shard, last)
    yield lambda: list(samples(manifest, folder, read_figures(manifest, folder, range(last + 1)).drawn, 1000))
    yield lambda: verify(path)


@pytest.mark.parametrize(("damage", "reason", "message"), DAMAGES, ids=lambda value: getattr(value, "__name__", ""))
def test_every_reader_refuses_a_damaged_shard_with_one_message(
    copy: Path, damage: Callable[[Path, pa.Schema], None], reason: str, message: str
) -> None:
    manifest, folder, shard = first_shard(copy)
    damage(folder / shard.path, shard_schema(manifest))
    sign(copy)
    found = set()
    for read in open_everything(copy):
        with pytest.raises(PackError) as caught:
            read()
        assert caught.value.reason == reason
        assert re.match(rf"{re.escape(str(folder / shard.path))}: {message}", str(caught.value))
        assert str(caught.value).endswith(f"; run: packcorpus repair {folder}")
        found.add(str(caught.value))
    assert len(found) == 1
    if reason == "foreign_shard":
        with pytest.raises(PackError) as caught:
            open_corpus(copy)
        assert {str(caught.value)} == found


@pytest.mark.parametrize("verified", [False, True])
def test_a_truncated_or_edited_file_is_refused_before_it_is_parsed(copy: Path, verified: bool) -> None:
    manifest, folder, shard = first_shard(copy)
    index = next(file for file in manifest.files if file.path == "index.arrow")
    for opened, listed in ((lambda: open_shard(manifest, folder, shard, verified), shard),
                           (lambda: open_index(manifest, folder, verified), index)):  # fmt: skip
        path = folder / listed.path
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(PackError, match=r"has .* bytes, .*; run: packcorpus repair"), opened():
            pass
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        with ExitStack() as stack:
            if verified or listed is index:
                stack.enter_context(pytest.raises(PackError, match=r"SHA-256; run: packcorpus repair"))
            stack.enter_context(opened())
        path.write_bytes(whole)


def test_an_index_of_other_columns_and_one_that_is_not_listed_are_refused(copy: Path) -> None:
    manifest, folder, _ = first_shard(copy)
    path = folder / "index.arrow"
    [*batches] = batches_of(path)
    write(path, batches, batches[0].schema.set(1, pa.field("line", pa.int64())))
    sign(copy)
    manifest = load_manifest(copy)
    with pytest.raises(PackError, match=r"index.arrow: is not an index \(columns source: int32, line: int64.*; run: "):
        open_index(manifest, folder).__enter__()
    bare = manifest.model_copy(update={"files": []})
    with pytest.raises(PackError, match=r"manifest.json: does not list index.arrow; run: packcorpus repair"):
        open_index(bare, folder).__enter__()


@pytest.mark.slow
def test_a_flipped_bit_is_an_error_or_a_row_of_full_length(copy: Path) -> None:
    """A flipped bit gives a PackError or rows of the right size.

    The file is mapped without comparing its checksum.
    """
    manifest, folder, shard = first_shard(copy)
    path = folder / shard.path
    whole = path.read_bytes()
    # The first of these bits contain the column lengths of the first batch. The others are spread over the file.
    lengths = range(8 * 1112, 8 * 1144)
    for place in [*lengths, *np.linspace(0, 8 * len(whole) - 1, 150).astype(int).tolist()]:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        rows = []
        for numbers in (range(shard.rows), [shard.rows - 1], [4]):
            with suppress(PackError):
                rows += list(read_rows(manifest, folder, shard, numbers))
        if manifest.packing_metadata.enabled:
            assert {len(values) for _, row in rows for values in row.values()} <= {manifest.sequence_length}
