"""A trace covers the requested steps after the first ones.

It changes no weight.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import torch
from support.training.tiny_training import packed_rows, tiny_model
from transformers import TrainingArguments, default_data_collator

from packcorpus.train.config import TrainingConfig
from packcorpus.train.loop.callbacks import TRACE, UNTRACED, Profile
from packcorpus.train.loop.trainer import Measured, arguments, one_gpu


def trained(folder: Path, *callbacks: Any, steps: int = 5) -> dict[str, torch.Tensor]:
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
    return {name: weights.detach().clone() for name, weights in found.model.named_parameters()}


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
