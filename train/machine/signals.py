"""End the process at once on Ctrl-C or SIGTERM outside the training steps.

There is nothing to save then, so one line and the exit code are enough.

    python -m train ─install─▶ libraries, model, proof ─▶ steps (Interruption) ─▶ results ─leave─▶ exit

The handler raises nothing. A library that is being imported or tried out would take the exception for a fault of its
own, and during exit nobody catches it.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import FrameType

from tasks.core.error_messages import format_error
from tasks.core.errors import Interrupted

NUMBERS = (signal.SIGTERM, signal.SIGINT)


class SignalGuard:
    """Ends the process on a signal; after `leave`, with the code passed to it."""

    def __init__(self) -> None:
        self._exit_code: int | None = None  # set once the result has been reported
        self._is_ending = False

    def install(self) -> None:
        for number in NUMBERS:
            signal.signal(number, self.end_at_once)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)  # pipeline.training blocks them until here
        atexit.register(_ignore)  # registered first, called last

    def leave(self, exit_code: int) -> None:
        """Fix the exit code: from here on a signal changes neither it nor the output."""
        sys.stdout.flush()
        self._exit_code = exit_code

    def end_at_once(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: report the interruption and exit."""
        if self._exit_code is not None:
            os._exit(self._exit_code)
        if self._is_ending:  # Ctrl-C and SIGTERM came together
            return
        self._is_ending = True
        if not is_rank():
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
    """Return whether a launcher started this process and reports for it."""
    return "TORCHELASTIC_RUN_ID" in os.environ
