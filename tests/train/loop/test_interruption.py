"""How a run reacts to signals; test_training.py sends some to the real command."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.commands import in_fork_with_torch

from packcorpus.tasks.core.errors import Interrupted
from packcorpus.train.loop import callbacks
from packcorpus.train.loop.callbacks import Deadline, Interruption
from packcorpus.train.machine.process import SignalGuard


def step(interruption: Interruption) -> bool:
    """Return whether training stops after a step, with a checkpoint."""
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    state = SimpleNamespace(global_step=3, max_steps=10)
    interruption.on_step_end(SimpleNamespace(device=torch.device("cpu")), state, control)
    assert control.should_save == control.should_training_stop == interruption.stopped
    return interruption.stopped


def begin() -> Interruption:
    interruption = Interruption(SignalGuard())
    interruption.on_train_begin(None, None, None)
    return interruption


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_the_step(number: int) -> None:
    interruption = begin()
    assert not step(interruption)
    signal.raise_signal(number)
    assert step(interruption)


def test_a_signal_outside_the_steps_ends_the_run_at_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", ended := Ended())
    for moment in ("before", "after"):
        interruption = Interruption(SignalGuard()) if moment == "before" else begin()
        if moment == "after":
            interruption.on_train_end(None, None, None)
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        assert capfd.readouterr().err == "E713 interrupted outside the steps; run the same command to resume\n"
    assert ended.codes == [75, 75]


def test_a_signal_ends_a_process_that_waits_within_a_library(tmp_path: Path) -> None:
    """A signal ends a process that waits in a library, such as torch's store."""
    # The store waits for a rank that has ended, and Python does not run its signal handler there. The main thread has
    # only half a second here, and another thread must have ended the process.
    code = """
import os, signal, sys, threading, time
from datetime import timedelta
from torch.distributed import TCPStore
from packcorpus.train.machine import process

class Guard(process.SignalGuard):
    def end_at_once(self, number, frame):
        os.write(1, b"main" if threading.current_thread() is threading.main_thread() else b"other")
        super().end_at_once(number, frame)

process.GRACE = 0.5
Guard().install()
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
try:
    store.wait(["never"], timedelta(seconds=30))
finally:
    print("the wait ended", file=sys.stderr)
"""
    done = in_fork_with_torch(tmp_path, "-c", code)
    assert (done.returncode, done.stdout) == (75, "other"), done.stderr
    assert done.stderr == "E713 interrupted outside the steps; run the same command to resume\n"


def test_a_signal_within_the_steps_is_left_to_the_interruption() -> None:
    guard = SignalGuard()
    interruption = Interruption(guard)
    assert not guard.in_steps
    interruption.on_train_begin(None, None, None)
    assert guard.in_steps
    interruption.on_train_end(None, None, None)
    assert not guard.in_steps
    interruption.on_train_begin(None, None, None)
    signal.raise_signal(signal.SIGTERM)
    assert step(interruption)
    interruption.on_train_end(None, None, None)
    assert guard.in_steps, "it reports after which step it stopped"


class Ended:
    """A replacement for `os._exit`."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        raise SystemExit(code)


def test_a_signal_after_the_result_changes_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", ended := Ended())
    guard = SignalGuard()
    Interruption(guard)
    guard.leave(65)
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGINT)
    assert (ended.codes, capfd.readouterr().err) == ([65], "")


def test_a_stopped_run_ignores_further_signals() -> None:
    interruption = begin()
    signal.raise_signal(signal.SIGTERM)
    assert step(interruption)
    interruption.on_train_end(None, None, None)
    signal.raise_signal(signal.SIGINT)


def test_a_second_ctrl_c_does_not_wait_for_the_step() -> None:
    begin()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(Interrupted, match="interrupted twice"):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)  # while the error is reported


@pytest.mark.parametrize("is_rank", [True, False])
def test_a_rank_stops_when_its_launcher_is_gone(monkeypatch: pytest.MonkeyPatch, is_rank: bool) -> None:
    # Without a launcher, the parent does not matter: with nohup, the parent shell may end as well.
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if is_rank:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    interruption = begin()
    assert not step(interruption)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert step(interruption) == is_rank


@pytest.mark.parametrize(("soon", "latest", "made"), [(0, 100, 3), (45, 100, 4), (100, 25, 2), (100, 100, 10)])
def test_a_trial_ends_before_the_step_for_which_it_has_no_time(
    monkeypatch: pytest.MonkeyPatch, soon: int, latest: int, made: int
) -> None:
    """Each step takes 10 s. Three steps are enough, unless even these take too long."""
    now = 0.0
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: now))
    deadline, args = Deadline(f"{soon} {latest}"), SimpleNamespace(device=torch.device("cpu"))
    control = SimpleNamespace(should_training_stop=False)
    for number in range(1, 11):
        deadline.on_step_begin(args, None, control)
        now += 10
        deadline.on_step_end(args, SimpleNamespace(global_step=number), control)
        if control.should_training_stop:
            break
    assert number == made


@pytest.mark.parametrize(("step", "now", "ends"), [(0, 60.0, False), (1, 40.0, False), (1, 60.0, True)])
def test_a_trial_ends_within_a_step_that_takes_too_long_if_there_is_one_before(
    monkeypatch: pytest.MonkeyPatch, step: int, now: float, ends: bool
) -> None:
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: now))
    control = SimpleNamespace(should_training_stop=False)
    Deadline("20 50").on_substep_end(None, SimpleNamespace(global_step=step), control)
    assert control.should_training_stop == ends
