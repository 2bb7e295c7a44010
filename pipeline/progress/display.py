"""Show a run to a person, or to a script, while it runs.

    counters ─▶ State ─┬─ live    on a terminal: a few lines, drawn over and over by a thread of the parent
                       ├─ lines   otherwise: a line every few seconds
                       ├─ json    PACKCORPUS_JSON=1, --json: {"progress": {…}}, {"note": …}, {"done": {…}}
                       └─ quiet   PACKCORPUS_QUIET=1, --quiet: nothing
    errors, notes, progress → standard error             path of the manifest → standard output, the last line

After each drawing, the cursor is at the start of the drawing. A process that prints a message first clears from there
to the end of the screen. The next drawing is below the message, and no process needs to know the height of a drawing.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Literal

import luigi

from pipeline.progress import counters
from pipeline.progress.state import State, state
from tasks.core.messages import JSON, is_on
from tasks.core.printable import duration, printable

QUIET = "PACKCORPUS_QUIET"
Mode = Literal["live", "lines", "json", "quiet"]
EVERY = {"live": 0.25, "lines": 5.0, "json": 1.0}  # seconds between two drawings

_CLEAR = "\r\x1b[J"


class output(luigi.Config):
    """Options that every command line of the pipeline has."""

    use_cmdline_section = False
    quiet = luigi.BoolParameter(default=False, always_in_help=True, description="Show only errors.")
    json = luigi.BoolParameter(
        default=False, always_in_help=True, description="Print progress and errors as JSON lines."
    )


def mode() -> Mode:
    """Return the mode in which this run is shown."""
    if is_on(JSON):
        return "json"
    if is_on(QUIET):
        return "quiet"
    return "live" if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else "lines"


def begin() -> None:
    """Apply --json and --quiet through the environment, which all processes inherit."""
    options = output()
    for name, is_set in ((JSON, options.json), (QUIET, options.quiet)):
        if is_set:
            os.environ[name] = "1"


# Messages


def room() -> int:
    """Return the width available to a line: 10,000 unless a drawing is shown."""
    # A new pseudo-terminal has 0 columns until its size is set.
    return (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1 if mode() == "live" else 10_000


def show(message: str, **facts: Any) -> None:
    """Print a line for a person, or `facts` as JSON for a machine."""
    how = mode()
    if how == "json":
        write(json.dumps(facts or {"note": message.removeprefix("note: ")}, default=str))
    elif how != "quiet":
        write(printable(message))


def write(text: str) -> None:
    """Print to standard error, above the drawing."""
    clear()
    print(text, file=sys.stderr, flush=True)


def clear() -> None:
    """Clear the drawing before other output is written in its place."""
    if mode() == "live":
        print(_CLEAR, end="", file=sys.stderr, flush=True)


# Progress


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


def frame(now: State, how: Mode, width: int) -> str:
    """Return the text to write for one moment."""
    if how == "json":
        return json.dumps({"progress": asdict(now)}) + "\n"
    if how == "lines":
        return _line(now) + "\n"
    from pipeline.progress.terminal import drawn  # rich takes 0.03 s to load, and only this mode needs it

    lines = drawn(now, width)
    up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""  # terminals treat 0 as 1
    return _CLEAR + "\n".join(lines) + "\r" + up


class _Drawing(threading.Thread):
    """Draw until the run has ended.

    It takes no lock that a forked child could find locked: it has its own console and bypasses Python's buffers.
    """

    def __init__(self, name: str, how: Mode, workers: int):
        super().__init__(daemon=True)
        self._of, self._how, self._workers = printable(name), how, workers
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(EVERY[self._how]) and not counters.of_run("finished"):
            # The terminal may be closed, or a task may appear between two reads. No drawing is worth a traceback.
            with suppress(Exception):
                now = state(self._of, self._workers)
                os.write(sys.stderr.fileno(), frame(now, self._how, room()).encode("utf-8", "replace"))
        if self._how == "live":
            with suppress(OSError):
                os.write(sys.stderr.fileno(), _CLEAR.encode())

    def stop(self) -> None:
        self._end.set()
        self.join()


_drawing: _Drawing | None = None


def start(name: str, workers: int) -> None:
    """Start drawing.

    The parent of all tasks calls this once the tasks are known.
    """
    global _drawing
    stop()
    how = mode()
    if how == "quiet":
        return
    frame(state(name, workers), how, 80)  # imports the modules of the thread now, because a fork may come at any time
    counters.put(finished=0)
    _drawing = _Drawing(name, how, workers)
    _drawing.start()


def stop() -> None:
    """Stop drawing and clear the drawing.

    In a child, this makes the parent stop.
    """
    global _drawing
    counters.put(finished=1)
    if _drawing and _drawing.is_alive():
        _drawing.stop()
    _drawing = None


atexit.register(stop)
