"""One row of a corpus as text: conversation by conversation, with what is trained on marked.

    manifest + shard + index + tokenizer ─show_row─▶ ⟦trained⟧, not trained, ▐control token▌

What the data says is shown as text and never obeyed. Every mark is a symbol as well as a colour.
"""

from __future__ import annotations

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
from rich.text import Text

from tasks.corpus_files import find_listed, open_tokenizer, reading
from tasks.encoders import Encoder
from tasks.errors import DataError, UsageError
from tasks.index import INDEX_SCHEMA
from tasks.manifest import Manifest, Shard, corpus_folder, load_manifest
from tasks.printable import CONTROL, MARKS, TRAINED, counted, escaped, is_plain, printable
from tasks.shards import IGNORED, conversation_schema, row_schema

TRAINED_STYLE, UNTRAINED_STYLE, ESCAPED_STYLE, HEADING_STYLE = "bold green", "dim", "magenta", "bold cyan"


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
        raise UsageError("bad_command_line", "--ids: a corpus of format 2.0 holds text, no tokens; leave --ids out")
    place, shard, at = _find_row(manifest, number, split)
    rows = manifest.splits[split].rows
    console.print(
        Text.assemble((f"row {number:,}", "bold"), f" of {rows:,} in {split}", (f"  {shard.path}, row {at:,}", "dim")),
        soft_wrap=True,
    )
    if manifest.format_version == "2.0":
        value = _read_row(folder, shard, conversation_schema(manifest.sequence_length, manifest.key), at)
        _print_messages(manifest, folder, split, place, at, value, console)
    else:
        value = _read_row(folder, shard, row_schema(manifest.sequence_length, manifest.key), at)
        _print_row(manifest, folder, split, place, at, value, ids, console)


def as_object(path: Path, number: int | None, split: str) -> dict[str, Any]:
    """The manifest, and row `number` of a split as it stands in its shard, with what index.arrow says of it; for JSON.

    Raises what `show_row` raises.
    """
    manifest = load_manifest(path)
    found: dict[str, Any] = {"manifest": str(path)}
    if number is None:
        return found | {"content": manifest.model_dump(mode="json")}
    folder = corpus_folder(manifest, path)
    place, shard, at = _find_row(manifest, number, split)
    schema = row_schema if manifest.packing_metadata.enabled else conversation_schema
    columns = _read_row(folder, shard, schema(manifest.sequence_length, manifest.key), at)
    pieces = _find_pieces(manifest, folder, split, place, at)
    return found | {
        "split": split,
        "row": number,
        "shard": shard.path,
        "row_of_shard": at,
        "columns": {
            name: getattr(values, "tolist", lambda values=values: values)() for name, values in columns.items()
        },
        "conversations": [pieces[start] | {"origin": _origin(manifest, pieces[start])} for start in sorted(pieces)],
    }


def _find_row(manifest: Manifest, number: int, split: str) -> tuple[int, Shard, int]:
    """Number of the shard within its split, the shard, and the row within it."""
    if split not in manifest.splits:
        raise UsageError(
            "bad_command_line", f"--split {split}: this corpus has {' and '.join(map(printable, manifest.splits))}"
        )
    chosen = manifest.splits[split]
    if chosen.rows == 0:
        raise UsageError("bad_command_line", f"--split {split}: this corpus has no {split} rows")
    if not 0 <= number < chosen.rows:
        raise UsageError(
            "bad_command_line", f"--row {number}: {split} has {chosen.rows:,} rows, 0 to {chosen.rows - 1:,}"
        )
    at = number
    for place, shard in enumerate(chosen.shards):
        if at < shard.rows:
            return place, shard, at
        at -= shard.rows
    raise DataError("wrong_count", f"the shards of {split} hold fewer rows than the manifest says ({chosen.rows:,})")


@contextmanager
def _mapped(folder: Path, name: str, size: int) -> Iterator[pa.RecordBatchReader]:
    """An Arrow stream of the corpus, mapped. Raises DataError or InputMissing where it is not as the manifest says."""
    path = find_listed(folder, name, size)
    with reading(path), pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
        yield reader


def _read_row(folder: Path, shard: Shard, schema: pa.Schema, at: int) -> dict[str, Any]:
    """One row of a shard; only the pages that it lies on are read."""
    path = folder / shard.path
    with _mapped(folder, shard.path, shard.bytes) as reader:
        if not reader.schema.equals(schema, check_metadata=True):
            raise DataError(
                "foreign_shard",
                f"{path}: belongs to another corpus (its schema or its key differ); make the corpus again",
            )
        for batch in reader:
            if at < batch.num_rows:
                row = batch.slice(at, 1)
                if batch.schema.names[0] == "messages":
                    return dict(row.to_pylist()[0])
                return {name: row.column(name).flatten().to_numpy() for name in batch.schema.names}
            at -= batch.num_rows
    raise DataError("wrong_count", f"{path}: holds fewer rows than the manifest says; make the corpus again")


