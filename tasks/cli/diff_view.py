"""What `packcorpus diff` shows of a Difference, and the same for JSON."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.cli.console import grid, heading, indented, whole
from tasks.core.printable import common_folder, counted, printable
from tasks.inspection.diff import Change, Difference, Moved
from tasks.inspection.labels import LOST

SHOWN = 20  # conversations, settings or figures
CUT = 72  # characters of a value or text


def show(found: Difference, before: Path, after: Path, console: Console) -> None:
    """What is another in `after`, section by section; what is the same is not spoken of."""
    console.print(Text.assemble(("− ", "red"), printable(str(before))), soft_wrap=True)
    console.print(Text.assemble(("+ ", "green"), printable(str(after))), soft_wrap=True)
    if found.same:
        console.print("the same sources, settings and conversations")
        return
    _print_sources(found, console)
    _print_changes("Settings", found.settings, console)
    _print_changes("Figures", found.figures, console)
    _print_conversations(found, console)


def _print_sources(found: Difference, console: Console) -> None:
    if not (found.added or found.removed or found.changed):
        return
    heading(console, "Sources")
    table = grid(False, False, True, False)
    for source in found.removed:
        table.add_row(Text("−", "red"), printable(source.path), *_conversations(source.conversations))
    for source in found.added:
        table.add_row(Text("+", "green"), printable(source.path), *_conversations(source.conversations))
    for before, after in found.changed:
        more = after.conversations - before.conversations
        count, noun = _conversations(after.conversations)
        told = f"{noun} ({more:+,}), {after.bytes - before.bytes:+,} bytes"
        if (before.format, before.columns) != (after.format, after.columns):
            told += f", read as {after.format}, not {before.format}"
        table.add_row(Text("≠", "yellow"), printable(after.path), count, told)
    indented(console, table)


def _conversations(count: int) -> list[str]:
    """The number and its noun."""
    return counted(count, "conversation").split()


def _print_changes(title: str, changes: list[Change], console: Console) -> None:
    if title == "Figures":
        changes = [named for change in changes for named in _in_words(change)]
    if not changes:
        return
    heading(console, title)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    figures = title == "Figures"
    for name in ("before", "after", *[""] * figures):
        table.add_column(name, justify="right" if figures else "left", no_wrap=figures, overflow="fold")
    for name, before, after in changes[: SHOWN * 2]:
        more = ""
        if figures and before is not None and after is not None:
            more = f"{after - before:+,.4g}" if isinstance(after - before, float) else f"{after - before:+,}"
        table.add_row(printable(name), _value(before), _value(after), *[Text(more, "dim")] * figures)
    (whole if figures else indented)(console, table)
    _print_rest(len(changes) - SHOWN * 2, console)


# Figures as `inspect` names them, by how the manifest does. What stands for nothing is said by another.
WORDS = {
    "ledger.conversations": "conversations",
    "ledger.conversations.rejected": "rejected:",
    "ledger.conversations.dropped": "dropped:",
    "ledger.pieces.packed": "pieces",
    "ledger.pieces": "pieces",
    "ledger.tokens.separators": "separators",
    "ledger.tokens.repeated": "tokens of further copies",
    "ledger.tokens.padding": "padding",
    "ledger.tokens": "tokens",
    "packing.rows": "",
    "packing.lower_bound_rows": "lower bound",
    "packing.above_lower_bound_percent": "above the bound, %",
    "packing.packing_efficiency": "efficiency, %",
    "packing.avg_conversations_per_sequence": "conversations per row",
    "packing.compression_ratio": "",
    "rows": "rows of",
    "shards": "shards of",
    "noticed": "noticed:",
}


def _in_words(change: Change) -> list[Change]:
    """A figure under the name that `inspect` has for it; nothing where another says the same."""
    name, before, after = change
    if name.startswith("ledger."):  # a reason that is not listed took none
        before, after = before or 0, after or 0
    if name in WORDS:
        return [Change(WORDS[name], before, after)] * bool(WORDS[name])
    group, _, last = name.rpartition(".")
    words = LOST.get(last) or last.replace("_", " ") * (group != "rows" and group != "shards") or last
    return [Change(f"{WORDS[group]} {words}" if group in WORDS else name, before, after)]


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str) and (digest := re.fullmatch(r"((?:trained:)?[0-9a-f]{12})[0-9a-f]{52}", value)):
        return digest[1]
    text = f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
    return _cut(text)


def _cut(text: str) -> str:
    line = printable(text.replace("\n", " "))
    return line if len(line) <= CUT else f"{line[: CUT - 1]}…"


def _print_conversations(found: Difference, console: Console) -> None:
    if not found.compared:
        heading(console, "Conversations", "not compared: a corpus folder is gone")
        return
    heading(console, "Conversations", f"{len(found.went):,} went, {len(found.came):,} came, known by what they say")
    counts = [Counter(one.source for one in moved) for moved in (found.went, found.came)]
    if names := sorted(counts[0] | counts[1]):
        folder = common_folder(names)
        table = grid(False, True, True)
        for name in names[:SHOWN]:
            table.add_row(printable(name.removeprefix(folder)), *_signed(counts[0][name], counts[1][name]))
        whole(console, table)
        _print_rest(len(names) - SHOWN, console)
    for sign, colour, when, moved in (("−", "red", "now", found.went), ("+", "green", "before", found.came)):
        table = grid(False, False, False)
        for one in moved[:SHOWN]:
            text = Text()
            if one.why:
                text.append(f"dropped {when}: {LOST.get(one.why, printable(one.why))}", "yellow")
                text.append(" · " * bool(one.text), "dim")
            text.append(_cut(one.text), "dim")
            table.add_row(Text(sign, colour), printable(f"{one.source}:{one.record}"), text)
        if moved:
            indented(console, table)
            _print_rest(len(moved) - SHOWN, console)


def _signed(went: int, came: int) -> tuple[Text, Text]:
    return Text(f"−{went:,}", "red" if went else "dim"), Text(f"+{came:,}", "green" if came else "dim")


def _print_rest(count: int, console: Console) -> None:
    if count > 0:
        console.print(Text(f"  … {counted(count, 'line')} more; --json gives all", "dim"))


def as_object(found: Difference, before: Path, after: Path) -> dict[str, Any]:
    """All of it, for JSON."""
    return {
        "before": str(before),
        "after": str(after),
        "same": found.same,
        "sources": {
            "added": [source.model_dump() for source in found.added],
            "removed": [source.model_dump() for source in found.removed],
            "changed": [{"before": one.model_dump(), "after": other.model_dump()} for one, other in found.changed],
        },
        "settings": [change._asdict() for change in found.settings],
        "figures": [change._asdict() for change in found.figures],
        "conversations": {
            "compared": found.compared,
            "went": [_moved(one) for one in found.went],
            "came": [_moved(one) for one in found.came],
        },
    }


def _moved(one: Moved) -> dict[str, Any]:
    return one._asdict()
