"""Ctrl-C while a command of ours still loads its modules: one line, and the process ends at once. To be imported first.

Nothing is raised there: libraries in C make a fault of their own of what is raised while they are loaded.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

COMMANDS = ("luigi", "packcorpus")
INTERRUPTED = b"E713 interrupted; nothing had begun\n"


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, INTERRUPTED)
    os._exit(75)


def is_over() -> None:
    """Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Whoever imports this into a program of his own keeps his Ctrl-C.
if (
    os.path.basename((sys.argv or [""])[0]) in COMMANDS
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, _end)