def _find_pieces(manifest: Manifest, folder: Path, split: str, shard: int, row: int) -> dict[int, dict[str, Any]]:
    """What index.arrow says of the conversations in a row, by their first token. `pieces` and `piece` are added
    where a conversation was split."""
    facts = next((file for file in manifest.files if file.path == "index.arrow"), None)
    if facts is None:
        raise DataError("bad_index", "the manifest names no index.arrow; make the corpus again")
    found: list[dict[str, Any]] = []
    with _mapped(folder, facts.path, facts.bytes) as reader:
        if not reader.schema.equals(INDEX_SCHEMA):
            raise DataError(
                "bad_index", f"{folder / facts.path}: has other columns than an index; make the corpus again"
            )
        for batch in reader:
            here = pc.and_(pc.equal(batch.column("shard"), shard), pc.equal(batch.column("row"), row))
            if here.true_count:
                found += (place for place in batch.filter(here).to_pylist() if place["split"] == split)
    if manifest.ledger.conversations.split:
        with _mapped(folder, facts.path, facts.bytes) as reader:
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
        pieces = sorted({*firsts[place["source"], place["record"]]})
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


def text_of(encoder: Encoder, runs: Sequence[Run], as_ids: bool) -> Text:
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


def print_hanging(console: Console, text: Text, indent: int = 2) -> None:
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
    encoder = open_tokenizer(manifest, folder)
    tokens, labels, positions = row["input_ids"], row["labels"], row["position_ids"]
    if tokens.min() < 0 or tokens.max() >= encoder.vocab_size:
        raise DataError("bad_row", "the row holds ids that the tokenizer does not have; packcorpus verify says where")
    filled = int(row["attention_mask"].sum())
    starts = np.flatnonzero(positions[:filled] == 0).tolist()
    ends = [*starts[1:], filled]
    places = _find_pieces(manifest, folder, split, shard, at)
    trained = int((labels[:filled] != IGNORED).sum())
    length = manifest.sequence_length
    console.print(
        f"{counted(len(starts), 'conversation')}, {counted(filled, 'token')} of {length:,}, {trained:,} trained "
        f"({100 * trained / max(filled, 1):.0f} %), {counted(length - filled, 'pad')}",
        soft_wrap=True,
    )
    print_legend(console)
    for number, (start, end) in enumerate(zip(starts, ends, strict=True), 1):
        place = places.get(start)
        own = labels[start:end]
        facts = [counted(end - start, "token"), f"{int((own != IGNORED).sum()):,} trained"]
        if place and place["truncated"]:
            facts.append("truncated")
        if place and (place["first"] or place.get("pieces", 1) > 1):
            facts.append(f"piece {place['piece']} of {place['pieces']}, from its token {place['first']:,}")
        console.print()
        print_conversation_head(console, f"{number}/{len(starts)}", _origin(manifest, place), facts)
        runs = runs_of(encoder, tokens[start:end], own)
        print_hanging(console, text_of(encoder, runs, as_ids=False))
        if ids:
            print_hanging(console, Text.assemble(("ids ", "dim"), text_of(encoder, runs, as_ids=True)))
    if filled < length:
        console.print()
        share = f"{100 * (length - filled) / length:.1f} % of the row"
        console.print(Text.assemble(("━━ ", "dim"), counted(length - filled, "pad"), (f"  {share}", "dim")))


def print_legend(console: Console) -> None:
    legend = Text.assemble(
        (f"{TRAINED[0]}trained on{TRAINED[1]}", TRAINED_STYLE), "  ", ("not trained on", UNTRAINED_STYLE), "  ",
        CONTROL[0], ("control token", "bold reverse"), CONTROL[1], "  ", ("\\x1b", ESCAPED_STYLE), " escaped character",
    )  # fmt: skip
    console.print(legend, soft_wrap=True)


def print_conversation_head(console: Console, number: str, origin: str, facts: Sequence[str]) -> None:
    head = Text.assemble(("━━ ", "cyan"), (f"{number}  " if number else "", "dim"), (origin, HEADING_STYLE))
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
        facts = [counted(place["length"], "token"), f"{place['trained']:,} trained"]
    console.print()
    print_conversation_head(console, "1/1", _origin(manifest, place), facts)
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
        print_hanging(console, _styled(content, ""), indent)


def _pretty(text: str) -> str:
    """JSON text, indented; other text as it is."""
    try:
        return orjson.dumps(orjson.loads(text), option=orjson.OPT_INDENT_2).decode()
    except orjson.JSONDecodeError:
        return text


def _styled(text: str, style: str) -> Text:
    """`text` as `printable` has it, what was escaped in a colour of its own."""
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
