"""How much longer a run takes, from what its tasks have done so far.

    parts: sizes, shares, seconds ─▶ speed ─▶ seconds of each part that is left ─┐
    tokens so far ─▶ tokens in all ─▶ seconds of the plan and of the shards ─────┴─▶ dealt to the workers ─▶ seconds

Seconds are those of one worker. Parts are dealt to the workers as they become free, so that the last and largest part
counts in full even where the other workers have nothing left to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

# A byte of a compressed file is as much work as these bytes of a plain one, on chats.
UNPACKED = 3.5
# Seconds of a core, as measured; where others use the cores too, so many times longer as the parts were.
# What a task of a part takes before its speed is that of its bytes.
PART_SECONDS = 0.08
# What the stages behind tokenisation take: used until a shard of this run is written.
PLAN_SECONDS = {"task": 0.07, "conversation": 6e-7, "token": 3e-9}
SHARD_SECONDS = {"task": 0.07, "token": 1.6e-8}
COMMIT_SECONDS = 0.1
# Seconds of a core behind the first batches from which a speed is told without what stood before them.
ENOUGH = 0.3


@dataclass(frozen=True)
class Work:
    """The run as its counters have it; arrays with an item for each part or shard, in the order of their tasks.

    `size` of each part in bytes of plain text, `share` of it that is read, `seconds` that were spent on it, and the
    two as they were after its first batch: a process is slow to begin. Parts that were found done have the share 1
    and took no time; `tokens_found` is what they hold, about. `cpu` are the seconds of all parts that were computed
    and not waited.
    """

    workers: int
    size: np.ndarray
    share: np.ndarray
    seconds: np.ndarray
    first_share: np.ndarray
    first_seconds: np.ndarray
    cpu: float
    conversations: float
    tokens: float
    tokens_found: float
    planned: bool
    plan_seconds: float
    shard_done: np.ndarray
    shard_seconds: np.ndarray


def seconds_left(work: Work) -> float | None:
    """None where nothing can be said yet."""
    waiting = max(1.0, float(work.seconds.sum()) / work.cpu) if work.cpu else 1.0
    parts_left = work.size * (1 - work.share)
    left, ahead = 0.0, 1.0
    if not work.planned and parts_left.any():
        begun = work.seconds > 0
        read = float((work.size * work.share)[begun].sum())
        pace = _seconds_per_byte(work, waiting)
        if pace is None:
            return None
        rest = parts_left * pace + np.where(begun | (parts_left == 0), 0, PART_SECONDS * waiting)
        begun_first = np.argsort(~begun, kind="stable")
        left += _makespan(rest[begun_first].tolist(), work.workers)
        ahead = 1 + float(parts_left.sum()) / read
    tokens, conversations = work.tokens * ahead + work.tokens_found, work.conversations * ahead
    if not work.planned:
        plan = sum(PLAN_SECONDS[name] * n for name, n in _amounts(conversations, tokens))
        left += max(plan * waiting - work.plan_seconds, 0.0)
    done = work.shard_done > 0
    expected = SHARD_SECONDS["task"] + SHARD_SECONDS["token"] * tokens / max(len(done), 1)
    expected = float(work.shard_seconds[done].mean()) if done.any() else expected * waiting
    shards = [max(expected - spent, expected / 10) for spent in work.shard_seconds[~done].tolist()]
    return left + _makespan(shards, work.workers) + COMMIT_SECONDS * waiting


def _seconds_per_byte(work: Work, waiting: float) -> float | None:
    """From what came after the first batches, where that is enough; else from all, less what a begin takes."""
    read = work.size * work.share
    later = read - work.size * work.first_share
    late_seconds = float(np.where(later > 0, work.seconds - work.first_seconds, 0).sum())
    if late_seconds >= ENOUGH * waiting:
        return late_seconds / float(later.sum())
    told = (work.first_seconds > 0) & (read > 0)
    if not told.any():
        return None
    spent = work.seconds[told]
    return float(np.maximum(spent - PART_SECONDS * waiting, spent / 4).sum() / read[told].sum())


def _amounts(conversations: float, tokens: float) -> Sequence[tuple[str, float]]:
    return (("task", 1), ("conversation", conversations), ("token", tokens))


def _makespan(seconds: Sequence[float], workers: int) -> float:
    """When all is done, where whoever is free takes the next."""
    free = [0.0] * max(workers, 1)
    heapify(free)
    for each in seconds:
        heapreplace(free, free[0] + each)
    return max(free)
