"""Measure this process, and name the limits of the system.

OSError(EMFILE), ImportError("… Too many open files")   ─limit_reached─▶ E705, with the value of ulimit -n
MemoryError, RuntimeError("can't start new thread")     ─limit_reached─▶ E705, with the value of ulimit -v
"""

from __future__ import annotations

import errno
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from tasks.core.errors import PackError, StorageError

# With less memory, libraries written in C and Rust end the process while they are loaded.
LEAST_MEMORY = 1 << 30

STATM = Path("/proc/self/statm")  # only on Linux

_MEMORY = {"ulimit -v": resource.RLIMIT_AS, "ulimit -d": resource.RLIMIT_DATA}

# Libraries report these problems in errors of any type.
_PROBLEMS = (
    ("too many files are open", (errno.EMFILE, errno.ENFILE), r"Too many open files"),
    (
        "memory ran out",
        (errno.ENOMEM,),
        r"(?i)cannot allocate memory|not enough memory|bad_alloc|can't start new thread"
        r"|failed to map segment",
    ),
)


def limit_reached(error: BaseException) -> StorageError | None:
    """Return the error for a limit of the system that caused an exception, or None."""
    for each in _with_causes(error):
        if isinstance(each, PackError) and each.reason == "bomb":  # its own limit ended the reading
            return None
        for problem, numbers, words in _PROBLEMS:
            is_memory = problem == "memory ran out"
            if (
                getattr(each, "errno", None) in numbers
                or (is_memory and isinstance(each, MemoryError))
                or (not isinstance(each, PackError) and re.search(words, str(each)))
            ):
                limits = memory_limits() if is_memory else _files()
                advice = "raise it, or run with fewer --workers" if limits else "run with fewer --workers"
                return StorageError("system_limit", f"{problem}{'; the limit is ' * bool(limits)}{limits}; {advice}")
    return None


def of_memory() -> str:
    """Return the limits of memory as a remark in a message, or ""."""
    return f" (its limit is {memory_limits()})" if memory_limits() else ""


def memory_limits() -> str:
    """Return the limits of the memory of this process in words, or "" without one."""
    found = {name: resource.getrlimit(number)[0] for name, number in _MEMORY.items()}
    return " and ".join(
        f"{value >> 10:,} KiB ({name})" for name, value in found.items() if value != resource.RLIM_INFINITY
    )


def may_allocate(size: int) -> bool:
    """Return whether the limits of the system allow `size` more bytes."""
    if not STATM.exists():
        return True
    pages = STATM.read_bytes().split()
    used = {resource.RLIMIT_AS: pages[0], resource.RLIMIT_DATA: pages[5]}
    limits = {number: resource.getrlimit(number)[0] for number in used}
    return all(
        limit == resource.RLIM_INFINITY or int(used[number]) * resource.getpagesize() + size <= limit
        for number, limit in limits.items()
    )


def _files() -> str:
    return f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,} files (ulimit -n)"


def too_little_memory() -> StorageError | None:
    """Return an error if a limit is too low to load the libraries."""
    if not 0 <= resource.getrlimit(resource.RLIMIT_AS)[0] < LEAST_MEMORY:
        return None
    least = f"it must be at least {LEAST_MEMORY >> 10:,} KiB"
    return StorageError("system_limit", f"the limit of memory is {memory_limits()}; {least}")


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(20):  # a chain may be a circle
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes."""
    # macOS counts bytes, other systems count units of 1,024 bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
