"""Every step learns: no step of a schedule has a learning rate of 0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from packcorpus.train.loop.trainer import Measured

STEPS = 40


def rates(schedule: str, warmup: float, folder: Path) -> list[float]:
    """Return the learning rate of each step, relative to the highest."""
    args = TrainingArguments(
        output_dir=str(folder), lr_scheduler_type=schedule, warmup_steps=warmup, learning_rate=1.0, use_cpu=True
    )
    trainer = Measured(torch.nn.Linear(1, 1), args)
    scheduler = trainer.create_scheduler(STEPS, trainer.create_optimizer())
    assert trainer.create_scheduler(STEPS) is scheduler
    found = []
    for _ in range(STEPS):
        found.append(scheduler.get_last_lr()[0])
        scheduler.step()
    return found


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_rate_rises_from_a_part_and_never_is_zero(schedule: str, tmp_path: Path) -> None:
    found = rates(schedule, 0.1, tmp_path)
    rising = [1.0] * 4 if schedule == "constant" else [0.25, 0.5, 0.75, 1.0]
    assert found[:4] == pytest.approx(rising)
    assert all(found)
    falling = found[3:]
    assert falling == sorted(falling, reverse=True)
    if schedule == "linear":
        assert falling == pytest.approx([1 - step / 37 for step in range(37)])


def test_without_warmup_the_first_step_has_the_highest_rate(tmp_path: Path) -> None:
    assert rates("linear", 0, tmp_path) == pytest.approx([1 - step / STEPS for step in range(STEPS)])
