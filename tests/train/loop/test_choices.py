"""The choices of a run's first start are reused, and a step keeps its rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.tiny_training import tiny_model

from packcorpus.train.__main__ import main
from packcorpus.train.config import TrainingConfig
from packcorpus.train.loop import micro_batch, run
from packcorpus.train.loop.micro_batch import Choice, Trial
from packcorpus.train.loop.run_folder import Choices
from packcorpus.train.machine.devices import Device
from packcorpus.train.model import options
from packcorpus.train.model.options import Tried

LENGTH = 128
BEFORE = Choices("cpu", "fp32", 1, "sdpa", 4, 3, 99.5, [], [])
CPU, GPU = Device("cpu", "fp32", "CPU"), Device("cuda", "bf16", "NVIDIA H200")


def chosen(
    monkeypatch: pytest.MonkeyPatch, config: TrainingConfig, before: Choices | None, known: bool, ranks: int = 1
) -> tuple[int, int, bool]:
    """Return rows per pass, passes per step, and whether they were measured."""
    measured = []

    def measure(
        model: Any, rows: Any, collator: Any, config: TrainingConfig, step: int, ranks: int, dtype: Any, **_: Any
    ) -> Choice:
        measured.append(step)
        size = 1 if config.micro_batch == "auto" else micro_batch.largest_divisor(step, config.micro_batch)
        return Choice(size, step // size, (Trial(size, 1.0, 1.0, 1.0),), "")

    monkeypatch.setattr(micro_batch, "micro_batch", measure)
    feed = SimpleNamespace(train=range(100), rows=100, longest=None, padded_tokens=100 * LENGTH)
    start = run._Start(("cpu", "fp32" if known else "other", ranks), before)
    model = SimpleNamespace(config=SimpleNamespace(model_type="x"), supports_gradient_checkpointing=False)
    size, passes, *_ = run._choose_size(model, feed, config, start, None, torch.float32, [])
    return size, passes, bool(measured)


@pytest.mark.parametrize(
    ("wanted", "reduced", "expected"),
    [
        ("auto", [], (4, 3, False)),
        (4, [], (4, 3, False)),
        (2, [], (2, 6, True)),
        (5, [], (4, 3, False)),  # does not divide the 12 rows of a step
        (12, [], (12, 1, True)),
        # The same command again, after it ran out of memory.
        (12, ["why"], (4, 3, False)),
        (2, ["why"], (2, 6, True)),
    ],
)
def test_a_resumed_run_keeps_the_rows_of_a_step(
    monkeypatch: pytest.MonkeyPatch, wanted: Any, reduced: list[str], expected: tuple[int, int, bool]
) -> None:
    before = replace(BEFORE, reduced=reduced)
    config = TrainingConfig(micro_batch=wanted, tokens_per_step=99 * LENGTH)
    assert chosen(monkeypatch, config, before, known=True) == expected


def test_the_rows_of_a_step_are_kept_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainingConfig(micro_batch=3, tokens_per_step=99 * LENGTH)
    assert chosen(monkeypatch, config, BEFORE, known=False, ranks=2) == (3, 2, True)
    assert chosen(monkeypatch, config, BEFORE, known=False, ranks=5) == (3, 1, True), "12 rows: three or two a rank"
    before = replace(BEFORE, ranks=5, step=11)
    assert chosen(monkeypatch, config, before, known=False, ranks=1) == (1, 11, True)
    assert chosen(monkeypatch, config, None, known=False, ranks=1) == (3, 32, True), "as the settings say"


@pytest.mark.parametrize(
    ("option", "setting", "device", "options", "wanted"),
    [
        # The first start.
        ("fused_loss", "auto", GPU, None, True),
        ("fused_loss", "auto", CPU, None, True),
        ("fused_loss", True, CPU, None, True),
        ("fused_loss", False, GPU, None, False),
        ("compile", True, CPU, None, True),
        ("compile", False, GPU, None, False),
        ("compile", "auto", GPU, None, True),
        ("compile", "auto", CPU, None, False),
        ("liger", None, GPU, None, True),
        ("liger", None, CPU, None, False),
        # Later starts, with the options of the first start.
        ("fused_loss", "auto", GPU, {"fused_loss": False, "compile": True}, False),
        ("fused_loss", "auto", GPU, {"fused_loss": True, "compile": True}, True),
        ("fused_loss", True, CPU, {"fused_loss": False, "compile": True}, False),
        ("fused_loss", False, GPU, {"fused_loss": True, "compile": True}, False),
        ("compile", True, GPU, {"fused_loss": True, "compile": False}, False),
        ("compile", True, GPU, {"fused_loss": True, "compile": True}, True),
        ("compile", "auto", GPU, {"fused_loss": True, "compile": True}, True),
        ("liger", None, GPU, {"fused_loss": True, "compile": True}, False),
        ("liger", None, GPU, {"liger": True}, True),
    ],
)
def test_options_are_those_of_the_first_start(
    option: str, setting: Any, device: Device, options: dict[str, bool] | None, wanted: bool
) -> None:
    place = (device.kind, device.precision, 1)
    before = replace(BEFORE, device=device.kind, precision=device.precision, options=options) if options else None
    config = TrainingConfig(**({} if option == "liger" else {option: setting}))
    assert run._Start(place, before).wants(option, config) == wanted


@pytest.mark.parametrize("option", ["compile", "liger"])
def test_with_divided_weights_nothing_is_tried_unless_it_is_asked_for(option: str) -> None:
    start = run._Start(("cuda", "bf16", 2), None)
    assert not start.wants(option, TrainingConfig(sharding="full"))
    assert start.wants("compile", TrainingConfig(sharding="full", compile=True))
    assert start.checkpointing(TrainingConfig(sharding="full")) is True


def test_what_recomputes_is_that_of_the_first_start() -> None:
    known = replace(BEFORE, checkpointing=2)
    for before, expected in ((known, 2), (BEFORE, True), (None, "auto")):
        assert run._Start(("cpu", "fp32", 1), before).checkpointing(TrainingConfig()) == expected
    assert run._Start(("cuda", "bf16", 1), known).checkpointing(TrainingConfig()) == "auto", "another machine"
    assert run._Start(("cpu", "fp32", 1), known).checkpointing(TrainingConfig(activation_checkpointing=False)) is False


def test_a_run_of_an_earlier_version_goes_on_without_the_fused_loss() -> None:
    start = run._Start(("cuda", "bf16", 1), replace(BEFORE, device="cuda", precision="bf16"))
    assert not start.wants("fused_loss", TrainingConfig())
    assert start.wants("fused_loss", TrainingConfig(fused_loss=True))


def test_options_are_tried_once_and_then_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options are tried on the rows of a pass, as in training."""
    tried: list[tuple[int, bool]] = []

    def compiles(model: Any, batches: Any, dtype: Any, seed: int, *, timed: bool) -> Tried:
        (rows,) = {len(batch["input_ids"]) for batch in batches}
        assert len({tuple(batch["input_ids"].flatten().tolist()) for batch in batches}) == 3
        tried.append((rows, timed))
        return Tried(True, "compile: used: as asked", 0.5 if timed else float("nan"))

    monkeypatch.setattr(options, "try_compile", compiles)
    monkeypatch.setattr("packcorpus.train.loop.record.picture", lambda *_: b"")  # it takes half of the time
    monkeypatch.setattr(options, "try_fused_loss", lambda *_: Tried(False, "fused_loss: not used: as asked"))
    manifest = pack_corpus(make_recipe(tmp_path, conversations(100, seed=3), sequence_length=LENGTH))
    tiny_model(adapter=False, num_hidden_layers=1, use_cache=True).save_pretrained(tmp_path / "tiny")
    words = [
        *("--manifest", str(manifest), "--output", str(tmp_path / "run"), "--base-model", str(tmp_path / "tiny")),
        *("--device", "cpu", "--quantization", "none", "--max-steps", "1", "--micro-batch", "2", "--compile", "true"),
        *("--tokens-per-step", str(4 * LENGTH)),
    ]
    for _ in range(2):
        assert main([*words, "--fused-loss", "true"]) == 0
        record = json.loads((tmp_path / "run" / "training.json").read_text())
        assert record["choices"]["options"] == {"compile": True, "fused_loss": False, "liger": False}
        assert record["choices"]["checkpointing"] is False
        assert record["choices"]["tokens_per_second"] == 2 * LENGTH / 0.5
        (tmp_path / "run" / "training.json").unlink()
    assert tried == [(2, True), (2, False)]
