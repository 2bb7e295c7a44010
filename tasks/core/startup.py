"""Load the modules of a command without garbage collection, and handle Ctrl-C.

    import startup ─▶ no garbage collection; Ctrl-C ends the command ─▶ the other modules ─▶ end()

Nearly all objects that are made meanwhile remain, and looking through them again and again takes a tenth of a short
command and a fifth of the time to load torch. The handler of Ctrl-C raises nothing, because libraries in C turn an
exception during their import into their own errors.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

COMMANDS = ("luigi", "packcorpus")
INTERRUPTED = b"E713 interrupted; nothing was started\n"
# Another program that imports this package keeps its handler and its collector. `python -m luigi` is named
# luigi/__main__.py.
IS_COMMAND = os.path.basename((sys.argv or [""])[0].removesuffix("/__main__.py")) in COMMANDS


def _exit(number: int, frame: FrameType | None) -> None:
    os.write(2, INTERRUPTED)
    os._exit(75)


def end() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, and collect garbage again."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if IS_COMMAND:
        collect_from_now()


@contextmanager
def loading() -> Iterator[None]:
    """Load large libraries in this context; collect no garbage until its end."""
    did_collect = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if did_collect:
            collect_from_now()


def collect_from_now() -> None:
    """Collect garbage only among objects that are made from now on."""
    gc.freeze()
    gc.enable()


if IS_COMMAND:
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)
