"""Ctrl-C and SIGTERM at the worst moments: no process waits for ever, and one message says what happened."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from commands import ROOT
from luigi.scheduler import RUNNING, Scheduler

from pipeline import progress, signals
from pipeline.graph import PackCorpus

fork = multiprocessing.get_context("fork")

# A task that hears no signal, as one that waits for a lock in C does not.
DEAF = """
import signal, sys, time
from pathlib import Path

import luigi

from pipeline import signals

signals.PATIENCE = 0.5
signals.begin()

class Deaf(luigi.Task):
    number = luigi.IntParameter()

    def run(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
        Path(sys.argv[1], str(self.number)).touch()
        time.sleep(60)

    def complete(self):
        return False

class Saving(Deaf):
    may_be_killed = False

    def run(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
        Path(sys.argv[1], str(self.number)).touch()
        time.sleep(2)
        Path(sys.argv[1], "saved").touch()

luigi.build([Deaf(number=0), Saving(number=1)], workers=2, local_scheduler=True, log_level="CRITICAL")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_child_that_has_ended_its_work_is_not_stopped_while_it_tells_luigi(number: signal.Signals) -> None:
    """Or else it may hold the lock of Luigi's queue for ever, and the other children wait for it."""
    queue = fork.SimpleQueue()

    def work() -> None:
        with progress.stage(PackCorpus()):
            pass
        os.kill(os.getpid(), number)
        queue.put("told")

    child = fork.Process(target=work)
    child.start()
    child.join(20)
    assert child.exitcode == 0
    assert queue.get() == "told"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_child_leaves_in_silence_while_it_works(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with progress.stage(PackCorpus()):
            os.kill(os.getpid(), number)
            time.sleep(20)

    child = fork.Process(target=work)
    child.start()
    child.join(10)
    assert child.exitcode == 128 + number
    assert capfd.readouterr().err == ""


def test_an_interrupt_that_python_drops_at_the_birth_of_a_child_comes_again(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is raised in a hook of fork goes nowhere. There, a child has not yet learnt to leave without a word."""
    due = [os.getpid()]

    def interrupted() -> None:
        if due and os.getpid() != due.pop():
            raise KeyboardInterrupt

    os.register_at_fork(after_in_child=interrupted)
    child = fork.Process(target=time.sleep, args=(20,))
    child.start()
    child.join(10)
    due.clear()
    assert child.exitcode == 128 + signal.SIGINT
    assert capfd.readouterr().err == ""


def noted_by_luigi() -> None:
    """Its scheduler drops whatever is raised while it notes the history of a task."""
    scheduler = Scheduler()
    scheduler._task_history.task_started = lambda *_: os.kill(os.getpid(), signal.SIGINT)  # type: ignore[method-assign]
    scheduler._update_task_history(None, RUNNING)  # type: ignore[arg-type]


def in_a_fork() -> None:
    """What is raised in its hooks goes nowhere, and what other modules lock in theirs may stay locked."""
    signals._before_fork()
    with suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    signals._in_parent()


@pytest.mark.parametrize("work", [noted_by_luigi, in_a_fork])
def test_an_interrupt_of_the_parent_that_would_go_nowhere_comes_again(
    work: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        signals.begin()
        try:
            work()
            time.sleep(20)
        except KeyboardInterrupt:
            os._exit(7)

    child = fork.Process(target=interrupted)
    child.start()
    child.join(10)
    assert child.exitcode == 7
    assert capfd.readouterr().err == ""


def test_who_does_not_leave_is_killed_but_not_while_it_saves(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", DEAF, str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGINT)
    _, said = run.communicate(timeout=15)
    assert run.returncode == 75
    assert said == "E713 interrupted; the same command goes on from here\n"
    assert (tmp_path / "saved").exists()
