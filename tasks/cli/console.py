"""Building blocks of views: plain console, headings, tables, and tokens as text.

    columns ─grid─▶ Table ─indented─▶ console, without trailing spaces if it is not a terminal
    Spans ─text_of─▶ ⟦trained⟧, not trained, ▐control token▌, tok▏ens ─print_hanging─▶ lines

The marks show which tokens are trained on, which are control tokens, and where tokens end. Every mark is a symbol as
well as a color, so it can be seen without colors. Text from the data is never interpreted, and these symbols are
escaped in it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from packcorpus.tasks.core.printable import BOUNDARY, CONTROL, MARKS, TRAINED, escaped, is_plain, printable_lines
from packcorpus.tasks.inspection.rows import Span

TRAINED_STYLE, UNTRAINED_STYLE, ESCAPED_STYLE, HEADING_STYLE = "bold green", "dim", "magenta", "bold cyan"
BOUNDARY_STYLE = "blue"

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


def say(console: Console, *parts: str | Text | tuple[str, str]) -> None:
    """Print a line, which is as long as its text."""
    console.print(Text.assemble(*parts), soft_wrap=True)


def heading(console: Console, title: str, remark: str = "") -> None:
    """Print an empty line and a title."""
    console.print()
    console.print(Text.assemble((title, HEADING_STYLE), (f"  {remark}" if remark else "", "dim")))


def plain_table(*titles: str) -> Table:
    """Return a table without lines and with a dim header; later columns have numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    return table


def grid(*right: bool, padding: int = 2) -> Table:
    """Return a table without lines and without a header."""
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
        say(console, line.rstrip())


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


# -- tokens ------------------------------------------------------------------------------------------------------------


def text_of(spans: Sequence[Span], as_ids: bool = False) -> Text:
    """Return spans as one text with marks.

    Marks are ⟦ ⟧ around trained text, ▐ ▌ around control tokens, and ▏ between single tokens. With `as_ids`, the text
    is replaced with token ids.
    """
    text = Text()
    trained = False
    for span in spans:
        style = TRAINED_STYLE if span.trained else UNTRAINED_STYLE
        gap = " " if as_ids and text.plain else ""
        if span.trained != trained:
            mark = TRAINED[0] if span.trained else TRAINED[1]
            text.append(gap + mark if span.trained else mark + gap, TRAINED_STYLE)
            trained, gap = span.trained, ""
        if as_ids:
            text.append(gap + " ".join(map(str, span.ids)), style)
        elif span.control:
            color = "green" if span.trained else "default"
            text.append(CONTROL[0], color)
            text.append(printable_lines(span.text), f"bold reverse {color}")
            text.append(CONTROL[1], color)
        elif span.tokens is not None:
            text.append_text(Text(BOUNDARY, BOUNDARY_STYLE).join(styled(token, style) for token in span.tokens))
        else:
            text.append_text(styled(span.text, style))
    if trained:
        text.append(TRAINED[1], TRAINED_STYLE)
    return text


def print_hanging(console: Console, text: Text, indent: int = 2) -> None:
    """Print text with every line indented."""
    if console.is_terminal:
        lines = text.wrap(console, max(console.width - indent, 20))
    else:
        lines = text.split("\n", allow_blank=True)
    for line in lines:
        say(console, " " * indent, line)


def print_legend(console: Console, boundaries: bool = False) -> None:
    """Print the meaning of the marks."""
    legend = Text.assemble(
        (f"{TRAINED[0]}trained on{TRAINED[1]}", TRAINED_STYLE), "  ", ("not trained on", UNTRAINED_STYLE), "  ",
        CONTROL[0], ("control token", "bold reverse"), CONTROL[1], "  ", ("\\x1b", ESCAPED_STYLE), " escaped character",
    )  # fmt: skip
    if boundaries:
        legend.append_text(Text.assemble("  tok", (BOUNDARY, BOUNDARY_STYLE), "ens"))
    say(console, legend)


def print_title(console: Console, number: str, origin: str, facts: Sequence[str], indent: int = 0) -> None:
    """Print the line above a conversation: its number, its source line, and facts."""
    before = (" " * indent, ""), ("━━ ", "cyan"), (f"{number}  " if number else "", "dim")
    head = Text.assemble(*before, (origin, HEADING_STYLE))
    facts_text = Text(" · ".join(facts), "dim")
    if console.is_terminal and head.cell_len + facts_text.cell_len + 2 > console.width:
        say(console, head)
        say(console, " " * (indent + 3), facts_text)
    else:
        say(console, head, "  ", facts_text)


def styled(text: str, style: str) -> Text:
    """Return text like `printable_lines`, with escaped characters in their own color."""
    if text.isprintable() and MARKS.isdisjoint(text):
        return Text(text, style)
    found = Text()
    plain: list[str] = []
    for char in text:
        if is_plain(char):
            plain.append(char)
            continue
        found.append("".join(plain), style)
        found.append(escaped(char), ESCAPED_STYLE)
        plain = []
    return found.append("".join(plain), style)
