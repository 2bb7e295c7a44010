"""Ctrl-C and SIGTERM never make a process wait forever.

They arrive at the worst moments, and one message reports them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from luigi.scheduler import RUNNING
from support.commands import BIN, ROOT, write_chats
from support.small_corpus import write_project

from packcorpus.pipeline import graph
from packcorpus.pipeline import signals as signals_module
from packcorpus.pipeline.patches import _LocalScheduler
from packcorpus.pipeline.signals import signals
from packcorpus.tasks.core import startup
from packcorpus.tasks.core.errors import Interrupted
from packcorpus.tasks.core.messages import format_error

fork = multiprocessing.get_context("fork")
STOP = [signal.SIGINT, signal.SIGTERM]
RESUMABLE = "E713 interrupted; run the same command again to resume\n"
INTERRUPTED = 7  # exit code of a process of these tests in which a KeyboardInterrupt was raised


def exit_code(work: Callable[[], object]) -> int | None:
    """Return the exit code of a fork that runs `work`, or -9 if it does not end."""
    child = fork.Process(target=work)
    child.start()
    child.join(300)
    child.kill()
    child.join()
    return child.exitcode


def press(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


class Destructor:
    def __del__(self) -> None:
        press(signal.SIGTERM)
        time.sleep(60)


def at_once() -> None:
    press(signal.SIGTERM)
    time.sleep(60)


def in_a_destructor() -> None:
    Destructor()
    time.sleep(60)


def during_a_fork() -> None:
    was_held = False
    try:
        with signals.held():
            press(signal.SIGTERM)
            was_held = True
    finally:
        if not was_held:
            os._exit(9)
    time.sleep(60)


# -- a worker ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("work", [at_once, in_a_destructor, during_a_fork])
def test_a_signal_ends_a_worker_without_a_message(work: Callable[[], None], capfd: pytest.CaptureFixture[str]) -> None:
    def in_a_worker() -> None:
        signals.begin(is_worker=True)
        work()

    assert exit_code(in_a_worker) == 128 + signal.SIGTERM
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", STOP)
def test_a_worker_that_is_stopped_while_it_is_forked_exits(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    def forked() -> None:
        signals.begin()
        with signals.held():
            press(number)
            os._exit(exit_code(lambda: signals.begin(is_worker=True)) or 0)

    assert exit_code(forked) == 128 + number
    assert capfd.readouterr().err == ""


# -- the run ----------------------------------------------------------------------------------------------------------


@contextmanager
def as_run() -> Iterator[None]:
    for number in STOP:
        signal.signal(number, signal.default_int_handler)
    signals.begin()
    with suppress(KeyboardInterrupt):
        yield
        os._exit(0)
    os._exit(INTERRUPTED)


def noted_by_luigi() -> None:
    """Interrupt Luigi's scheduler, whose task history drops exceptions."""
    scheduler = _LocalScheduler()
    scheduler._task_history.task_started = lambda *_: press()
    scheduler._update_task_history(None, RUNNING)
    press()
    time.sleep(60)


