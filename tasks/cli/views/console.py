"""Building blocks of views: a plain console, headings, and tables without lines.

columns ─grid─▶ Table ─indented─▶ console, without trailing spaces if it is not a terminal
"""

from __future__ import annotations

import os

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

HEADING_STYLE = "bold cyan"

UNBOUNDED = 10_000  # width of an output that is not a terminal: wider than any line, so nothing wraps


def open_console() -> Console:
    """Return a console that prints every string verbatim.

    It interprets no markup and no emoji names, and highlights nothing. Only a terminal has a width, unless COLUMNS is
    set. Elsewhere, lines are as long as their text.
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
    """Return a table without lines and without a header.

    It has a column for each argument, which is aligned right if the argument is true.
    """
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
    # A file or pipe gets the lines without the spaces that fill the last column.
    with console.capture() as capture:
        console.print(padded)
    for line in capture.get().splitlines():
        console.print(Text(line.rstrip()), soft_wrap=True)


def whole(console: Console, table: Table) -> None:
    """Print a table without wrapping or cutting it, even if the terminal is narrower."""
    width = console.width
    console.width = max(width, console.measure(table, options=console.options.update_width(UNBOUNDED)).maximum + 2)
    indented(console, table)
    console.width = width


def single(text: Text) -> Table:
    """Return a table with one cell, which wraps at the width of the terminal."""
    table = grid(False)
    table.add_row(text)
    return table


def print_remark(text: str, console: Console) -> None:
    """Print a dim sentence, unless it is empty."""
    if text:
        indented(console, single(Text(text, "dim")))
