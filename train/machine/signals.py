"""Ctrl-C and SIGTERM outside the steps: there is nothing to save, and the process ends at once, with one line.

    python -m train ─begin─▶ libraries, model, proof ─▶ steps (interruption) ─▶ results ─leave─▶ exit

Nothing is raised there: who imports a library or tries one out takes an exception for a fault of that library, and at
the exit nobody catches it.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import FrameType

from tasks.core.error_messages import told
from tasks.core.errors import Interrupted

NUMBERS = (signal.SIGTERM, signal.SIGINT)

_exit_code: int | None = None  # once the last word is said
_is_ending = False


def begin() -> None:
    global _exit_code
    _exit_code = None
    for number in NUMBERS:
        signal.signal(number, end_at_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)  # pipeline.training holds them back until here
    atexit.register(_ignore)  # the first that is registered is the last that is called


def _ignore() -> None:
    """What Python still does takes torch a while, and Python does it with the handlers of the system."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def leave(exit_code: int) -> None:
    """The last word is said, or is about to be: from here on a signal changes neither that nor the exit code."""
    global _exit_code
    sys.stdout.flush()
    _exit_code = exit_code


def end_at_once(number: int, frame: FrameType | None) -> None:
    global _is_ending
    if _exit_code is not None:
        os._exit(_exit_code)
    if _is_ending:  # Ctrl-C and SIGTERM came together
        return
    _is_ending = True
    if not is_rank():
        line = told(Interrupted("interrupted", "interrupted outside the steps; the same command goes on from here"))
        os.write(2, f"{line}\n".encode())  # print fails where it was itself interrupted
    os._exit(Interrupted.exit_code)


def is_rank() -> bool:
    """Whether this is one of several processes, of which the one that started them says that it was told to stop."""
    return "TORCHELASTIC_RUN_ID" in os.environ
