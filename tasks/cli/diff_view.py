"""Render the difference of two corpora."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from rich.text import Text

from tasks.cli.console import grid, heading, indented, plain_table, whole
from tasks.core.printable import common_folder, counted, printable
from tasks.corpus.summary import DROPPED
from tasks.inspection.diff import Change, ConversationChanges, Difference, SourceChanges

SHOWN = 20  # sources or conversations to list; twice as many settings or figures
CUT = 72  # characters of a value or text


def show_difference(difference: Difference, console: Console) -> None:
    """Render the differences between two corpora, section by section.

    Sections without differences are left out.
    """
    console.print(Text.assemble(("− ", "red"), printable(str(difference.before))), soft_wrap=True)
    console.print(Text.assemble(("+ ", "green"), printable(str(difference.after))), soft_wrap=True)
    if difference.same:
        console.print("same sources, settings, and conversations")
        return
    _print_sources(difference.sources, console)
    _print_changes("Settings", difference.settings, console)
    _print_changes("Figures", difference.figures, console)
    _print_conversations(difference.conversations, console)


def _print_sources(sources: SourceChanges, console: Console) -> None:
    if not (sources.added or sources.removed or sources.changed):
        return
    heading(console, "Sources")
    table = grid(False, False, True, False)
    for source in sources.removed:
        table.add_row(Text("−", "red"), printable(source.path), *_conversations(source.conversations))
    for source in sources.added:
        table.add_row(Text("+", "green"), printable(source.path), *_conversations(source.conversations))
    for change in sources.changed:
        before, after = change.before, change.after
        more = after.conversations - before.conversations
        count, noun = _conversations(after.conversations)
        remark = f"{noun} ({more:+,}), {after.bytes - before.bytes:+,} bytes"
        if (before.format, before.columns) != (after.format, after.columns):
            remark += f", read as {after.format}, not {before.format}"
        table.add_row(Text("≠", "yellow"), printable(after.path), count, remark)
    indented(console, table)


def _conversations(count: int) -> list[str]:
    return counted(count, "conversation").split()


def _print_changes(title: str, changes: list[Change], console: Console) -> None:
    if title == "Figures":
        changes = [named for change in changes for named in _named_as_inspect(change)]
    if not changes:
        return
    heading(console, title)
    table = plain_table()
    table.add_column("", no_wrap=True)
    figures = title == "Figures"
    for name in ("before", "after", *[""] * figures):
        table.add_column(name, justify="right" if figures else "left", no_wrap=figures, overflow="fold")
    for change in changes[: SHOWN * 2]:
        before, after, more = change.before, change.after, ""
        if figures and before is not None and after is not None:
            more = f"{after - before:+,.4g}" if isinstance(after - before, float) else f"{after - before:+,}"
        table.add_row(printable(change.name), _value(before), _value(after), *[Text(more, "dim")] * figures)
    (whole if figures else indented)(console, table)
    _print_rest(len(changes) - SHOWN * 2, console)


# The names of figures in `inspect`, by their names in the manifest. The name is "" if another figure implies it.
WORDS = {
    "ledger.conversations": "conversations",
    "ledger.conversations.rejected": "rejected:",
    "ledger.conversations.dropped": "dropped:",
    "ledger.samples": "samples",
    "ledger.samples.dropped": "samples dropped:",
    "ledger.samples.repeated_prompt_tokens": "tokens of repeated prompts",
    "ledger.samples.apart": "with turns: apart:",
    "ledger.context.tokens": "",
    "ledger.context.left_out": "left out of the context:",
    "ledger.pieces.packed": "pieces",
    "ledger.pieces": "pieces",
    "ledger.tokens.separators": "separators",
    "ledger.tokens.repeated": "tokens of copies",
    "ledger.tokens.padding": "padding",
    "ledger.tokens.alignment": "padding of align",
    "ledger.tokens.trained_truncated": "trained tokens of truncated",
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


def _named_as_inspect(change: Change) -> list[Change]:
    """Return a list with a figure under its name in `inspect`.

    The list is empty if another figure implies it.
    """
    name, before, after = change.name, change.before, change.after
    if name.startswith("ledger."):  # a reason that is not listed has a count of 0
        before, after = before or 0, after or 0
    if name in WORDS:
        return [Change(WORDS[name], before, after)] * bool(WORDS[name])
    if name.startswith("content."):
        return [Change(printable(f"written by content: {name.removeprefix('content.')}"), before or 0, after or 0)]
    if name.startswith("unused."):
        return [Change(f"unused: {name.removeprefix('unused.')}", before, after)]
    group, _, last = name.rpartition(".")
    words = DROPPED.get(last) or last.replace("_", " ") * (group != "rows" and group != "shards") or last
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


def _print_conversations(found: ConversationChanges, console: Console) -> None:
    if not found.compared:
        heading(console, "Conversations", "not compared: a corpus folder is missing")
        return
    removed, added = sum(found.removed.values()), sum(found.added.values())
    heading(console, "Conversations", f"{removed:,} removed, {added:,} added, compared by content")
    if names := sorted(found.removed | found.added):
        folder = common_folder(names)
        table = grid(False, True, True)
        for name in names[:SHOWN]:
            went, came = found.removed.get(name, 0), found.added.get(name, 0)
            signed = Text(f"−{went:,}", "red" if went else "dim"), Text(f"+{came:,}", "green" if came else "dim")
            table.add_row(printable(name.removeprefix(folder)), *signed)
        whole(console, table)
        _print_rest(len(names) - SHOWN, console)
    for sign, color, when, moved, count in (
        ("−", "red", "now", found.went, removed),
        ("+", "green", "before", found.came, added),
    ):
        table = grid(False, False, False)
        for one in moved[:SHOWN]:
            text = Text()
            if one.why:
                text.append(f"dropped {when}: {DROPPED.get(one.why, printable(one.why))}", "yellow")
                text.append(" · " * bool(one.text), "dim")
            text.append(_cut(one.text), "dim")
            table.add_row(Text(sign, color), printable(f"{one.source}:{one.record}"), text)
        if moved:
            indented(console, table)
            listed = "all" if count == len(moved) else f"{len(moved):,} in total (see --limit)"
            _print_rest(count - min(SHOWN, len(moved)), console, listed)


def _print_rest(count: int, console: Console, listed: str = "all") -> None:
    if count > 0:
        console.print(Text(f"  … {counted(count, 'line')} more; --json lists {listed}", "dim"))
