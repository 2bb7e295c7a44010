"""A corpus in figures: sources, ledger, packing, splits, steps; and the findings of a check.

    manifest ─inspect─▶ tables          checks of verify ─checks─▶ a list

Nothing that comes from a file is read as markup, and control characters in it are escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.cli.console import grid, heading, indented, single, whole
from tasks.core.errors import InputMissing
from tasks.core.printable import common_folder, counted, in_bytes, printable
from tasks.corpus.mixture_table import mixture_table, narrowed
from tasks.inspection.labels import BATCH_ROWS, BEFORE_MIXTURE, FEW_STEPS, LOST, NOTICED, TRAINED_TURNS
from tasks.storage.corpus_folder import corpus_folder
from tasks.storage.manifest import Manifest, MixtureFacts, SourceFacts, load_manifest

SHOWN_SOURCES = 30


def inspect(path: Path, console: Console) -> None:
    """Show what the corpus of a manifest consists of. Raises PackError, naming what is missing or wrong."""
    manifest = load_manifest(path)
    _print_head(manifest, path, console)
    _print_sources(manifest, console)
    print_mixture(manifest.mixture, manifest.config.get("weighting"), console)
    _print_ledger(manifest, console)
    _print_packing(manifest, console)
    _print_notes(manifest, console)


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
    table = grid(False, False)
    for name, value in facts:
        table.add_row(Text(name, "dim"), printable(value))
        if name == "template" and template.markers_as_text:
            markers = " ".join(map(printable, template.markers_as_text))
            table.add_row("", Text(f"{markers}: no tokens of this tokenizer, written as text", "yellow"))
    indented(console, table)


def _relative(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _print_sources(manifest: Manifest, console: Console) -> None:
    sources = manifest.sources
    folder = common_folder([source.path for source in sources])
    notes = [f"below {printable(folder)}"] * bool(folder)
    notes += ["trained: in all rows, further copies too"] * bool(manifest.ledger.tokens.repeated)
    notes += [BEFORE_MIXTURE] * bool(mixture_table(manifest.mixture, manifest.config.get("weighting")))
    heading(console, "Sources", "; ".join(notes))
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
    indented(console, table)


def print_mixture(mixture: Sequence[MixtureFacts], weighting: object, console: Console) -> None:
    lines = narrowed(mixture_table(mixture, weighting), console.width - 2)
    if not lines:
        return
    heading(console, "Mixture", f"{weighting}, of one pass over the training split")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for number, name in enumerate(lines[0]):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for line in lines[1:]:
        table.add_row(*map(Text, line))
    whole(console, table)


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
    if tokens.rejected:
        _detail(right, "besides, of rejected ones", tokens.rejected)
    _line(right, "+", "separators", tokens.separators)
    if tokens.repeated:
        _line(right, "+", "further copies", tokens.repeated)
    _line(right, "−", "truncated", tokens.truncated)
    _line(right, "−", "dropped", tokens.dropped)
    _line(right, "=", "packed", tokens.packed, "bold")
    _detail(right, f"trained, {100 * tokens.trained / max(tokens.packed, 1):.1f} %", tokens.trained)
    if manifest.packing_metadata.enabled:
        rows, length = manifest.packing_metadata.rows, manifest.sequence_length
        _line(right, "+", "padding", tokens.padding)
        _line(right, "=", f"{counted(rows, 'row')} × {length:,}", tokens.packed + tokens.padding, "bold")
    heading(console, "Ledger")
    if console.width >= 76:
        both = grid(False, False, padding=4)
        both.add_row(left, right)
        indented(console, both)
    else:
        indented(console, left)
        indented(console, right)
    if sum(conversations.rejected.values()):
        indented(console, single(Text("rejects.jsonl in the corpus names each rejected conversation", "dim")))


def _sum_table(title: str) -> Table:
    table = grid(False, False, True, padding=1)
    table.add_row("", Text(title, "dim"), "")
    return table


def _line(table: Table, sign: str, label: str, count: int, style: str = "") -> None:
    table.add_row(Text(sign, "dim"), Text(label, style), Text(f"{count:,}", style or ("" if count else "dim")))


def _detail(table: Table, label: str, count: int) -> None:
    """A number that is part of the one above it."""
    table.add_row("", Text(f"  {label}", "dim"), Text(f"{count:,}", "dim"))


def _print_packing(manifest: Manifest, console: Console) -> None:
    packing = manifest.packing_metadata
    if packing.enabled:
        heading(console, "Packing", packing.algorithm)
        table = grid(False, True, False)
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
        indented(console, table)
    heading(console, "Splits")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("split")
    for name in ("rows", "shards", "size", *(f"steps at {batch}" for batch in BATCH_ROWS)):
        table.add_column(name, justify="right", no_wrap=True)
    for name, split in manifest.splits.items():
        size = sum(shard.bytes for shard in split.shards)
        steps = [f"{-(-split.rows // batch):,}" if name != "validation" else "" for batch in BATCH_ROWS]
        style = "" if split.rows else "dim"
        table.add_row(
            Text(printable(name)), f"{split.rows:,}", f"{len(split.shards):,}", in_bytes(size), *steps, style=style
        )
    indented(console, table)
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
        indented(console, single(Text(warning, "yellow")))


def _print_notes(manifest: Manifest, console: Console) -> None:
    noticed = {name: count for name, count in manifest.noticed.items() if count}
    if not noticed:
        return
    heading(console, "Noticed")
    table = grid(True, False, False)
    for name, count in noticed.items():
        noun, meaning = NOTICED.get(name, ("", printable(name)))
        table.add_row(f"{count:,}", noun if count == 1 or not noun else f"{noun}s", meaning)
    indented(console, table)


def checks(found: Sequence[tuple[str, str]], path: Path, console: Console) -> None:
    """Show what `verify` checked: (name, what was found)."""
    table = grid(False, False, False)
    for name, what in found:
        table.add_row(Text("✓", "green"), printable(name), printable(what))
    indented(console, table)
    console.print(Text(f"{printable(str(path))}: all {counted(len(found), 'check')} passed", "bold"), soft_wrap=True)
