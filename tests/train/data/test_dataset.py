"""PackedDataset returns the rows of the shards if they match the manifest.

The reference is what `datasets` and pyarrow read from the same files.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packed_rows import COLUMNS, LENGTH, pack_small, random_rows, shards_of, sign, write_rows
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator

from packcorpus.tasks.core.errors import DataError, PackError
from packcorpus.train.data import dataset as module
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.data.dataset import PackedDataset

KEPT = {"input_ids": torch.int32, "labels": torch.int64, "position_ids": torch.int32}
LOADS = ("memory", "mmap")
NAME = "train-00000-of-00001.arrow"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_small(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def opened(made: Path) -> dict[str, PackedDataset]:
    return {load: PackedDataset(made, load=load) for load in LOADS}


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """The manifest of a copy that tests may damage."""
    root = made.parent.parent
    shutil.copytree(root, tmp_path / "copy")
    return tmp_path / "copy" / made.relative_to(root)


def expected(made: Path, split: str = "train") -> dict[str, np.ndarray]:
    """Read the columns of the shards with `datasets`."""
    whole = concatenate_datasets([Dataset.from_file(str(shard)) for shard in shards_of(made, split)])
    return {name: np.array(whole[name]) for name in COLUMNS}


# -- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("load", LOADS)
def test_rows_are_those_of_the_shards(made: Path, split: str, load: Any) -> None:
    rows, wanted = PackedDataset(made, split, load), expected(made, split)
    assert rows.load == load
    assert len(rows) == rows.rows == len(wanted["input_ids"])
    assert rows.nbytes == 3 * 4 * LENGTH * len(rows)
    for number, row in enumerate(rows):
        assert {name: values.dtype for name, values in row.items()} == KEPT
        for name, values in row.items():
            assert values.tolist() == wanted[name][number].tolist()
    for count, held in (
        (rows.max_id, wanted["input_ids"].max()),
        (rows.tokens, wanted["attention_mask"].sum()),
        (rows.trained_tokens, (wanted["labels"] != -100).sum()),
        (rows.conversations, ((wanted["position_ids"] == 0) & (wanted["attention_mask"] == 1)).sum()),
    ):
        assert count == held


@settings(deadline=None)
@given(st.data())
def test_rows_are_indexed_like_a_list(opened: dict[str, PackedDataset], data: st.DataObject) -> None:
    rows = opened[data.draw(st.sampled_from(LOADS))]
    numbers = list(range(len(rows)))
    chosen = data.draw(st.lists(st.integers(-len(rows) - 2, len(rows) + 1), min_size=1, max_size=9))
    try:
        wanted = [numbers[number] for number in chosen]
    except IndexError:
        with pytest.raises(IndexError):
            rows.__getitems__(chosen)
        return
    found = rows.__getitems__(chosen)
    assert len(found) == len(wanted)
    for row, number in zip(found, wanted, strict=True):
        alone = rows[np.int64(number)]
        assert row.keys() == alone.keys() == KEPT.keys()
        assert all(torch.equal(row[name], alone[name]) for name in row)


def test_rows_are_copies(opened: dict[str, PackedDataset]) -> None:
    for rows in opened.values():
        row = rows[0]
        row["labels"] += 1
        row["input_ids"] += 1
        assert torch.equal(rows[0]["input_ids"] + 1, row["input_ids"])
        assert torch.equal(rows[0]["labels"] + 1, row["labels"])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("load", LOADS)
def test_the_default_collator_builds_the_batch(made: Path, opened: Any, load: str, workers: int) -> None:
    wanted = expected(made)
    loader = DataLoader(
        opened[load], 3, shuffle=True, collate_fn=default_data_collator, num_workers=workers,
        generator=torch.Generator().manual_seed(1), multiprocessing_context="fork" if workers else None,
    )  # fmt: skip
    batches = list(loader)
    assert all({name: values.dtype for name, values in batch.items()} == KEPT for batch in batches)
    found = {name: torch.cat([batch[name] for batch in batches]).tolist() for name in KEPT}
    order = [wanted["input_ids"].tolist().index(row) for row in found["input_ids"]]
    assert order != sorted(order)
    assert sorted(order) == list(range(len(opened[load])))
    for name, values in found.items():
        assert values == wanted[name][order].tolist()


def test_trainer_trains_on_it(opened: dict[str, PackedDataset], tmp_path: Path) -> None:
    rows = opened["memory"]
    config = LlamaConfig(
        vocab_size=rows.max_id + 1, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model, seen = LlamaForCausalLM(config), []
    model.register_forward_pre_hook(lambda model, given, batch: seen.append(batch), with_kwargs=True)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trained = Trainer(model, arguments, default_data_collator, rows).train()
    assert 0 < trained.training_loss < 20
    assert len(seen) == 2
    for batch in seen:
        assert batch["position_ids"].shape == (4, LENGTH)
        assert "attention_mask" not in batch


# -- memory and mmap ---------------------------------------------------------------------------------------------------


def test_auto_uses_memory_if_all_processes_fit_in_half_of_it(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = PackedDataset(made)
    largest = max(shard.bytes for shard in rows.corpus.splits["train"])
    for processes in (1, 3):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        need = 2 * processes * (rows.nbytes + largest)
        for free, load in ((need, "memory"), (need - 2, "mmap")):
            monkeypatch.setattr(module, "free_memory", lambda free=free: free)
            assert PackedDataset(made).load == load


def test_on_wsl_mapped_rows_are_noted(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_wsl", lambda: True)
    for free, load, expected in ((1 << 60, "auto", "memory"), (0, "auto", "mmap"), (1 << 60, "mmap", "mmap")):
        monkeypatch.setattr(module, "free_memory", lambda free=free: free)
        rows = PackedDataset(made, load=load)
        assert rows.load == expected
        assert ["WSL" in note for note in rows.notes] == [True] * (expected == "mmap")


def test_each_shard_is_read_into_memory_once(
    copy: Path, monkeypatch: pytest.MonkeyPatch, opened: dict[str, PackedDataset]
) -> None:
    corpus, read, reads = open_corpus(copy), Path.read_bytes, []

    def once(path: Path) -> bytes:
        reads.append(path)
        data = read(path)
        path.write_bytes(b"gone")  # reading the file again would return this
        return data

    shards = shards_of(copy)
    monkeypatch.setattr(Path, "read_bytes", once)
    rows = PackedDataset(corpus, load="memory")
    assert sorted(reads) == shards
    for row, wanted in zip(rows, opened["memory"], strict=True):
        assert all(torch.equal(row[name], wanted[name]) for name in wanted)


# -- damage ------------------------------------------------------------------------------------------------------------


def rejected(given: Any, load: Any, kind: type[PackError] = DataError) -> str:
    with pytest.raises(kind) as caught:
        PackedDataset(given, load=load)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("load", LOADS)
def test_every_flipped_bit_is_detected(copy: Path, load: str) -> None:
    """The damage happens before or after the corpus is opened."""
    corpus, source = open_corpus(copy), random.Random(0)
    for shard in shards_of(copy):
        whole = shard.read_bytes()
        places = [0, 1, 4, 8, 100, 300, len(whole) - 8, len(whole) - 1, *source.choices(range(len(whole)), k=10)]
        for place in places:
            damaged = bytearray(whole)
            damaged[place] ^= 1 << source.randrange(8)
            shard.write_bytes(damaged)
            message = rejected(corpus, load)
            assert f"{shard}: does not have the recorded SHA-256" in message
            assert "run: packcorpus repair" in message
            assert str(shard) in rejected(copy, load), f"bit flipped in byte {place}"
        shard.write_bytes(whole)
    assert PackedDataset(copy, load=load).rows


@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize("load", LOADS)
def test_a_manifest_with_a_wrong_row_count_is_rejected(copy: Path, load: str, more: int) -> None:
    def change(values: dict[str, Any]) -> None:
        values["splits"]["train"]["shards"][0]["rows"] += more
        values["splits"]["train"]["shards"][1]["rows"] -= more

    sign(copy, change)
    assert re.search(rf"{shards_of(copy)[0]}: holds \d+ rows, but \d+ are recorded; run: ", rejected(copy, load))


def test_a_corpus_without_such_rows_is_rejected(made: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"split 'test' has no rows \(train has"):
        PackedDataset(made, "test")
    whole = pack_small(tmp_path, packing=False)
    message = rejected(whole, "auto")
    assert "format 2.0" in message
    assert "packing: true" in message


# -- rows of other tools -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.list_(pa.int64()), pa.large_list(pa.int16())])
@pytest.mark.parametrize("load", LOADS)
def test_other_list_types_give_the_same_rows(kind: pa.DataType, load: Any, tmp_path: Path) -> None:
    wanted = random_rows(7)
    wanted["input_ids"][3, 1] = wanted["labels"][3, 1] = 300
    write_rows(tmp_path / NAME, wanted | {"score": np.ones((7, 2), int)}, kind=kind)
    rows = PackedDataset(tmp_path, load=load)
    assert "no digests" in rows.corpus.notes[0]
    for number, row in enumerate(rows):
        assert {name: values.dtype for name, values in row.items()} == KEPT
        assert all(values.tolist() == wanted[name][number].tolist() for name, values in row.items())
    assert rows.conversations == 14
    assert rows.max_id == 300


def test_unisolated_rows_have_no_positions(tmp_path: Path) -> None:
    wanted = random_rows(4)
    del wanted["position_ids"]
    write_rows(tmp_path / NAME, wanted)
    with pytest.raises(DataError, match="allow_unisolated: true"):
        PackedDataset(tmp_path)
    rows = PackedDataset(tmp_path, allow_unisolated=True)
    assert rows[0].keys() == {"input_ids", "labels"}
    assert rows.conversations is None
    assert rows.nbytes == 2 * 4 * LENGTH * 4


def put(name: str, value: int, place: Any = (3, 1)) -> Callable[[dict[str, np.ndarray]], None]:
    def change(rows: dict[str, np.ndarray]) -> None:
        rows[name][place] = value

    return change


def end_of_row_3(rows: dict[str, np.ndarray]) -> None:
    """Make the last token padding that is trained on."""
    for name in COLUMNS:
        rows[name][3, -1] = 0


def first_of_row_3(rows: dict[str, np.ndarray]) -> None:
    rows["labels"][3, 0] = rows["input_ids"][3, 0]


def nothing_trained(rows: dict[str, np.ndarray]) -> None:
    rows["labels"][3] = -100


BROKEN: dict[str, Callable[[dict[str, np.ndarray]], None]] = {
    "row 3: a token id is negative": put("input_ids", -1),
    "row 3: attention_mask has values other than": put("attention_mask", 2),
    "row 3: attention_mask has padding before": put("attention_mask", 0),
    "row 3: a label is neither": put("labels", 100),
    "row 3: padding is trained on": end_of_row_3,
    "row 3: no token of the row is trained on": nothing_trained,
    "row 3: the first token of a conversation is trained on": first_of_row_3,
    "row 3: position_ids do not start at 0": put("position_ids", 5, (3, 0)),
    "row 3: position_ids neither increase by 1": put("position_ids", 7),
}


@pytest.mark.parametrize("found", BROKEN)
def test_rows_that_would_train_wrongly_are_rejected(found: str, tmp_path: Path) -> None:
    rows = random_rows(6)
    write_rows(tmp_path / NAME, rows)
    assert PackedDataset(tmp_path).rows == 6
    BROKEN[found](rows)
    write_rows(tmp_path / NAME, rows)
    assert f"{tmp_path / NAME}: {found}" in rejected(tmp_path, "auto")


def test_columns_that_are_not_rows_are_rejected(tmp_path: Path) -> None:
    rows = {name: values.astype(object) for name, values in random_rows(3).items()}
    kind = pa.list_(pa.int64())
    for name, broken, found in (
        ("labels", [list(row) for row in rows["labels"][:2]] + [[-100] * (LENGTH - 1)], "labels has rows of 63 to 64"),
        ("input_ids", [[None, *rows["input_ids"][0][1:]], *rows["input_ids"][1:]], "input_ids has nulls"),
        ("input_ids", [[1 << 40, *rows["input_ids"][0][1:]], *rows["input_ids"][1:]], "1099511627776 not in range"),
    ):
        write_rows(tmp_path / NAME, rows | {name: broken}, kind=kind, batch=3)
        message = rejected(tmp_path, "auto")
        assert str(tmp_path / NAME) in message
        assert found in message
