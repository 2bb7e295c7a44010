"""Read one row of a corpus with its conversations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.core.errors import DataError, UsageError
from tasks.core.printable import counted, printable
from tasks.encoders.corpus_tokenizer import open_tokenizer
from tasks.encoders.encoder import Encoder
from tasks.inspection.labels import LOST
from tasks.inspection.lookup import (
    Place,
    find_row,
    kept_in_place_of,
    origin,
    pieces_in_row,
    row_number,
)
from tasks.storage.corpus_folder import check_unchanged, corpus_folder
from tasks.storage.manifest import Manifest, Shard, load_manifest
from tasks.storage.shards import read_rows


def why_dropped(manifest: Manifest, folder: Path, place: Place) -> str:
    """Why a conversation is in no row, with the numbers that decided. Raises DataError or InputMissing."""
    reason, config = place["dropped"], manifest.config
    if reason == "too_long":
        return f"its {place['length']:,} tokens are more than a row of {manifest.sequence_length:,} (overlong: drop)"
    if reason in ("min_tokens", "max_tokens", "min_turns", "max_turns"):
        counts = counted(place["length"], "token") if reason.endswith("tokens") else counted(place["turns"], "turn")
        return f"it has {counts}, {reason} is {config.get(reason):,}"
    if reason == "duplicate":
        kept = kept_in_place_of(manifest, folder, place)
        if kept is None:
            return "it says what one before it says, which was rejected"
        return f"it says what {origin(manifest, kept)} (#{kept['number']:,}) says"
    entry = manifest.mixture[manifest.sources[place["source"]].entry]
    if reason == "limit":
        return f"it is over the limit of its source ({printable(entry.path)}: {entry.limit or 0:,}), chosen by the seed"
    if reason == "weight":
        weight = f"{printable(entry.path)}: {entry.weight:g}, weighting: {config.get('weighting')}"
        return f"left out by the weight of its source ({weight}), chosen by the seed"
    return LOST.get(reason, printable(str(reason)))


def as_object(path: Path, number: int | None, split: str) -> dict[str, Any]:
    """The manifest, or row `number` of a split as it stands in its shard, with what index.arrow says of it; for JSON.

    Raises what `show_row` raises.
    """
    manifest = load_manifest(path)
    found: dict[str, Any] = {"manifest": str(path)}
    if number is None:
        return found | {"content": manifest.model_dump(mode="json")}
    folder = corpus_folder(manifest, path)
    place, shard, at = find_row(manifest, number, split)
    columns = read_row(manifest, folder, shard, at)
    pieces = pieces_in_row(manifest, folder, split, place, at)
    return found | {
        "split": split,
        "row": number,
        "shard": shard.path,
        "row_of_shard": at,
        "columns": {
            name: getattr(values, "tolist", lambda values=values: values)() for name, values in columns.items()
        },
        "conversations": [place_as_object(manifest, piece) for piece in pieces],
    }


def conversation_as_object(path: Path, places: Sequence[Place]) -> dict[str, Any]:
    """A conversation with the tokens and labels of each of its pieces, or its messages; for JSON."""
    manifest, folder = open_shard(path, False)
    pieces = []
    for place in places:
        found = place_as_object(manifest, place)
        if place["row"] is None:
            found["why"] = why_dropped(manifest, folder, place)
        else:
            row = read_row(manifest, folder, manifest.splits[place["split"]].shards[place["shard"]], place["row"])
            if manifest.format_version == "2.0":
                found |= row
            else:
                inside = slice(place["start"], place["start"] + place["length"])
                found |= {name: row[name][inside].tolist() for name in ("input_ids", "labels")}
                found["text"] = encoder_for_row(manifest, folder, row).decode(found["input_ids"])
        pieces.append(found)
    return {"manifest": str(path), "conversation": places[0]["number"], "pieces": pieces}


def place_as_object(manifest: Manifest, place: Place) -> dict[str, Any]:
    """A place with the row as `--row` takes it, and with its source by name."""
    return place | {"row_of_split": row_number(manifest, place), "origin": origin(manifest, place)}


def read_row(manifest: Manifest, folder: Path, shard: Shard, at: int) -> dict[str, Any]:
    """The columns of one row. Raises DataError or InputMissing, also where another row of its shard was damaged."""
    check_unchanged(folder, shard)
    [(_, row)] = read_rows(manifest, folder, shard, [at])
    return row


def open_shard(path: Path, ids: bool) -> tuple[Manifest, Path]:
    manifest = load_manifest(path)
    if ids and manifest.format_version == "2.0":
        raise UsageError("bad_command_line", "--ids: a corpus of format 2.0 holds text, no tokens; leave --ids out")
    return manifest, corpus_folder(manifest, path)


def encoder_for_row(manifest: Manifest, folder: Path, row: dict[str, Any]) -> Encoder:
    """The corpus's own tokenizer, which must have all ids of the row."""
    encoder = open_tokenizer(manifest, folder)
    if row["input_ids"].min() < 0 or row["input_ids"].max() >= encoder.vocab_size:
        raise DataError("bad_row", "the row holds ids that the tokenizer does not have; packcorpus verify says where")
    return encoder
