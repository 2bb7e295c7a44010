"""Training on rows of several lengths, on any number of ranks.

Each step has rows of one length, and all steps have equally many tokens.

    rows of 96 and 192 tokens ─PackedFeed─▶ Trainer ┬ every row once per epoch, the same rows on one rank and on two
                                                    ├ a resumed run takes the rows that are left
                                                    └ the validation loss is that of all trained tokens
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given as given_by
from hypothesis import settings as profile
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.gloo_ranks import train_on_two_ranks
from support.training.tiny_training import tiny_model

from packcorpus.tasks.core.errors import DataError
from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.data.dataset import PackedDataset
from packcorpus.train.data.steps import slices_of
from packcorpus.train.loop.feed import PackedFeed, empty_row, open_feed
from packcorpus.train.loop.record import count_steps
from packcorpus.train.loop.trainer import arguments

LENGTHS = [96, 192]
ROWS = 4  # rows of 192 tokens per step; or 8 of 96


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with two packings; rows of both lengths leave an incomplete step."""
    records = [*conversations(50, seed=1, longest=6), *conversations(10, seed=2, longest=40)]
    values = {"sequence_length": LENGTHS, "validation": 0.2, "epochs": 2, "max_rejects": 0.5}
    found = pack_corpus(make_recipe(tmp_path_factory.mktemp("mixed"), records, **values))
    corpus = open_corpus(found)
    assert corpus.rows("train-192") % ROWS
    assert corpus.rows("train-96") % (2 * ROWS)
    return found


