"""Building blocks of every view: a console that interprets no markup, headings, and tables without lines.

columns ─grid─▶ Table ─indented─▶ console, without trailing spaces if that is not a terminal
"""

from __future__ import annotations

import os

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

HEADING_STYLE = "bold cyan"


UNBOUNDED = 10_000  # columns of an output that is not a terminal: nothing is as wide, so nothing wraps


def open_console() -> Console:
    """Return a console that prints every string as it is: no markup, no emoji names, no highlighting.

    Only a terminal has a width, unless COLUMNS is set; elsewhere lines are as long as their text.
    """
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = UNBOUNDED
    return console


def heading(console: Console, title: str, remark: str = "") -> None:
    """Print an empty line and a title."""
    console.print()
    console.print(Text.assemble((title, HEADING_STYLE), (f"  {remark}" if remark else "", "dim")))


def plain_table() -> Table:
    """Return a table without lines and with a dim header."""
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")


def grid(*right: bool, padding: int = 2) -> Table:
    """Return a table without lines, with a column for each argument, flush right if it is true."""
    table = Table(box=None, padding=(0, padding, 0, 0), show_header=False, pad_edge=False)
    for flush in right:
        table.add_column(justify="right" if flush else "left", no_wrap=flush, overflow="fold")
    return table


def indented(console: Console, table: Table) -> None:
    """Print a table two columns to the right."""
    padded = Padding(table, (0, 0, 0, 2), expand=False)
    if console.is_terminal:
        console.print(padded)
        return
    # In a file or pipe, the spaces that fill the last column would only be in the way.
    with console.capture() as capture:
        console.print(padded)
    for line in capture.get().splitlines():
        console.print(Text(line.rstrip()), soft_wrap=True)


def whole(console: Console, table: Table) -> None:
    """Print a table that must not wrap or be cut, even if it is wider than the terminal."""
    width = console.width
    console.width = max(width, console.measure(table, options=console.options.update_width(UNBOUNDED)).maximum + 2)
    indented(console, table)
    console.width = width


def single(text: Text) -> Table:
    """Return a table of one cell, which wraps at the width of the terminal."""
    table = grid(False)
    table.add_row(text)
    return table
