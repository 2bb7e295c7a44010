"""What the tasks of a run did, in numbers that every process of it sees.

A task may run in a forked child, and nothing that a child sets reaches its parent. So the numbers lie in memory that
is shared with every fork: a row for the run, and one for each task, given out by the parent before any child is forked.

    row 0   the run            exit_code, finished, started
    row 1   tasks without one  (of a process that never scheduled them)
    row 2…  a task each        done, read, conversations, tokens, …      ─total─▶ sums over a kind of task

A row is written by the one process that runs its task, so that no lock is needed, and a process that is killed at any
moment holds nothing that others wait for. A task that runs a second time begins its row anew and counts once.
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
    "exit_code", "finished", "copies", "told",  # of the run; told: a checksum of the last error
    "started", "seconds", "peak", "done", "reused",  # started: when, as time.time() has it; peak: bytes
    "cpu", "cpu_before",  # seconds of the task, and of its process before it
    "size", "share",  # of a part: bytes of plain text to read, about, and how much of it is read
    "told_seconds",  # what a part had taken when its share was told
    "conversations", "rejected", "tokens", "tokens_found",
    "rows", "fill",  # of the plan
)  # fmt: skip
RUN, UNKNOWN, FIRST = 0, 1, 2
# Memory that is never touched costs nothing, and Luigi's own cost grows with the square of the tasks long before this.
_ROWS = 1 << 16
_VERSIONS = ("packcorpus", "luigi", "pyarrow", "numpy", "sentencepiece", "tokenizers", "gigatoken", "orjson")

_place = {name: place for place, name in enumerate(FIELDS)}
_table = np.frombuffer(mmap.mmap(-1, _ROWS * len(FIELDS) * 8), np.float64).reshape(_ROWS, len(FIELDS))
_rows: dict[str, int] = {}
_kinds: dict[str, list[int]] = {}


def begin() -> None:
    """Forget an earlier run of this process."""
    _table[: FIRST + len(_rows)] = 0
    _rows.clear()
    _kinds.clear()
    put(started=time.time())


def know(task: str, kind: str) -> bool:
    """Give a task its row; False where it has one. For the parent, before it forks the task's process."""
    if task in _rows or FIRST + len(_rows) == _ROWS:
        return False
    _rows[task] = FIRST + len(_rows)
    _kinds.setdefault(kind, []).append(_rows[task])
    return True


def restart(task: str) -> None:
    """A task begins: what an earlier attempt at it counted is forgotten, but not what there is to read."""
    row = _table[_rows.get(task, UNKNOWN)]
    row[[_place[name] for name in FIELDS if name != "size"]] = 0
    row[_place["started"]] = time.time()


def put(task: str | None = None, **values: float) -> None:
    """Set numbers of a task, or of the run."""
    row = RUN if task is None else _rows.get(task, UNKNOWN)
    for name, value in values.items():
        _table[row, _place[name]] = value


def of_run(name: str) -> float:
    return float(_table[RUN, _place[name]])


def each(kind: str, name: str) -> np.ndarray:
    """float64[tasks of this kind], in the order in which they were found."""
    return _table[_kinds.get(kind, []), _place[name]]


def total(name: str, kind: str | None = None) -> float:
    """Over all tasks, or those of a kind."""
    if kind is None:
        return float(_table[UNKNOWN : FIRST + len(_rows), _place[name]].sum())
    return float(each(kind, name).sum())


def of_task(task: str, name: str) -> float:
    return float(_table[_rows.get(task, UNKNOWN), _place[name]])


def seconds(kind: str) -> np.ndarray:
    """float64[tasks]; what each took, or has taken so far."""
    started, took = each(kind, "started"), each(kind, "seconds")
    return np.where((started > 0) & (took == 0), time.time() - started, took)


def span(kind: str) -> float:
    """Seconds from the begin of the first task of a kind to the end of the last, or until now."""
    started = each(kind, "started")
    begun = started > 0
    return float((started + seconds(kind))[begun].max() - started[begun].min()) if begun.any() else 0.0


def elapsed() -> float:
    """Seconds since the run began."""
    return max(time.time() - of_run("started"), 1e-3)


def run_record() -> dict[str, Any]:
    """What this run took: seconds are summed over the tasks of a stage, which run side by side."""
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
