"""Loss and token accuracy of an evaluation match their definition.

This holds with and without logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.tiny_training import LENGTH, tiny_model
from support.training.validation import evaluated

from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.loop.feed import PackedFeed
from packcorpus.train.loop.trainer import arguments
from packcorpus.train.model import token_loss
from packcorpus.train.model.token_loss import fuse_loss


@pytest.fixture(scope="module")
def feed(tmp_path_factory: pytest.TempPathFactory) -> PackedFeed:
    recipe = make_recipe(tmp_path_factory.mktemp("corpus"), conversations(60), validation=0.2, sequence_length=LENGTH)
    return PackedFeed(open_corpus(pack_corpus(recipe)), TrainingConfig())


@pytest.fixture
def predicting(feed: PackedFeed) -> Any:
    """Return a model that predicts some tokens."""
    # Its head is moved toward frequent tokens.
    model = tiny_model()
    labels = torch.cat([row["labels"] for row in feed.validation])
    counts = torch.bincount(labels[labels >= 0], minlength=model.config.vocab_size).double()
    with torch.no_grad():
        model.get_decoder().norm.weight.mul_(0.2)
        head = model.get_output_embeddings()
        head.bias = torch.nn.Parameter((counts + 0.1).log().float(), requires_grad=False)
    return model


@pytest.mark.parametrize(("rows_per_pass", "fused"), [(1, False), (3, False), (3, True)])
def test_an_evaluation_has_the_mean_of_all_trained_tokens(
    feed: PackedFeed, predicting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool, rows_per_pass: int
) -> None:
    monkeypatch.setattr(token_loss, "CHUNK", 7)
    expected = evaluated(predicting.eval(), feed.validation)
    assert 0.05 < expected[1] < 0.9, "otherwise a wrong count may look right"
    if fused:
        fuse_loss(predicting)
    given = arguments(TrainingConfig(activation_checkpointing=False), str(tmp_path), rows_per_pass, 1, "cpu", False)
    trainer = feed.trainer(predicting, given, feed.collator("sdpa"))
    trainer.measure(1.0, 1.0, None)
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(expected[0], rel=1e-5)
    assert found["eval_token_accuracy"] == pytest.approx(expected[1], abs=1e-9)
    assert trainer.state.log_history[-1]["eval_token_accuracy"] == found["eval_token_accuracy"]
    assert predicting.training
