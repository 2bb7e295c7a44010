"""End the process at once on Ctrl-C or SIGTERM outside the training steps.

There is nothing to save at that time, so one line and the exit code are enough.

    python -m train ─install─▶ libraries, model, proof ─▶ steps (Interruption) ─▶ results ─leave─▶ exit

The handler raises no exception. A library that is being imported or tried would take an exception for its own failure,
and nothing catches one during exit. Python runs a handler only between two bytecode instructions. A thread therefore
ends a process that waits within a library, for example for a rank that has ended.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from types import FrameType

from tasks.core.errors import Interrupted
from tasks.core.messages import format_error

NUMBERS = (signal.SIGTERM, signal.SIGINT)

# Seconds within which the main thread handles a signal, unless it is waiting within a library.
GRACE = 2.0

# Environment variable that our launcher sets for its ranks, because it can restart them. torchrun does not set it.
LAUNCHED = "PACKCORPUS_LAUNCHED"


class SignalGuard:
    """Handler that ends the process on a signal; after `leave`, with the final code."""

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
        """Set the final exit code.

        Later signals change neither the code nor the output.
        """
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
    """Return whether this process prints messages that concern all ranks.

    Our launcher prints them for its ranks. torchrun does not know our messages, so the first rank of each machine
    prints them.
    """
    return not is_rank() or (LAUNCHED not in os.environ and os.environ.get("LOCAL_RANK", "0") == "0")
