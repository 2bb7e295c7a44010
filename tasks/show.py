"""A corpus in figures: sources, ledger, packing, splits, steps; and the findings of a check.

    manifest ─inspect─▶ tables          checks of verify ─checks─▶ a list

Nothing that comes from a file is read as markup, and control characters in it are escaped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tasks.errors import InputMissing
from tasks.manifest import Manifest, SourceFacts, corpus_folder, load_manifest
from tasks.printable import counted, printable

HEADING_STYLE = "bold cyan"

SHOWN_SOURCES = 30
BATCH_ROWS = (8, 32, 64)
# Below this a run is over before the learning rate has warmed up and come down again.
FEW_STEPS = 100

# Counts of the manifest's `noticed`: what is counted, and what it means.
NOTICED = {
    "control_text_seen": ("conversation", "with the name of a control token in what is said: encoded as plain text"),
    "not_round_trip": ("conversation", "with ▁ (U+2581), which this tokenizer takes for a space: decodes to a space"),
    "unknown_tokens": ("token", "that only stands for the unknown: this tokenizer cannot write these characters"),
    "unusual_order": ("conversation", "not in the order system, user, assistant, user, …: taken as it is"),
}
LOST = {
    "too_long": "longer than a row",
    "no_trained_tokens": "no token to train on",
}
TRAINED_TURNS = {"assistant": "assistant turns", "last": "the last assistant turn", "all": "all turns"}


def open_console() -> Console:
    """A console that takes every string for what it says: no markup, no emoji names, no highlighting."""
    return Console(markup=False, emoji=False, highlight=False)


def inspect(path: Path, console: Console) -> None:
    """Show what the corpus of a manifest consists of. Raises PackError, naming what is missing or wrong."""
    manifest = load_manifest(path)
    _print_head(manifest, path, console)
    _print_sources(manifest, console)
    _print_ledger(manifest, console)
    _print_packing(manifest, console)
    _print_notes(manifest, console)


def _heading(console: Console, title: str, remark: str = "") -> None:
    console.print()
    console.print(Text.assemble((title, HEADING_STYLE), (f"  {remark}" if remark else "", "dim")))


def _grid(*right: bool, padding: int = 2) -> Table:
    """A table without lines; a column for each argument, flush right where it is true."""
    table = Table(box=None, padding=(0, padding, 0, 0), show_header=False, pad_edge=False)
    for flush in right:
        table.add_column(justify="right" if flush else "left", no_wrap=flush, overflow="fold")
    return table


def _indented(console: Console, table: Table) -> None:
    padded = Padding(table, (0, 0, 0, 2), expand=False)
    if console.is_terminal:
        console.print(padded)
        return
    # Elsewhere the spaces that fill the last column would only be in the way.
    with console.capture() as capture:
        console.print(padded)
    for line in capture.get().splitlines():
        console.print(Text(line.rstrip()), soft_wrap=True)


def _print_head(manifest: Manifest, path: Path, console: Console) -> None:
    length = manifest.sequence_length
    unit = f"rows of {length:,} tokens" if manifest.packing_metadata.enabled else "one conversation a row"
    console.print(
        Text.assemble(
            (printable(manifest.name), "bold"),
            f" {manifest.key[:12]}",
            (f"  format {manifest.format_version}, {unit}", "dim"),
        )
    )
    tokenizer, template = manifest.tokenizer, manifest.template
    origin = ", trained on these sources" if tokenizer.trained_here else ""
    facts = [
        ("tokenizer", f"{Path(tokenizer.path).name} ({tokenizer.kind}, {tokenizer.vocab_size:,} tokens{origin})"),
        ("template", template.name),
        ("trained on", TRAINED_TURNS[manifest.train_on]),
        ("over-long", str(manifest.config.get("overlong", "?"))),
    ]
    try:
        folder = str(_relative(corpus_folder(manifest, path)))
    except InputMissing:
        folder = f"{manifest.corpus} is gone; make the corpus again"
    facts += [("corpus", folder), ("manifest", str(path))]
    table = _grid(False, False)
    for name, value in facts:
        table.add_row(Text(name, "dim"), printable(value))
        if name == "template" and template.markers_as_text:
            markers = " ".join(map(printable, template.markers_as_text))
            table.add_row("", Text(f"{markers}: no tokens of this tokenizer, written as text", "yellow"))
    _indented(console, table)


def _relative(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _common_folder(paths: Sequence[str]) -> str:
    """The folder that all paths share, with a slash at its end; "" where there is none."""
    folders = [os.path.dirname(path) for path in paths]
    if len(paths) < 2 or len({os.path.isabs(path) for path in paths}) > 1:
        return ""
    common = os.path.commonpath(folders) if all(folders) else ""
    return f"{common.rstrip('/')}/" if common else ""


def _print_sources(manifest: Manifest, console: Console) -> None:
    sources = manifest.sources
    folder = _common_folder([source.path for source in sources])
    _heading(console, "Sources", f"below {printable(folder)}" if folder else "")
    wide = console.width >= 100
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", footer_style="bold")
    table.show_footer = len(sources) > 1
    total = [
        sum(getattr(s, name) for s in sources) for name in ("conversations", "rejected", "tokens", "trained_tokens")
    ]
    table.add_column("file", "all" if len(sources) < 2 else f"{len(sources):,} files", overflow="fold")
    if wide:
        table.add_column("format")
    for name, value in zip(("read", "rejected", "tokens", "trained"), total, strict=True):
        table.add_column(name, f"{value:,}", justify="right", no_wrap=True)
    table.add_column("share", "100 %", justify="right", no_wrap=True)

    def add(name: Text, kind: str, values: Sequence[int]) -> None:
        cells = [Text(f"{value:,}", "dim" if value == 0 else "") for value in values]
        share = f"{100 * values[2] / max(total[2], 1):.1f} %"
        names = [name, Text(kind, "dim")] if wide else [Text.assemble(name, "\n" if kind else "", (kind, "dim"))]
        table.add_row(*names, *cells, share)

    for source in sources[:SHOWN_SOURCES]:
        add(Text(printable(source.path.removeprefix(folder))), source.format, _counts([source]))
    if rest := sources[SHOWN_SOURCES:]:
        add(Text(f"… {len(rest):,} more"), "", _counts(rest))
    _indented(console, table)


def _counts(sources: Sequence[SourceFacts]) -> list[int]:
    columns = ("conversations", "rejected", "tokens", "trained_tokens")
    return [sum(getattr(source, name) for source in sources) for name in columns]


def _print_ledger(manifest: Manifest, console: Console) -> None:
    conversations, tokens, pieces = manifest.ledger.conversations, manifest.ledger.tokens, manifest.ledger.pieces
    left = _sum_table("conversations")
    _line(left, "", "read", conversations.read)
    for title, lost in (("rejected", conversations.rejected), ("dropped", conversations.dropped)):
        _line(left, "−", title, sum(lost.values()))
        for reason, count in lost.items():
            if count:
                _detail(left, LOST.get(reason, printable(reason)), count)
    _line(left, "=", "packed", conversations.packed, "bold")
    for title, count in (("truncated", conversations.truncated), ("split", conversations.split)):
        if count:
            _detail(left, title, count)
    if pieces.packed != conversations.packed:
        _detail(left, "pieces", pieces.packed)
    if pieces.dropped:
        _detail(left, "pieces dropped", pieces.dropped)
    right = _sum_table("tokens")
    _line(right, "", "encoded", tokens.encoded)
    _line(right, "+", "separators", tokens.separators)
    _line(right, "−", "truncated", tokens.truncated)
    _line(right, "−", "dropped", tokens.dropped)
    _line(right, "=", "packed", tokens.packed, "bold")
    _detail(right, f"trained, {100 * tokens.trained / max(tokens.packed, 1):.1f} %", tokens.trained)
    if manifest.packing_metadata.enabled:
        rows, length = manifest.packing_metadata.rows, manifest.sequence_length
        _line(right, "+", "padding", tokens.padding)
        _line(right, "=", f"{rows:,} rows × {length:,}", tokens.packed + tokens.padding, "bold")
    _heading(console, "Ledger")
    if console.width >= 76:
        both = _grid(False, False, padding=4)
        both.add_row(left, right)
        _indented(console, both)
    else:
        _indented(console, left)
        _indented(console, right)
    if sum(conversations.rejected.values()):
        _indented(console, _single(Text("rejects.jsonl in the corpus names each rejected conversation", "dim")))


def _sum_table(title: str) -> Table:
    table = _grid(False, False, True, padding=1)
    table.add_row("", Text(title, "dim"), "")
    return table


def _line(table: Table, sign: str, label: str, count: int, style: str = "") -> None:
    table.add_row(Text(sign, "dim"), Text(label, style), Text(f"{count:,}", style or ("" if count else "dim")))


def _detail(table: Table, label: str, count: int) -> None:
    """A number that is part of the one above it."""
    table.add_row("", Text(f"  {label}", "dim"), Text(f"{count:,}", "dim"))


def _single(text: Text) -> Table:
    table = _grid(False)
    table.add_row(text)
    return table


def _print_packing(manifest: Manifest, console: Console) -> None:
    packing = manifest.packing_metadata
    if packing.enabled:
        _heading(console, "Packing", packing.algorithm)
        table = _grid(False, True, False)
        table.add_row("rows", f"{packing.rows:,}", "")
        table.add_row("lower bound", f"{packing.lower_bound_rows:,}", Text(printable(packing.lower_bound), "dim"))
        table.add_row("above the bound", f"{packing.above_lower_bound_percent:.2f} %", "")
        if packing.packing_efficiency is not None:
            table.add_row(
                "efficiency",
                Text(f"{packing.packing_efficiency:.2f} %", "bold"),
                Text("of all places hold a token", "dim"),
            )
        table.add_row("conversations per row", f"{packing.avg_conversations_per_sequence:.2f}", "")
        _indented(console, table)
    _heading(console, "Splits")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("split")
    for name in ("rows", "shards", "size", *(f"steps at {batch}" for batch in BATCH_ROWS)):
        table.add_column(name, justify="right", no_wrap=True)
    for name, split in manifest.splits.items():
        size = sum(shard.bytes for shard in split.shards)
        steps = [f"{-(-split.rows // batch):,}" if name == "train" else "" for batch in BATCH_ROWS]
        style = "" if split.rows else "dim"
        table.add_row(
            Text(printable(name)), f"{split.rows:,}", f"{len(split.shards):,}", size_of(size), *steps, style=style
        )
    _indented(console, table)
    console.print(Text("  steps: optimizer steps in one epoch, at so many rows a step", "dim"))
    rows = manifest.splits["train"].rows if "train" in manifest.splits else 0
    epoch = -(-rows // BATCH_ROWS[1])
    if epoch < FEW_STEPS:
        seen = packing.avg_conversations_per_sequence * BATCH_ROWS[1]
        held = f" Such a step sees about {seen:,.0f} conversations." if packing.enabled else ""
        warning = (
            f"An epoch at {BATCH_ROWS[1]} rows a step is {counted(epoch, 'step')}, fewer than {FEW_STEPS}.{held} "
            "Take fewer rows a step, or more epochs."
        )
        _indented(console, _single(Text(warning, "yellow")))


def size_of(count: int) -> str:
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:,.1f} {units[0]}" if value < 100 and units[0] != "B" else f"{value:,.0f} {units[0]}"


def _print_notes(manifest: Manifest, console: Console) -> None:
    noticed = {name: count for name, count in manifest.noticed.items() if count}
    if not noticed:
        return
    _heading(console, "Noticed")
    table = _grid(True, False, False)
    for name, count in noticed.items():
        noun, meaning = NOTICED.get(name, ("", printable(name)))
        table.add_row(f"{count:,}", noun if count == 1 or not noun else f"{noun}s", meaning)
    _indented(console, table)


def checks(found: Sequence[tuple[str, str]], path: Path, console: Console) -> None:
    """Show what `verify` checked: (name, what was found)."""
    table = _grid(False, False, False)
    for name, what in found:
        table.add_row(Text("✓", "green"), printable(name), printable(what))
    _indented(console, table)
    console.print(Text(f"{printable(str(path))}: all {counted(len(found), 'check')} passed", "bold"), soft_wrap=True)
