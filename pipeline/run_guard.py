"""The end of a run: one message and one exit code, whatever ends it.

    PackError in a task ─reporting─▶ one message, its exit code ─▶ counters ─▶ luigi exits with this code
    command line that Luigi cannot parse ─command_line_errors─▶ one message, E101
    Ctrl-C, SIGTERM ─┬─▶ parent  KeyboardInterrupt: partial files are removed, Luigi ends its children, one message
                     └─▶ child   SystemExit: partial files are removed, no message; nothing if its work has ended

With an engine, the tasks of a corpus are a chain: one child at a time, and the workers of the engine are children of
this child. With Ray, the parent runs the tasks itself. Several children at once exist only with --on luigi, or if a
program builds several corpora. Each of them may fail or hold the lock of Luigi's queue.

Ctrl-C reaches every process of a terminal at the same moment, whatever the process is doing, and often several times.
The first signal counts. In a few places, the exception that a signal raises would be lost. In the hooks of a fork, and
where Luigi's scheduler drops exceptions, the signal waits. In destructors, the signal is sent again a moment later.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType
from typing import Any
from zlib import crc32

import luigi
import luigi.retcodes
import luigi.worker
from luigi.cmdline_parser import CmdlineParser
from luigi.scheduler import Scheduler
from luigi.worker import TaskProcess, Worker

from pipeline.command_line_errors import as_pack_error, with_pack_errors
from pipeline.engines.on_ray import leave
from pipeline.progress import counters, display
from tasks.core.errors import Interrupted, PackError, StorageError
from tasks.core.messages import DEBUG, format_error, is_on, to_pack_error

STOP = (signal.SIGINT, signal.SIGTERM)
# Seconds until a signal that was lost is sent again.
MOMENT = 0.05


class RunGuard:
    """Report each error once, and turn signals into an orderly end.

    Each process has one guard; a forked child inherits it. `install` replaces the following attributes, and `remove`
    restores them (for Luigi 3.8; pinned to <3.9):

    patched                                | why                                             | upstream
    ---------------------------------------|-------------------------------------------------|-------------------------
    Worker.__enter__ (luigi.worker)        | no other way to notice the start of a Luigi run | no event
                                           | (one process may run several: `run`) or to get  |
                                           | the worker (`keep_tasks_here`)                  |
    Worker.__exit__ (luigi.worker)         | no other way to notice the end of a run, when   | no event
                                           | an engine may still be connected                |
    TaskProcess._Popen (luigi.worker)      | starts a task by Python's default method, which | no setting
                                           | is not a fork on macOS and from Python 3.14 on; |
                                           | only a fork shares the counters                 |
    multiprocessing (luigi.worker)         | makes queues for Python's default method; then  | no setting
                                           | Python starts a process that watches them,      |
                                           | outlives Ctrl-C, and warns of a leak            |
    TaskProcess.terminate (luigi.worker)   | waits without limit, one child after another,   | spotify/luigi#1191 added
                                           | and may kill a task that saves a checkpoint     | no deadline
                                           | (`may_be_killed`)                               |
    Scheduler._update_task_history         | catches BaseException: Ctrl-C at that moment is | no issue
                                           | logged and lost                                 |
    CmdlineParser._build_parser            | argparse prints all options of Luigi and exits  | no issue; no hook
                                           | with 2                                          |
    retcode(): each code (luigi.retcodes)  | one code per kind of failure instead of one per | spotify/luigi#3038
                                           | error                                           |
    logger "luigi-interface": a filter     | logs the traceback of an error that was already | no setting
                                           | reported                                        |
    Task: SUCCESS, FAILURE handlers        | a child that is stopped while it reports its    | public API
                                           | result may keep Luigi's queue locked            |
    sys.excepthook                         | prints a traceback for Ctrl-C and for errors    | public API
                                           | before a task runs                              |
    sys.unraisablehook                     | Python drops exceptions raised in destructors,  | public API
                                           | even KeyboardInterrupt                          |
    os.register_at_fork                    | Python drops exceptions raised in the hooks of  | public API, stays
                                           | a fork                                          | installed
    atexit                                 | a signal after the last message would still     | public API
                                           | kill the process                                |
    SIGINT, SIGTERM handlers (`begin`)     | see the module; a handler of the user's program | public API
                                           | is kept                                         |
    """

    def __init__(self) -> None:
        self.run = 0  # the number of runs that this process has started
        self._worker: Worker | None = None  # Luigi's worker of the last run
        self.patience = 5.0  # seconds for a child to remove its partial files
        self.is_child = False
        self.is_leaving = False  # signals no longer change anything
        self.deadline = 0.0  # for the children; until then, the parent ignores further signals
        self.is_forking = False
        self.waiting_blocks = 0  # nested blocks in which signals wait
        self.waiting: list[tuple[int, int]] = []  # process and number of the signals that wait
        self.last_signal: int = signal.SIGINT
        self.is_due = False  # a signal will be sent again
        self.reported: set[str] = set()  # messages of this process
        self._undo: list[Callable[[], None]] = []

    # Install and remove

    def install(self) -> None:
        """Patch Luigi and Python, as listed in the table.

        Call it after all imports, so that our hook is the first to run before a fork.
        """
        if self._undo:
            return
        enter, exit, update = Worker.__enter__, Worker.__exit__, Scheduler._update_task_history

        def start(worker: Worker) -> Worker:
            self.run += 1
            self._worker = worker
            return enter(worker)

        def end(worker: Worker, *error: Any) -> bool:
            self._worker = None
            leave()
            return bool(exit(worker, *error))

        def undisturbed(*given: Any, **named: Any) -> None:
            with self._signals_wait():
                update(*given, **named)

        self._replace(Worker, "__enter__", start)
        self._replace(Worker, "__exit__", end)
        fork = multiprocessing.get_context("fork")
        self._replace(TaskProcess, "_Popen", staticmethod(fork.Process._Popen))
        self._replace(luigi.worker, "multiprocessing", fork)
        self._replace(TaskProcess, "terminate", lambda process: self._terminate(process))
        self._replace(Scheduler, "_update_task_history", undisturbed)
        self._replace(CmdlineParser, "_build_parser", staticmethod(with_pack_errors(CmdlineParser._build_parser)))
        codes = luigi.retcodes.retcode()  # Luigi has one object per config section
        for name, _ in codes.get_params():
            self._replace(codes, name, _ExitCode(getattr(codes, name)))
        self._replace(sys, "excepthook", self._on_uncaught)
        self._previous_unraisable_hook = sys.unraisablehook
        self._replace(sys, "unraisablehook", self._on_unraisable)
        logger, log_filter = logging.getLogger("luigi-interface"), _LogFilter(self)
        logger.addFilter(log_filter)
        self._undo.append(lambda: logger.removeFilter(log_filter))
        for event in (luigi.Event.SUCCESS, luigi.Event.FAILURE):
            luigi.Task.event_handler(event)(self._on_work_ended)
            self._undo.append(lambda event=event: luigi.Task.remove_event_handler(event, self._on_work_ended))  # type: ignore[misc]
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._after_fork_in_child
        )
        atexit.register(self._at_exit)
        self._undo.append(lambda: atexit.unregister(self._at_exit))

    def remove(self) -> None:
        """Undo `install` and `begin`; the fork hooks stay, but do nothing."""
        while self._undo:
            self._undo.pop()()
        for number in STOP:
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def _replace(self, owner: Any, name: str, value: object) -> None:
        inherits = isinstance(owner, type) and name not in vars(owner)
        previous = vars(owner).get(name) if isinstance(owner, type) else getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: delattr(owner, name) if inherits else setattr(owner, name, previous))

    def begin(self) -> None:
        """Start a run: this process is the parent of all processes that it forks."""
        self.is_child = self.is_leaving = False
        self.deadline = 0.0
        self.reported.clear()
        if threading.current_thread() is threading.main_thread():
            for number in STOP:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):  # keep a program's handler
                    signal.signal(number, self._on_signal)

    def keep_tasks_here(self) -> None:
        """Run the tasks of this run one after another in this process, despite --workers.

        A remote engine and a root in a bucket need this, because their connections end in a fork.
        """
        if self._worker:
            self._worker.set_worker_processes(1)

    # Errors: each is reported once

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an error as one message before Luigi prints a traceback."""
        try:
            yield
        except Exception as error:
            failed = to_pack_error(error)
            if not str(failed):  # reported by another process
                counters.put(exit_code=failed.exit_code)
            elif str(failed) not in self.reported:
                self.reported.add(str(failed))
                checksum = float(crc32(str(failed).encode()))
                # With --on luigi, a full disk makes every worker fail, each with a different file. The first message is
                # enough. One message is also enough for a changed source with many parts.
                is_full_disk = counters.of_run("exit_code") == failed.exit_code == StorageError.exit_code
                repeats = is_full_disk or checksum == counters.of_run("last_error")
                counters.put(exit_code=failed.exit_code, last_error=checksum)
                if not repeats:
                    display.write(format_error(failed))
            raise failed from error.__cause__ if failed is error else error

    @staticmethod
    def report(error: PackError) -> None:
        """Print an error, and exit with its code when Luigi ends."""
        display.write(format_error(error))
        counters.put(exit_code=error.exit_code)

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        display.stop()
        if issubclass(kind, KeyboardInterrupt):
            self.is_leaving = True
            # This includes children that were forked after the terminal sent its signal.
            _end(multiprocessing.active_children(), time.monotonic() + self.patience)
            if counters.of_run("exit_code") != Interrupted.exit_code:  # else the training has reported its step
                self.report(Interrupted("interrupted", "interrupted; run the same command again to resume"))
            os._exit(Interrupted.exit_code)
        elif is_on(DEBUG) or not isinstance(error, Exception):
            sys.__excepthook__(kind, error, trace)
        else:
            failed = as_pack_error(error)
            self.report(failed)
            # Python would exit with 1. Nothing is running or locked while the command line is parsed.
            sys.stdout.flush()
            os._exit(failed.exit_code)

    # Signals

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_leaving or time.monotonic() < self.deadline:
            return
        if self.is_forking or self.waiting_blocks:
            self.waiting.append((os.getpid(), number))
            return
        self.last_signal = number
        if self.is_child:
            self.is_leaving = True
            raise SystemExit(128 + number)
        self.deadline = time.monotonic() + self.patience
        raise KeyboardInterrupt

    def _send_again(self, number: int) -> None:
        """Forget a signal, and send it again a moment later."""
        self.is_leaving, self.deadline, self.is_due = False, 0.0, True

        def again(*_: object) -> None:
            self.is_due = False
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.raise_signal(number)

        handler = signal.signal(signal.SIGALRM, again)
        timer = signal.setitimer(signal.ITIMER_REAL, MOMENT)

    @contextmanager
    def _signals_wait(self) -> Iterator[None]:
        """Hold back signals until the block has ended."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.waiting_blocks += 1
        try:
            yield
        finally:
            self.waiting_blocks -= 1
            if self.waiting:
                _, number = self.waiting.pop()
                self.waiting.clear()
                signal.raise_signal(number)

    def _on_unraisable(self, found: sys.UnraisableHookArgs) -> None:
        if issubclass(found.exc_type, KeyboardInterrupt) or (self.is_child and issubclass(found.exc_type, SystemExit)):
            self._send_again(self.last_signal)
        else:
            self._previous_unraisable_hook(found)

    # Children

    def _terminate(self, process: TaskProcess) -> None:
        if time.monotonic() < self.deadline:
            children = multiprocessing.active_children()
            _end([child for child in children if isinstance(child, TaskProcess)], self.deadline)
        else:
            _end([process], time.monotonic() + self.patience)

    def _on_work_ended(self, task: luigi.Task, *_: object) -> None:
        """Ignore further signals in a child that is about to report its result to Luigi.

        If a signal stopped the child while it reports, it could keep the lock of Luigi's queue, and the other children
        would wait forever.
        """
        self.is_leaving = self.is_leaving or self.is_child

    # Forks

    def _before_fork(self) -> None:
        self.is_forking = threading.current_thread() is threading.main_thread()  # the only one that receives signals

    def _after_fork_in_child(self) -> None:
        if self._undo:
            self.is_child, self.waiting_blocks = True, 0
            for number in STOP:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, self._on_signal)
        self._after_fork()

    def _after_fork(self) -> None:
        self.is_forking = False
        if own := [number for process, number in self.waiting if process == os.getpid()]:
            self._send_again(own[0])
        self.waiting.clear()

    def _at_exit(self) -> None:
        """Ignore signals until the process ends.

        Python restores the system's handlers next, but leaves ignored signals alone.
        """
        if self.is_due:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number in STOP:
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_IGN)


def _end(children: Sequence[BaseProcess], deadline: float) -> None:
    """Ask all children to leave, and kill the children still alive at the deadline.

    A child whose task may not be killed has no deadline.
    """
    for child in children:
        BaseProcess.terminate(child)
    for child in sorted(children, key=_may_not_be_killed):
        child.join(None if _may_not_be_killed(child) else max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()


def _may_not_be_killed(child: BaseProcess) -> bool:
    return isinstance(child, TaskProcess) and not getattr(child.task, "may_be_killed", True)


class _ExitCode(int):
    """One of Luigi's exit codes.

    Luigi multiplies each code with 1 if it applies, or 0. If a PackError was reported, its code replaces Luigi's code.
    """

    def __mul__(self, applies: int) -> int:
        return (int(counters.of_run("exit_code")) or int(self)) * applies


class _LogFilter(logging.Filter):
    """Drop Luigi's log records about interrupts and about errors already reported."""

    def __init__(self, guard: RunGuard):
        super().__init__()
        self._guard = guard

    def filter(self, record: logging.LogRecord) -> bool:
        if is_on(DEBUG):
            return True
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, (PackError, SystemExit)):
            return False
        message = record.getMessage()
        if isinstance(error, Exception) and message == "Uncaught exception in luigi":
            failed = as_pack_error(error)
            self._guard.report(failed)
            luigi.retcodes.retcode().unhandled_exception = failed.exit_code
            return False
        if "Traceback" in message and any(text in message for text in self._guard.reported):
            return False
        display.clear()
        return True


guard = RunGuard()
