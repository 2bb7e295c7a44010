"""What all that is shown is made of: a console that obeys nothing, headings, tables without lines, sizes.

columns ─grid─▶ Table ─indented─▶ console, without trailing spaces where that is no terminal
"""

from __future__ import annotations

import os

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

HEADING_STYLE = "bold cyan"


UNBOUNDED = 10_000  # columns of what is no terminal: nothing is as wide, so nothing wraps


def open_console() -> Console:
    """A console that takes every string for what it says: no markup, no emoji names, no highlighting.

    Only a terminal has a width, or what is told one by COLUMNS: elsewhere lines are as long as what they say.
    """
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = UNBOUNDED
    return console


def heading(console: Console, title: str, remark: str = "") -> None:
    console.print()
    console.print(Text.assemble((title, HEADING_STYLE), (f"  {remark}" if remark else "", "dim")))


def grid(*right: bool, padding: int = 2) -> Table:
    """A table without lines; a column for each argument, flush right where it is true."""
    table = Table(box=None, padding=(0, padding, 0, 0), show_header=False, pad_edge=False)
    for flush in right:
        table.add_column(justify="right" if flush else "left", no_wrap=flush, overflow="fold")
    return table


def indented(console: Console, table: Table) -> None:
    padded = Padding(table, (0, 0, 0, 2), expand=False)
    if console.is_terminal:
        console.print(padded)
        return
    # Elsewhere the spaces that fill the last column would only be in the way.
    with console.capture() as capture:
        console.print(padded)
    for line in capture.get().splitlines():
        console.print(Text(line.rstrip()), soft_wrap=True)


def whole(console: Console, table: Table) -> None:
    """The same, where nothing may wrap or be cut: a table that is wider than the terminal is left to it."""
    width = console.width
    console.width = max(width, console.measure(table, options=console.options.update_width(UNBOUNDED)).maximum + 2)
    indented(console, table)
    console.width = width


def single(text: Text) -> Table:
    table = grid(False)
    table.add_row(text)
    return table
