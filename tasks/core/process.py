"""Measure this process, limit its memory, and name what the system allows it.

OSError(EMFILE), ImportError("… Too many open files")   ─limit_reached─▶ E705, with the value of ulimit -n
MemoryError, RuntimeError("can't start new thread")     ─limit_reached─▶ E705, with the value of ulimit -v

    with bounded_memory(size): …                an allocation of more than `size` additional bytes is a MemoryError
    with bounded_table(name, size, what): …     the same for reading a table of that size, as a DataError

The content of a file can be a thousand times as large as the file. The operating system enforces the limit
(RLIMIT_DATA on Linux), so it holds for anything that Arrow does.
"""

from __future__ import annotations

import errno
import math
import os
import re
import resource
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from packcorpus.tasks.core.errors import DataError, PackError, StorageError

STATM = Path("/proc/self/statm")  # only on Linux
PROC_CGROUP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")

# A page, a repeated value, or a column of nulls takes a few bytes of a table and any number of bytes in memory. Reading
# one batch may take this much in addition to four times the size of the file.
TABLE = 640 << 20

# Libraries report these problems in errors of any type.
_FILES = (errno.EMFILE, errno.ENFILE), re.compile("Too many open files")
_MEMORY = (
    (errno.ENOMEM,),
    re.compile(
        "(?i)cannot allocate memory|not enough memory|bad_alloc|can't start new thread|failed to map segment",
    ),
)


def limit_reached(error: BaseException) -> StorageError | None:
    """Return the error for a limit of the system that caused an exception, or None."""
    cause: BaseException | None = error
    for _ in range(20):  # a chain may be a circle
        if cause is None or (isinstance(cause, PackError) and cause.reason == "bomb"):  # its own limit ended it
            return None
        number, text = getattr(cause, "errno", None), "" if isinstance(cause, PackError) else str(cause)
        is_files, is_memory = (number in numbers or bool(words.search(text)) for numbers, words in (_FILES, _MEMORY))
        if is_files or is_memory or isinstance(cause, MemoryError):
            problem, limits = "memory ran out", memory_limits()
            if is_files:
                problem = "too many files are open"
                limits = f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,} files (ulimit -n)"
            advice = f"; the limit is {limits}; raise it, or run" if limits else "; run"
            return StorageError("system_limit", f"{problem}{advice} with fewer --workers")
        cause = cause.__cause__ or cause.__context__
    return None


def of_memory() -> str:
    """Return the limits of memory as a remark in a message, or ""."""
    return f" (its limit is {memory_limits()})" if memory_limits() else ""


def memory_limits() -> str:
    """Return the limits of the memory of this process in words, or "" without one."""
    limits = {
        name: resource.getrlimit(number)[0]
        for name, number in (("ulimit -v", resource.RLIMIT_AS), ("ulimit -d", resource.RLIMIT_DATA))
    }
    known = {name: limit for name, limit in limits.items() if limit != resource.RLIM_INFINITY}
    return " and ".join(f"{limit >> 10:,} KiB ({name})" for name, limit in known.items())


def may_allocate(size: int) -> bool:
    """Return whether the limits of the system allow `size` more bytes."""
    return not STATM.exists() or all(
        (limit := resource.getrlimit(number)[0]) == resource.RLIM_INFINITY or _used(column) + size <= limit
        for number, column in ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5))
    )


def memory_limit() -> int | None:
    """Return the bytes of memory that this process may use, or None if unknown.

    That is the memory of the machine, or less if a control group (a container's `--memory`) limits it.
    """
    limits = []
    with suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for (limit,) in _group_limits("memory", ("memory.max",), ("memory.limit_in_bytes",)):
        limits.append(limit)
    return min(limits, default=None)


def free_disk(folder: Path) -> int | None:
    """Return the bytes that can be written below a folder, which may not exist yet."""
    for existing in (folder.absolute(), *folder.absolute().parents):
        with suppress(OSError):
            return shutil.disk_usage(existing).free
    return None


def _used(column: int) -> int:
    """Return a column of STATM in bytes."""
    return int(STATM.read_bytes().split()[column]) * resource.getpagesize()


def versions_of(*names: str) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    versions = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def cores() -> int:
    """Return the number of cores that this process may use, at least 1.

    It is limited by the affinity of the process and by the quota of its control group (a container's `--cpus`); half a
    core counts as one. PYTHON_CPU_COUNT replaces it.
    """
    if (given := os.environ.get("PYTHON_CPU_COUNT", "")).isdecimal() and int(given):
        return int(given)
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(count, math.ceil(min(_quotas(), default=count))))


def _quotas() -> Iterator[float]:
    """Yield the quotas of the control groups of this process, in cores."""
    for quota, period in _group_limits("cpu", ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        if quota > 0:
            yield quota / period


def _group_limits(controller: str, files: Sequence[str], files_of_v1: Sequence[str]) -> Iterator[list[int]]:
    """Yield the numbers of a controller in each control group of this process.

    `files` have them in version 2 of control groups, and `files_of_v1` in version 1. Groups without a limit are left
    out.
    """
    for line in PROC_CGROUP.read_text().splitlines() if PROC_CGROUP.exists() else ():
        _, controllers, path = line.split(":", 2)
        root, names = CGROUPS, files
        if controllers:
            root, names = CGROUPS / controller, files_of_v1
            if controller not in controllers.split(","):
                continue
        # A container may show paths of its host, of which it has only the root.
        group = root if ".." in path else root / path.lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # `max` is not a number
                yield [int(word) for name in names for word in (folder / name).read_text().split()]
            if folder == root:
                break


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes."""
    # macOS counts bytes, other systems count units of 1,024 bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def bounded_memory(size: int) -> Iterator[None]:
    """Let this process allocate at most `size` more bytes.

    There is no limit if the system does not report memory use.
    """
    import pyarrow as pa

    if not STATM.exists():
        yield
        return
    limits, pool = resource.getrlimit(resource.RLIMIT_DATA), pa.default_memory_pool()
    bounds = [_used(5) + size, *(limit for limit in limits if limit != resource.RLIM_INFINITY)]
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
    most = TABLE + 4 * size
    is_enough = may_allocate(most)
    try:
        with bounded_memory(most):
            yield
    except MemoryError:
        if not is_enough:
            raise
        raise bomb(name, f"{what} takes over {most >> 20:,} MiB of memory") from None


def bomb(name: str, problem: str) -> DataError:
    return DataError(
        "bomb", f"{name}: {problem}: damaged, or a decompression bomb? If this is intended, convert it to JSONL"
    )
