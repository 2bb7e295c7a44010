"""Check the memory limit and handle Ctrl-C while a command loads its modules.

    import startup ─▶ Ctrl-C ends the command ─▶ the other modules ─▶ end()

The handler raises nothing, because libraries in C turn an exception during their import into their own errors.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from types import FrameType

COMMANDS = ("luigi", "packcorpus")
INTERRUPTED = b"E713 interrupted; nothing was started\n"
# With less memory, libraries written in C and Rust end the process while they are loaded.
LEAST_MEMORY = 1 << 30
# Another program that imports this package keeps its handler. `python -m luigi` is named luigi/__main__.py.
IS_COMMAND = os.path.basename((sys.argv or [""])[0].removesuffix("/__main__.py")) in COMMANDS


def _exit(number: int, frame: FrameType | None) -> None:
    os.write(2, INTERRUPTED)
    os._exit(75)


def end() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if IS_COMMAND and 0 <= resource.getrlimit(resource.RLIMIT_AS)[0] < LEAST_MEMORY:
    from packcorpus.tasks.core.errors import StorageError
    from packcorpus.tasks.core.messages import format_error
    from packcorpus.tasks.core.process import memory_limits

    least = f"it must be at least {LEAST_MEMORY >> 10:,} KiB"
    error = StorageError("system_limit", f"the limit of memory is {memory_limits()}; {least}")
    print(format_error(error), file=sys.stderr)
    sys.exit(error.exit_code)

if IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _exit)
