"""An index that is read in blocks and partitions equals the index.

Nothing is lost, duplicated, or out of order.
"""

from __future__ import annotations

import random
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import conversations, make_recipe, pack_corpus

from packcorpus.tasks.core.errors import StorageError
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.verification import check_index, partitions
from packcorpus.tasks.verification.check_index import PIECE, conversations_of
from packcorpus.tasks.verification.partitions import Partitions

ROW = np.dtype([("a", "i8"), ("b", "?")])


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 5), st.lists(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=8), max_size=8))
def test_a_partition_has_its_rows_in_the_order_in_which_they_came(
    count: int, blocks: list[list[tuple[int, bool]]]
) -> None:
    rows = [[(number % count, place, flag) for place, (number, flag) in enumerate(block)] for block in blocks]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitions, "IN_MEMORY", 20)
        patch.setattr(partitions, "BLOCK", 40)
        with Partitions(count, ROW) as parts:
            for block in rows:
                numbers = np.array([number for number, *_ in block], np.int64)
                parts.add(numbers, np.array([tuple(values) for _, *values in block], ROW))
            found = [part.tolist() for part in parts]
    flat = [row for block in rows for row in block]
    assert found == [[(place, flag) for n, place, flag in flat if n == number] for number in range(count)]


def test_memory_is_that_of_a_block_and_a_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "IN_MEMORY", 1 << 10)
    block, numbers = np.zeros(4096, PIECE), np.arange(4096) % 64
    monkeypatch.setattr(partitions, "BLOCK", block.nbytes)
    tracemalloc.start()
    try:
        with Partitions(64, PIECE) as parts:
            for _ in range(64):
                parts.add(numbers, block)
            sizes = [len(part) for part in parts]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sizes == [4096] * 64
    monkeypatch.setattr(partitions, "BLOCK", 16 * block.nbytes)
    with Partitions(64, PIECE) as parts:
        for _ in range(64):
            parts.add(numbers, block)
        assert [len(part) for part in parts] == [4096] * 64
        assert len(parts._edges) == 4, "what is kept for each partition is kept for each block that was added"
    assert peak < 64 * block.nbytes / 8


def test_a_full_disk_is_reported_with_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(tempfile.SpooledTemporaryFile[bytes]):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(partitions, "BLOCK", 1)
    monkeypatch.setattr(tempfile, "SpooledTemporaryFile", Full)
    with Partitions(1, ROW) as parts, pytest.raises(StorageError, match=r"No space left on device; set TMPDIR"):
        parts.add(np.zeros(1, np.int64), np.zeros(1, ROW))


# -- the index -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, Path]:
    """Pack a corpus of two sources.

    Some conversations are split, dropped, or packed several times.
    """
    root = tmp_path_factory.mktemp("corpus")
    (root / "other.jsonl").write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in conversations(8, seed=1)))
    sources = [{"path": "chat.jsonl", "weight": 2.5}, {"path": "other.jsonl", "limit": 5}]
    settings = {"sources": sources, "sequence_length": 64, "overlong": "split", "validation": 0.3, "epochs": 2}
    recipe = make_recipe(root, conversations(16, longest=40), **settings)
    manifest = load_manifest(pack_corpus(recipe))
    assert manifest.ledger.conversations.split
    return manifest, recipe.corpus_folder


def shuffled(folder: Path, order: random.Random, folder_of_copy: Path) -> pa.Table:
    """Write a copy of the index with its entries in random order, and return it."""
    with pa.OSFile(str(folder / "index.arrow")) as file:
        index = pa.ipc.open_stream(file).read_all()
    index = index.take(pa.array(order.sample(range(len(index)), len(index))))
    with pa.OSFile(str(folder_of_copy), "w") as file, pa.ipc.new_stream(file, index.schema) as writer:
        writer.write_table(index, max_chunksize=order.randint(1, len(index)))
    return index


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(1, 200), st.integers(50, 5000), st.randoms(use_true_random=False))
def test_an_index_in_any_order_and_any_blocks_has_the_same_conversations(
    corpus: tuple[Manifest, Path], block: int, range_size: int, order: random.Random
) -> None:
    manifest, folder = corpus
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        patch.setattr(check_index, "ENTRIES", block)
        patch.setattr(check_index, "RANGE", range_size)
        index = shuffled(folder, order, Path(name) / "index.arrow")
        with pa.OSFile(str(Path(name) / "index.arrow")) as file:
            data = file.read_buffer()
        patch.setattr(check_index, "open_index", lambda *_: pa.ipc.open_stream(data))
        with check_index.read_index(manifest, folder) as found:
            shards = [rows.tolist() for rows in found.by_shard]
            seen = [conversations_of(entries) for entries in found.by_conversation]
            assert found.placed == len(index) - index["row"].null_count
            assert found.trained.sum() == sum(source.trained_tokens for source in manifest.sources)
    rows = index.to_pylist()
    # The pieces of each shard, found in plain Python.
    wanted = [
        [
            tuple(row.get(name, 0) for name in PIECE.names or ())
            for row in rows
            if (row["split"], row["shard"]) == (split, n)
        ]
        for split, facts in manifest.splits.items()
        for n in range(len(facts.shards))
    ]
    assert shards == wanted
    keys = [key for part in seen for key in zip(part["source"].tolist(), part["record"].tolist(), strict=True)]
    assert sorted(keys) == sorted({(row["source"], row["record"]) for row in rows})
    packed = {(row["source"], row["record"]) for row in rows if row["row"] is not None}
    assert sum(int(part["placed"].sum()) for part in seen) == len(packed) == manifest.ledger.conversations.packed
    assert sum(int(part["places"].sum()) for part in seen) == sum(
        row["length"] for row in rows if row["split"] == "train"
    )


def test_a_content_that_is_repeated_fills_no_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_index, "RANGE", 2000)
    recipe = make_recipe(tmp_path, conversations(1) * 400)
    manifest, folder = load_manifest(pack_corpus(recipe)), recipe.corpus_folder
    with check_index.read_index(manifest, folder) as index:
        sizes = [len(entries) for entries in index.by_conversation]
        check_index.IndexCheck(manifest, folder, index).check()
        contents = [len(rows) for rows in index.by_content]
    assert sum(sizes) == 400
    assert len(sizes) > 10
    assert max(sizes) < 400 / len(sizes) * 2
    assert sum(contents) <= 2 * len(sizes)
