"""Render how long the ranks of a step wait for the slowest rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from tasks.cli.views.console import heading, indented, plain_table, single
from tasks.inspection.labels import waiting_line, waiting_note
from tasks.packing.balance.waiting import Waiting


def print_waiting(
    waiting: Sequence[Waiting], balance: Mapping[str, Any] | None, hidden_size: int | None, console: Console
) -> None:
    """Print forecasts of waiting.

    If `balance`, the setting of the corpus, is set, they are a table. Otherwise, they are one sentence.
    """
    if not waiting or not hidden_size:
        return
    if not balance:
        indented(console, single(Text(waiting_line(waiting, hidden_size), "dim")))
        return
    heading(console, "Waiting", "for the slowest rank of each step, in percent of the time of all ranks")
    table = plain_table()
    for name in ("ranks", "rows per rank", "random order", "with balance"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in waiting:
        shares = (f"{one.random:.2f} %", f"{one.balanced:.2f} %")
        table.add_row(f"{one.ranks:,}", f"{one.rows_per_rank:,}", *shares)
    indented(console, table)
    indented(console, single(Text(waiting_note(waiting, balance, hidden_size), "dim")))
