"""When a run is told to stop, apart from the signals that test_training.py sends to the real command."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tasks.core.errors import Interrupted
from train.machine import signals
from train.machine.interruption import Interruption


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def step(interruption: Interruption) -> bool:
    """Whether training stops after a step, with a checkpoint."""
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    state = SimpleNamespace(global_step=3, max_steps=10)
    interruption.on_step_end(SimpleNamespace(device=torch.device("cpu")), state, control)
    assert control.should_save == control.should_training_stop == interruption.stopped
    return interruption.stopped


def begin() -> Interruption:
    interruption = Interruption()
    interruption.on_train_begin(None, None, None)
    return interruption


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_the_step(number: int) -> None:
    interruption = begin()
    assert not step(interruption)
    signal.raise_signal(number)
    assert step(interruption)


def test_before_the_first_step_and_after_the_last_a_signal_ends_the_run_at_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", ended := Ended())
    monkeypatch.setattr(signals, "_exit_code", None)
    for moment in ("before", "after"):
        monkeypatch.setattr(signals, "_is_ending", False)
        interruption = Interruption() if moment == "before" else begin()
        if moment == "after":
            interruption.on_train_end(None, None, None)
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        assert capfd.readouterr().err == "E713 interrupted outside the steps; the same command goes on from here\n"
    assert ended.codes == [75, 75]


class Ended:
    """Instead of `os._exit`."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        raise SystemExit(code)


def test_when_the_last_word_is_said_a_signal_adds_none(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", ended := Ended())
    Interruption()
    monkeypatch.setattr(signals, "_exit_code", None)
    signals.leave(65)
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGINT)
    assert (ended.codes, capfd.readouterr().err) == ([65], "")


def test_a_run_that_stopped_after_a_step_says_so_itself() -> None:
    interruption = begin()
    signal.raise_signal(signal.SIGTERM)
    assert step(interruption)
    interruption.on_train_end(None, None, None)
    signal.raise_signal(signal.SIGINT)


def test_a_second_ctrl_c_does_not_wait_for_the_step_and_a_second_sigterm_does() -> None:
    begin()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(Interrupted, match="interrupted twice"):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)  # while that is told


def test_a_rank_stops_when_its_launcher_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    interruption = begin()
    assert not step(interruption)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert step(interruption)


def test_without_a_launcher_the_parent_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that was left with nohup is gone as well."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    interruption = begin()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not step(interruption)
