"""Draw a run on a terminal: a header, and a line with a bar for each stage."""

from __future__ import annotations

import os
from io import StringIO
from typing import Literal

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.progress.state import State
from tasks.core.printable import duration, printable

_BAR_CELLS = 24


def drawn(now: State, width: int) -> list[str]:
    """Return the lines to draw for one moment, with colors."""
    colors: Literal["standard"] | None = None if os.environ.get("NO_COLOR") else "standard"
    file = StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=colors, markup=False, emoji=False)
    console.print(_picture(now, width), end="", crop=True)
    return file.getvalue().rstrip("\n").split("\n")


def _picture(now: State, width: int) -> Table:
    """Return a header and a line for each stage."""
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
    return whole
