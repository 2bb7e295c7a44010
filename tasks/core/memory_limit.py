"""Limit the memory that a library may allocate to read a file.

    with bounded_memory(size): …                an allocation of more than `size` additional bytes is a MemoryError
    with bounded_table(name, size, what): …     the same for reading a table of that size, as a DataError

The content of a file can be a thousand times as large as the file. The operating system enforces the limit
(RLIMIT_DATA on Linux), so it holds for anything that Arrow does.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from tasks.core.errors import DataError
from tasks.core.process import STATM, may_allocate

# A page, a repeated value, or a column of nulls takes a few bytes of a table and any number of bytes in memory. Reading
# one batch may take this much in addition to four times the size of the file.
TABLE = 640 << 20


@contextmanager
def bounded_memory(size: int) -> Iterator[None]:
    """Let this process allocate at most `size` more bytes.

    There is no limit if the system does not report memory use.
    """
    if not STATM.exists():
        yield
        return
    limits, pool = resource.getrlimit(resource.RLIMIT_DATA), pa.default_memory_pool()
    has = int(STATM.read_bytes().split()[5]) * resource.getpagesize()
    bounds = [has + size, *(limit for limit in limits if limit != resource.RLIM_INFINITY)]
    # Arrow's own pool reserves a gigabyte of addresses at once, used or not.
    pa.set_memory_pool(pa.system_memory_pool())
    resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        pa.set_memory_pool(pool)


@contextmanager
def bounded_table(name: str, size: int, what: str) -> Iterator[None]:
    """Limit the memory for reading from a table of `size` bytes.

    Raises DataError if `what` takes too much memory, and MemoryError if a stricter limit of the system ends it.
    """
    is_enough = may_allocate(TABLE + 4 * size)
    try:
        with bounded_memory(TABLE + 4 * size):
            yield
    except MemoryError:
        if not is_enough:
            raise
        raise bomb(name, f"{what} takes over {(TABLE + 4 * size) >> 20:,} MiB of memory") from None


def bomb(name: str, problem: str) -> DataError:
    return DataError(
        "bomb", f"{name}: {problem}: damaged, or a decompression bomb? If this is intended, convert it to JSONL"
    )
