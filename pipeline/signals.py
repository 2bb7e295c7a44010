"""What Ctrl-C and SIGTERM do to the processes of a run.

    parent  KeyboardInterrupt: what is half-written is removed, Luigi ends its children, exits says what happened
    child   SystemExit: what is half-written is removed, and not a word; once its work has ended, nothing

Ctrl-C reaches every process of a terminal at the same moment, whatever it does. In three places what a signal raises
goes nowhere, and it comes again a moment later: in the hooks of a fork, in destructors, and where Luigi drops it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from types import FrameType

from luigi.worker import TaskProcess

# Seconds for a child to remove what it had half-written.
PATIENCE = 5.0
# Seconds until a signal comes again.
_MOMENT = 0.05

_is_child = False
_is_leaving = False
_is_forking = False
_came_to: set[int] = set()  # processes that had a signal while they were forked, or forked


def begin() -> None:
    """A run begins, and this process is the parent of what it forks from now on."""
    global _is_child, _is_leaving
    _is_child = _is_leaving = False
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_signal)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # or a program has its own
            signal.signal(signal.SIGINT, _on_signal)


def work_ended() -> None:
    """A child is about to tell Luigi how its task ended, and to leave. If a signal stopped it there, the lock of its
    queue could stay taken, and the other children would wait for it for ever."""
    global _is_leaving
    _is_leaving = _is_child


def end_children() -> None:
    """Also one that was forked when the terminal had told the others already."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    for child in children:
        child.join(PATIENCE)
        child.kill()


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _is_leaving
    if _is_leaving:
        return
    if _is_forking:
        _came_to.add(os.getpid())
        return
    if _is_child:
        _is_leaving = True
        raise SystemExit(128 + number)
    signal.signal(signal.SIGALRM, _lose_patience)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    raise KeyboardInterrupt


def _lose_patience(number: int, frame: FrameType | None) -> None:
    """Luigi waits for its children without an end."""
    for child in multiprocessing.active_children():
        if isinstance(child, TaskProcess) and getattr(child.task, "may_be_killed", True):
            child.kill()


def _come_again() -> None:
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, _MOMENT)


# Forks


def follow_forks() -> None:
    """Once, when all is imported: so ours is the first hook before a fork and the last one after it."""
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


def _before_fork() -> None:
    global _is_forking
    _is_forking = True


def _in_parent() -> None:
    global _is_forking
    _is_forking = False
    if os.getpid() in _came_to:
        _came_to.clear()
        _come_again()


def _in_child() -> None:
    global _is_child
    _is_child = True
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _on_signal)
    _in_parent()


# Where what a signal raises goes nowhere


def _on_unraisable(found: sys.UnraisableHookArgs) -> None:
    global _is_leaving
    if issubclass(found.exc_type, KeyboardInterrupt if not _is_child else (KeyboardInterrupt, SystemExit)):
        _is_leaving = False
        _come_again()
    else:
        sys.__unraisablehook__(found)


sys.unraisablehook = _on_unraisable


class _Dropped(logging.Filter):
    """Luigi's scheduler logs whatever is raised while it notes the history of a task, and goes on."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not (record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt)):
            return True
        _come_again()
        return False


logging.getLogger("luigi.scheduler").addFilter(_Dropped())