def train(manifest: Path, folder: Path, ranks: int = 1, resumed: str | None = None, **given: Any) -> dict[str, Any]:
    """Train as one process or as one of several ranks."""
    # Returns the losses, the weights, the validation loss, and the rows of each pass of this rank.
    config = TrainingConfig(epochs=2.25, warmup=0, learning_rate=1e-2, **given)
    feed = open_feed(open_corpus(manifest), config)
    assert isinstance(feed, PackedFeed)
    values = arguments(config, str(folder), 2, ROWS // 2 // ranks, "cpu", "fp32")
    values |= {"optim": "sgd", "activation_checkpointing": False, "report_to": "none", "dataloader_pin_memory": False}
    trainer = feed.trainer(tiny_model(dropout=0.0), values, feed.collator("sdpa"))
    trainer.measure(1.0, 1.0, None)
    seen: list[list[str]] = []
    collate = trainer.data_collator

    def watched(rows: Any) -> Any:
        seen.append([row["input_ids"].numpy().tobytes().hex() for row in rows if (row["labels"] != -100).any()])
        return collate(rows)

    trainer.data_collator = watched
    steps = count_steps(trainer, config)
    trainer.train(resume_from_checkpoint=resumed)
    losses = [entry["loss"] for entry in trainer.state.log_history if "step_seconds" in entry]
    assert len(losses) == steps.total
    weights = torch.cat([weights.flatten() for weights in trainer.model.parameters() if weights.requires_grad])
    trainer.data_collator = collate
    loss = trainer.evaluate()["eval_loss"]
    return {"losses": losses, "weights": weights.tolist(), "seen": seen, "folder": str(folder),
            "per_epoch": steps.per_epoch, "validation": loss}  # fmt: skip


@pytest.fixture(scope="module")
def whole(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(manifest, tmp_path_factory.mktemp("whole"), save_every=4)


def rows_of(manifest: Path, split: str) -> list[str]:
    rows = PackedDataset(manifest, split)
    return [rows[row]["input_ids"].numpy().tobytes().hex() for row in range(len(rows))]


def test_each_step_has_rows_of_one_length_and_as_many_tokens(manifest: Path, whole: dict[str, Any]) -> None:
    passes = ROWS // 2
    of_epoch = whole["per_epoch"] * passes
    corpus = open_corpus(manifest)
    assert whole["per_epoch"] == math.ceil(corpus.rows("train-192") / ROWS) + math.ceil(corpus.rows("train-96") / 8)
    for epoch, kind in enumerate(("train", "train_epoch_2")):
        own = whole["seen"][epoch * of_epoch : (epoch + 1) * of_epoch]
        steps = [[*chain(*own[top : top + passes])] for top in range(0, of_epoch, passes)]
        assert Counter(row for step in steps for row in step) == Counter(
            row for length in LENGTHS for row in rows_of(manifest, f"{kind}-{length}")
        )
        sizes = Counter[tuple[int, int]]()
        for step in steps:
            [length] = {len(row) // 8 for row in step}
            sizes[length, len(step)] += 1
        assert sizes[192, ROWS] == corpus.rows("train-192") // ROWS
        assert sizes[96, 8] == corpus.rows("train-96") // 8
        assert sum(sizes.values()) == whole["per_epoch"], "only the last step of each length has fewer"


def test_two_ranks_take_the_same_steps(manifest: Path, whole: dict[str, Any], tmp_path: Path) -> None:
    ranks = train_on_two_ranks(__file__, manifest, tmp_path / "run", save_every=1000)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(whole["losses"], rel=1e-4)
        assert rank["validation"] == pytest.approx(whole["validation"], rel=1e-4)
        torch.testing.assert_close(torch.tensor(rank["weights"]), torch.tensor(whole["weights"]), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("step", [4, 8])
def test_a_resumed_run_takes_the_rows_that_are_left(
    manifest: Path, whole: dict[str, Any], tmp_path: Path, step: int
) -> None:
    assert step % whole["per_epoch"], "the checkpoint is within an epoch"
    resumed = train(manifest, tmp_path, resumed=f"{whole['folder']}/checkpoint-{step}", save_every=1000)
    assert resumed["losses"] == whole["losses"]
    assert resumed["weights"] == whole["weights"]
    assert resumed["seen"] == whole["seen"][step * ROWS // 2 :]


def test_the_validation_loss_is_that_of_all_trained_tokens(manifest: Path, tmp_path: Path) -> None:
    corpus, config = open_corpus(manifest), TrainingConfig()
    feed = open_feed(corpus, config)
    values = arguments(config, str(tmp_path), 3, 1, "cpu", "fp32") | {"report_to": "none"}
    trainer = feed.trainer(tiny_model(dropout=0.0), values, feed.collator("sdpa"))
    trainer.measure(1.0, 1.0, None)
    found = trainer.evaluate()["eval_loss"]
    losses = tokens = 0.0
    for length in LENGTHS:
        split = f"validation-{length}"
        rows: Any = PackedDataset(corpus, split) if corpus.rows(split) else []
        for number in range(len(rows)):
            batch = {name: values[None] for name, values in rows[number].items()}
            count = int((batch["labels"][:, 1:] != -100).sum())
            with torch.no_grad():
                losses += float(trainer.model(**batch)["loss"]) * count
            tokens += count
    assert found == pytest.approx(losses / tokens, rel=1e-4)


@profile(max_examples=examples(200), deadline=None)
@given_by(
    st.dictionaries(st.sampled_from([16, 24, 64, 100]), st.integers(1, 200), min_size=1),
    st.integers(1, 9),
    st.sampled_from(["tokens", "blocks"]),
    st.integers(0, 3),
)
def test_steps_have_every_row_once(rows: dict[int, int], size: int, mix: Any, epoch: int) -> None:
    steps = slices_of(rows, size, 100, mix, 7, epoch)
    assert steps == slices_of(rows, size, 100, mix, 7, epoch)
    for length, count in rows.items():
        own = sorted((step.first, step.last) for step in steps if step.length == length)
        assert [first for first, _ in own] == list(range(0, count, size * 100 // length))
        assert [last for _, last in own] == [*(first for first, _ in own[1:]), count]
    if mix == "blocks":
        assert [step.length for step in steps] == sorted(step.length for step in steps)
        return
    for length in rows:  # at any place, about the same share of the steps of each length was taken
        own = sum(step.length == length for step in steps)
        for place in range(len(steps)):
            taken = sum(step.length == length for step in steps[:place])
            assert abs(taken / own - place / len(steps)) <= 1 / own + len(rows) / len(steps)


def test_a_split_of_several_lengths_is_not_one_dataset(manifest: Path) -> None:
    corpus = open_corpus(manifest)
    assert corpus.rows("validation") == corpus.rows("validation-96") + corpus.rows("validation-192")
    with pytest.raises(DataError, match="open one of the splits train-96, train-192"):
        PackedDataset(corpus)


def test_rows_of_each_length_have_their_weights(tmp_path: Path) -> None:
    records = [*conversations(50, seed=1, longest=6), *conversations(10, seed=2, longest=40)]
    values = {"sequence_length": LENGTHS, "loss_weight": "conversation", "max_rejects": 0.5}
    corpus = open_corpus(pack_corpus(make_recipe(tmp_path, records, **values)))
    assert corpus.manifest is not None
    assert corpus.manifest.loss_weight is not None
    total = 0.0
    for length in LENGTHS:
        rows = PackedDataset(corpus, f"train-{length}")
        total += sum(float(rows[number]["loss_weight"].double().sum()) for number in range(len(rows)))
        filler = empty_row(rows)
        shapes = [{name: (values.shape, values.dtype) for name, values in row.items()} for row in (rows[0], filler)]
        assert shapes[0] == shapes[1]
        assert not filler["loss_weight"].any()
    assert total == pytest.approx(corpus.manifest.loss_weight["train"].loss_weight)


def test_shards_without_the_manifest_of_several_lengths_are_refused(manifest: Path, tmp_path: Path) -> None:
    corpus = open_corpus(manifest)
    for shard in (*corpus.splits["train-96"], *corpus.splits["train-192"]):
        shutil.copy(corpus.folder / shard.path, tmp_path)
    with pytest.raises(
        DataError, match="has rows of one of several lengths, which cannot be read without the manifest"
    ):
        open_corpus(tmp_path)
