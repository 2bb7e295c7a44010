"""Render the figures of a corpus, the checks of `verify`, and a list of corpora.

Text from files is never interpreted as markup, and its control characters are escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.cli.views.console import grid, heading, indented, plain_table, print_remark, single, whole
from tasks.core.error_codes import CODES
from tasks.core.printable import common_folder, counted, in_bytes, lengths_in_words, printable
from tasks.corpus.mixture_table import fit_to_width, mixture_table
from tasks.inspection.labels import (
    BATCH_ROWS,
    DROPPED,
    FEW_STEPS,
    NOTICED,
    SHARE_NOTE,
    TRAINED_TURNS,
    content_tokens,
    explain_left_out,
    explain_samples,
    steps_of,
    unused_keys,
    weighting,
)
from tasks.inspection.manifests import Listing, Overview, Unreadable
from tasks.inspection.waiting import waiting_line
from tasks.storage.facts import MixtureFacts, SourceFacts
from tasks.storage.layout import kind_of
from tasks.storage.manifest import Manifest
from tasks.templates.names import explain_undefined
from tasks.templates.sections import explain_sections, sections_of_config

SHOWN_SOURCES = 30


def show_overview(overview: Overview, console: Console) -> None:
    """Render the overview of a corpus."""
    manifest = overview.content
    _print_head(overview, console)
    _print_sources(manifest, console)
    print_mixture(manifest.mixture, manifest.config.get("weighting"), console)
    _print_ledger(manifest, console)
    _print_packing(manifest, console)
    print_remark(waiting_line(overview.waiting, manifest.config.get("balance")), console)
    _print_noticed(manifest, console)


def _print_head(overview: Overview, console: Console) -> None:
    manifest = overview.content
    size = lengths_in_words(manifest.row_lengths)
    if manifest.row_layout.padding == "none":
        size = f"up to {size}"
    unit = f"rows of {size} tokens" if manifest.packing_metadata.enabled else "one conversation per row"
    console.print(
        Text.assemble(
            (printable(manifest.name), "bold"),
            f" {manifest.key[:12]}",
            (f"  format {manifest.format_version}, {unit}", "dim"),
        )
    )
    tokenizer, template = manifest.tokenizer, manifest.template
    origin = ", trained on these sources" if tokenizer.trained_here else ""
    gone = f"{manifest.corpus} is missing; pack the corpus again"
    print_facts(
        [
            ("tokenizer", f"{Path(tokenizer.path).name} ({tokenizer.kind}, {tokenizer.vocab_size:,} tokens{origin})"),
            ("template", template.name),
            ("trained on", TRAINED_TURNS[manifest.train_on] + explain_sections(sections_of_config(manifest.config))),
            ("overlong", str(manifest.config.get("overlong", "?"))),
            *weighting(manifest.config),
            ("corpus", str(_relative(overview.corpus)) if overview.corpus else gone),
            ("manifest", str(overview.manifest)),
        ],
        template.markers_as_text,
        console,
    )


def print_facts(facts: Sequence[tuple[str, str]], markers_as_text: Sequence[str], console: Console) -> None:
    """Print names and values.

    A line below the template lists its markers that are not tokens.
    """
    table = grid(False, False)
    for name, value in facts:
        table.add_row(Text(name, "dim"), printable(value))
        if name == "template" and markers_as_text:
            markers = " ".join(map(printable, markers_as_text))
            table.add_row("", Text(f"{markers}: not tokens of this tokenizer, encoded as text", "yellow"))
    indented(console, table)


def _relative(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _print_sources(manifest: Manifest, console: Console) -> None:
    sources = manifest.sources
    folder = common_folder([source.path for source in sources])
    notes = [f"below {printable(folder)}"] * bool(folder)
    notes += ["trained: in all rows, including copies"] * bool(manifest.ledger.tokens.repeated)
    notes += [SHARE_NOTE] * bool(mixture_table(manifest.mixture, manifest.config.get("weighting")))
    heading(console, "Sources", "; ".join(notes))
    wide = console.width >= 100
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", footer_style="bold")
    table.show_footer = len(sources) > 1
    total = _counts(sources)
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
                _detail(left, DROPPED.get(reason, printable(reason)), count)
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
        _detail(right, "not included: rejected", tokens.rejected)
    _line(right, "+", "separators", tokens.separators)
    if tokens.repeated:
        _line(right, "+", "additional copies", tokens.repeated)
    _line(right, "−", "truncated", tokens.truncated)
    if tokens.trained_truncated:
        _detail(right, "of them trained", tokens.trained_truncated)
    _line(right, "−", "dropped", tokens.dropped)
    _line(right, "=", "packed", tokens.packed, "bold")
    _detail(right, f"trained, {100 * tokens.trained / max(tokens.packed, 1):.1f} %", tokens.trained)
    _detail(right, "context", tokens.packed - tokens.trained)
    if manifest.packing_metadata.enabled:
        rows, length = counted(manifest.packing_metadata.rows, "row"), f" × {manifest.sequence_length:,}"
        _line(right, "+", "padding", tokens.padding)
        if tokens.alignment is not None:
            _detail(right, f"of align: {manifest.row_layout.align}", tokens.alignment)
        all_rows = rows + length * (len(manifest.row_lengths) == 1)
        if manifest.row_layout.padding == "none":
            all_rows = f"in {rows}"
        _line(right, "=", all_rows, tokens.packed + tokens.padding, "bold")
    heading(console, "Ledger")
    if console.width >= 76:
        both = grid(False, False, padding=4)
        both.add_row(left, right)
        indented(console, both)
    else:
        indented(console, left)
        indented(console, right)
    if manifest.ledger.samples:
        indented(console, single(Text(explain_samples(manifest.ledger.model_dump()), "dim")))
    if manifest.ledger.context and (left_out := explain_left_out(manifest.ledger.context.left_out)):
        indented(console, single(Text(left_out, "dim")))
    if sum(conversations.rejected.values()):
        indented(console, single(Text("rejects.jsonl in the corpus lists each rejected conversation", "dim")))


def _sum_table(title: str) -> Table:
    table = grid(False, False, True, padding=1)
    table.add_row("", Text(title, "dim"), "")
    return table


def _line(table: Table, sign: str, label: str, count: int, style: str = "") -> None:
    table.add_row(Text(sign, "dim"), Text(label, style), Text(f"{count:,}", style or ("" if count else "dim")))


def _detail(table: Table, label: str, count: int) -> None:
    """Add a number that is part of the number above it."""
    table.add_row("", Text(f"  {label}", "dim"), Text(f"{count:,}", "dim"))


def _print_packing(manifest: Manifest, console: Console) -> None:
    packing = manifest.packing_metadata
    if packing.enabled:
        heading(console, "Packing", packing.algorithm)
        table = grid(False, True, False)
        table.add_row("rows", f"{packing.rows:,}", "")
        bound, proof = f"{packing.lower_bound_rows:,}", Text(printable(packing.lower_bound), "dim")
        if packing.places is not None and packing.lower_bound_places is not None:
            table.add_row("places", f"{packing.places:,}", Text("rows of all lengths", "dim"))
            bound = f"{packing.lower_bound_places:,}"
        table.add_row("lower bound", bound, proof)
        table.add_row("above the bound", f"{packing.above_lower_bound_percent:.2f} %", "")
        if packing.packing_efficiency is not None:
            is_padded = manifest.row_layout.padding != "none"
            positions = "all positions" if is_padded else f"rows × {manifest.sequence_length:,} positions"
            table.add_row(
                "efficiency",
                Text(f"{packing.packing_efficiency:.2f} %", "bold"),
                Text(f"of {positions} hold a token", "dim"),
            )
        table.add_row(
            f"{'samples' if manifest.ledger.samples else 'conversations'} per row",
            f"{packing.avg_conversations_per_sequence:.2f}",
            "",
        )
        indented(console, table)
    heading(console, "Splits")
    table = plain_table()
    table.add_column("split")
    several = len(manifest.row_lengths) > 1
    for name in (
        "rows",
        *("full", "bound") * several,
        "shards",
        "size",
        *(f"steps at {batch}" for batch in BATCH_ROWS),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for name, split in manifest.splits.items():
        size = sum(shard.bytes for shard in split.shards)
        is_trained = kind_of(name) != "validation"
        steps = [f"{steps_of(manifest, name, batch):,}" if is_trained else "" for batch in BATCH_ROWS]
        filled = []
        if several:
            places = split.rows * manifest.length_of_split(name)
            filled = [f"{100 * (split.tokens or 0) / places:.2f} %" if places else "-", f"{split.lower_bound_rows:,}"]
        style = "" if split.rows else "dim"
        table.add_row(
            Text(printable(name)),
            f"{split.rows:,}",
            *filled,
            f"{len(split.shards):,}",
            in_bytes(size),
            *steps,
            style=style,
        )
    indented(console, table)
    longest = f" of {manifest.sequence_length:,} tokens" if several else ""
    console.print(Text(f"  steps: optimizer steps per epoch, by rows{longest} per step", "dim"))
    epoch = sum(steps_of(manifest, name, BATCH_ROWS[1]) for name in manifest.splits if kind_of(name) == "train")
    if epoch < FEW_STEPS:
        seen = packing.avg_conversations_per_sequence * BATCH_ROWS[1]
        noun = "samples" if manifest.ledger.samples else "conversations"
        held = f" Each step sees about {seen:,.0f} {noun}." if packing.enabled else ""
        warning = (
            f"At {BATCH_ROWS[1]} rows per step, an epoch has {counted(epoch, 'step')}, fewer than {FEW_STEPS}.{held} "
            "Use fewer rows per step, or more epochs."
        )
        indented(console, single(Text(warning, "yellow")))


def _print_noticed(manifest: Manifest, console: Console) -> None:
    noticed = {name: count for name, count in manifest.noticed_counts.items() if count}
    undefined = explain_undefined(manifest.undefined_names)
    if not noticed and not manifest.content_tokens and not manifest.unused_keys and not undefined:
        return
    heading(console, "Noticed")
    table = grid(True, False, False)
    for name, count in noticed.items():
        noun, meaning = NOTICED.get(name, ("", printable(name)))
        table.add_row(f"{count:,}", noun if count == 1 or not noun else f"{noun}s", meaning)
    indented(console, table)
    for line in undefined:
        console.print(Text(f"  {line}", "dim"), soft_wrap=True)
    print_content_tokens(manifest.content_tokens, console)
    print_unused(manifest.unused_keys, console)


def print_content_tokens(found: Mapping[str, Mapping[str, int]], console: Console, where: str = "") -> None:
    """Print how often conversations contain each content token, by role."""
    if lines := content_tokens(found):
        console.print(Text(f"  tokens written by content{where}: {', '.join(lines)}", "dim"), soft_wrap=True)


def print_unused(found: Mapping[str, Mapping[str, int]], console: Console, where: str = "") -> None:
    """Print the unused keys of each source, and how often they occurred."""
    for number, line in enumerate(unused_keys(found)):
        if not number:
            console.print(Text(f"  unused keys{where}, with their counts", "dim"), soft_wrap=True)
        indented(console, single(Text(f"  {printable(line)}", "dim")))


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
