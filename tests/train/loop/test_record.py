"""The summary of a run accepts logs of other devices and earlier versions."""

from __future__ import annotations

from typing import Any

from train.loop.record import data_wait, picture, summary
from train.measures.phases import PHASES

CPU: dict[str, Any] = {
    "step": 1, "loss": 2.0, "step_seconds": 1.0, "data_wait": 0.0, "memory_bytes": 1.0, "tokens_per_second": 10.0,
    "non_pad_tokens_per_second": 9.0, "trained_tokens_per_second": 5.0,
}  # fmt: skip
TIMED = CPU | {f"{phase}_seconds": 0.2 for phase in PHASES}
GPU = TIMED | {"gpu_share": 0.9, "memory_share": 0.5, "mfu": 0.4}


def test_figures_that_some_steps_lack_are_left_out() -> None:
    assert {"gpu_share", "memory_share", "mfu"} <= summary([GPU, GPU]).keys()
    for log in ([GPU, TIMED], [TIMED, GPU]):
        found = summary(log)
        assert {"gpu_share", "memory_share", "mfu"}.isdisjoint(found)
        assert found["tokens_per_second"] == 10
        assert set(found["phases"].values()) == {0.2}


def test_steps_of_an_earlier_version_have_no_phases() -> None:
    assert set(summary([CPU, TIMED])["phases"].values()) == {0.1}
    plain = picture([CPU, TIMED | {"step": 2}], "run", 2)
    assert b"<svg" in plain
    shown = picture([GPU, GPU | {"step": 2}], "run", 2)
    assert len(shown) > len(plain) + 1000, "the share of the GPU has an axis of its own"


def test_a_rank_waits_for_its_own_batches_no_longer_than_for_all_or_than_its_gpu_does() -> None:
    assert data_wait({"data_wait": 0.01, "phases": {"data": 0.4}}) == 0.01, "it waited for another rank"
    assert data_wait({"data_wait": 0.4, "phases": {"data": 0.01}}) == 0.01, "its GPU computed meanwhile"
