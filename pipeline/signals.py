"""Ctrl-C and SIGTERM: one exception in each process of a run.

    Ctrl-C, SIGTERM ─┬─▶ the run      KeyboardInterrupt: partial files are removed, the engine ends its workers
                     └─▶ its workers  SystemExit: partial files are removed, no message

Ctrl-C reaches every process of a terminal at the same moment, whatever the process is doing, and often several times.
The first signal counts. While a worker is forked, signals wait, because Python drops the exceptions of hooks of a fork.
Python also drops the exceptions of destructors: there, the signal is sent again a moment later.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from types import FrameType
from typing import Any

from packcorpus.tasks.core import startup

STOP = (signal.SIGINT, signal.SIGTERM)
# Seconds until a signal that was lost is sent again.
MOMENT = 0.05
# Seconds in which a run that was stopped ignores further signals, to remove its partial files.
PATIENCE = 5.0


class _Signals:
    """The handler of both signals in this process."""

    def __init__(self) -> None:
        self.is_worker = False
        self._deadline = 0.0  # until then, signals change nothing
        self._is_held = False
        self._waiting: int = 0
        self._last: int = signal.SIGINT
        self._previous: dict[int, Any] = {}  # handlers to restore
        self._previous_hook = sys.unraisablehook

    def begin(self, is_worker: bool = False) -> None:
        """Handle the signals of a run, or of a worker, from now on.

        A handler of the user's program is kept. Only the main thread can set handlers.
        """
        startup.end()
        self.is_worker, self._is_held, self._deadline = is_worker, False, 0.0
        if threading.current_thread() is not threading.main_thread():
            return
        if sys.unraisablehook != self._on_unraisable:
            self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        for number in STOP:
            handler = signal.getsignal(number)
            if handler in (signal.SIG_DFL, signal.default_int_handler) or (is_worker and handler != signal.SIG_IGN):
                self._previous[number] = signal.signal(number, self._on_signal)
        if is_worker and self._waiting:  # it arrived during the fork
            raise SystemExit(128 + self._waiting)

    def end(self, ignore: bool = False) -> None:
        """Restore the handlers; with `ignore`, ignore signals until the process ends.

        At its end, Python restores the system's handlers, but leaves ignored signals alone.
        """
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_IGN if ignore else handler)
        self._previous.clear()
        if sys.unraisablehook == self._on_unraisable:
            sys.unraisablehook = self._previous_hook

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let signals wait until the block has ended; a fork in the block inherits them."""
        self._is_held, self._waiting = True, 0
        try:
            yield
        finally:
            self._is_held = False
            if self._waiting:
                number, self._waiting = self._waiting, 0
                signal.raise_signal(number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() < self._deadline:
            return
        if self._is_held:
            self._waiting = number
            return
        self._last = number
        if self.is_worker:
            self._deadline = inf
            raise SystemExit(128 + number)
        self._deadline = time.monotonic() + PATIENCE
        raise KeyboardInterrupt

    def _on_unraisable(self, lost: sys.UnraisableHookArgs) -> None:
        if not issubclass(lost.exc_type, SystemExit if self.is_worker else KeyboardInterrupt):
            self._previous_hook(lost)
            return

        def again(*_: object) -> None:
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.raise_signal(self._last)

        self._deadline = 0.0
        handler = signal.signal(signal.SIGALRM, again)
        timer = signal.setitimer(signal.ITIMER_REAL, MOMENT)


signals = _Signals()
