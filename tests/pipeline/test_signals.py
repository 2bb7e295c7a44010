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
from types import SimpleNamespace

import luigi
import pytest
from luigi.scheduler import RUNNING, Scheduler
from luigi.worker import TaskProcess
from support.commands import BIN, ROOT, write_chats
from support.small_corpus import write_project

from pipeline import events, training
from pipeline.graph import PackCorpus
from pipeline.progress import counters
from pipeline.run_guard import guard
from tasks.core import startup
from tasks.core.error_messages import format_error
from tasks.core.errors import Interrupted

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


# -- a child ----------------------------------------------------------------------------------------------------------


class Task(luigi.Task):
    """A task that succeeds or fails."""

    fails = luigi.BoolParameter()

    def run(self) -> None:
        if self.fails:
            raise ValueError


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("number", STOP)
def test_a_child_that_has_finished_is_not_stopped_while_it_reports_to_luigi(
    number: signal.Signals, fails: bool
) -> None:
    """A stopped child could hold the lock of Luigi's queue forever.

    The other children would wait for it.
    """
    reported = fork.SimpleQueue()

    class Queue:
        def put(self, news: tuple[object, ...]) -> None:
            press(number)
            reported.put(news[1])

    reporter = SimpleNamespace(**dict.fromkeys(TaskProcess.forward_reporter_attributes))
    child = TaskProcess(Task(fails=fails), "worker", Queue(), reporter, use_multiprocessing=True)
    child.start()
    child.join(300)
    assert child.exitcode == 0
    assert reported.get() == ("FAILED" if fails else "DONE")


