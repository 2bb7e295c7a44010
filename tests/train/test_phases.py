"""The phases of a step are disjoint and complete.

They are measured on the clock of the device.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training.tiny_training import packed_rows, tiny_model
from transformers import TrainingArguments, default_data_collator

from packcorpus.train import measures
from packcorpus.train.config import TrainingConfig
from packcorpus.train.loop.trainer import Measured, arguments, one_gpu
from packcorpus.train.measures import PHASES, Phases


@given(st.lists(st.sampled_from(("", *PHASES)), max_size=12))
def test_phases_add_up_to_the_time_between_the_first_and_the_last_mark(entered: list[str]) -> None:
    ticks = count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measures.time, "perf_counter", lambda: float(next(ticks)))
        measured = Phases(torch.device("cpu"))
        for phase in entered:
            measured.enter(phase)
    expected = [phase for phase in entered[:-1] if phase]
    assert measured.take() == {phase: expected.count(phase) for phase in PHASES}
    assert not any(measured.take().values()), "a second reading is empty"


class Event:
    """A stand-in for torch.cuda.Event with a clock in milliseconds."""

    # Its times can be read only after the GPU has reached an event.

    clock = count(step=250)
    reached = False

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.at = next(self.clock)

    def synchronize(self) -> None:
        Event.reached = True

    def elapsed_time(self, end: Event) -> float:
        assert Event.reached, "read before the GPU got there"
        return end.at - self.at


def test_events_of_a_gpu_are_read_in_seconds_once_the_last_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    measured = Phases(torch.device("cuda"))
    for phase in (*PHASES, ""):
        measured.enter(phase)
    assert measured.take() == dict.fromkeys(PHASES, 0.25)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_phases_of_a_step_are_its_time(accumulation: int, tmp_path: Any) -> None:
    given_ = arguments(TrainingConfig(max_steps=6, save_every=100), str(tmp_path), 1, accumulation, "cpu", False)
    trainer = Measured(
        model=tiny_model(),
        args=one_gpu(TrainingArguments(**given_)),
        data_collator=default_data_collator,
        train_dataset=packed_rows(),
    )
    trainer.measure(1.0, 1.0, None)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "step_seconds" in entry]
    assert len(steps) == 6
    shares = []
    for step in steps:
        spent = {phase: step[f"{phase}_seconds"] for phase in PHASES}
        assert min(spent.values()) > 0
        assert spent["backward"] > spent["copy"], "a step computes longer than it copies"
        shares.append(sum(spent.values()) / step["step_seconds"])
    assert max(shares) <= 1
    assert max(shares) > 0.9, "of a step that no other process has interrupted, the phases are nearly all"
