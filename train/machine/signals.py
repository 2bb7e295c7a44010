"""End the process at once on Ctrl-C or SIGTERM outside the training steps.

There is nothing to save then, so one line and the exit code are enough.

    python -m train ─install─▶ libraries, model, proof ─▶ steps (Interruption) ─▶ results ─leave─▶ exit

The handler raises nothing. A library that is being imported or tried out would take the exception for a fault of its
own, and during exit nobody catches it. Python runs it between two of its own instructions only: a thread ends a process
that waits within a library, such as for a rank that has ended.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from types import FrameType

from tasks.core.error_messages import format_error
from tasks.core.errors import Interrupted

NUMBERS = (signal.SIGTERM, signal.SIGINT)

# Seconds in which the main thread handles a signal, unless it waits within a library.
GRACE = 2.0

# Set by our launcher for its ranks, which it can start again. torchrun does not set it.
LAUNCHED = "PACKCORPUS_LAUNCHED"


class SignalGuard:
    """Ends the process on a signal; after `leave`, with the code passed to it."""

    def __init__(self) -> None:
        self._exit_code: int | None = None  # set once the result has been reported
        self._is_ending = False
        self.in_steps = False  # set by Interruption, which then handles signals

    def install(self) -> None:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reading,), daemon=True).start()
        for number in NUMBERS:
            signal.signal(number, self.end_at_once)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)  # pipeline.training blocks them until here
        atexit.register(_ignore)  # registered first, called last

    def leave(self, exit_code: int) -> None:
        """Fix the exit code: from here on a signal changes neither it nor the output."""
        sys.stdout.flush()
        self._exit_code = exit_code

    def _watch(self, signals: int) -> None:
        """End the process if its main thread does not handle a signal."""
        while os.read(signals, 1):
            if not self.in_steps:
                time.sleep(GRACE)
                self.end_at_once(signal.SIGTERM, None)

    def end_at_once(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: report the interruption and exit."""
        if self._exit_code is not None:
            os._exit(self._exit_code)
        if self._is_ending:  # Ctrl-C and SIGTERM came together
            return
        self._is_ending = True
        if reports():
            line = format_error(
                Interrupted("interrupted", "interrupted outside the steps; run the same command to resume")
            )
            os.write(2, f"{line}\n".encode())  # print fails if it was itself interrupted
        os._exit(Interrupted.exit_code)


def _ignore() -> None:
    """Ignore signals during exit, when Python has restored the default handlers."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def is_rank() -> bool:
    """Return whether a launcher started this process: ours or torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def reports() -> bool:
    """Return whether this process reports what concerns all ranks.

    Our launcher reports for its ranks. torchrun does not know our messages, so the first rank of each machine reports.
    """
    return not is_rank() or (LAUNCHED not in os.environ and os.environ.get("LOCAL_RANK", "0") == "0")
