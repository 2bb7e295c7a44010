"""Training reads rows of every shape and checks them.

The same conversations have the same loss in every shape.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from support.packed_rows import COLUMNS, LENGTH, shards_of, write_rows
from support.row_shapes import read_corpus
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.tiny_training import force_attention, gradients, largest_difference, plain_kernels, tiny_model

from packcorpus.tasks import recipe as recipe_module
from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.corpus import shards
from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.data.dataset import PackedDataset
from packcorpus.train.loop.feed import open_feed
from packcorpus.train.loop.trainer import arguments
from packcorpus.train.model.attention import Collator
from packcorpus.train.model.isolation import check_isolation, choose_rows, require_isolation

NAME = "train-00000-of-00001.arrow"
ALIGNED = {"format_version": "3.1", "sequence_length": str(LENGTH), "align": "8"}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("corpora")
    lists = {"padding": "none"}
    shapes = {"plain": {}, "aligned": {"align": 16}, "lists": lists, "aligned lists": {"align": 16} | lists}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BATCH_TOKENS", 5 * LENGTH)
        patch.setattr(recipe_module, "SOURCE_BYTES_PER_SHARD", 3000)
        common = {"sequence_length": LENGTH, "validation": 0.2}
        return {
            name: pack_corpus(make_recipe(folder, conversations(30), **common, **given))
            for name, given in shapes.items()
        }


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
    assert open_corpus(corpora["aligned"]).layout.align == 16


@pytest.mark.parametrize("name", ["aligned", "aligned lists"])
def test_a_folder_of_such_shards_needs_no_manifest(corpora: dict[str, Path], tmp_path: Path, name: str) -> None:
    for shard in shards_of(corpora[name]):
        (tmp_path / shard.name).write_bytes(shard.read_bytes())
    assert open_corpus(tmp_path).layout.align == 16
    alone, whole = PackedDataset(tmp_path), PackedDataset(corpora[name])
    assert (alone.tokens, alone.conversations) == (whole.tokens, whole.conversations)


def rows_with_gaps() -> dict[str, np.ndarray]:
    """Return two rows with two conversations each, of 13 and 21 tokens."""
    # The second conversation starts at place 16.
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


# -- rows without padding ----------------------------------------------------------------------------------------------

LISTS = {"format_version": "3.1", "sequence_length": str(LENGTH), "padding": "none"}


@pytest.mark.parametrize("name", ["lists", "aligned lists"])
@pytest.mark.parametrize("load", ["memory", "mmap"])
def test_rows_without_padding_are_those_of_the_shards(corpora: dict[str, Path], name: str, load: Any) -> None:
    wanted, rows = read_corpus(corpora[name]).rows["train"], PackedDataset(corpora[name], load=load)
    assert len(rows) == len(wanted)
    for row, other in zip(all_rows(rows), wanted, strict=True):
        assert list(row) == ["input_ids", "labels", "position_ids"]
        assert row["labels"].dtype == torch.int64
        assert {key: values.tolist() for key, values in row.items()} == {key: other.columns[key] for key in row}
        row["labels"] += 1  # a copy
    assert rows[0]["labels"].tolist() == wanted[0].columns["labels"]
    sizes = [len(row.columns["input_ids"]) for row in wanted]
    assert rows.lengths.tolist() == sizes
    assert rows.nbytes == 12 * sum(sizes)
    assert rows.conversations == sum(len(row.entries) for row in wanted)
    assert rows.tokens == sum(entry["length"] for row in wanted for entry in row.entries)
    longest = open_feed(open_corpus(corpora[name]), TrainingConfig(load=load)).longest
    assert [len(row["input_ids"]) for row in all_rows(longest)] == sorted(sizes, reverse=True)


def two_lists() -> dict[str, list[Any]]:
    """Return rows of two conversations: of 5 and 3 tokens, and of 4 and 2."""
    lengths = [[5, 3], [4, 2]]
    positions = [[at for size in sizes for at in range(size)] for sizes in lengths]
    return {
        "input_ids": [[7] * len(row) for row in positions],
        "labels": [[7 if at else -100 for at in row] for row in positions],
        "position_ids": positions,
        "seq_lens": lengths,
    }


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda rows: rows["position_ids"].__setitem__(1, [*range(6)]), "seq_lens do not match the runs of position_i"),
        (lambda rows: rows["seq_lens"].__setitem__(0, [5, 2, 1]), "seq_lens do not match the runs of position_ids"),
        (lambda rows: rows["position_ids"][0].pop(), "more or fewer position_ids than input_ids"),
        (lambda rows: rows.pop("position_ids"), "rows without padding have no position_ids"),
    ],
)
def test_lists_that_would_train_wrongly_are_refused(
    damage: Callable[[dict[str, list[Any]]], Any], message: str, tmp_path: Path
) -> None:
    rows = two_lists()
    write_rows(tmp_path / NAME, rows, LISTS, pa.list_(pa.int32()))
    assert PackedDataset(tmp_path).conversations == 4
    damage(rows)
    write_rows(tmp_path / NAME, rows, LISTS, pa.list_(pa.int32()))
    with pytest.raises(DataError, match=message):
        PackedDataset(tmp_path)


@pytest.mark.parametrize("backend", ["sdpa", "eager", "varlen"])
@pytest.mark.parametrize("name", ["lists", "aligned lists"])
def test_rows_without_padding_have_the_same_loss_and_gradient(
    corpora: dict[str, Path], name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_kernels(monkeypatch)
    padded, lists = (all_rows(PackedDataset(corpora[of]))[:6] for of in ("plain", "lists"))
    if name == "aligned lists":
        padded, lists = (all_rows(PackedDataset(corpora[of]))[:6] for of in ("aligned", name))
    assert len({len(row["input_ids"]) for row in lists}) > 1
    model = tiny_model()
    loss, gradient = gradients(model, **Collator("sdpa")(padded))
    force_attention(model, backend)
    batch = Collator(backend)(lists)
    assert batch["input_ids"].shape == (1, sum(len(row["input_ids"]) for row in lists))
    other_loss, other = gradients(model, **batch)
    assert loss == pytest.approx(other_loss, rel=1e-5)
    assert largest_difference(gradient, other) < 1e-4


def test_isolation_is_proven_without_padding(corpora: dict[str, Path]) -> None:
    rows = PackedDataset(corpora["lists"])
    proof = require_isolation(tiny_model(), rows, Collator("sdpa"), 2, attention="sdpa", seed=1)
    assert proof is not None
    assert proof.moved == 0
    chosen = all_rows(rows)[:8]
    batch = Collator("sdpa")(chosen)
    assert batch["input_ids"].shape[0] == 1, "rows of several lengths are one row of a batch"
    assert check_isolation(tiny_model(), batch, chosen, seed=1).passed
    leaking = batch | {"position_ids": torch.arange(batch["input_ids"].shape[1])[None]}
    assert not check_isolation(tiny_model(), leaking, chosen, seed=1).passed


@pytest.mark.parametrize("load", ["memory", "mmap"])
def test_a_run_takes_the_same_steps_without_padding(corpora: dict[str, Path], load: Any, tmp_path: Path) -> None:
    found = {}
    for name in ("plain", "lists"):
        config = TrainingConfig(load=load, max_steps=3, warmup=0, learning_rate=1e-2)
        feed = open_feed(open_corpus(corpora[name]), config)
        assert feed.equal == (name == "plain")
        given = arguments(config, str(tmp_path / name), 3, 4, "cpu", "fp32")
        given |= {"optim": "sgd", "activation_checkpointing": False}
        given |= {"report_to": "none", "dataloader_pin_memory": False}
        trainer = feed.trainer(tiny_model(), given, feed.collator("sdpa"))
        trainer.measure(feed.tokens / feed.padded_tokens, 1.0, None)
        trainer.train()
        losses = [entry for entry in trainer.state.log_history if "step_seconds" in entry]
        tokens = [entry["non_pad_tokens_per_second"] / entry["tokens_per_second"] for entry in losses]
        found[name] = [entry["loss"] for entry in losses], trainer.evaluate()["eval_loss"], tokens
        assert feed.positions().shape[0] == 1
    plain, lists = found["plain"], found["lists"]
    assert len(plain[0]) == 3
    assert lists[0] == pytest.approx(plain[0], rel=1e-4)
    assert lists[1] == pytest.approx(plain[1], rel=1e-4)
    assert set(lists[2]) == {1.0}
    assert max(plain[2]) < 1
