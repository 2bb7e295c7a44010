"""A bound on what a library may allocate, for files whose content can be a thousand times as large as they are.

    with bounded_memory(size): …    an allocation beyond `size` more bytes than now fails with MemoryError

The system keeps the bound (RLIMIT_DATA of Linux), so that it holds for whatever Arrow does with what a file claims.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

_STATM = Path("/proc/self/statm")


@contextmanager
def bounded_memory(size: int) -> Iterator[None]:
    """Let this process take `size` bytes more at most. Where the system cannot say what it has, there is no bound."""
    if not _STATM.exists():
        yield
        return
    limits, pool = resource.getrlimit(resource.RLIMIT_DATA), pa.default_memory_pool()
    has = int(_STATM.read_bytes().split()[5]) * resource.getpagesize()
    bounds = [has + size, *(limit for limit in limits if limit != resource.RLIM_INFINITY)]
    # Arrow's own pool takes a gigabyte of addresses at once, used or not.
    pa.set_memory_pool(pa.system_memory_pool())
    resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        pa.set_memory_pool(pool)
