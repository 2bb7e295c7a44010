"""Measure this process, and quiet the native code in it."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes."""
    # macOS counts bytes, other systems count units of 1,024 bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def suppress_stderr() -> Iterator[None]:
    """Discard everything that the process writes to stderr.

    This includes native code, because Rust reports errors there even if they are handled.
    """
    before = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
