"""Show a run to a person, or to a script, while it runs.

    State ─┬─ live    on a terminal: a few lines, drawn over and over by a thread
           ├─ lines   otherwise: a line every few seconds
           ├─ json    PACKCORPUS_JSON=1, --json: {"progress": {…}}, {"note": …}, {"done": {…}}
           └─ quiet   PACKCORPUS_QUIET=1, --quiet: nothing
    errors, notes, progress → standard error             path of the manifest → standard output, the last line

After each drawing, the cursor is at the start of the drawing. A message clears from there to the end of the screen. The
next drawing is below the message, and nothing needs to know the height of a drawing.
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

from pipeline.progress import State, state
from tasks.core.messages import JSON, is_on
from tasks.core.printable import duration, printable

QUIET = "PACKCORPUS_QUIET"
Mode = Literal["live", "lines", "json", "quiet"]
EVERY = {"live": 0.25, "lines": 5.0, "json": 1.0}  # seconds between two drawings

_BAR_CELLS = 24
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
    stop()
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
    if mode() == "live":
        print(_CLEAR, end="", file=sys.stderr, flush=True)
    print(text, file=sys.stderr, flush=True)


# Progress


def frame(now: State, how: Mode, width: int) -> str:
    """Return the text to write for one moment."""
    if how == "json":
        return json.dumps({"progress": asdict(now)}) + "\n"
    if how == "live":
        lines = _drawn(now, width)
        up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""  # terminals treat 0 as 1
        return _CLEAR + "\n".join(lines) + "\r" + up
    by_name = {stage.name: stage for stage in now.stages}
    facts = [
        f"{now.seconds:.1f} s",
        f"{duration(now.seconds_left)} left" if now.seconds_left is not None else "",
        *(
            f"{label} {by_name[name].done:,}/{by_name[name].tasks:,}"
            for name, label in (("tokens", "parts"), ("shards", "shards"))
            if name in by_name
        ),
        f"{now.conversations:,} conversations ({now.conversations_per_second:,.0f}/s)" if now.conversations else "",
        f"{now.rejected:,} rejected" if now.rejected else "",
        f"{now.tokens / 1e6:,.2f} M tokens ({now.tokens_per_second / 1e6:.2f} M/s)" if now.tokens else "",
        f"{now.fill:.2f} % full" if now.fill else "",
    ]
    return "  ".join(filter(None, facts)) + "\n"


def _drawn(now: State, width: int) -> list[str]:
    """Return a header and a line with a bar for each stage, with colors."""
    from io import StringIO

    from rich.console import Console  # rich takes 0.03 s to load, and only this mode needs it
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    left = f" · {duration(now.seconds_left)} left" if now.seconds_left is not None else ""
    rejected = f" · {now.rejected:,} rejected" if now.rejected else ""
    head = Text.assemble((printable(now.name), "bold"), f"  {duration(now.seconds)}{left}", (rejected, "yellow"))
    lines = Table.grid(padding=(0, 1))
    for column in ({"no_wrap": True, "style": "dim"}, {}, {"justify": "right", "no_wrap": True}, {"no_wrap": True}):
        lines.add_column(**column)
    bar = _BAR_CELLS if width >= 100 else _BAR_CELLS // 2
    for stage in now.stages:
        facts = ""
        if stage.name == "tokens" and now.conversations:
            facts = f"{now.conversations_per_second:,.0f} conversations/s · {now.tokens_per_second / 1e6:.2f} Mtok/s"
        elif stage.name == "plan" and now.fill:
            facts = f"{now.rows:,} rows, {now.fill:.2f} % full"
        lines.add_row(
            f"  {stage.name}",
            ProgressBar(total=1.0, completed=stage.share, width=bar, finished_style="green", complete_style="cyan"),
            f"{stage.done:,}/{stage.tasks:,}",
            Text(facts and f" {facts}"),
        )
    whole = Table.grid()
    whole.add_column(no_wrap=True, overflow="ellipsis")
    whole.add_row(head)
    whole.add_row(lines)
    colors: Literal["standard"] | None = None if os.environ.get("NO_COLOR") else "standard"
    file = StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=colors, markup=False, emoji=False)
    console.print(whole, end="", crop=True)
    return file.getvalue().rstrip("\n").split("\n")


class _Drawing(threading.Thread):
    """Draw until the run has ended.

    It takes no lock that a forked worker could find locked: it has its own console and bypasses Python's buffers.
    """

    def __init__(self, name: str, how: Mode):
        super().__init__(daemon=True)
        self._of, self._how = printable(name), how
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(EVERY[self._how]):
            # The terminal may be closed, or work may be added between two reads. No drawing is worth a traceback.
            with suppress(Exception):
                os.write(sys.stderr.fileno(), frame(state(self._of), self._how, room()).encode("utf-8", "replace"))
        if self._how == "live":
            with suppress(OSError):
                os.write(sys.stderr.fileno(), _CLEAR.encode())

    def stop(self) -> None:
        self._end.set()
        self.join()


_drawing: _Drawing | None = None


def start(name: str) -> None:
    """Start drawing, once it is known that there is work to do."""
    global _drawing
    stop()
    how = mode()
    if how == "quiet":
        return
    frame(state(name), how, 80)  # imports the modules of the thread now, because a fork may come at any time
    _drawing = _Drawing(name, how)
    _drawing.start()


def stop() -> None:
    """Stop drawing and clear the drawing."""
    global _drawing
    if _drawing and _drawing.is_alive():
        _drawing.stop()
    _drawing = None


atexit.register(stop)
