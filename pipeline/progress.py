"""What a run has done so far, and an estimate of the time left.

outcomes of parts, shards, … ─▶ run ─┬─state─▶ State: stages, speeds, time left ─▶ display
                                     └─record─▶ run.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from heapq import heapify, heapreplace
from typing import Any, NamedTuple

from packcorpus.tasks.core.process import peak_memory, versions_of
from packcorpus.tasks.core.reading import Reading
from packcorpus.tasks.dry_run.cost_model import COMMIT, ROW_BYTES, TASK, WRITTEN_BYTE, plan_seconds
from packcorpus.tasks.readers.containers import container_named
from packcorpus.tasks.sources.model import Part
from packcorpus.tasks.sources.parts import sizes_of
from packcorpus.tasks.work import Outcome

# The stages that are counted: the name of each in run.json, and in the display.
STAGES = {
    "prepare": ("TrainTokenizer", "tokenizer"),
    "tokenize": ("TokenizePart", "tokens"),
    "plan": ("PlanPacking", "plan"),
    "write": ("WriteShard", "shards"),
}
# A byte of a compressed file is as much work as this many bytes of plain text, measured on chats.
UNPACKED = 3.5
NOTHING = Reading(0.0, 0.0, 0.0)
_VERSIONS = ("packcorpus", "luigi", "pyarrow", "numpy", "sentencepiece", "tokenizers", "gigatoken", "orjson")


@dataclass(slots=True)
class Count:
    """The figures of one part, one shard, the plan, or the tokenizer.

    `size` is the approximate work of a part, in bytes of plain text, of which `reading` says how much is done.
    `started` is a time.time(). A part of an earlier
    run `is_reused` and has about `tokens_found` tokens.
    """

    size: float = 0.0
    started: float = 0.0
    outcome: Outcome = Outcome()  # noqa: RUF009 - frozen
    tokens_found: float = 0.0
    reading: Reading = NOTHING
    is_reused: bool = False
    is_done: bool = False

    @property
    def share(self) -> float:
        """Return the share of the work that is done."""
        return 1.0 if self.is_done else self.reading.share

    @property
    def seconds(self) -> float:
        """Return the seconds that the work took, or has taken so far."""
        return time.time() - self.started if self.started and not self.is_done else self.outcome.seconds

    def take(self, outcome: Outcome) -> None:
        """Take the outcome of work that this run has done."""
        self.started, self.outcome, self.is_done = time.time() - outcome.seconds, outcome, True


class Run:
    """The figures and the reports of the run of this process."""

    def __init__(self) -> None:
        self.number = 0  # of the runs of this process
        self.begin(1)

    def begin(self, workers: int) -> None:
        """Start a run, and forget an earlier run."""
        self.number += 1
        self.workers = workers
        self.started = time.time()
        self.copies = 1.0  # how often a token is written
        self.rows, self.fill = 0, 0.0  # of the plan
        self.exit_code = 0  # of an error that was reported
        self.status_at = 0.0  # when luigid received a status
        self._said: set[str] = set()
        self._counts: dict[tuple[str, str], list[Count]] = {}  # by stage and id of a task

    def first(self, report: str) -> bool:
        """Return whether a report is new in this run, and remember it."""
        is_new = report not in self._said
        self._said.add(report)
        return is_new

    @property
    def elapsed(self) -> float:
        """Return the seconds since the run started."""
        return max(time.time() - self.started, 1e-3)

    def counts(self, stage: str, task: str, create: Callable[[], list[Count]] = list) -> list[Count]:
        """Return the counts of a task; `create` makes them at the first call."""
        if (stage, task) not in self._counts:
            self._counts[stage, task] = create()
        return self._counts[stage, task]

    def of(self, stage: str) -> list[Count]:
        """Return the counts of all tasks of a stage."""
        return [count for (name, _), counts in self._counts.items() if name == stage for count in counts]

    def total(self, name: str, stage: str = "tokenize") -> float:
        """Sum a figure of the outcomes over all work of a stage."""
        return sum(getattr(count.outcome, name) for count in self.of(stage))

    def record(self) -> dict[str, Any]:
        """Return times, counts, and versions for run.json."""
        seconds, conversations, tokens = self.elapsed, self.total("conversations"), self.total("tokens")
        every = [count for counts in self._counts.values() for count in counts]
        return {
            "seconds": round(seconds, 3),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "stages": {
                name: {
                    "seconds": round(self.total("seconds", stage), 3),
                    "cpu_seconds": round(self.total("cpu", stage), 3),
                }
                for stage, (name, _) in STAGES.items()
            },
            "conversations": conversations,
            "tokens": tokens,
            "conversations_per_second": round(conversations / seconds, 1),
            "tokens_per_second": round(tokens / seconds, 1),
            "peak_memory_bytes": max([peak_memory(), *(count.outcome.peak for count in every)]),
            "tasks_found_done": sum(count.is_reused for count in every),
            "versions": versions_of(*_VERSIONS) | {"python": sys.version.split()[0]},
        }


run = Run()


def text_sizes(parts: Sequence[Part]) -> list[float]:
    """Return the approximate work of each part, in bytes of plain text."""
    packed = [part.file.compression or container_named(part.file.container).is_compressed for part in parts]
    return [size * (UNPACKED if is_packed else 1) for size, is_packed in zip(sizes_of(parts), packed, strict=True)]


@dataclass(frozen=True)
class Stage:
    """A stage of the run: the number of its tasks, and the share that is done."""

    name: str
    tasks: int
    done: int
    share: float


@dataclass(frozen=True)
class State:
    """State of the run at one moment."""

    name: str
    seconds: float
    seconds_left: float | None
    stages: list[Stage]
    conversations: int
    rejected: int
    tokens: int
    conversations_per_second: float
    tokens_per_second: float
    rows: int
    fill: float | None


def state(name: str, now: Run = run) -> State:
    """Return the state of a run now."""
    stages = []
    for stage, (_, label) in STAGES.items():
        if counts := now.of(stage):
            weights = [count.size if stage == "tokenize" else 1.0 for count in counts]
            done = sum(weight * count.share for count, weight in zip(counts, weights, strict=True))
            share = done / sum(weights) if any(weights) else 1.0
            stages.append(Stage(label, len(counts), sum(count.is_done for count in counts), share))
    ran = [count for count in now.of("tokenize") if count.started]
    ends = [count.started + count.seconds for count in ran]
    encoding = max(max(ends) - min(count.started for count in ran) if ran else 0.0, 1e-3)
    conversations, tokens = now.total("conversations"), now.total("tokens")
    left = seconds_left(now) if stages else None
    return State(
        name=name,
        seconds=round(now.elapsed, 2),
        seconds_left=left and round(left, 2),
        stages=stages,
        conversations=int(conversations),
        rejected=int(now.total("rejected")),
        tokens=int(tokens),
        conversations_per_second=round(conversations / encoding, 1),
        tokens_per_second=round(tokens / encoding, 1),
        rows=now.rows,
        fill=now.fill or None,
    )


def seconds_left(now: Run) -> float | None:
    """Return an estimate of the time left, or None before the first part is done.

        parts: sizes, seconds ─▶ speed ─▶ seconds of each remaining part ───────────┐
        tokens so far ─▶ total tokens ─▶ seconds of the plan and of the shards ─────┴─▶ divided among the workers

    A large last part counts in full even if the other workers have nothing left to do.
    """
    parts, plan, shards = now.of("tokenize"), now.of("plan"), now.of("write")
    measured = [_Measured(part.size, part.outcome.seconds, part.outcome.cpu) for part in parts if part.outcome.cpu > 0]
    reading = [part for part in parts if not part.is_done and part.reading.cpu > 0]
    measured += [_Measured(part.size * part.share, part.reading.seconds, part.reading.cpu) for part in reading]
    is_planned = any(count.is_done for count in plan)
    waiting = 1.0  # if other processes also use the cores, everything takes longer by this ratio
    if measured:
        waiting = max(1.0, sum(part.seconds for part in measured) / sum(part.cpu for part in measured))
    left, ahead = 0.0, 1.0
    if not is_planned and (unread := [part.size * (1 - part.share) for part in parts if not part.is_done]):
        read = sum(part.size for part in measured)
        if not read:
            return None
        pace = sum(max(part.cpu - TASK, part.cpu / 4) for part in measured) / read
        left += _makespan([(size * pace + TASK) * waiting for size in sorted(unread, reverse=True)], now.workers)
        ahead = 1 + sum(unread) / read
    tokens = now.total("tokens") * ahead + sum(part.tokens_found for part in parts)
    if not is_planned:
        expected = TASK + plan_seconds(now.total("conversations") * ahead * max(1, now.copies), tokens)
        left += _remaining(expected * waiting, plan)
    written = [shard.outcome.seconds for shard in shards if shard.is_done]
    # Use the cost model until a shard of this run is written.
    of_shard = (TASK + WRITTEN_BYTE * ROW_BYTES * tokens * now.copies / max(len(shards), 1)) * waiting
    if written:
        of_shard = sum(written) / len(written)
    return (
        left
        + _makespan([of_shard] * (len(shards) - len(written)), now.workers)
        + _remaining(COMMIT * waiting, now.of("publish"))
    )


class _Measured(NamedTuple):
    """What was read of a part: bytes of plain text, seconds, and CPU seconds."""

    size: float
    seconds: float
    cpu: float


def _remaining(expected: float, counts: Sequence[Count]) -> float:
    """Return the seconds left of work; if it takes longer than expected, half as long."""
    spent = sum(count.seconds for count in counts)
    return max(expected - spent, spent / 2)


def _makespan(seconds: Sequence[float], workers: int) -> float:
    free = [0.0] * max(workers, 1)
    heapify(free)
    for item in seconds:
        heapreplace(free, free[0] + item)
    return max(free)
