"""Trackers receive every evaluation, and upload nothing unless set up to do so.

The trackers are not among the requirements. A stand-in for trackio has the functions that transformers calls.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.tiny_training import LENGTH, tiny_model
from transformers.integrations import integration_utils

from packcorpus.tasks.core.errors import PartMissing, UsageError
from packcorpus.train.config import TrainingConfig, load_training_config
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.evaluation import Decisions
from packcorpus.train.loop.feed import PackedFeed
from packcorpus.train.loop.trainer import arguments
from packcorpus.train.machine import devices


class Config(dict[str, Any]):
    def update(self, values: dict[str, Any], allow_val_change: bool) -> None:  # type: ignore[override]
        super().update(values)


class Tracker:
    """A stand-in for the module trackio that keeps all calls."""

    # It has everything that transformers uses of the module.

    __version__ = "0.43.0"

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.config = Config()
        self.finished = 0
        self.context_vars = SimpleNamespace(current_space_id=SimpleNamespace(get=lambda: None))

    def init(self, **given: Any) -> None:
        self.started.append(given)

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished += 1

    def freeze(self, **_: Any) -> None:
        raise AssertionError("uploads the run")

    sync = freeze


def test_trackio_receives_every_evaluation_and_uploads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, "trackio", tracker)  # type: ignore[arg-type]
    monkeypatch.setattr(integration_utils, "is_trackio_available", lambda: True)
    recipe = make_recipe(tmp_path / "corpus", conversations(30), validation=0.2, sequence_length=LENGTH)
    config = TrainingConfig(report_to="trackio", max_steps=4, eval_every=3, activation_checkpointing=False)
    feed = PackedFeed(open_corpus(pack_corpus(recipe)), config)
    given = arguments(config, str(tmp_path / "mine-0123"), 1, 1, "cpu", False) | {"save_strategy": "no"}
    trainer = feed.trainer(tiny_model(), given, feed.collator("sdpa"))
    trainer.measure(1.0, 1.0, None)
    trainer.add_callback(Decisions(config, has_rows=True))
    trainer.train()
    [started] = tracker.started
    assert (started["project"], started["name"]) == ("packcorpus", "mine-0123")
    assert started["space_id"] is started["bucket_id"] is None, "local"
    evaluations = [values for values in tracker.logged if "eval/loss" in values]
    assert [values["train/global_step"] for values in evaluations] == [3, 4]
    assert all(0 <= values["eval/token_accuracy"] <= 1 for values in evaluations)
    assert [values["train/global_step"] for values in tracker.logged if "train/loss" in values] == [1, 2, 3, 4]
    assert tracker.finished == 1


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("none", []),
        ("wandb", ["wandb"]),
        ("trackio", ["trackio"]),
        ("[tensorboard, trackio, tensorboard]", ["tensorboard", "trackio"]),
    ],
)
def test_one_tracker_or_several_are_named(text: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "")  # so that it is restored
    monkeypatch.delenv("WANDB_PROJECT")
    config = load_training_config(overrides={"report_to": text})
    assert config.trackers == names
    assert arguments(config, "out", 1, 1, "cpu", False)["report_to"] == names
    assert os.environ.get("WANDB_PROJECT") == ("packcorpus" if "wandb" in names else None)
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    arguments(config, "out", 1, 1, "cpu", False)
    assert os.environ["WANDB_PROJECT"] == "theirs"


@pytest.mark.parametrize("text", ["[]", "[none]", "comet_ml", "[trackio, all]"])
def test_other_trackers_are_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="report_to"):
        load_training_config(overrides={"report_to": text})


def test_a_missing_tracker_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "version_of", lambda name: "1.0" if name == "tensorboard" else None)
    devices.check_reporting(TrainingConfig(report_to="tensorboard"))
    devices.check_reporting(TrainingConfig())
    with pytest.raises(PartMissing, match="report_to: trackio is not installed; run: pip install trackio"):
        devices.check_reporting(TrainingConfig(report_to=["tensorboard", "trackio"]))
