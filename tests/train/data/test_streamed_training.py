"""The Trainer takes streamed rows in their order.

This holds with accumulation, on several ranks, over epochs, and after a run is resumed.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.packed_rows import LENGTH
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.gloo_ranks import train_on_two_ranks
from support.training.tiny_training import tiny_model

from tasks import recipe
from tasks.core.errors import UsageError
from train.config import TrainingConfig
from train.data.corpus import open_corpus
from train.data.stream import StreamedRows
from train.loop.effect import count_steps
from train.loop.feed import StreamedFeed, open_feed
from train.loop.trainer import arguments

ROWS = 12  # of a step


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of several shards with two packings and an incomplete last step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "SOURCE_BYTES_PER_SHARD", 4_000)
        settings = {"sequence_length": LENGTH, "validation": 0.2, "epochs": 2}
        found = pack_corpus(make_recipe(tmp_path_factory.mktemp("streamed"), conversations(80), **settings))
    assert open_corpus(found).rows("train") % ROWS not in (0, ROWS - 1)
    return found


def train(manifest: Path, folder: Path, ranks: int = 1, resumed: str | None = None, **settings: Any) -> dict[str, Any]:
    """Train as one process or as one of several ranks.

    Returns the losses, the weights, and the rows that this rank saw.
    """
    config = TrainingConfig(load="stream", epochs=2.5, warmup=0, learning_rate=1e-2, **settings)
    feed = open_feed(open_corpus(manifest), config)
    given = arguments(config, str(folder), 2, ROWS // 2 // ranks, "cpu", "fp32")
    given |= {"optim": "sgd", "activation_checkpointing": False, "report_to": "none", "dataloader_pin_memory": False}
    trainer = feed.trainer(tiny_model(dropout=0.0), given, feed.collator("sdpa"))
    trainer.measure(1.0, 1.0, None)
    seen: list[str] = []
    collate = trainer.data_collator

    def watched(rows: Any) -> Any:
        seen.extend(row["input_ids"].numpy().tobytes().hex() for row in rows if (row["labels"] != -100).any())
        return collate(rows)

    trainer.data_collator = watched
    steps = count_steps(trainer, config).total
    trainer.train(resume_from_checkpoint=resumed)
    assert not [thread for thread in threading.enumerate() if thread.name == "shards"], "the cache was not emptied"
    losses = [entry["loss"] for entry in trainer.state.log_history if "step_seconds" in entry]
    assert len(losses) == steps
    weights = torch.cat([weights.flatten() for weights in trainer.model.parameters() if weights.requires_grad])
    return {"losses": losses, "weights": weights.tolist(), "seen": seen, "folder": str(folder)}


@pytest.fixture(scope="module")
def whole(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(manifest, tmp_path_factory.mktemp("whole"), save_every=4)


def expected(manifest: Path) -> list[str]:
    """Return the rows of two and a half epochs.

    They end with the step that completes half of the third epoch.
    """
    rows = StreamedRows(manifest, ROWS, splits=("train", "train_epoch_2"))
    names = [[row["input_ids"].numpy().tobytes().hex() for row in rows] for _ in range(3)]
    of_epoch = -(-len(rows) // ROWS)
    steps = -(-5 * of_epoch // 2) - 2 * of_epoch
    return [*names[0], *names[1], *names[2][: steps * ROWS]]


def test_a_run_takes_the_rows_in_their_order(manifest: Path, whole: dict[str, Any]) -> None:
    wanted = expected(manifest)
    # accelerate reads one batch ahead, which is not trained on if a run ends within an epoch.
    assert whole["seen"][: len(wanted)] == wanted
    assert len(whole["seen"]) <= len(wanted) + 2


def test_two_ranks_take_the_same_steps_and_a_cache_changes_nothing(
    manifest: Path, whole: dict[str, Any], tmp_path: Path
) -> None:
    ranks = train_on_two_ranks(__file__, manifest, tmp_path / "run", cache=str(tmp_path / "cache"), save_every=1000)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(whole["losses"], rel=1e-4)
        torch.testing.assert_close(torch.tensor(rank["weights"]), torch.tensor(whole["weights"]), rtol=1e-3, atol=1e-6)
    assert sorted(ranks[0]["seen"][:24] + ranks[1]["seen"][:24]) == sorted(whole["seen"][:48])
    assert not list((tmp_path / "cache").rglob("*.arrow*"))


@pytest.mark.parametrize("step", [4, 12])
def test_a_resumed_run_takes_the_rows_that_are_left(
    manifest: Path, whole: dict[str, Any], tmp_path: Path, step: int
) -> None:
    resumed = train(manifest, tmp_path, resumed=f"{whole['folder']}/checkpoint-{step}", save_every=1000)
    assert resumed["losses"] == whole["losses"]
    assert resumed["weights"] == whole["weights"]
    of_epoch = -(-open_corpus(manifest).rows("train") // ROWS)
    assert step % of_epoch, "the checkpoint is within an epoch"
    done = step // of_epoch * open_corpus(manifest).rows("train") + step % of_epoch * ROWS
    assert resumed["seen"] == whole["seen"][done:]


def test_a_model_whose_loss_is_a_mean_gets_no_batch_without_trained_tokens(manifest: Path, tmp_path: Path) -> None:
    """The loss would be NaN, so the filler repeats the first row of the corpus."""
    config = TrainingConfig(load="stream", report_to="none")
    feed = open_feed(open_corpus(manifest), config)
    fillers = []
    for accepts in (True, False):
        model = tiny_model()
        model.get_base_model().accepts_loss_kwargs = accepts
        given = arguments(config, str(tmp_path), 7, 1, "cpu", "fp32")
        dealt = feed.trainer(model, given, feed.collator("sdpa")).train_dataset
        fillers.append(dealt[len(dealt) - 1])
        dealt.close()
    assert feed.rows % 7, "the last batch has a filler"
    assert (fillers[0]["labels"] == -100).all()
    assert fillers[1]["labels"].tolist() == feed.train[0]["labels"].tolist()


def test_settings_of_streaming(manifest: Path, tmp_path: Path) -> None:
    corpus = open_corpus(manifest)
    feed = open_feed(corpus, TrainingConfig(load="stream", cache=str(tmp_path), loader_workers=2))
    assert isinstance(feed, StreamedFeed)
    assert f"streamed from {len(corpus.splits['train'])} shards, copied to {tmp_path}; 2 packings" in feed.described
    assert feed.notes == ["loader_workers: has no effect with load: stream, where threads read ahead"]
    plain = open_feed(corpus, TrainingConfig(cache=str(tmp_path)))
    assert "cache: has no effect without load: stream" in plain.notes
    assert (feed.rows, feed.padded_tokens, feed.isolated) == (plain.rows, plain.padded_tokens, plain.isolated)
    assert feed.tokens == pytest.approx(plain.tokens, rel=0.1)
    assert feed.trained == pytest.approx(plain.trained, rel=0.1)
    assert feed.max_id >= plain.max_id
    whole = pack_corpus(make_recipe(tmp_path / "whole", conversations(20), packing=False))
    with pytest.raises(UsageError, match="contains conversations"):
        open_feed(open_corpus(whole), TrainingConfig(load="stream"))
