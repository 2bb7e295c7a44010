"""Exit with one line on Ctrl-C while a command still loads its modules.

Import this module first. The handler raises nothing, because libraries in C turn an exception during their import into
their own errors.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

COMMANDS = ("luigi", "packcorpus")
INTERRUPTED = b"E713 interrupted; nothing was started\n"


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, INTERRUPTED)
    os._exit(75)


def restore_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# A program that imports this package keeps its own handler. `python -m luigi` is named luigi/__main__.py.
if (
    os.path.basename((sys.argv or [""])[0].removesuffix("/__main__.py")) in COMMANDS
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, _end)
