"""Recover from a step that runs out of memory: take it again, with fewer rows at a time.

    a step fails ─may_be_shortage─▶ run.json with a smaller micro-batch ─▶ Restart
      ─restart─▶ the same command once more, from the newest checkpoint

After an error of the GPU, its memory cannot be trusted or freed, so the process is replaced. One rank cannot do that
alone: it ends with RESTART. The others, which wait for it in a collective operation, find the smaller micro-batch in
run.json (`watching`) and end as well, and the launcher starts all of them again.
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
FIRST = 3  # number of the first file besides standard input, output, and error

_SHORTAGE = re.compile(r"out of memory|ALLOC\w*_FAILED|can't allocate memory", re.IGNORECASE)


class Restart(Exception):
    """The command must be run again, because run.json has a smaller micro-batch now."""


def is_shortage(error: BaseException) -> bool:
    """Return whether an allocation failed."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_SHORTAGE.search(str(error)))


def may_be_shortage(error: BaseException) -> bool:
    """Return whether an allocation failed, or a GPU reported an error, which it may do at another place."""
    import torch

    return is_shortage(error) or isinstance(error, torch.AcceleratorError)


def described(error: BaseException) -> str:
    """Return what happened, in a few words."""
    if is_shortage(error):
        return "ran out of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"failed ({(lines or [type(error).__name__])[0][:160].rstrip('.')})"


def restart(arguments: list[str], why: str) -> NoReturn:
    """Replace this process by `python -m train` with the same arguments, or end this rank."""
    if LAUNCHED in os.environ:
        os._exit(RESTART)  # an orderly exit would wait for the other ranks
    print(why, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)  # until the new process can report that it was stopped
    # The driver keeps the memory of a GPU as long as its files are open.
    for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").is_dir() else ():
        with suppress(OSError):
            os.set_inheritable(int(name), int(name) < FIRST)
    # -P, as in train.machine.launch
    os.execv(sys.executable, [sys.executable, "-P", "-m", "train", *arguments])  # noqa: S606 - no shell is wanted


@contextmanager
def watching(is_reduced: Callable[[], bool]) -> Iterator[None]:
    """End this rank within seconds if another one has reduced the micro-batch, even while it waits for that one."""
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
