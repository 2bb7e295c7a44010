"""A trace covers the requested steps after the first ones.

It changes no weight.
"""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.training.tiny_training import packed_rows, tiny_model
from transformers import TrainingArguments, default_data_collator

from train.config import TrainingConfig
from train.loop import trainer
from train.loop.callbacks import TRACE, UNTRACED, Profile
from train.loop.trainer import Measured, arguments, one_gpu


def trained(folder: Path, *callbacks: Any, steps: int = 5) -> dict[str, torch.Tensor]:
    return {
        name: weights.detach().clone()
        for name, weights in train(folder, *callbacks, steps=steps).model.named_parameters()
    }


def train(folder: Path, *callbacks: Any, steps: int) -> Measured:
    given = arguments(TrainingConfig(max_steps=steps, save_every=100), str(folder), 1, 1, "cpu", False)
    found = Measured(
        model=tiny_model(),
        args=one_gpu(TrainingArguments(**given)),
        data_collator=default_data_collator,
        train_dataset=packed_rows(),
    )
    found.measure(1.0, 1.0, None)
    for callback in callbacks:
        found.add_callback(callback)
    found.train()
    return found


def traced_steps(folder: Path) -> int:
    trace = json.loads(gzip.decompress((folder / TRACE).read_bytes()))
    return sum(event.get("name", "").startswith("Optimizer.step#") for event in trace["traceEvents"])


def test_a_trace_covers_its_steps_and_changes_no_weight(tmp_path: Path) -> None:
    plain, profiled = trained(tmp_path / "plain"), trained(tmp_path, Profile(2, tmp_path))
    assert traced_steps(tmp_path) == 2 < 5 - UNTRACED
    assert all(torch.equal(weights, profiled[name]) for name, weights in plain.items())


def test_a_run_shorter_than_its_trace_is_traced_from_the_start(tmp_path: Path) -> None:
    trained(tmp_path, Profile(9, tmp_path), steps=3)
    assert traced_steps(tmp_path) == 3


def test_writing_the_trace_counts_as_part_of_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, clock, written = Profile._write, time.perf_counter, []

    def write_slowly(self: Profile, found: Any) -> None:
        write(self, found)
        written.append(1000.0)  # seconds that the clock of the steps moves on

    monkeypatch.setattr(Profile, "_write", write_slowly)
    monkeypatch.setattr(trainer, "time", SimpleNamespace(perf_counter=lambda: clock() + sum(written)))
    log = train(tmp_path, Profile(1, tmp_path), steps=5).state.log_history
    assert len(written) == 1
    assert [step["step"] for step in log if "loss" in step] == [1, 2, 3, 4, 5], "some steps are after the trace"
    assert max(step["step_seconds"] for step in log if "loss" in step) < 1000
