"""What Ctrl-C and SIGTERM do to the processes of a run.

    parent  KeyboardInterrupt: what is half-written is removed, Luigi ends its children, exits says what happened
    child   SystemExit: what is half-written is removed, and not a word; once its work has ended, nothing

Ctrl-C reaches every process of a terminal at the same moment, whatever it does, and often several times. The first
one counts. In a few places what a signal raises would go nowhere: in the hooks of a fork and where Luigi's scheduler
drops it, so there it waits; and in destructors, so it comes again a moment later.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import luigi
from luigi.scheduler import Scheduler
from luigi.worker import TaskProcess

# Seconds for a child to remove what it had half-written.
PATIENCE = 5.0
# Seconds until a signal comes again.
_MOMENT = 0.05

_STOP = (signal.SIGINT, signal.SIGTERM)

_is_child = False
_is_leaving = False  # and no signal changes anything any more
_deadline = 0.0  # of the children; until then the parent takes no other signal
_is_forking = False
_waits = 0  # how many blocks there are, one in the other, in which signals wait
_came: list[tuple[int, int]] = []  # process and number of those that wait
_last: int = signal.SIGINT
_is_due = False  # a signal comes again


def begin() -> None:
    """A run begins, and this process is the parent of what it forks from now on."""
    global _is_child, _is_leaving, _deadline
    _is_child = _is_leaving = False
    _deadline = 0.0
    if threading.current_thread() is threading.main_thread():
        for number in _STOP:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):  # or a program has its own
                signal.signal(number, _on_signal)


def in_task() -> bool:
    """Whether this process was forked by Luigi for a task."""
    return isinstance(multiprocessing.current_process(), TaskProcess)


def end_children() -> None:
    """Also those that were forked when the terminal had told the others already. For a parent that is about to exit."""
    global _is_leaving
    _is_leaving = True
    _end(multiprocessing.active_children(), time.monotonic() + PATIENCE)


def _end(children: Sequence[BaseProcess], deadline: float) -> None:
    """Ask all to leave, and kill who is there at the deadline; but wait for those whose task may not be killed."""
    for child in children:
        BaseProcess.terminate(child)
    for child in sorted(children, key=_waits_for_more):
        child.join(None if _waits_for_more(child) else max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()


def _waits_for_more(child: BaseProcess) -> bool:
    return isinstance(child, TaskProcess) and not getattr(child.task, "may_be_killed", True)


def _terminate(task: TaskProcess) -> None:
    """In place of Luigi's own, which waits without an end, and for one child after the other."""
    if time.monotonic() < _deadline:
        _end([child for child in multiprocessing.active_children() if isinstance(child, TaskProcess)], _deadline)
    else:
        _end([task], time.monotonic() + PATIENCE)


TaskProcess.terminate = _terminate


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _is_leaving, _deadline, _last
    if _is_leaving or time.monotonic() < _deadline:
        return
    if _is_forking or _waits:
        _came.append((os.getpid(), number))
        return
    _last = number
    if _is_child:
        _is_leaving = True
        raise SystemExit(128 + number)
    _deadline = time.monotonic() + PATIENCE
    raise KeyboardInterrupt


def _come_again(number: int) -> None:
    """As if nothing had come, and in a moment as if it came now."""
    global _is_leaving, _deadline, _is_due
    _is_leaving, _deadline, _is_due = False, 0.0, True

    def again(*_: object) -> None:
        global _is_due
        _is_due = False
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.raise_signal(number)

    handler = signal.signal(signal.SIGALRM, again)
    timer = signal.setitimer(signal.ITIMER_REAL, _MOMENT)


# Forks


def follow_forks() -> None:
    """Once, when all is imported: so ours is the first hook before a fork and the last one after it."""
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
    atexit.register(_at_exit)


def _before_fork() -> None:
    global _is_forking
    _is_forking = threading.current_thread() is threading.main_thread()  # which alone has signals


def _in_child() -> None:
    global _is_child, _waits
    _is_child, _waits = True, 0
    for number in _STOP:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_signal)
    _after_fork()


def _after_fork() -> None:
    global _is_forking
    _is_forking = False
    if mine := [number for process, number in _came if process == os.getpid()]:
        _come_again(mine[0])
    _came.clear()


def _at_exit() -> None:
    """All is said. Python does the rest with the handlers of the system, but leaves alone what is ignored."""
    if _is_due:
        signal.setitimer(signal.ITIMER_REAL, 0)
    for number in _STOP:
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, signal.SIG_IGN)


# Where what a signal raises would go nowhere


@contextmanager
def _signals_wait() -> Iterator[None]:
    """What comes within the block counts when it has ended."""
    global _waits
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _waits += 1
    try:
        yield
    finally:
        _waits -= 1
        if _came:
            _, number = _came.pop()
            _came.clear()
            signal.raise_signal(number)


def _undisturbed(method: Callable[..., None]) -> Callable[..., None]:
    @wraps(method)
    def run(*given: Any, **named: Any) -> None:
        with _signals_wait():
            method(*given, **named)

    return run


# It logs whatever is raised while it notes what becomes of a task, and goes on.
Scheduler._update_task_history = _undisturbed(Scheduler._update_task_history)


_hook = sys.unraisablehook


def _on_unraisable(found: sys.UnraisableHookArgs) -> None:
    """Python drops what is raised in a destructor."""
    if issubclass(found.exc_type, KeyboardInterrupt) or (_is_child and issubclass(found.exc_type, SystemExit)):
        _come_again(_last)
    else:
        _hook(found)


sys.unraisablehook = _on_unraisable


# The end of a child


@luigi.Task.event_handler(luigi.Event.SUCCESS)
@luigi.Task.event_handler(luigi.Event.FAILURE)
def _work_ended(task: luigi.Task, *_: object) -> None:
    """A child is about to tell Luigi how its task ended, and to leave. If a signal stopped it there, the lock of its
    queue could stay taken, and the other children would wait for it for ever."""
    global _is_leaving
    _is_leaving = _is_leaving or _is_child
