"""State of a run at one moment: stages, speeds, and time left, from the counters.

counters ─state─▶ State      ─▶ display
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.progress import counters, time_left

# Label of each stage, and its kind of task.
_ROWS = {
    "tokenizer": "TrainTokenizer",
    "tokens": "TokenizePart",
    "plan": "PlanPacking",
    "shards": "WriteShard",
}


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


def state(name: str, workers: int) -> State:
    """Return the state of the run now."""
    stages = []
    for label, kind in _ROWS.items():
        done = counters.each(kind, "done")
        if len(done):
            weight = counters.each(kind, "size") if kind == "TokenizePart" else np.ones(len(done))
            share = float((np.maximum(done, counters.each(kind, "share")) * weight).sum() / max(weight.sum(), 1e-9))
            stages.append(Stage(label, len(done), int(done.sum()), share if weight.any() else 1.0))
    conversations, tokens = counters.total("conversations"), counters.total("tokens")
    encoding = max(counters.span("TokenizePart"), 1e-3)
    left = time_left.seconds_left(_work(workers)) if stages else None
    return State(
        name=name,
        seconds=round(counters.elapsed(), 2),
        seconds_left=left and round(left, 2),
        stages=stages,
        conversations=int(conversations),
        rejected=int(counters.total("rejected")),
        tokens=int(tokens),
        conversations_per_second=round(conversations / encoding, 1),
        tokens_per_second=round(tokens / encoding, 1),
        rows=int(counters.total("rows", "PlanPacking")),
        fill=counters.total("fill", "PlanPacking") or None,
    )


def _work(workers: int) -> time_left.Work:
    part, shard = "TokenizePart", "WriteShard"
    return time_left.Work(
        workers=workers,
        size=counters.each(part, "size"),
        share=np.maximum(counters.each(part, "share"), counters.each(part, "done")),
        seconds=counters.seconds(part),
        seconds_at_share=counters.each(part, "seconds_at_share"),
        cpu=counters.each(part, "cpu"),
        conversations=counters.total("conversations"),
        tokens=counters.total("tokens"),
        tokens_found=counters.total("tokens_found"),
        copies=counters.of_run("copies"),
        planned=counters.total("done", "PlanPacking") > 0,
        plan_seconds=float(counters.seconds("PlanPacking").sum()),
        shard_done=counters.each(shard, "done"),
        shard_seconds=counters.seconds(shard),
    )
