"""Render the figures of a corpus, the checks of `verify`, and a list of corpora.

Text from files is never interpreted as markup, and its control characters are escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.cli.console import grid, heading, indented, plain_table, print_remark, single, whole
from tasks.core.error_codes import CODES
from tasks.core.printable import common_folder, counted, in_bytes, lengths_in_words, printable
from tasks.corpus.summary import (
    BATCH_ROWS,
    FEW_STEPS,
    NOTICED_NAMES,
    SHARE_NOTE,
    Fact,
    content_tokens,
    conversation_facts,
    fit_to_width,
    ledger_notes,
    mixture_table,
    noticed_facts,
    packing_facts,
    setting_facts,
    steps_of_split,
    token_facts,
    unused_keys,
    waiting_line,
)
from tasks.inspection.manifests import Listing, Overview, Unreadable
from tasks.storage.facts import Ledger, MixtureFacts
from tasks.storage.layout import kind_of
from tasks.storage.manifest import Manifest
from tasks.templates.adjust import explain_undefined

SHOWN_SOURCES = 30


def show_overview(overview: Overview, console: Console) -> None:
    """Render the overview of a corpus."""
    manifest, settings = overview.content, overview.content.config
    _print_head(overview, console)
    mixture = mixture_table(manifest.mixture, settings.get("weighting"))
    notes = ["trained: in all rows, including copies"] * bool(manifest.ledger.tokens.repeated)
    sources = [
        SourceLine(one.path, one.format, [one.conversations, one.rejected, one.tokens, one.trained_tokens])
        for one in manifest.sources
    ]
    print_sources(sources, [*notes, *[SHARE_NOTE] * bool(mixture)], console)
    print_mixture(manifest.mixture, settings.get("weighting"), console)
    heading(console, "Ledger")
    print_ledger(manifest.ledger, settings, manifest.packing_metadata.rows, console)
    if sum(manifest.ledger.conversations.rejected.values()):
        print_remark("rejects.jsonl in the corpus lists each rejected conversation", console)
    if facts := packing_facts(manifest):
        heading(console, "Packing", manifest.packing_metadata.algorithm)
        print_facts(facts, console)
    _print_splits(manifest, console)
    print_remark(waiting_line(overview.waiting, settings.get("balance")), console)
    if noticed_facts(manifest.noticed) or manifest.noticed.keys() & NOTICED_NAMES:
        heading(console, "Noticed")
        print_noticed(manifest.noticed, console)


def _print_head(overview: Overview, console: Console) -> None:
    manifest = overview.content
    size = "up to " * (manifest.row_layout.padding == "none") + lengths_in_words(manifest.row_lengths)
    unit = f"rows of {size} tokens" if manifest.packing_metadata.enabled else "one conversation per row"
    title = (printable(manifest.name), "bold"), f" {manifest.key[:12]}"
    console.print(Text.assemble(*title, (f"  format {manifest.format_version}, {unit}", "dim")))
    tokenizer, folder = manifest.tokenizer, f"{manifest.corpus} is missing; pack the corpus again"
    if overview.corpus:
        here = Path.cwd()
        inside = overview.corpus.is_relative_to(here)
        folder = str(overview.corpus.relative_to(here) if inside else overview.corpus)
    origin = ", trained on these sources" if tokenizer.trained_here else ""
    facts = [
        Fact("tokenizer", f"{Path(tokenizer.path).name} ({tokenizer.kind}, {tokenizer.vocab_size:,} tokens{origin})"),
        Fact("template", manifest.template.name),
        *setting_facts(manifest.config),
        Fact("corpus", folder),
        Fact("manifest", str(overview.manifest)),
    ]
    print_head(facts, manifest.template.markers_as_text, console)


def print_head(facts: Sequence[Fact], markers_as_text: Sequence[str], console: Console) -> None:
    """Print names and values.

    A line below the template lists its markers that are not tokens.
    """
    table = grid(False, False)
    for fact in facts:
        table.add_row(Text(fact.name, "dim"), printable(fact.text))
        if fact.name == "template" and markers_as_text:
            markers = " ".join(map(printable, markers_as_text))
            table.add_row("", Text(f"{markers}: not tokens of this tokenizer, encoded as text", "yellow"))
    indented(console, table)


def print_facts(facts: Sequence[Fact], console: Console) -> None:
    """Print names, values, and notes."""
    table = grid(False, True, False)
    for fact in facts:
        table.add_row(f"{'  ' * fact.is_part}{fact.name}", fact.text, Text(fact.note, "dim"))
    indented(console, table)


class SourceLine(NamedTuple):
    """A source file; `counts` are read, rejected, encoded, trained, after `marks`."""

    path: str
    remark: str
    counts: list[int]
    marks: Sequence[str] = ("", "", "", "")


def print_sources(sources: Sequence[SourceLine], notes: Sequence[str], console: Console) -> None:
    """Print the figures of each source file, and their sum."""
    folder = common_folder([source.path for source in sources])
    heading(console, "Sources", "; ".join([f"below {printable(folder)}"] * bool(folder) + [*notes]))
    wide = console.width >= 100
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", footer_style="bold")
    table.show_footer = len(sources) > 1
    total = [sum(counts) for counts in zip(*(source.counts for source in sources), strict=True)]
    marks = [max(of_sources) for of_sources in zip(*(source.marks for source in sources), strict=True)]
    table.add_column("file", f"{len(sources):,} files", overflow="fold")
    if wide:
        table.add_column("format")
    for name, mark, value in zip(("read", "rejected", "tokens", "trained"), marks, total, strict=True):
        table.add_column(name, f"{mark}{value:,}", justify="right", no_wrap=True)
    table.add_column("share", "100 %", justify="right", no_wrap=True)
    shown = [*sources[:SHOWN_SOURCES]]
    if rest := sources[SHOWN_SOURCES:]:
        sums = [sum(counts) for counts in zip(*(source.counts for source in rest), strict=True)]
        shown.append(SourceLine(f"{folder}… {len(rest):,} more", "", sums, marks))
    for source in shown:
        names = [Text(printable(source.path.removeprefix(folder))), Text(source.remark, "dim")]
        if not wide:
            names = [Text("\n" * bool(source.remark)).join(names)]
        cells = zip(source.marks, source.counts, strict=True)
        share = f"{100 * source.counts[2] / max(total[2], 1):.1f} %"
        table.add_row(*names, *(Text(f"{mark}{n:,}" if n else "0", "" if n else "dim") for mark, n in cells), share)
    indented(console, table)


def print_mixture(mixture: Sequence[MixtureFacts], weighting: object, console: Console) -> None:
    lines = fit_to_width(mixture_table(mixture, weighting), console.width - 2)
    if not lines:
        return
    heading(console, "Mixture", f"{weighting}, in one epoch of the training split")
    table = plain_table()
    for number, name in enumerate(lines[0]):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for line in lines[1:]:
        table.add_row(*map(Text, line))
    whole(console, table)


def print_ledger(ledger: Ledger, settings: Mapping[str, Any], rows: int, console: Console, mark: str = "") -> None:
    """Print what became of conversations and tokens; `mark` is before each count."""
    tables = []
    for title, facts in (
        ("conversations", conversation_facts(ledger, settings)),
        ("tokens", token_facts(ledger, settings, rows)),
    ):
        table = grid(False, False, True, padding=1)
        table.add_row("", Text(title, "dim"), "")
        for fact in facts:
            bold = "bold" if fact.sign == "=" else ""
            style = "dim" if fact.is_part or not fact.value else bold
            name = Text(f"  {fact.name}", "dim") if fact.is_part else Text(fact.name, bold)
            table.add_row(Text(fact.sign, "dim"), name, Text(f"{mark * bool(fact.value)}{fact.text}", style))
        tables.append(table)
    if console.width >= 76:
        both = grid(False, False, padding=4)
        both.add_row(*tables)
        tables = [both]
    for table in tables:
        indented(console, table)
    for note in ledger_notes(ledger):
        print_remark(note, console)


def _print_splits(manifest: Manifest, console: Console) -> None:
    heading(console, "Splits")
    table = plain_table()
    table.add_column("split")
    several = len(manifest.row_lengths) > 1
    steps = [f"steps at {batch}" for batch in BATCH_ROWS]
    for name in ("rows", *("full", "bound") * several, "shards", "size", *steps):
        table.add_column(name, justify="right", no_wrap=True)
    for name, split in manifest.splits.items():
        filled, counts = [], [""] * len(BATCH_ROWS)
        if kind_of(name) != "validation":
            counts = [f"{steps_of_split(manifest, name, batch):,}" for batch in BATCH_ROWS]
        if several:
            places = split.rows * manifest.length_of_split(name)
            filled = [f"{100 * (split.tokens or 0) / places:.2f} %" if places else "-", f"{split.lower_bound_rows:,}"]
        size = in_bytes(sum(shard.bytes for shard in split.shards))
        cells = (f"{split.rows:,}", *filled, f"{len(split.shards):,}", size, *counts)
        table.add_row(Text(printable(name)), *cells, style="" if split.rows else "dim")
    indented(console, table)
    longest = f" of {manifest.sequence_length:,} tokens" if several else ""
    console.print(Text(f"  steps: optimizer steps per epoch, by rows{longest} per step", "dim"))
    epoch = sum(steps_of_split(manifest, name, BATCH_ROWS[1]) for name in manifest.splits if kind_of(name) == "train")
    if epoch < FEW_STEPS:
        seen = manifest.packing_metadata.avg_conversations_per_sequence * BATCH_ROWS[1]
        noun = "samples" if manifest.ledger.samples else "conversations"
        held = f" Each step sees about {seen:,.0f} {noun}." if manifest.packing_metadata.enabled else ""
        warning = (
            f"At {BATCH_ROWS[1]} rows per step, an epoch has {counted(epoch, 'step')}, fewer than {FEW_STEPS}.{held} "
            "Use fewer rows per step, or more epochs."
        )
        indented(console, single(Text(warning, "yellow")))


def print_noticed(noticed: Mapping[str, Any], console: Console) -> None:
    """Print what a manifest noticed."""
    table = grid(True, False, False)
    for fact in noticed_facts(noticed):
        table.add_row(fact.text, fact.unit if fact.value == 1 or not fact.unit else f"{fact.unit}s", fact.note)
    if table.rows:
        indented(console, table)
    for line in explain_undefined(noticed.get("undefined_names", {})):
        console.print(Text(f"  {line}", "dim"), soft_wrap=True)
    if lines := content_tokens(noticed.get("content_tokens", {})):
        console.print(Text(f"  tokens written by content: {', '.join(lines)}", "dim"), soft_wrap=True)
    for number, line in enumerate(unused_keys(noticed.get("unused_keys", {}))):
        if not number:
            console.print(Text("  unused keys, with their counts", "dim"), soft_wrap=True)
        print_remark(f"  {printable(line)}", console)


def show_checks(value: dict[str, Any], console: Console) -> None:
    """Render the checks of `verify`, which are the value that it prints as JSON."""
    table = grid(False, False, False)
    for check in value["checks"]:
        table.add_row(Text("✓", "green"), printable(check.name), printable(check.found))
    indented(console, table)
    path, count = printable(str(value["manifest"])), counted(len(value["checks"]), "check")
    console.print(Text(f"{path}: all {count} passed", "bold"), soft_wrap=True)


def show_list(listing: Listing, console: Console) -> None:
    """Render all manifests, one per line.

    A manifest that cannot be read is shown with its error code.
    """
    if not listing.manifests:
        console.print("no manifests; make one with: packcorpus pack CONFIG")
        return
    table = plain_table()
    # Every command finds a manifest by its name. With the folder, the table would be too wide for many terminals.
    table.add_column("manifest", no_wrap=True)
    for title in ("length", "rows", "efficiency", "finished"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in listing.manifests:
        name = Text(printable(one.path.name))
        if isinstance(one, Unreadable):
            meaning = next(code.meaning for code in CODES.values() if code.code == one.error.code)
            table.add_row(Text.assemble(name, "\n", (f"{one.error.code} {meaning}", "yellow")), "", "", "", "")
            continue
        full = "-" if one.packing_efficiency is None else f"{one.packing_efficiency:.2f} %"
        finished = printable((one.finished or "")[:16].replace("T", " ")) or "-"
        table.add_row(name, ", ".join(f"{n:,}" for n in one.row_lengths), f"{one.rows:,}", full, finished)
    whole(console, table)