@pytest.mark.parametrize("work", [noted_by_luigi, during_a_fork, in_a_destructor])
def test_an_interrupt_is_never_lost(work: Callable[[], None], capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        with as_run():
            work()

    assert exit_code(interrupted) == INTERRUPTED
    assert capfd.readouterr().err == ""


def test_only_the_first_of_several_signals_counts() -> None:
    def work() -> None:
        with as_run():
            try:
                press()
            finally:
                for number in (*STOP, *STOP):
                    press(number)
                os._exit(3)

    assert exit_code(work) == 3


def test_a_signal_counts_again_in_the_next_run_and_after_the_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        monkeypatch.setattr(signals_module, "PATIENCE", 0.2)
        with as_run():
            for wait in (lambda: time.sleep(0.3), signals.begin, signals.begin):
                with suppress(KeyboardInterrupt):
                    press()
                    os._exit(4)
                wait()
            press(signal.SIGTERM)

    assert exit_code(work) == INTERRUPTED


def test_signal_handlers_of_the_calling_program_are_kept() -> None:
    def work() -> None:
        heard: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signals.begin()

        def in_a_worker() -> None:
            signals.begin(is_worker=True)
            press()

        ignored = exit_code(in_a_worker)
        press()
        press(signal.SIGTERM)
        os._exit(0 if heard == [signal.SIGTERM] and ignored == 0 else 1)

    assert exit_code(work) == 0


PROGRAM = """
import signal, sys
import luigi, pipeline

class Other(luigi.Task):
    done = False
    def run(self):
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        Other.done = True
    def complete(self):
        return Other.done

hook = sys.unraisablehook
assert luigi.build([Other()], workers=3, local_scheduler=True, log_level="CRITICAL")
assert Other.done, "it ran in this process"
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
assert sys.unraisablehook == hook
"""


def test_a_program_gets_its_handlers_back_after_a_run() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_training_restores_the_signal_handlers() -> None:
    before = [signal.getsignal(number) for number in STOP]
    graph.train((sys.executable, "-c", ""))
    with pytest.raises(graph.TrainingFailed, match="exit code 5"):
        graph.train((sys.executable, "-c", "raise SystemExit(5)"))
    assert [signal.getsignal(number) for number in STOP] == before


@pytest.mark.parametrize("number", STOP)
def test_a_signal_to_the_parent_alone_stops_the_run(tmp_path: Path, number: signal.Signals) -> None:
    write_project(tmp_path, (), sources=["a.jsonl"], part_size=1 << 17)
    write_chats(tmp_path / "a.jsonl", 12_000)
    words = [str(BIN / "luigi"), "--module", "pipeline", "PackCorpus", "--config", "corpus.yaml", "--workers", "2"]
    run = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while not list((tmp_path / "data").glob("tokens/*/*.json")):
            assert time.monotonic() < deadline, "no part is done"
            time.sleep(0.02)
        run.send_signal(number)
        _, errors = run.communicate(timeout=300)
        assert subprocess.run(["pgrep", "-g", str(run.pid)], check=False, capture_output=True).stdout == b""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 75
    assert errors.endswith(RESUMABLE)
    assert not list((tmp_path / "data").rglob("*.tmp"))


LATE = """
import os, signal, sys, threading
from packcorpus import pipeline
from packcorpus.pipeline.signals import signals

signals.begin()
signals.end(ignore=True)

class Last:
    def __init__(self):
        self.kill, self.process = os.kill, os.getpid()

    def __del__(self):
        self.kill(self.process, NUMBER)

sys.late = Last()  # is deleted after everything else
if NUMBER == signal.SIGINT:
    thread = threading.Thread(target=lambda: (threading.main_thread().join(), os.kill(os.getpid(), NUMBER)))
    thread.start()
"""


@pytest.mark.parametrize("number", STOP)
def test_a_signal_at_interpreter_exit_changes_nothing(number: signal.Signals) -> None:
    words = LATE.replace("NUMBER", f"{number:d}")
    done = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# -- before a run starts ----------------------------------------------------------------------------------------------


# Python code that is interrupted while it imports a library, and that ignores the exception.
IMPORTING = """
import os, signal, sys
sys.argv[:] = ["/usr/bin/COMMAND", "verify", "x"]
def find(name, *_):
    if name == "LIBRARY":
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError from None
sys.meta_path.insert(0, type("Finder", (), {"find_spec": staticmethod(find)}))
"""
STOPPED = """
from packcorpus.tasks.cli import app
def stop(*_):
    os.kill(os.getpid(), signal.SIGINT)
app.find_manifest = stop
app.main()
"""
LOADING = startup.INTERRUPTED.decode()


@pytest.mark.parametrize(
    ("command", "library", "words", "expected"),
    [
        ("packcorpus", "typer", "import packcorpus.tasks.cli.app", LOADING),
        ("luigi", "numpy", "import luigi, pipeline", LOADING),
        ("packcorpus", "", STOPPED, "E713 interrupted; only the changes reported above were made\n"),
        ("luigi", "", "import luigi, pipeline; os.kill(os.getpid(), signal.SIGINT)", LOADING),
    ],
)
def test_an_interrupt_without_a_run(command: str, library: str, words: str, expected: str) -> None:
    importing = IMPORTING.replace("COMMAND", command).replace("LIBRARY", library)
    done = subprocess.run(
        [sys.executable, "-c", importing + words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (75, expected)


def test_importing_the_package_keeps_ctrl_c() -> None:
    importing = IMPORTING.replace("COMMAND", "notebook").replace("LIBRARY", "numpy")
    words = "try:\n    import luigi, pipeline\nexcept ImportError:\n    raise SystemExit(3)"
    assert subprocess.run([sys.executable, "-c", importing + words], cwd=ROOT, check=False).returncode == 3


def test_the_message_while_modules_load_has_the_usual_format() -> None:
    assert format_error(Interrupted("interrupted", "interrupted; nothing was started")) + "\n" == LOADING
    assert Interrupted.exit_code == 75
