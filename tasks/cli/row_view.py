"""Rows and conversations of a corpus as text, with what is trained on marked.

row N              ─┐                                  ┌─▶ a head with its line in the source, and with its number
number, file:line  ─┴─▶ places ─▶ shard + tokenizer ───┴─▶ ⟦trained on⟧, not trained on, ▐control token▌
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.console import Console
from rich.text import Text

from tasks.cli.token_text import print_conversation_head, print_hanging, print_legend, styled, text_of
from tasks.core.printable import CONTROL, counted, printable
from tasks.encoders.encoder import Encoder
from tasks.inspection.lookup import Place, find_row, origin, pieces_in_row, row_number
from tasks.inspection.rows import encoder_for_row, open_shard, read_row, why_dropped
from tasks.inspection.token_runs import runs_of
from tasks.storage.manifest import Manifest
from tasks.storage.schemas import IGNORED

# Rows that are named beside the first one in which a conversation stands.
SHOWN_COPIES = 10


def show_row(path: Path, number: int, split: str, ids: bool, console: Console) -> None:
    """Show row `number` of a split, counted from 0 over all its shards, decoded conversation by conversation.

    Raises UsageError where there is no such row, DataError or InputMissing where a file is not what it was.
    """
    manifest, folder = open_shard(path, ids)
    place, shard, at = find_row(manifest, number, split)
    rows = manifest.splits[split].rows
    console.print(
        Text.assemble((f"row {number:,}", "bold"), f" of {rows:,} in {split}", (f"  {shard.path}, row {at:,}", "dim")),
        soft_wrap=True,
    )
    row = read_row(manifest, folder, shard, at)
    places = pieces_in_row(manifest, folder, split, place, at)
    if manifest.format_version == "2.0":
        console.print()
        _print_messages(manifest, "1/1", places[0] if places else None, row, console)
        return
    encoder = encoder_for_row(manifest, folder, row)
    positions, labels = row["position_ids"], row["labels"]
    filled = int(row["attention_mask"].sum())
    starts = np.flatnonzero(positions[:filled] == 0).tolist()
    trained = int((labels[:filled] != IGNORED).sum())
    length = manifest.sequence_length
    console.print(
        f"{counted(len(starts), 'conversation')}, {counted(filled, 'token')} of {length:,}, {trained:,} trained "
        f"({100 * trained / max(filled, 1):.0f} %), {counted(length - filled, 'pad')}",
        soft_wrap=True,
    )
    print_legend(console, ids)
    by_start = {place["start"]: place for place in places}
    for index, (start, end) in enumerate(zip(starts, [*starts[1:], filled], strict=True), 1):
        console.print()
        _print_piece(manifest, encoder, f"{index}/{len(starts)}", by_start.get(start), row, start, end, ids, console)
    if filled < length:
        console.print()
        share = f"{100 * (length - filled) / length:.1f} % of the row"
        console.print(Text.assemble(("━━ ", "dim"), counted(length - filled, "pad"), (f"  {share}", "dim")))


def show_conversation(path: Path, places: Sequence[Place], ids: bool, console: Console) -> None:
    """Show a conversation by itself: each of its pieces, and all rows where it stands; or why it is in none.

    Raises as show_row does.
    """
    manifest, folder = open_shard(path, ids)
    first = places[0]
    pieces: dict[int, list[Place]] = {}
    for place in places:
        pieces.setdefault(place["first"] or 0, []).append(place)
    head = Text.assemble((f"conversation {first['number']:,}", "bold"), f"  {origin(manifest, first)}")
    if len(pieces) > 1:
        head.append(f"  {len(pieces)} pieces", "dim")
    if (times := len(places) // len(pieces)) > 1:
        head.append(f"  packed {times:,} times", "dim")
    console.print(head, soft_wrap=True)
    if manifest.format_version == "3.0" and any(place["row"] is not None for place in places):
        print_legend(console, ids)
    encoder: Encoder | None = None
    for place, *others in pieces.values():
        console.print()
        if place["row"] is None:
            console.print(Text(f"dropped: {why_dropped(manifest, folder, place)}", "yellow"), soft_wrap=True)
            file = shlex.quote(printable(manifest.sources[place["source"]].path))
            line = f"packcorpus inspect {file} --line {place['record']}"
            console.print(Text(f"what it says: {line}", "dim"), soft_wrap=True)
            continue
        shard = manifest.splits[place["split"]].shards[place["shard"]]
        row = read_row(manifest, folder, shard, place["row"])
        label = f"row {row_number(manifest, place):,} of {place['split']}"
        if manifest.format_version == "2.0":
            _print_messages(manifest, label, place, row, console)
        else:
            start, end = place["start"], place["start"] + place["length"]
            label += f", places {start:,} to {end - 1:,}"
            encoder = encoder or encoder_for_row(manifest, folder, row)
            _print_piece(manifest, encoder, label, place, row, start, end, ids, console)
        if others:
            print_hanging(console, Text(_also(manifest, others), "dim"))


def _also(manifest: Manifest, places: Sequence[Place]) -> str:
    """The rows where further copies of a piece stand."""
    told = [
        f"row {row_number(manifest, place):,} of {place['split']}"
        + (f" from place {place['start']:,}" if manifest.format_version == "3.0" else "")
        for place in places[:SHOWN_COPIES]
    ]
    more = f" and {len(places) - SHOWN_COPIES:,} more" if len(places) > SHOWN_COPIES else ""
    return f"also in {', '.join(told)}{more}"


def _print_piece(
    manifest: Manifest,
    encoder: Encoder,
    label: str,
    place: Place | None,
    row: dict[str, Any],
    start: int,
    end: int,
    ids: bool,
    console: Console,
) -> None:
    """Places `start` to `end` of a row: one conversation, or a piece of one."""
    tokens, labels = row["input_ids"][start:end], row["labels"][start:end]
    facts = [counted(end - start, "token"), f"{int((labels != IGNORED).sum()):,} trained"]
    if place:
        facts.append(f"#{place['number']:,}")
        if place["truncated"]:
            facts.append("truncated")
        if place["first"] or place.get("pieces", 1) > 1:
            facts.append(f"piece {place['piece']} of {place['pieces']}, from its token {place['first']:,}")
    print_conversation_head(console, label, origin(manifest, place), facts)
    runs = runs_of(encoder, tokens, labels)
    print_hanging(console, text_of(encoder, runs, boundaries=ids))
    if ids:
        print_hanging(console, Text.assemble(("ids ", "dim"), text_of(encoder, runs, as_ids=True)))


def _print_messages(manifest: Manifest, label: str, place: Place | None, row: dict[str, Any], console: Console) -> None:
    facts = []
    if place:
        facts = [counted(place["length"], "token"), f"{place['trained']:,} trained", f"#{place['number']:,}"]
    print_conversation_head(console, label, origin(manifest, place), facts)
    if row["messages"] is None:
        _print_titled(console, "text", row["text"])
    else:
        print_messages(row["messages"], row["tools"], console)


def print_messages(messages: Sequence[dict[str, Any]], tools: str | None, console: Console) -> None:
    """Messages as format 2.0 has them, each under its role."""
    if tools:
        _print_titled(console, "tools", _pretty(tools))
    for message in messages:
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
        print_hanging(console, styled(content, ""), indent)


def _pretty(text: str) -> str:
    """JSON text, indented; other text as it is."""
    try:
        return orjson.dumps(orjson.loads(text), option=orjson.OPT_INDENT_2).decode()
    except orjson.JSONDecodeError:
        return text
