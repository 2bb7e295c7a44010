"""Estimate the time left in a run from the progress of its tasks so far.

    parts: sizes, shares, seconds ─▶ speed ─▶ seconds of each remaining part ───┐
    tokens so far ─▶ total tokens ─▶ seconds of the plan and of the shards ─────┴─▶ assigned to the workers ─▶ seconds

Seconds count the time of one worker. Parts are assigned to workers as the workers become free, so a large last part
counts in full even if the other workers have nothing left to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

from tasks.dry_run.cost_model import COMMIT, ROW_BYTES, TASK, WRITTEN_BYTE, plan_seconds
from tasks.readers.containers import container_named
from tasks.sources.model import Part

# A byte of a compressed file is as much work as this many bytes of plain text, measured on chats.
UNPACKED = 3.5


def sizes_of(parts: Sequence[Part]) -> list[float]:
    """Return the approximate work of each part, in bytes of plain text.

    `parts` are all parts, in order.
    """
    ends = {id(part.file): part.stop for part in parts}  # the last part of a file ends with it
    sizes = []
    for part in parts:
        file, end = part.file, max(ends[id(part.file)], 1)
        packed = file.compression or container_named(file.container).is_compressed
        sizes.append(file.bytes * (part.stop - part.start) / end * (UNPACKED if packed else 1))
    return sizes


@dataclass(frozen=True)
class Work:
    """Counters of a run; arrays have one item per part or shard, in task order.

    For each part, `size` is its bytes of plain text, and `share` is the share that is read. `seconds_at_share`
    (elapsed) and `cpu` (CPU seconds) are its times when this share was reported; `seconds` is its time until now.
    Cached parts have a share of 1 and took no time; `tokens_found` is their approximate number of tokens. `copies` is
    how often a token is written.
    """

    workers: int
    size: np.ndarray
    share: np.ndarray
    seconds: np.ndarray
    seconds_at_share: np.ndarray
    cpu: np.ndarray
    conversations: float
    tokens: float
    tokens_found: float
    copies: float
    planned: bool
    plan_seconds: float
    shard_done: np.ndarray
    shard_seconds: np.ndarray


def seconds_left(work: Work) -> float | None:
    """Return the estimate, or None if there is nothing to base it on yet."""
    measured = work.cpu > 0
    # If other processes also use the cores, everything takes longer by the ratio that the running parts show.
    now = measured & (work.share < 1)
    recent = now if now.any() else measured
    waiting = max(1.0, float(work.seconds_at_share[recent].sum() / work.cpu[recent].sum())) if measured.any() else 1.0
    parts_left = work.size * (1 - work.share)
    left, ahead = 0.0, 1.0
    if not work.planned and parts_left.any():
        read = float((work.size * work.share)[measured].sum())
        if not read:
            return None
        computed = np.maximum(work.cpu - TASK, work.cpu / 4)[measured].sum()
        started = work.seconds > 0
        startup = np.where(started | (parts_left == 0), 0, TASK * waiting)
        rest = parts_left * float(computed / read) * waiting + startup - (work.seconds - work.seconds_at_share) * now
        in_turn = np.lexsort((-work.size, ~started))  # running parts first, then the largest
        left += _makespan(np.maximum(rest, 0)[in_turn].tolist(), work.workers)
        ahead = 1 + float(parts_left.sum()) / read
    tokens, conversations = work.tokens * ahead + work.tokens_found, work.conversations * ahead
    if not work.planned:
        plan = TASK + plan_seconds(conversations * max(1, work.copies), tokens)
        left += max(plan * waiting - work.plan_seconds, 0.0)
    done = work.shard_done > 0
    # Use the cost model until a shard of this run is written.
    expected = (TASK + WRITTEN_BYTE * ROW_BYTES * tokens * work.copies / max(len(done), 1)) * waiting
    if done.any():
        expected = float(work.shard_seconds[done].mean())
    shards = [max(expected - spent, expected / 10) for spent in work.shard_seconds[~done].tolist()]
    return left + _makespan(shards, work.workers) + COMMIT * waiting


def _makespan(seconds: Sequence[float], workers: int) -> float:
    """Return when all tasks are done if each free worker takes the next one."""
    free = [0.0] * max(workers, 1)
    heapify(free)
    for each in seconds:
        heapreplace(free, free[0] + each)
    return max(free)
