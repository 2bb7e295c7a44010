"""What a person, or a script, sees of a run while it runs.

    counters ─▶ State ─┬─ live    on a terminal: a few lines, drawn over and over by a thread of the parent
                       ├─ lines   elsewhere: a line every few seconds
                       ├─ json    PACKCORPUS_JSON=1, --json: {"progress": {…}}, {"note": …}, {"done": {…}}
                       └─ quiet   PACKCORPUS_QUIET=1, --quiet: nothing
    errors, notes, progress → standard error             path of the manifest → standard output, the last line

After every drawing the cursor stands where the drawing begins. So whoever has something to say, in whatever process,
clears from there to the end of the screen and writes; the next drawing is below it, and nobody need know its height.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

import luigi
import numpy as np

from pipeline import counters, estimate
from tasks.messages import JSON, is_on
from tasks.printable import printable

QUIET = "PACKCORPUS_QUIET"
Mode = Literal["live", "lines", "json", "quiet"]
EVERY = {"live": 0.25, "lines": 5.0, "json": 1.0}  # seconds between two drawings

_CLEAR = "\r\x1b[J"
# The stages as they are shown, with the tasks that they stand for.
_ROWS = {"tokenizer": "TrainTokenizer", "tokens": "TokenizePart", "plan": "PlanPacking", "shards": "WriteShard"}


class output(luigi.Config):
    """Options of every command line of ours."""

    use_cmdline_section = False
    quiet = luigi.BoolParameter(default=False, always_in_help=True, description="Show errors alone.")
    json = luigi.BoolParameter(
        default=False, always_in_help=True, description="Tell progress and errors as lines of JSON."
    )


def mode() -> Mode:
    """How this run is shown."""
    if is_on(JSON):
        return "json"
    if is_on(QUIET):
        return "quiet"
    return "live" if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else "lines"


def begin() -> None:
    """Take what the command line says of output. In the environment, it reaches every process of the run."""
    asked = output()
    for name, wanted in ((JSON, asked.json), (QUIET, asked.quiet)):
        if wanted:
            os.environ[name] = "1"


# What is said once


def room() -> int:
    """Columns that a line may have; where nothing is drawn, as many as it needs."""
    return (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1 if mode() == "live" else 10_000


def say(message: str, **facts: Any) -> None:
    """A line for a person; to a machine the `facts`, where there are any."""
    how = mode()
    if how == "json":
        write(json.dumps(facts or {"note": message}, default=str))
    elif how != "quiet":
        write(printable(message))


def write(text: str) -> None:
    """Onto standard error, above what is drawn there."""
    make_room()
    print(text, file=sys.stderr, flush=True)


def make_room() -> None:
    """Clear what is drawn: something else is about to be written in its place."""
    if mode() == "live":
        print(_CLEAR, end="", file=sys.stderr, flush=True)


# What is shown over and over


@dataclass(frozen=True)
class Stage:
    """A stage of the run: how many tasks it has, and how much of them is done."""

    name: str
    tasks: int
    done: int
    share: float


@dataclass(frozen=True)
class State:
    """The run at one moment."""

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
    """What the counters say now."""
    stages = []
    for label, kind in _ROWS.items():
        done = counters.each(kind, "done")
        if len(done):
            weight = counters.each(kind, "size") if kind == "TokenizePart" else np.ones(len(done))
            share = float((np.maximum(done, counters.each(kind, "share")) * weight).sum() / max(weight.sum(), 1e-9))
            stages.append(Stage(label, len(done), int(done.sum()), share if weight.any() else 1.0))
    conversations, tokens = counters.total("conversations"), counters.total("tokens")
    encoding = max(counters.span("TokenizePart"), 1e-3)
    left = estimate.seconds_left(_work(workers)) if stages else None
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


def _work(workers: int) -> estimate.Work:
    part, shard = "TokenizePart", "WriteShard"
    return estimate.Work(
        workers=workers,
        size=counters.each(part, "size"),
        share=np.maximum(counters.each(part, "share"), counters.each(part, "done")),
        seconds=counters.seconds(part),
        told_seconds=counters.each(part, "told_seconds"),
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


def _line(now: State) -> str:
    by_name = {stage.name: stage for stage in now.stages}
    counts = [
        f"{label} {by_name[name].done:,}/{by_name[name].tasks:,}"
        for name, label in (("tokens", "parts"), ("shards", "shards"))
        if name in by_name
    ]
    facts = [
        f"{now.seconds:.1f} s",
        f"{duration(now.seconds_left)} left" if now.seconds_left is not None else "",
        *counts,
        f"{now.conversations:,} conversations ({now.conversations_per_second:,.0f}/s)" if now.conversations else "",
        f"{now.rejected:,} rejected" if now.rejected else "",
        f"{now.tokens / 1e6:,.2f} M tokens ({now.tokens_per_second / 1e6:.2f} M/s)" if now.tokens else "",
        f"{now.fill:.2f} % full" if now.fill else "",
    ]
    return "  ".join(filter(None, facts))


def duration(seconds: float) -> str:
    """4.2 s, 3 min 20 s, 2 h 05 min"""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def frame(now: State, how: Mode, width: int) -> str:
    """What is written of one moment."""
    if how == "json":
        return json.dumps({"progress": asdict(now)}) + "\n"
    if how == "lines":
        return _line(now) + "\n"
    from pipeline.picture import drawn  # rich takes 0.03 s, and a run that is not watched needs none of it

    lines = drawn(now, width)
    up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""  # terminals take 0 for 1
    return _CLEAR + "\n".join(lines) + "\r" + up


class _Drawing(threading.Thread):
    """Draws until the run has ended. It takes no lock that a forked child could find taken: what it draws with is its
    own, and it writes past Python's own buffers."""

    def __init__(self, name: str, how: Mode, workers: int):
        super().__init__(daemon=True)
        self._of, self._how, self._workers = printable(name), how, workers
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(EVERY[self._how]) and not counters.of_run("finished"):
            # A terminal that was closed, a task that was found between two numbers: no drawing is worth a traceback.
            with suppress(Exception):
                self._draw()
        if self._how == "live":
            with suppress(OSError):
                os.write(sys.stderr.fileno(), _CLEAR.encode())

    def _draw(self) -> None:
        handle = sys.stderr.fileno()
        # A new pseudo-terminal has no columns until somebody says how many.
        width = (os.get_terminal_size(handle).columns or 80) - 1 if self._how == "live" else 0
        os.write(handle, frame(state(self._of, self._workers), self._how, width).encode("utf-8", "replace"))

    def stop(self) -> None:
        self._end.set()
        self.join()


_drawing: _Drawing | None = None


def start(name: str, workers: int) -> None:
    """Draw from now on. For the parent of all tasks, once it knows what there is to do."""
    global _drawing
    stop()
    how = mode()
    if how == "quiet":
        return
    frame(state(name, workers), how, 80)  # what the thread needs is imported before it begins: a fork may come any time
    counters.put(finished=0)
    _drawing = _Drawing(name, how, workers)
    _drawing.start()


def stop() -> None:
    """Draw no more, and leave nothing of it on the screen. In a child, whose parent draws, this tells the parent."""
    global _drawing
    counters.put(finished=1)
    if _drawing and _drawing.is_alive():
        _drawing.stop()
    _drawing = None


atexit.register(stop)
