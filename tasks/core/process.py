"""Measure this process."""

from __future__ import annotations

import resource
import sys


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes."""
    # macOS counts bytes, other systems count units of 1,024 bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
