"""What a person looks at: a corpus in figures, and one row of it as text.

    manifest ─inspect─▶ sources, ledger, packing, splits, steps
    manifest + shard + index + tokenizer ─show_row─▶ each conversation of a row, trained text marked

What the data says is shown as text and never obeyed: control characters and the marks of this display are escaped,
and nothing that comes from a file is read as markup. Every mark is a symbol as well as a colour.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tasks.encoders import Encoder, TokenizerFiles, open_encoder
from tasks.errors import DataError, InputMissing, UsageError
from tasks.index import INDEX_SCHEMA
from tasks.manifest import Manifest, Shard, SourceFacts, corpus_folder, load_manifest
from tasks.shards import IGNORED, conversation_schema, row_schema

# Marks that frame what is shown. In the data they are escaped, so that no text can pass for a mark.
TRAINED = "⟦⟧"
CONTROL = "▐▌"

# Characters without a glyph that text needs all the same: joiners of Persian, of Indian scripts and of emoji.
JOINERS = "\u200c\u200d"
SPACES = "\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
MARKS = frozenset(TRAINED + CONTROL)
KEPT = frozenset("\n" + JOINERS + SPACES)

TRAINED_STYLE, UNTRAINED_STYLE, ESCAPED_STYLE, HEADING_STYLE = "bold green", "dim", "magenta", "bold cyan"

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


def open_console(stderr: bool = False) -> Console:
    """A console that takes every string for what it says: no markup, no emoji names, no highlighting."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


# Text that is safe to show


def _is_plain(char: str) -> bool:
    return (char.isprintable() or char in KEPT) and char not in MARKS


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


def printable(text: str) -> str:
    """`text` with every character escaped that a terminal would obey, hide or reorder; newlines stay."""
    if text.isprintable() and MARKS.isdisjoint(text):
        return text
    return "".join(char if _is_plain(char) else _escaped(char) for char in text)


def _styled(text: str, style: str) -> Text:
    """`text` as `printable` has it, what was escaped in a colour of its own."""
    if text.isprintable() and MARKS.isdisjoint(text):
        return Text(text, style)
    found = Text()
    plain: list[str] = []
    for char in text:
        if _is_plain(char):
            plain.append(char)
            continue
        found.append("".join(plain), style)
        found.append(_escaped(char), ESCAPED_STYLE)
        plain = []
    return found.append("".join(plain), style)


