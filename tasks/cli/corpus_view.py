"""Render the figures of a corpus, checks, lists, and the difference of two.

Text from files is never interpreted as markup, and its control characters are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from packcorpus.tasks.cli.console import grid, heading, indented, plain_table, print_remark, say, single, whole
from packcorpus.tasks.core.error_codes import CODES
from packcorpus.tasks.core.printable import common_folder, counted, in_bytes, lengths_in_words, printable
from packcorpus.tasks.corpus.summary import (
    BATCH_ROWS,
    DROPPED,
    FEW_STEPS,
    NOTICED_NAMES,
    SHARE_NOTE,
    Fact,
    content_notes,
    content_tokens,
    conversation_facts,
    explain_evaluation,
    explain_losses,
    fit_to_width,
    held_out_notes,
    ledger_notes,
    mixture_table,
    noticed_facts,
    packing_facts,
    setting_facts,
    steps_of_split,
    token_facts,
    unknown_markers,
    unused_keys,
    waiting_line,
)
from packcorpus.tasks.inspection.diff import Change, ConversationChanges, Difference, SourceChanges
from packcorpus.tasks.inspection.manifests import Listing, Overview, Unreadable
from packcorpus.tasks.storage.facts import Ledger, MixtureFacts
from packcorpus.tasks.storage.layout import kind_of
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.templates.adjust import explain_undefined

SHOWN_SOURCES = 30


def show_overview(overview: Overview, console: Console) -> None:
    """Render the overview of a corpus."""
    manifest, settings = overview.content, overview.content.config
    _print_head(overview, console)
    for line in explain_losses(manifest.ledger):
        indented(console, single(Text(line, "bold")))
    mixture = mixture_table(manifest.mixture, settings.get("weighting"))
    sources = [
        SourceLine(one.path, one.kind, [one.conversations, one.rejected, one.tokens, one.trained_tokens])
        for one in manifest.sources
    ]
    print_sources(sources, manifest.ledger, bool(mixture), console)
    print_mixture(manifest.mixture, settings.get("weighting"), console)
    heading(console, "Ledger")
    print_ledger(manifest.ledger, settings, manifest.packing_metadata.rows, console)
    if sum(manifest.ledger.conversations.rejected.values()):
        print_remark("rejects.jsonl in the corpus lists each rejected conversation", console)
    if any(file.path == "dropped.jsonl" and file.bytes for file in manifest.files):
        print_remark("dropped.jsonl in the corpus lists what was cleaned away, with the places of its like", console)
    if facts := packing_facts(manifest):
        heading(console, "Packing", manifest.packing_metadata.algorithm)
        print_facts(facts, console)
    _print_splits(manifest, console)
    print_remark(waiting_line(overview.waiting, settings.get("balance")), console)
    lines = [*content_notes(manifest.ledger, settings), *explain_evaluation(manifest)]
    lines += held_out_notes(manifest.held_out, manifest.ledger, settings)
    if lines or noticed_facts(manifest.noticed) or manifest.noticed.keys() & NOTICED_NAMES:
        heading(console, "Noticed")
        for line in lines:
            print_remark(line, console)
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
        Fact("tokenizer", f"{manifest.tokenizer_name} ({tokenizer.kind}, {tokenizer.vocab_size:,} tokens{origin})"),
        Fact("template", manifest.template.name),
        *setting_facts(manifest.config),
        Fact("corpus", folder),
        Fact("manifest", str(overview.manifest)),
    ]
    print_head(facts, manifest.template.markers_as_text, console)


def print_head(facts: Sequence[Fact], markers_as_text: Sequence[str], console: Console) -> None:
    """Print names and values."""
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


def print_sources(sources: Sequence[SourceLine], ledger: Ledger, is_mixed: bool, console: Console) -> None:
    """Print the figures of each source file, and their sum.

    Each token is counted once. If there are copies, trained tokens are known only with all copies, and are left out.
    """
    folder = common_folder([source.path for source in sources])
    notes = [f"below {printable(folder)}"] * bool(folder) + [SHARE_NOTE] * is_mixed
    notes += ["without copies"] * (ledger.has_copies and not is_mixed)
    heading(console, "Sources", "; ".join(notes))
    shown_counts = 3 if ledger.has_copies else 4
    wide = console.width >= 100
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", footer_style="bold")
    table.show_footer = len(sources) > 1
    total = [sum(counts) for counts in zip(*(source.counts for source in sources), strict=True)]
    marks = [max(of_sources) for of_sources in zip(*(source.marks for source in sources), strict=True)]
    table.add_column("file", f"{len(sources):,} files", overflow="fold")
    if wide:
        table.add_column("format")
    names_of_counts = ("read", "rejected", "tokens", "trained")[:shown_counts]
    for name, mark, value in zip(names_of_counts, marks, total, strict=False):
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
        cells = [*zip(source.marks, source.counts, strict=True)][:shown_counts]
        share = f"{100 * source.counts[2] / max(total[2], 1):.1f} %"
        table.add_row(*names, *(Text(f"{mark}{n:,}" if n else "0", "" if n else "dim") for mark, n in cells), share)
    indented(console, table)


def print_mixture(mixture: Sequence[MixtureFacts], weighting: object, console: Console) -> None:
    lines = fit_to_width(mixture_table(mixture, weighting), console.width - 2)
    if not lines:
        return
    heading(console, "Mixture", f"{weighting}, in one epoch of the training split")
    table = plain_table(*lines[0])
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
    several = len(manifest.row_lengths) > 1
    steps = [f"steps at {batch}" for batch in BATCH_ROWS]
    table = plain_table("split", "rows", *("full", "bound") * several, "shards", "size", *steps)
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
        print_remark(line, console)
    for line in unknown_markers(noticed):
        print_remark(line, console)
    if lines := content_tokens(noticed.get("content_tokens", {})):
        print_remark(f"tokens written by content: {', '.join(lines)}", console)
    for number, line in enumerate(unused_keys(noticed.get("unused_keys", {}))):
        if not number:
            say(console, ("  unused keys, with their counts", "dim"))
        print_remark(f"  {printable(line)}", console)


def show_checks(value: dict[str, Any], console: Console) -> None:
    """Render the checks of `verify`, which are the value that it prints as JSON."""
    table = grid(False, False, False)
    for check in value["checks"]:
        table.add_row(Text("✓", "green"), printable(check.name), printable(check.found))
    indented(console, table)
    path, count = printable(str(value["manifest"])), counted(len(value["checks"]), "check")
    say(console, (f"{path}: all {count} passed", "bold"))


def show_list(listing: Listing, console: Console) -> None:
    """Render all manifests, one per line."""
    if not listing.manifests:
        console.print("no manifests; make one with: packcorpus pack CONFIG")
        return
    # Every command finds a manifest by its name. With the folder, the table would be too wide for many terminals.
    table = plain_table("manifest", "length", "rows", "efficiency", "finished")
    for one in listing.manifests:
        name = Text(printable(one.path.name))
        if isinstance(one, Unreadable):
            meaning = next(code.meaning for code in CODES.values() if code.code == one.error.code)
            table.add_row(Text.assemble(name, "\n", (f"{one.error.code} {meaning}", "yellow")), "", "", "", "")
            continue
        full = "-" if one.packing_efficiency is None else f"{one.packing_efficiency:.2f} %"
        finished = printable((one.finished or "")[:16].replace("T", " ")) or "-"
        if one.is_gone:
            finished = "folder missing"
        if one.differs:
            texts = {key: str(value) for key, value in one.differs.items()}
            values = [f"{key}: {text if len(text) <= CUT else f'{text[: CUT - 1]}…'}" for key, text in texts.items()]
            more = f" and {len(values) - MOST_DIFFERENCES:,} more" * (len(values) > MOST_DIFFERENCES)
            name = Text.assemble(name, "\n", (f"  {printable(', '.join(values[:MOST_DIFFERENCES]))}{more}", "dim"))
        table.add_row(name, ", ".join(f"{n:,}" for n in one.row_lengths), f"{one.rows:,}", full, finished)
    whole(console, table)


SHOWN = 20  # sources or conversations to list; twice as many settings or figures
CUT = 72  # characters of a value or text
MOST_DIFFERENCES = 6  # settings in which corpora of one name differ


def show_difference(difference: Difference, console: Console) -> None:
    """Render the differences between two corpora, section by section."""
    say(console, ("− ", "red"), printable(str(difference.before)))
    say(console, ("+ ", "green"), printable(str(difference.after)))
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
    "ledger.reasoning.dropped": "reasoning that is dropped:",
    "ledger.reasoning.unwritten": "reasoning that the template leaves out:",
    "ledger.pieces.packed": "pieces",
    "ledger.pieces": "pieces",
    "ledger.pieces.later": "pieces without the beginning",
    "ledger.pieces.inside": "pieces that begin within a turn",
    "ledger.pieces.repeated_tokens": "tokens before later pieces",
    "ledger.tokens.separators": "separators",
    "ledger.tokens.repeated": "tokens repeated",
    "ledger.tokens.shared": "tokens shared",
    "ledger.tokens.padding": "padding",
    "ledger.tokens.alignment": "padding of align",
    "ledger.tokens.trained_truncated": "trained tokens of truncated",
    "ledger.tokens": "tokens",
    "held_out": "held out:",
    "packing.rows": "",
    "packing.lower_bound_rows": "lower bound",
    "packing.above_lower_bound_percent": "above the bound, %",
    "packing.packing_efficiency": "efficiency, %",
    "packing.avg_conversations_per_sequence": "conversations per row",
    "packing.compression_ratio": "",
    "rows": "rows of",
    "shards": "shards of",
    "noticed": "noticed:",
    "markers": "conversations with marker",
}


def _named_as_inspect(change: Change) -> list[Change]:
    """Return a list with a figure under its name in `inspect`."""
    name, before, after = change.name, change.before, change.after
    if name.startswith("ledger."):  # a reason that is not listed has a count of 0
        before, after = before or 0, after or 0
        if before == after:
            return []
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
