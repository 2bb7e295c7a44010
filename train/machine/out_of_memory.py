"""Retry a step that runs out of memory, with fewer rows at a time.

    a step fails ─may_be_shortage─▶ run.json with a smaller micro-batch ─▶ Restart
      ─restart─▶ the same command once more, from the newest checkpoint

After a GPU error, the memory of the GPU cannot be trusted or freed, so the process is replaced. If there are several
ranks, the failed rank ends with RESTART. The others, which wait for it in a collective operation, find the smaller
micro-batch in run.json (`watching`) and end as well. The launcher then starts all ranks again.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from train.machine.signals import LAUNCHED, NUMBERS

RESTART = 90  # exit code of a rank, only for the launcher
LOOK_EVERY = 1.0  # seconds
FIRST = 3  # first file descriptor after standard input, output, and error

_SHORTAGE = re.compile(r"out of memory|ALLOC\w*_FAILED|can't allocate memory", re.IGNORECASE)


class Restart(Exception):
    """Request to run the command again, with the smaller micro-batch in run.json."""


def is_shortage(error: BaseException) -> bool:
    """Return whether an error means that an allocation failed."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_SHORTAGE.search(str(error)))


def may_be_shortage(error: BaseException) -> bool:
    """Return whether an allocation failed or a GPU reported an error.

    A GPU may report a failed allocation as an error of a later operation.
    """
    import torch

    return is_shortage(error) or isinstance(error, torch.AcceleratorError)


def described(error: BaseException) -> str:
    """Return a short description of an error."""
    if is_shortage(error):
        return "ran out of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"failed ({(lines or [type(error).__name__])[0][:160].rstrip('.')})"


def restart(arguments: list[str], why: str) -> NoReturn:
    """Replace this process with `python -m train ARGUMENTS`, or end this rank."""
    if LAUNCHED in os.environ:
        os._exit(RESTART)  # an orderly exit would wait for the other ranks
    print(why, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)  # until the new process can report that it was stopped
    # The driver keeps GPU memory as long as its files are open, so the new process must not inherit them.
    for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").is_dir() else ():
        with suppress(OSError):
            os.set_inheritable(int(name), int(name) < FIRST)
    # For -P, see train.machine.launch.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "train", *arguments])  # noqa: S606 - no shell is wanted


@contextmanager
def watching(is_reduced: Callable[[], bool]) -> Iterator[None]:
    """End this rank within seconds if another rank has reduced the micro-batch.

    This works even while this rank waits for the other rank.
    """
    done = threading.Event()

    def look() -> None:
        while not done.wait(LOOK_EVERY):
            if is_reduced():
                os._exit(RESTART)

    if LAUNCHED in os.environ:
        threading.Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        done.set()
