"""Each rank takes its own rows of a balanced step.

This holds for every divisor of the ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.gloo_ranks import train_on_two_ranks
from support.training.tiny_training import LENGTH, tiny_model
from support.training.waiting import idle_of_steps

from packcorpus.tasks import recipe
from packcorpus.tasks.config import Balance
from packcorpus.tasks.storage.shards import statistics_of_split
from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.data.dataset import PackedDataset
from packcorpus.train.data.steps import line_of_rows, why_unbalanced
from packcorpus.train.loop.feed import open_feed
from packcorpus.train.loop.trainer import arguments

ROWS = 8  # of a step: 4 ranks × 2 rows
BALANCE = Balance(ranks=4, rows_per_rank=2)


# -- the order ---------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 9))
def test_a_line_has_every_row_once_and_groups_stay_whole(
    groups: list[int], ranks: int, rows_per_rank: int, seed: int
) -> None:
    balance = Balance.model_construct(ranks=ranks, rows_per_rank=rows_per_rank)
    size, firsts = ranks * rows_per_rank, np.cumsum([0, *groups])
    line = line_of_rows(groups, balance, seed, 0)
    assert sorted(line.tolist()) == list(range(sum(groups)))
    whole = sum(rows // size for rows in groups)
    for step in line[: whole * size].reshape(whole, size):
        group = int(np.searchsorted(firsts, step[0], side="right")) - 1
        assert (np.diff(step) == 1).all()
        assert (step[0] - firsts[group]) % size == 0
        assert step[-1] < firsts[group + 1]
    assert (line == line_of_rows(groups, balance, seed, 0)).all()


def test_epochs_and_seeds_have_other_orders() -> None:
    lines = [line_of_rows([800], BALANCE, *given) for given in ((1, 0), (1, 1), (2, 0))]
    assert not any((lines[0] == line).mean() > 0.1 for line in lines[1:])


@pytest.mark.parametrize(
    ("ranks", "rows", "message"),
    [
        (4, 8, None),
        (2, 8, None),
        (2, 16, None),
        (2, 2, None),
        (3, 6, "3 is not a div"),
        (4, 12, "12 rows, which is nei"),
    ],
)
def test_runs_that_the_order_does_not_fit_are_warned(ranks: int, rows: int, message: str | None) -> None:
    found = why_unbalanced(BALANCE, ranks, rows)
    assert found is None if message is None else message in str(found)


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of several shards with two packings and an incomplete last step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "SOURCE_BYTES_PER_SHARD", 6_000)
        values: dict[str, Any] = {"sequence_length": LENGTH, "epochs": 2, "balance": BALANCE.model_dump()}
        found = pack_corpus(make_recipe(tmp_path_factory.mktemp("balanced"), conversations(40, longest=40), **values))
    corpus = open_corpus(found)
    assert len(corpus.splits["train"]) > 1
    assert corpus.rows("train") % ROWS
    return found


def train(manifest: Path, folder: Path, ranks: int = 1, resumed: str | None = None, **values: Any) -> dict[str, Any]:
    """Train as one process or as one of several ranks."""
    # Returns the losses, the weights, and the rows that this rank saw.
    config = TrainingConfig(epochs=2, warmup=0, learning_rate=1e-2, **values)
    feed = open_feed(open_corpus(manifest), config)
    given = arguments(config, str(folder), 2, ROWS // 2 // ranks, "cpu", "fp32")
    given |= {"optim": "sgd", "activation_checkpointing": False, "report_to": "none", "dataloader_pin_memory": False}
    trainer = feed.trainer(tiny_model(dropout=0.0), given, feed.collator("sdpa"))
    trainer.measure(1.0, 1.0, None)
    seen: list[str] = []
    collate = trainer.data_collator

    def watched(rows: Any) -> Any:
        seen.extend(row["input_ids"].numpy().tobytes().hex() for row in rows)
        return collate(rows)

    trainer.data_collator = watched
    trainer.train(resume_from_checkpoint=resumed)
    losses = [entry["loss"] for entry in trainer.state.log_history if "step_seconds" in entry]
    weights = torch.cat([weights.flatten() for weights in trainer.model.parameters() if weights.requires_grad])
    return {"losses": losses, "weights": weights.tolist(), "seen": seen, "folder": str(folder)}


@pytest.fixture(scope="module")
def whole(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(manifest, tmp_path_factory.mktemp("whole"), save_every=2)


def named(manifest: Path, split: str) -> dict[str, int]:
    """Return the number of each row of a split."""
    rows = PackedDataset(open_corpus(manifest), split)
    return {row["input_ids"].numpy().tobytes().hex(): number for number, row in enumerate(rows)}


def test_an_epoch_has_every_row_and_whole_groups_in_another_order(manifest: Path, whole: dict[str, Any]) -> None:
    count = open_corpus(manifest).rows("train")
    for epoch, split in enumerate(("train", "train_epoch_2")):
        numbers = [named(manifest, split)[row] for row in whole["seen"][epoch * count : (epoch + 1) * count]]
        assert sorted(numbers) == list(range(count))
        steps = np.array(numbers[: count // ROWS * ROWS]).reshape(-1, ROWS)
        assert (np.sort(steps, axis=1) % ROWS == np.arange(ROWS)).all()
        assert (np.diff(steps[:, 0]) < 0).any(), "groups are not shuffled"


def test_two_ranks_have_equal_work_and_take_the_same_steps(
    manifest: Path, whole: dict[str, Any], tmp_path: Path
) -> None:
    ranks = train_on_two_ranks(__file__, manifest, tmp_path / "run", save_every=1000)
    count = open_corpus(manifest).rows("train") // ROWS * ROWS
    for rank in ranks:
        assert rank["losses"][: count // ROWS] == pytest.approx(whole["losses"][: count // ROWS], rel=1e-3)
    numbers = named(manifest, "train")
    taken = [[numbers[row] for row in rank["seen"][: count // 2]] for rank in ranks]
    assert [{number % 2 for number in own} for own in taken] == [{0}, {1}]
    assert sorted(taken[0] + taken[1]) == list(range(count))
    corpus = open_corpus(manifest)
    assert corpus.manifest
    found = statistics_of_split(corpus.manifest, corpus.folder, "train")
    assert found
    order = np.array(taken).T.reshape(-1)
    shuffled = np.random.default_rng(0).permutation(found.squares)
    after, before = (idle_of_steps(values, 2, ROWS // 2, 6 * LENGTH) for values in (found.squares[order], shuffled))
    assert after < 0.7 * before


def test_a_resumed_run_takes_the_rows_that_are_left(manifest: Path, whole: dict[str, Any], tmp_path: Path) -> None:
    resumed = train(manifest, tmp_path, resumed=f"{whole['folder']}/checkpoint-2", save_every=1000)
    assert resumed["losses"] == whole["losses"]
    assert resumed["weights"] == whole["weights"]
    assert resumed["seen"] == whole["seen"][2 * ROWS :]
