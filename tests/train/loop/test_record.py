"""The summary of a run accepts logs of other devices and earlier versions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from packcorpus.train.loop import record
from packcorpus.train.loop.record import data_wait, picture, smooth, summary
from packcorpus.train.loop.run import unavailable
from packcorpus.train.machine.devices import Device
from packcorpus.train.measures import PHASES

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


def test_the_step_of_the_kept_adapter_is_marked_unless_it_is_the_last() -> None:
    evaluated = [{"step": step, "eval_loss": 1.0 + step} for step in (1, 2)]
    log = [TIMED, evaluated[0], TIMED | {"step": 2}, evaluated[1]]
    first, last = picture(log, "run", 1), picture(log, "run", 2)
    assert len(first) > len(last) + 300, "a line and its label"


def test_no_legend_hides_a_panel_or_is_hidden_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    save, panels = Figure.savefig, []

    def measure(figure: Figure, *given: Any, **named: Any) -> None:
        save(figure, *given, **named)
        for axes in figure.axes:
            if legend := axes.get_legend():
                panels.append((legend.get_window_extent(), axes.get_window_extent(), figure.bbox))

    monkeypatch.setattr(Figure, "savefig", measure)
    picture([GPU, {"step": 1, "eval_loss": 3.0}, *(GPU | {"step": step} for step in range(2, 50))], "run", 1)
    assert len(panels) == 3
    for legend, panel, page in panels:
        assert panel.y1 <= legend.y0
        assert page.x0 < legend.x0
        assert legend.x1 < page.x1


def test_losses_are_smoothed_over_the_steps_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert smooth([1.0, 2.0, 3.0, 4.0, 50.0], 3) == [1.5, 2.0, 3.0, 19.0, 27.0]
    log = [TIMED | {"step": step + 1} for step in range(20)]
    shown = picture(log, "run", 20)
    monkeypatch.setattr(record, "SMOOTHED", 20)
    assert len(shown) > len(picture(log, "run", 20)) + 1000, "a line and its label"


def test_what_a_gpu_cannot_use_is_recorded_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    found = unavailable(Device("cuda", "fp16", "T4"))
    assert found["attention"].keys() == {"flash3", "flash2", "varlen"}
    assert found["attention"]["varlen"] == "varlen needs a GPU of compute capability 8.0 (Ampere) or later"


def test_a_rank_waits_for_its_own_batches_no_longer_than_for_all_or_than_its_gpu_does() -> None:
    assert data_wait({"data_wait": 0.01, "phases": {"data": 0.4}}) == 0.01, "it waited for another rank"
    assert data_wait({"data_wait": 0.4, "phases": {"data": 0.01}}) == 0.01, "its GPU computed meanwhile"
