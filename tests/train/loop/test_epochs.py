"""A corpus of several packings: each epoch trains on the rows of the next."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.tiny_training import LENGTH, SETTINGS, SOURCES, tiny_model

from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.data.dataset import PackedDataset
from packcorpus.train.loop.feed import PackedFeed, StepRows
from packcorpus.train.loop.record import Steps, warnings
from packcorpus.train.loop.run import Run
from packcorpus.train.loop.run_folder import Choices
from packcorpus.train.loop.trainer import arguments

Seen = list[bytes]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values: dict[str, Any] = {"sources": SOURCES, "sequence_length": LENGTH, "epochs": 2, **SETTINGS}
    return pack_corpus(make_recipe(tmp_path_factory.mktemp("epochs"), conversations(20), **values))


def test_each_epoch_uses_the_next_packing(manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, config = open_corpus(manifest), TrainingConfig(epochs=3, warmup=0)
    feed = PackedFeed(corpus, config)
    assert "2 packings, one for each epoch in turn" in feed.described
    rows = [
        sorted(row["input_ids"].numpy().tobytes() for row in PackedDataset(corpus, name))
        for name in ("train", "train_epoch_2")
    ]
    assert rows[0] != rows[1]
    assert len(rows[0]) == len(rows[1])
    seen: Seen = []

    read = StepRows.__getitems__

    def watched(self: StepRows, numbers: Any) -> Any:
        found = read(self, numbers)
        seen.extend(row["input_ids"].numpy().tobytes() for row in found)
        return found

    monkeypatch.setattr(StepRows, "__getitems__", watched)
    given = arguments(config, str(tmp_path), 4, 1, "cpu", "fp32")
    given |= {"save_strategy": "no", "optim": "sgd", "activation_checkpointing": False, "report_to": "none"}
    trainer = feed.trainer(tiny_model(), given, feed.collator("sdpa"))
    trainer.measure(1.0, 1.0, None)
    torch.manual_seed(0)
    trainer.train()
    count = len(rows[0])
    passes = [sorted(seen[top : top + count]) for top in range(0, len(seen), count)]
    assert passes == [rows[0], rows[1], rows[0]]


@pytest.mark.parametrize(("total", "used"), [(5, 1), (10, 1), (11, 2), (20, 2), (30, 2)])
def test_unused_packings_are_reported(manifest: Path, total: int, used: int) -> None:
    corpus, config = open_corpus(manifest), TrainingConfig(lora_dropout=0.0)
    known = {
        "corpus": corpus,
        "config": config,
        "feed": PackedFeed(corpus, config),
        "choices": Choices("cpu", "fp32", 1, "sdpa", 1, 1, 1.0, [], []),
        "warnings": [],
        "model": tiny_model(),
    }
    run = Run(**dict.fromkeys(field.name for field in fields(Run)) | known)
    found = [warning for warning in warnings(run, Steps(10, total)) if "packings" in warning]
    if used == 2:
        assert not found
    else:
        [warning] = found
        assert f"has 2 packings, one for each epoch, but {total} steps use only 1. Raise epochs to 2" in warning
