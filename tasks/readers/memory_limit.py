"""A bound on what a library may allocate, for files whose content can be a thousand times as large as they are.

    with bounded_memory(size): …                an allocation beyond `size` more bytes than now fails with MemoryError
    with bounded_table(name, size, what): …     the same for what is read of a table of that size, as a DataError

The system keeps the bound (RLIMIT_DATA of Linux), so that it holds for whatever Arrow does with what a file claims.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from tasks.core.errors import DataError

# A page, a repeated value or a column of nulls takes a few bytes of a table, and any number of them in memory. What is
# read of it at once may take this much besides four times the size of the file.
TABLE = 640 << 20

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


@contextmanager
def bounded_table(name: str, size: int, what: str) -> Iterator[None]:
    """Bound what is read of a table of `size` bytes at once. Raises DataError, saying that `what` takes too much."""
    try:
        with bounded_memory(TABLE + 4 * size):
            yield
    except MemoryError:
        raise bomb(name, f"{what} takes over {(TABLE + 4 * size) >> 20:,} MiB of memory") from None


def bomb(name: str, said: str) -> DataError:
    return DataError("bomb", f"{name}: {said}: damaged, or a bomb? Where it is meant so, write it as JSONL")
