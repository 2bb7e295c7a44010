"""Training reads rows of every shape, checks them, and computes the loss of the same conversations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.packed_rows import COLUMNS, LENGTH, pack_small, shards_of, write_rows
from support.row_shapes import read_corpus
from support.training.tiny_training import gradients, largest_difference, tiny_model

from tasks.core.errors import DataError
from train.data.corpus import open_corpus
from train.data.dataset import PackedDataset
from train.data.stream import StreamedRows
from train.model.attention import Collator
from train.model.isolation import check_isolation, choose_rows, require_isolation

NAME = "train-00000-of-00001.arrow"
ALIGNED = {"format_version": "3.1", "sequence_length": str(LENGTH), "align": "8"}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("corpora")
    return {name: pack_small(folder, **given) for name, given in {"plain": {}, "aligned": {"align": 16}}.items()}


def all_rows(dataset: Any) -> list[dict[str, torch.Tensor]]:
    return [dataset[number] for number in range(len(dataset))]


# -- align -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", ["memory", "mmap"])
def test_rows_with_gaps_are_those_of_the_shards(corpora: dict[str, Path], load: Any) -> None:
    corpus, rows = read_corpus(corpora["aligned"]), PackedDataset(corpora["aligned"], load=load)
    wanted = corpus.rows["train"]
    assert len(rows) == len(wanted)
    for row, other in zip(all_rows(rows), wanted, strict=True):
        assert {name: values.tolist() for name, values in row.items()} == {name: other.columns[name] for name in row}
    assert rows.conversations == sum(len(row.entries) for row in wanted)
    assert rows.tokens == sum(entry["length"] for row in wanted for entry in row.entries)
    assert open_corpus(corpora["aligned"]).shape.align == 16
    streamed = list(StreamedRows(corpora["aligned"], rows_per_step=4))
    assert sorted(row["input_ids"].tolist() for row in streamed) == sorted(r.columns["input_ids"] for r in wanted)


def test_a_folder_of_aligned_shards_needs_no_manifest(corpora: dict[str, Path], tmp_path: Path) -> None:
    for shard in shards_of(corpora["aligned"]):
        (tmp_path / shard.name).write_bytes(shard.read_bytes())
    assert open_corpus(tmp_path).shape.align == 16
    alone, whole = PackedDataset(tmp_path), PackedDataset(corpora["aligned"])
    assert (alone.tokens, alone.conversations) == (whole.tokens, whole.conversations)


def rows_with_gaps() -> dict[str, np.ndarray]:
    """Two conversations of 13 and 21 tokens in each of two rows, the second from place 16 on."""
    rows = {name: np.zeros((2, LENGTH), np.int32) for name in COLUMNS}
    for first, last in ((0, 13), (13, 16), (16, 37), (37, LENGTH)):
        rows["position_ids"][:, first:last] = np.arange(last - first)
    for first, last in ((0, 13), (16, 37)):
        rows["attention_mask"][:, first:last] = 1
    rows["input_ids"][:] = np.where(rows["attention_mask"] == 1, 7, 0)
    rows["labels"][:] = np.where((rows["attention_mask"] == 1) & (rows["position_ids"] > 0), 7, -100)
    return rows


def trained_gap(rows: dict[str, np.ndarray]) -> None:
    rows["labels"][1, 14] = 0


def moved_start(rows: dict[str, np.ndarray]) -> None:
    rows["attention_mask"][1, 15] = 1
    rows["position_ids"][1, 15:37] = np.arange(22)


def joined(rows: dict[str, np.ndarray]) -> None:
    rows["position_ids"][1, 13:37] = np.arange(13, 37)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (trained_gap, "row 1: padding is trained on"),
        (moved_start, "row 1: a conversation does not start at a multiple of 8"),
        (joined, "row 1: position_ids do not restart at 0 after padding"),
    ],
)
def test_gaps_that_would_train_wrongly_are_refused(
    damage: Callable[[dict[str, np.ndarray]], None], message: str, tmp_path: Path
) -> None:
    rows = rows_with_gaps()
    write_rows(tmp_path / NAME, rows, ALIGNED)
    assert PackedDataset(tmp_path).conversations == 4
    damage(rows)
    write_rows(tmp_path / NAME, rows, ALIGNED)
    with pytest.raises(DataError, match=message):
        PackedDataset(tmp_path)
    write_rows(tmp_path / NAME, rows_with_gaps(), ALIGNED | {"align": "0"})
    with pytest.raises(DataError, match="metadata: align: Input should be greater than or equal to 1"):
        PackedDataset(tmp_path)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_gaps_change_neither_loss_nor_gradient(corpora: dict[str, Path], backend: str) -> None:
    plain, aligned = (all_rows(PackedDataset(corpora[name])) for name in ("plain", "aligned"))
    model = tiny_model(attn_implementation=backend)
    (loss, gradient), (other_loss, other) = (gradients(model, **Collator(backend)(rows)) for rows in (plain, aligned))
    assert loss == pytest.approx(other_loss, rel=1e-5)
    assert largest_difference(gradient, other) < 1e-4
    leaking = [row | {"position_ids": torch.arange(LENGTH, dtype=torch.int32)} for row in aligned]
    assert largest_difference(gradient, gradients(model, **Collator(backend)(leaking))[1]) > 1e-2


def test_isolation_is_proven_with_gaps(corpora: dict[str, Path]) -> None:
    rows = PackedDataset(corpora["aligned"])
    proof = require_isolation(tiny_model(), rows, Collator("sdpa"), 2, attention="sdpa", seed=1)
    assert proof is not None
    assert proof.moved == 0
    chosen = [rows[number] for number in choose_rows(rows, 2)]
    held = sum(int(((row["position_ids"] == 0).cumsum(0)[row["labels"] >= 0]).unique().numel()) for row in chosen)
    assert check_isolation(tiny_model(), Collator("sdpa")(chosen), chosen, seed=1).conversations == held