@pytest.mark.parametrize("number", STOP)
def test_a_working_child_exits_silently(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with events.stage(PackCorpus()):
            press(number)
            time.sleep(60)

    assert exit_code(work) == 128 + number
    assert capfd.readouterr().err == ""


class Destructor:
    def __del__(self) -> None:
        press(signal.SIGTERM)
        time.sleep(60)


def in_a_destructor() -> None:
    Destructor()
    time.sleep(60)


def while_signals_wait() -> None:
    guard._before_fork()
    with suppress(SystemExit):
        press(signal.SIGTERM)
    guard._after_fork()
    time.sleep(60)


@pytest.mark.parametrize("work", [in_a_destructor, while_signals_wait])
def test_a_signal_lost_in_a_child_is_sent_again(work: Callable[[], None], capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code(work) == 128 + signal.SIGTERM
    assert capfd.readouterr().err == ""


def test_an_interrupt_that_python_drops_at_a_fork_is_sent_again(capfd: pytest.CaptureFixture[str]) -> None:
    due = [os.getpid()]

    def interrupted() -> None:
        if due and os.getpid() != due.pop():
            raise KeyboardInterrupt

    os.register_at_fork(after_in_child=interrupted)
    found = exit_code(lambda: time.sleep(60))
    due.clear()
    assert found == 128 + signal.SIGINT
    assert capfd.readouterr().err == ""


def test_a_child_that_checks_for_a_corpus_stays_a_child(tmp_path: Path) -> None:
    """Luigi checks for the corpus before it trains."""
    (tmp_path / "corpus.yaml").write_text("name: some\nsources: [a.jsonl]\n")
    write_chats(tmp_path / "a.jsonl", 3)
    events.begin()
    counters.put(rows=5)

    def work() -> None:
        assert not PackCorpus(config=str(tmp_path / "corpus.yaml"), root=str(tmp_path)).complete()
        assert counters.of_run("rows") == 5
        press()
        time.sleep(60)

    assert exit_code(work) == 128 + signal.SIGINT


# -- the parent -------------------------------------------------------------------------------------------------------


@contextmanager
def as_parent() -> Iterator[None]:
    for number in STOP:
        signal.signal(number, signal.default_int_handler)
    guard.begin()
    with suppress(KeyboardInterrupt):
        yield
        os._exit(0)
    os._exit(INTERRUPTED)


def noted_by_luigi() -> None:
    """Interrupt Luigi's scheduler, which drops exceptions in its task history."""
    scheduler = Scheduler()
    scheduler._task_history.task_started = lambda *_: press()  # type: ignore[method-assign]
    scheduler._update_task_history(None, RUNNING)  # type: ignore[arg-type]


@pytest.mark.parametrize("work", [noted_by_luigi, while_signals_wait, in_a_destructor])
def test_an_interrupt_lost_in_the_parent_is_sent_again(
    work: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        with as_parent():
            work()
            time.sleep(60)

    assert exit_code(interrupted) == INTERRUPTED
    assert capfd.readouterr().err == ""


def test_only_the_first_of_several_signals_counts() -> None:
    def work() -> None:
        with as_parent():
            try:
                press()
            finally:
                for number in (*STOP, *STOP):
                    press(number)
                os._exit(3)

    assert exit_code(work) == 3


def test_a_signal_counts_again_in_the_next_run_and_after_the_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        monkeypatch.setattr(guard, "patience", 0.2)
        with as_parent():
            for wait in (lambda: time.sleep(0.3), guard.begin, guard.begin):
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
        guard.begin()
        ignored = exit_code(press)  # its children ignore it too
        press()
        press(signal.SIGTERM)
        os._exit(0 if heard == [signal.SIGTERM] and ignored == 0 else 1)

    assert exit_code(work) == 0


def test_training_restores_the_signal_handlers() -> None:
    before = [signal.getsignal(number) for number in STOP]
    training.train((sys.executable, "-c", ""))
    with pytest.raises(training.TrainingFailed, match="exit code 5"):
        training.train((sys.executable, "-c", "raise SystemExit(5)"))
    assert [signal.getsignal(number) for number in STOP] == before


# Tasks that block signals, as a task that waits for a lock in C does. One of them may not be killed.
DEAF = """
import fcntl, multiprocessing, signal, sys, time
from pathlib import Path

import luigi

import pipeline
from pipeline.run_guard import guard

multiprocessing.set_start_method(sys.argv[2])
guard.patience = 0.5
guard.begin()
folder = Path(sys.argv[1])

class Deaf(luigi.Task):
    number = luigi.IntParameter()

    def run(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
        with (folder / f"{self.number}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until this process ends
            (folder / f"{self.number} is deaf").touch()
            while not (folder / "pressed").exists():
                time.sleep(0.02)
            self.work()
        (folder / f"{self.number} has ended").touch()

    def work(self):
        time.sleep(60)

    def complete(self):
        return False

class Saving(Deaf):
    may_be_killed = False

    def work(self):
        for number in (0, 1):  # waits until the other tasks have been killed
            fcntl.flock((folder / f"{number}.lock").open("w"), fcntl.LOCK_EX)
        time.sleep(0.3)

tasks = [Deaf(number=0), Deaf(number=1), Saving(number=2)]
luigi.build(tasks, workers=3, local_scheduler=True, log_level="CRITICAL")
"""


# By default, processes are not forks on macOS (spawn) and from Python 3.14 (forkserver).
@pytest.mark.parametrize(("times", "method"), [(1, "forkserver"), (4, "fork")])
def test_a_child_that_does_not_exit_is_killed_unless_it_is_saving(tmp_path: Path, times: int, method: str) -> None:
    words = [sys.executable, "-c", DEAF, str(tmp_path), method]
    run = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while len(list(tmp_path.glob("* is deaf"))) < 3:
            assert time.monotonic() < deadline, "the tasks do not begin"
            time.sleep(0.02)
        for _ in range(times):
            os.killpg(run.pid, signal.SIGINT)
            time.sleep(0.1)
        (tmp_path / "pressed").touch()
        _, errors = run.communicate(timeout=300)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    assert (run.returncode, errors) == (75, RESUMABLE)
    assert [path.name for path in tmp_path.glob("* has ended")] == ["2 has ended"]


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
import pipeline
from pipeline.run_guard import guard

guard.begin()

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
import tasks.cli.app
def stop(*_):
    os.kill(os.getpid(), signal.SIGINT)
tasks.cli.commands.find_manifest = stop
tasks.cli.app.main()
"""
LOADING = startup.INTERRUPTED.decode()


@pytest.mark.parametrize(
    ("command", "library", "words", "expected"),
    [
        ("packcorpus", "typer", "import tasks.cli.app", LOADING),
        ("luigi", "numpy", "import pipeline", LOADING),
        ("packcorpus", "", STOPPED, "E713 interrupted; only the changes reported above were made\n"),
        ("luigi", "", "import pipeline; os.kill(os.getpid(), signal.SIGINT)", RESUMABLE),
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
    words = "try:\n    import pipeline\nexcept ImportError:\n    raise SystemExit(3)"
    assert subprocess.run([sys.executable, "-c", importing + words], cwd=ROOT, check=False).returncode == 3


def test_the_message_while_modules_load_has_the_usual_format() -> None:
    assert format_error(Interrupted("interrupted", "interrupted; nothing was started")) + "\n" == LOADING
    assert Interrupted.exit_code == 75


# -- the guard --------------------------------------------------------------------------------------------------------

REMOVED = """
import logging, signal, sys
import luigi, luigi.retcodes
from luigi.cmdline_parser import CmdlineParser
from luigi.scheduler import Scheduler
from luigi.worker import TaskProcess, Worker

def patched():
    codes = luigi.retcodes.retcode()
    return [
        Worker.__enter__, TaskProcess._Popen, TaskProcess.terminate, Scheduler._update_task_history,
        CmdlineParser._build_parser, sys.excepthook,
        sys.unraisablehook, logging.getLogger("luigi-interface").filters[:], signal.getsignal(signal.SIGINT),
        signal.getsignal(signal.SIGTERM), *(type(getattr(codes, name)) for name, _ in codes.get_params()),
        *(set(handlers) for handlers in luigi.Task._event_callbacks.get(luigi.Task, {}).values()),
    ]

before = patched()
from pipeline.run_guard import guard
guard.begin()
changed = patched()
guard.remove()
after = [each for each in patched() if not isinstance(each, set)]
assert after == [each for each in before if not isinstance(each, set)], after
assert not any(guard._on_work_ended in handlers for handlers in luigi.Task._event_callbacks[luigi.Task].values())
assert all(one != other for one, other in zip(before, changed)), changed
guard.install()
guard.install()
assert len(logging.getLogger("luigi-interface").filters) == 1
"""


def test_everything_that_is_patched_is_restored() -> None:
    done = subprocess.run([sys.executable, "-c", REMOVED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