# The summary


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
            Text(printable(name)), f"{split.rows:,}", f"{len(split.shards):,}", _size(size), *steps, style=style
        )
    _indented(console, table)
    console.print(Text("  steps: optimizer steps in one epoch, at so many rows a step", "dim"))
    rows = manifest.splits["train"].rows if "train" in manifest.splits else 0
    epoch = -(-rows // BATCH_ROWS[1])
    if epoch < FEW_STEPS:
        seen = packing.avg_conversations_per_sequence * BATCH_ROWS[1]
        held = f" Such a step sees about {seen:,.0f} conversations." if packing.enabled else ""
        warning = (
            f"An epoch at {BATCH_ROWS[1]} rows a step is {_count(epoch, 'step')}, fewer than {FEW_STEPS}.{held} "
            "Take fewer rows a step, or more epochs."
        )
        _indented(console, _single(Text(warning, "yellow")))


def _size(count: int) -> str:
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
    console.print(Text(f"{printable(str(path))}: all {_count(len(found), 'check')} passed", "bold"), soft_wrap=True)


# A row


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tokens of one kind: text, or control tokens, that are trained on or not."""

    ids: list[int]
    trained: bool
    control: bool


def show_row(path: Path, number: int, split: str, ids: bool, console: Console) -> None:
    """Show row `number` of a split, counted from 0 over all its shards, decoded conversation by conversation.

    Raises UsageError where there is no such row, DataError or InputMissing where a file is not what it was.
    """
    manifest = load_manifest(path)
    folder = corpus_folder(manifest, path)
    if ids and manifest.format_version == "2.0":
        raise UsageError("--ids: a corpus of format 2.0 holds text, no tokens; leave --ids out")
    place, shard, at = _find_row(manifest, number, split)
    rows = manifest.splits[split].rows
    console.print(
        Text.assemble((f"row {number:,}", "bold"), f" of {rows:,} in {split}", (f"  {shard.path}, row {at:,}", "dim")),
        soft_wrap=True,
    )
    if manifest.format_version == "2.0":
        value = _read_row(folder / shard.path, shard, conversation_schema(manifest.sequence_length, manifest.key), at)
        _print_messages(manifest, folder, split, place, at, value, console)
    else:
        value = _read_row(folder / shard.path, shard, row_schema(manifest.sequence_length, manifest.key), at)
        _print_row(manifest, folder, split, place, at, value, ids, console)


def _find_row(manifest: Manifest, number: int, split: str) -> tuple[int, Shard, int]:
    """Number of the shard within its split, the shard, and the row within it."""
    if split not in manifest.splits:
        raise UsageError(f"--split {split}: this corpus has {' and '.join(map(printable, manifest.splits))}")
    chosen = manifest.splits[split]
    if chosen.rows == 0:
        raise UsageError(f"--split {split}: this corpus has no {split} rows")
    if not 0 <= number < chosen.rows:
        raise UsageError(f"--row {number}: {split} has {chosen.rows:,} rows, 0 to {chosen.rows - 1:,}")
    at = number
    for place, shard in enumerate(chosen.shards):
        if at < shard.rows:
            return place, shard, at
        at -= shard.rows
    raise DataError(f"the shards of {split} hold fewer rows than the manifest says ({chosen.rows:,})")


@contextmanager
def _mapped(path: Path, size: int) -> Iterator[pa.RecordBatchReader]:
    """An Arrow stream of the corpus, mapped. Raises DataError or InputMissing where it is not as the manifest says."""
    if path.is_symlink():
        raise DataError(f"{path}: is a link; a corpus consists of its own files")
    if not path.is_file():
        raise InputMissing(f"{path}: is gone; make the corpus again")
    found = path.stat().st_size
    if found != size:
        raise DataError(f"{path}: has {found:,} bytes, the manifest says {size:,}; make the corpus again")
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
            yield reader
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: is damaged ({str(error).splitlines()[0]}); make the corpus again") from None


def _read_row(path: Path, shard: Shard, schema: pa.Schema, at: int) -> dict[str, Any]:
    """One row of a shard; only the pages that it lies on are read."""
    with _mapped(path, shard.bytes) as reader:
        if not reader.schema.equals(schema, check_metadata=True):
            raise DataError(f"{path}: belongs to another corpus (its schema or its key differ); make the corpus again")
        for batch in reader:
            if at < batch.num_rows:
                row = batch.slice(at, 1)
                if batch.schema.names[0] == "messages":
                    return dict(row.to_pylist()[0])
                return {name: row.column(name).flatten().to_numpy() for name in batch.schema.names}
            at -= batch.num_rows
    raise DataError(f"{path}: holds fewer rows than the manifest says; make the corpus again")


def _open_tokenizer(manifest: Manifest, folder: Path) -> Encoder:
    """The corpus's own copy of its tokenizer, checked."""
    files = tuple(folder / file.path for file in manifest.files if file.path.startswith("tokenizer/"))
    for file in files:
        if not file.is_file():
            raise InputMissing(f"{file}: is gone; make the corpus again")
    main = folder / manifest.tokenizer.path
    if main not in files:
        raise DataError(f"{main}: the tokenizer is not among the files of the manifest")
    tokenizer = TokenizerFiles(main, files)
    if tokenizer.sha256() != manifest.tokenizer.sha256:
        raise DataError(f"{main}: is not the tokenizer that the rows were made with; make the corpus again")
    return open_encoder(tokenizer, manifest.config.get("eos_token"), manifest.config.get("pad_token"))


def _find_pieces(manifest: Manifest, folder: Path, split: str, shard: int, row: int) -> dict[int, dict[str, Any]]:
    """What index.arrow says of the conversations in a row, by their first token. `pieces` and `piece` are added
    where a conversation was split."""
    facts = next((file for file in manifest.files if file.path == "index.arrow"), None)
    if facts is None:
        raise DataError("the manifest names no index.arrow; make the corpus again")
    found: list[dict[str, Any]] = []
    with _mapped(folder / facts.path, facts.bytes) as reader:
        if not reader.schema.equals(INDEX_SCHEMA):
            raise DataError(f"{folder / facts.path}: has other columns than an index; make the corpus again")
        for batch in reader:
            here = pc.and_(pc.equal(batch.column("shard"), shard), pc.equal(batch.column("row"), row))
            if here.true_count:
                found += (place for place in batch.filter(here).to_pylist() if place["split"] == split)
    if manifest.ledger.conversations.split:
        with _mapped(folder / facts.path, facts.bytes) as reader:
            _number_pieces(reader, found)
    return {place["start"]: place for place in found}


def _number_pieces(reader: pa.RecordBatchReader, found: list[dict[str, Any]]) -> None:
    firsts: dict[tuple[int, int], list[int]] = {(place["source"], place["record"]): [] for place in found}
    records = pa.array({record for _, record in firsts}, pa.int64())
    for batch in reader:
        near = batch.filter(pc.is_in(batch.column("record"), records))
        for source, record, first in zip(
            *(near.column(n).to_pylist() for n in ("source", "record", "first")), strict=True
        ):
            if (source, record) in firsts:
                firsts[source, record].append(first)
    for place in found:
        pieces = sorted(firsts[place["source"], place["record"]])
        place["pieces"] = len(pieces)
        place["piece"] = pieces.index(place["first"]) + 1


def _origin(manifest: Manifest, place: dict[str, Any] | None) -> str:
    if place is None or not 0 <= place["source"] < len(manifest.sources):
        return "not in index.arrow (packcorpus verify says what is wrong)"
    return f"{printable(manifest.sources[place['source']].path)}:{place['record']}"


def runs_of(encoder: Encoder, ids: np.ndarray, labels: np.ndarray) -> list[Run]:
    """Tokens of one conversation, cut where training begins or ends and around every control token."""
    found: list[Run] = []
    marks = encoder.control_strings
    for token, label in zip(ids.tolist(), labels.tolist(), strict=True):
        trained = label != IGNORED
        control = token in marks or token == encoder.unk_id
        last = found[-1] if found else None
        if last is None or control or (last.trained, last.control) != (trained, control):
            found.append(Run([token], trained, control))
        else:
            last.ids.append(token)
    return found


def _text_of(encoder: Encoder, runs: Sequence[Run], as_ids: bool) -> Text:
    """Runs as one text: ⟦ ⟧ around what is trained on, ▐ ▌ around control tokens."""
    text = Text()
    trained = False
    for run in runs:
        style = TRAINED_STYLE if run.trained else UNTRAINED_STYLE
        gap = " " if as_ids and text.plain else ""
        if run.trained != trained:
            mark = TRAINED[0] if run.trained else TRAINED[1]
            text.append(gap + mark if run.trained else mark + gap, TRAINED_STYLE)
            trained, gap = run.trained, ""
        if as_ids:
            text.append(gap + " ".join(map(str, run.ids)), style)
        elif run.control:
            colour = "green" if run.trained else "default"
            text.append(CONTROL[0], colour)
            text.append(printable(encoder.decode(run.ids)), f"bold reverse {colour}")
            text.append(CONTROL[1], colour)
        else:
            text.append_text(_styled(encoder.decode(run.ids), style))
    if trained:
        text.append(TRAINED[1], TRAINED_STYLE)
    return text


def _print_hanging(console: Console, text: Text, indent: int = 2) -> None:
    """Print with every line moved in. Only a terminal gets lines that are wrapped; a pipe gets the data's own."""
    if console.is_terminal:
        lines = text.wrap(console, max(console.width - indent, 20))
    else:
        lines = text.split("\n", allow_blank=True)
    for line in lines:
        console.print(Text.assemble(" " * indent, line), soft_wrap=True)


def _print_row(
    manifest: Manifest, folder: Path, split: str, shard: int, at: int, row: dict[str, Any], ids: bool, console: Console
) -> None:
    encoder = _open_tokenizer(manifest, folder)
    tokens, labels, positions = row["input_ids"], row["labels"], row["position_ids"]
    if tokens.min() < 0 or tokens.max() >= encoder.vocab_size:
        raise DataError("the row holds ids that the tokenizer does not have; packcorpus verify says where")
    filled = int(row["attention_mask"].sum())
    starts = np.flatnonzero(positions[:filled] == 0).tolist()
    ends = [*starts[1:], filled]
    places = _find_pieces(manifest, folder, split, shard, at)
    trained = int((labels[:filled] != IGNORED).sum())
    length = manifest.sequence_length
    console.print(
        f"{_count(len(starts), 'conversation')}, {_count(filled, 'token')} of {length:,}, {trained:,} trained "
        f"({100 * trained / max(filled, 1):.0f} %), {_count(length - filled, 'pad')}",
        soft_wrap=True,
    )
    _print_legend(console)
    for number, (start, end) in enumerate(zip(starts, ends, strict=True), 1):
        place = places.get(start)
        own = labels[start:end]
        facts = [_count(end - start, "token"), f"{int((own != IGNORED).sum()):,} trained"]
        if place and place["truncated"]:
            facts.append("truncated")
        if place and (place["first"] or place.get("pieces", 1) > 1):
            facts.append(f"piece {place['piece']} of {place['pieces']}, from its token {place['first']:,}")
        console.print()
        _print_conversation_head(console, f"{number}/{len(starts)}", _origin(manifest, place), facts)
        runs = runs_of(encoder, tokens[start:end], own)
        _print_hanging(console, _text_of(encoder, runs, as_ids=False))
        if ids:
            _print_hanging(console, Text.assemble(("ids ", "dim"), _text_of(encoder, runs, as_ids=True)))
    if filled < length:
        console.print()
        share = f"{100 * (length - filled) / length:.1f} % of the row"
        console.print(Text.assemble(("━━ ", "dim"), _count(length - filled, "pad"), (f"  {share}", "dim")))


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _print_legend(console: Console) -> None:
    legend = Text.assemble(
        (f"{TRAINED[0]}trained on{TRAINED[1]}", TRAINED_STYLE), "  ", ("not trained on", UNTRAINED_STYLE), "  ",
        CONTROL[0], ("control token", "bold reverse"), CONTROL[1], "  ", ("\\x1b", ESCAPED_STYLE), " escaped character",
    )  # fmt: skip
    console.print(legend, soft_wrap=True)


def _print_conversation_head(console: Console, number: str, origin: str, facts: Sequence[str]) -> None:
    head = Text.assemble(("━━ ", "cyan"), (f"{number}  ", "dim"), (origin, HEADING_STYLE))
    facts_text = Text(" · ".join(facts), "dim")
    if console.is_terminal and head.cell_len + facts_text.cell_len + 2 > console.width:
        console.print(head, soft_wrap=True)
        console.print(Text.assemble("   ", facts_text), soft_wrap=True)
    else:
        console.print(Text.assemble(head, "  ", facts_text), soft_wrap=True)


def _print_messages(
    manifest: Manifest, folder: Path, split: str, shard: int, at: int, row: dict[str, Any], console: Console
) -> None:
    place = _find_pieces(manifest, folder, split, shard, at).get(0)
    facts = []
    if place:
        facts = [_count(place["length"], "token"), f"{place['trained']:,} trained"]
    console.print()
    _print_conversation_head(console, "1/1", _origin(manifest, place), facts)
    if row["tools"]:
        _print_titled(console, "tools", _pretty(row["tools"]))
    for message in row["messages"]:
        title = message["role"] + "".join(
            f" {name} {message[name]}" for name in ("name", "tool_call_id") if message[name] is not None
        )
        _print_titled(console, title, message["content"] or "")
        for call in message["tool_calls"] or []:
            function = call["function"]
            _print_titled(console, f"  calls {function['name']}", _pretty(function["arguments"] or ""), 4)


def _print_titled(console: Console, title: str, content: str, indent: int = 2) -> None:
    console.print(Text.assemble(CONTROL[0], (printable(title), "bold reverse"), CONTROL[1]), soft_wrap=True)
    if content:
        _print_hanging(console, _styled(content, ""), indent)


def _pretty(text: str) -> str:
    """JSON text, indented; other text as it is."""
    try:
        return orjson.dumps(orjson.loads(text), option=orjson.OPT_INDENT_2).decode()
    except orjson.JSONDecodeError:
        return text
