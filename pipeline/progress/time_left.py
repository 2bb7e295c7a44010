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

from tasks.dry_run.cost_model import COMMIT, ROW_BYTES, TASK, WRITTEN_BYTE, plan_seconds
from tasks.readers.containers import container_named
from tasks.sources.model import Part

# A byte of a compressed file is as much work as these bytes of a plain one, on chats.
UNPACKED = 3.5


def size_of(part: Part, parts: Sequence[Part]) -> float:
    """Bytes of plain text that a part is as much work as, about. `parts` are all."""
    file = part.file
    end = max(other.stop for other in parts if other.file is file)  # of bytes, or of groups of rows
    packed = file.compression or container_named(file.container).is_packed
    return file.bytes * (part.stop - part.start) / max(end, 1) * (UNPACKED if packed else 1)


@dataclass(frozen=True)
class Work:
    """The run as its counters have it; arrays with an item for each part or shard, in the order of their tasks.

    `size` of each part in bytes of plain text, `share` of it that is read, `told_seconds` and `cpu` that it had taken
    when that was told, computing and waiting or computing alone, `seconds` until now. Parts that were found done have
    the share 1 and took no time; `tokens_found` is what they hold, about. `copies` is how often a token is written.
    """

    workers: int
    size: np.ndarray
    share: np.ndarray
    seconds: np.ndarray
    told_seconds: np.ndarray
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
    """None where nothing can be said yet."""
    told = work.cpu > 0
    # Where others use the cores, too, everything takes so much longer: as long as those that run now.
    now = told & (work.share < 1)
    recent = now if now.any() else told
    waiting = max(1.0, float(work.told_seconds[recent].sum() / work.cpu[recent].sum())) if told.any() else 1.0
    parts_left = work.size * (1 - work.share)
    left, ahead = 0.0, 1.0
    if not work.planned and parts_left.any():
        read = float((work.size * work.share)[told].sum())
        if not read:
            return None
        computed = np.maximum(work.cpu - TASK, work.cpu / 4)[told].sum()
        begun = work.seconds > 0
        begin = np.where(begun | (parts_left == 0), 0, TASK * waiting)
        rest = parts_left * float(computed / read) * waiting + begin - (work.seconds - work.told_seconds) * now
        in_turn = np.lexsort((-work.size, ~begun))  # those that run, then the largest
        left += _makespan(np.maximum(rest, 0)[in_turn].tolist(), work.workers)
        ahead = 1 + float(parts_left.sum()) / read
    tokens, conversations = work.tokens * ahead + work.tokens_found, work.conversations * ahead
    if not work.planned:
        plan = TASK + plan_seconds(conversations * max(1, work.copies), tokens)
        left += max(plan * waiting - work.plan_seconds, 0.0)
    done = work.shard_done > 0
    # Told by what shards took elsewhere until one of this run is written.
    expected = (TASK + WRITTEN_BYTE * ROW_BYTES * tokens * work.copies / max(len(done), 1)) * waiting
    if done.any():
        expected = float(work.shard_seconds[done].mean())
    shards = [max(expected - spent, expected / 10) for spent in work.shard_seconds[~done].tolist()]
    return left + _makespan(shards, work.workers) + COMMIT * waiting


def _makespan(seconds: Sequence[float], workers: int) -> float:
    """When all is done, where whoever is free takes the next."""
    free = [0.0] * max(workers, 1)
    heapify(free)
    for each in seconds:
        heapreplace(free, free[0] + each)
    return max(free)
