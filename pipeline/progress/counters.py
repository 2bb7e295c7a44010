"""Count the work of a run's tasks, in memory that all processes of the run share.

A task may run in a forked child, and values that a child sets do not reach its parent. The numbers are therefore in
memory shared with every fork: one row for the run and one row for each task, which the parent assigns before it forks.

    row 0   the run            exit_code, finished, started
    row 1   unknown tasks      (of a process that never scheduled them)
    row 2…  one task each      done, read, conversations, tokens, …      ─total─▶ sums over a kind of task

Only the process that runs a task writes its row. No lock is needed, so no process ever waits for a killed process. A
task that runs a second time restarts its row and counts once.
"""

from __future__ import annotations

import mmap
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import numpy as np

from tasks.core.process import peak_memory

STAGES = ("TrainTokenizer", "TokenizePart", "PlanPacking", "WriteShard")
FIELDS = (
    "exit_code", "finished", "copies", "last_error",  # of the run; last_error: checksum of the last message
    "started", "seconds", "peak", "done", "reused",  # started: as time.time(); peak: bytes
    "cpu", "cpu_before",  # CPU seconds of the task, and of its process before it
    "size", "share",  # of a part: approximate bytes of plain text, and the share that has been read
    "seconds_at_share",  # seconds that a part had taken when its share was last reported
    "conversations", "rejected", "tokens", "tokens_found",
    "rows", "fill",  # of the plan
)  # fmt: skip
RUN, UNKNOWN, FIRST = 0, 1, 2
# Untouched memory costs nothing. Luigi's own cost, which is quadratic in the tasks, limits their number long before.
_ROWS = 1 << 16
_VERSIONS = ("packcorpus", "luigi", "pyarrow", "numpy", "sentencepiece", "tokenizers", "gigatoken", "orjson")

_place = {name: place for place, name in enumerate(FIELDS)}
_table = np.frombuffer(mmap.mmap(-1, _ROWS * len(FIELDS) * 8), np.float64).reshape(_ROWS, len(FIELDS))
_rows: dict[str, int] = {}
_kinds: dict[str, list[int]] = {}


def begin() -> None:
    """Start a run, and forget an earlier run of this process."""
    _table[: FIRST + len(_rows)] = 0
    _rows.clear()
    _kinds.clear()
    put(started=time.time())


def register(task: str, kind: str) -> bool:
    """Assign a row to a task; return False if it has a row or none is free.

    The parent calls this before it forks the task's process.
    """
    if task in _rows or FIRST + len(_rows) == _ROWS:
        return False
    _rows[task] = FIRST + len(_rows)
    _kinds.setdefault(kind, []).append(_rows[task])
    return True


def restart(task: str) -> None:
    """Start a task: forget the counts of an earlier attempt, but not its size."""
    row = _table[_rows.get(task, UNKNOWN)]
    row[[_place[name] for name in FIELDS if name != "size"]] = 0
    row[_place["started"]] = time.time()


def put(task: str | None = None, **values: float) -> None:
    """Set values of a task, or of the run if `task` is None."""
    row = RUN if task is None else _rows.get(task, UNKNOWN)
    for name, value in values.items():
        _table[row, _place[name]] = value


def of_run(name: str) -> float:
    return float(_table[RUN, _place[name]])


def each(kind: str, name: str) -> np.ndarray:
    """Return a value of each task of a kind, in order of registration: float64[tasks]."""
    return _table[_kinds.get(kind, []), _place[name]]


def total(name: str, kind: str | None = None) -> float:
    """Sum a value over all tasks, or over all tasks of a kind."""
    if kind is None:
        return float(_table[UNKNOWN : FIRST + len(_rows), _place[name]].sum())
    return float(each(kind, name).sum())


def of_task(task: str, name: str) -> float:
    return float(_table[_rows.get(task, UNKNOWN), _place[name]])


def seconds(kind: str) -> np.ndarray:
    """Return the seconds that each task took, or has taken so far: float64[tasks]."""
    started, took = each(kind, "started"), each(kind, "seconds")
    return np.where((started > 0) & (took == 0), time.time() - started, took)


def span(kind: str) -> float:
    """Return the seconds from the first start to the last end of a kind of task.

    A task that is still running ends now.
    """
    started = each(kind, "started")
    ran = started > 0
    return float((started + seconds(kind))[ran].max() - started[ran].min()) if ran.any() else 0.0


def elapsed() -> float:
    """Return the seconds since the run started."""
    return max(time.time() - of_run("started"), 1e-3)


def run_record() -> dict[str, Any]:
    """Return times, counts, and versions for run.json.

    The seconds of a stage are summed over its parallel tasks.
    """
    seconds = elapsed()
    peaks = _table[: FIRST + len(_rows), _place["peak"]]
    return {
        "seconds": round(seconds, 3),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "stages": {
            name: {"seconds": round(total("seconds", name), 3), "cpu_seconds": round(total("cpu", name), 3)}
            for name in STAGES
        },
        "conversations": int(total("conversations")),
        "tokens": int(total("tokens")),
        "conversations_per_second": round(total("conversations") / seconds, 1),
        "tokens_per_second": round(total("tokens") / seconds, 1),
        "peak_memory_bytes": int(max(float(peaks.max()), peak_memory())),
        "tasks_found_done": int(total("reused")),
        "versions": {name: metadata.version(name) for name in _VERSIONS} | {"python": sys.version.split()[0]},
    }
