"""Training in fp16 with loss scaling equals training in fp32.

Steps whose gradients overflow are skipped.

accelerate scales the loss only on a GPU. Here it scales the loss on the CPU, with torch's own autocast and scaler.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from rich.console import Console
from support.training.tiny_training import Row, packed_rows, tiny_model
from transformers import PrinterCallback

from packcorpus.tasks.core.errors import DataError
from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.steps import shuffled_steps
from packcorpus.train.evaluation import outcome
from packcorpus.train.loop import trainer
from packcorpus.train.loop.callbacks import describe
from packcorpus.train.loop.feed import Shares, StepRows, empty_row
from packcorpus.train.loop.record import show_result, summary
from packcorpus.train.loop.trainer import Measured, arguments, packed_trainer
from packcorpus.train.model.attention import Collator


def scale_on_cpu(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    real = Accelerator.__init__

    def build(self: Any, *args: Any, **named: Any) -> None:
        real(self, *args, **named)
        if self.mixed_precision == "fp16":
            self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu", init_scale=scale)

    monkeypatch.setattr(Accelerator, "__init__", build)


class Rows(list[Row]):
    def __getitems__(self, numbers: list[int]) -> list[Row]:
        return [self[number] for number in numbers]


def prepared(folder: Path, precision: str, steps: int = 4, **settings: Any) -> Any:
    """Return a trainer with two rows per step, in two passes."""
    config = TrainingConfig(max_steps=steps, learning_rate=1e-3, warmup=0, activation_checkpointing=False, **settings)
    rows: Any = Rows(packed_rows()[:8])
    given = arguments(config, str(folder), 1, 2, "cpu", precision)
    taken = StepRows(partial(shuffled_steps, [rows], 2, config.seed), Shares.of(given), empty_row)
    built = packed_trainer(tiny_model(initializer_range=0.05), given, Collator("sdpa"), taken, None)
    built.measure(1.0, 1.0, None)
    built.remove_callback(PrinterCallback)
    return built


def steps_of(trainer: Any) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "step_seconds" in entry]


def adapter(trainer: Any) -> list[torch.Tensor]:
    return [weights.detach().clone() for weights in trainer.model.parameters() if weights.requires_grad]


def test_losses_are_those_of_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_on_cpu(monkeypatch, 2.0**16)
    kinds: set[torch.dtype] = set()
    full = prepared(tmp_path, "fp32")
    full.train()
    half = prepared(tmp_path, "fp16")
    half.model.get_decoder().layers[0].mlp.gate_proj.register_forward_hook(lambda *all: kinds.add(all[2].dtype))
    half.train()
    assert kinds == {torch.float16}
    found, expected = ([entry["loss"] for entry in steps_of(built)] for built in (half, full))
    assert found == pytest.approx(expected, rel=2e-3)
    assert found != expected
    assert {weights.dtype for weights in adapter(half)} == {torch.float32}
    assert [entry["loss_scale"] for entry in steps_of(half)] == [2.0**16] * 4
    assert not any("loss_scale" in entry for entry in steps_of(full))


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "paged_adamw_8bit"])
def test_steps_that_overflow_are_skipped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scale_on_cpu(monkeypatch, 2.0**22)
    built = prepared(tmp_path, "fp16", steps=6, optimizer=optimizer)
    weights = [adapter(built)]
    log = Measured.log
    monkeypatch.setattr(Measured, "log", lambda self, *args: (weights.append(adapter(self)), log(self, *args)))
    built.train()
    steps = steps_of(built)
    skipped = [bool(entry["skipped"]) for entry in steps]
    assert True in skipped
    assert False in skipped
    unchanged = [all(map(torch.equal, a, b)) for a, b in pairwise(weights)]
    assert unchanged[: len(steps)] == skipped
    assert [" (skipped)" in describe(entry) for entry in steps] == skipped
    history = built.state.log_history
    result = summary(history) | outcome(history, TrainingConfig(), True)
    assert result["skipped_steps"] == sum(skipped)
    show_result(Console(), result, [], tmp_path, tokenizer=True, warning=None)
    assert f"{sum(skipped)} steps skipped, because gradients exceeded the range of fp16" in capsys.readouterr().out


def test_gradients_that_always_overflow_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_on_cpu(monkeypatch, 2.0**100)
    monkeypatch.setattr(trainer, "SKIPPED", 3)
    with pytest.raises(DataError, match=r"gradients of the last 3 steps, up to step 3, .*; set precision: fp32"):
        prepared(tmp_path, "fp16").train()


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_loss_that_is_not_finite_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    scale_on_cpu(monkeypatch, 2.0**16)
    built = prepared(tmp_path, precision)
    real = built.compute_loss
    built.compute_loss = lambda *args, **named: real(*args, **named) * (math.nan if built.state.global_step else 1)
    with pytest.raises(DataError, match=r"loss of step 2 is nan; .* Lower learning_rate") as stopped:
        built.train()
    assert ("set precision: fp32" in str(stopped.value)) == (precision == "fp16")


def test_a_resumed_run_goes_on_with_its_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_on_cpu(monkeypatch, 2.0**22)
    settings = {"steps": 6, "save_every": 3, "lora_dropout": 0.0}
    whole = prepared(tmp_path, "fp16", **settings)
    whole.train()
    resumed = prepared(tmp_path, "fp16", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    names = ("loss", "loss_scale", "skipped")
    expected = [[entry[name] for name in names] for entry in steps_of(whole)]
    assert [[entry[name] for name in names] for entry in steps_of(resumed)] == expected
    assert expected[2][1] != expected[0][1], "the scale is not the first one"
