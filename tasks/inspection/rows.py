"""Read a row, or all pieces of a conversation, as text.

split, row number        ─row_of_split─▶ Row            ┐
places from index.arrow  ─conversation─▶ Conversation   ┴─ Pieces: place, source line, and Spans of text

ids, labels ─runs_of─▶ Runs of ids ─spans_of─▶ Spans of text
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packcorpus.tasks.core.errors import DataError, InputMissing, UsageError
from packcorpus.tasks.core.printable import counted, printable
from packcorpus.tasks.corpus.summary import DROPPED
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.encoders.tokenizer_files import open_tokenizer
from packcorpus.tasks.inspection.lookup import (
    Place,
    find_row,
    kept_in_place_of,
    listed_drop,
    origin,
    pieces_in_row,
    row_number,
)
from packcorpus.tasks.storage.corpus_folder import check_copies, check_unchanged, checked_folder
from packcorpus.tasks.storage.facts import Shard
from packcorpus.tasks.storage.manifest import Manifest, load_manifest, lost_hint
from packcorpus.tasks.storage.schemas import END, IGNORED, LOSS_WEIGHT
from packcorpus.tasks.storage.shards import (
    bounds_of_pieces,
    open_shard,
    path_before,
    read_rows,
    rows_of,
    sample_of_piece,
)

Piece = dict[str, Any]
"""A Place with `row_of_split` (the number that --row takes), `origin` (FILE:LINE), and, in a packed corpus, `spans`.

`loss_weight` has the least and the greatest weight of the trained tokens, if rows have weights.

If the corpus has `share`, `path` has the runs of tokens of its row that precede the piece in its sample: lists of the
first place and the place after the last. `under` is the number of the piece of the row, from 0, that has the last of
these tokens; it is None if the piece begins a tree. `level` is 0 for such a piece, and otherwise one more than that of
the piece it is under.
"""


@dataclass(frozen=True)
class Row:
    """One row of a split. In format 2.0, it is one conversation."""

    manifest: Path
    split: str
    row: int
    shard: str
    row_of_shard: int
    columns: dict[str, Any]
    conversations: list[Piece]
    rows_of_split: int
    tokens: int
    trained: int
    padding: int
    longest: int  # tokens of the longest conversation or sample
    squares: int  # sum of the squared lengths of the conversations, without shared tokens: the cost of attention


@dataclass(frozen=True)
class Conversation:
    """A conversation and its pieces, once for every row that contains them.

    If the conversation was dropped, its only piece has the reason, `why`, instead of a row.
    """

    manifest: Path
    conversation: int
    pieces: list[Piece]


def row_of_split(path: Path, number: int, split: str, tokens: bool = False) -> Row:
    """Read one row of a split.

    `number` counts from 0 over all shards of the split. With `tokens`, spans also have the text of each token. Raises
    UsageError if there is no such row, and DataError or InputMissing if a file is missing or damaged.
    """
    manifest, folder = _open_corpus(path, tokens)
    place, shard, at = find_row(manifest, number, split)
    columns = read_row(manifest, folder, shard, at)
    places = pieces_in_row(manifest, folder, split, place, at)
    if manifest.format_version == "2.0":
        # A row is shown even if a damaged index lacks it.
        pieces = [place_in_corpus(manifest, places[0] if places else None)]
        return Row(path, split, number, shard.path, at, columns, pieces, manifest.splits[split].rows, 0, 0, 0, 0, 0)
    encoder = encoder_for_row(manifest, folder, columns)
    by_start = {place["start"]: place for place in places}
    bounds = bounds_of_pieces(columns["attention_mask"][None], columns["position_ids"][None])
    pieces, longest, squares = list[Piece](), 0, 0
    for start, length in zip(*(values.tolist() for values in bounds), strict=True):
        inside, before = slice(start, start + length), 0
        piece = place_in_corpus(manifest, by_start.get(start)) | {"start": start, "length": length}
        piece["trained"] = int((columns["labels"][inside] != IGNORED).sum())
        if END in columns:
            shared = path_before(columns[END], start)
            piece |= _branch(shared, pieces)
            before = len(shared)
        longest, squares = max(longest, before + length), squares + (before + length) ** 2 - before**2
        pieces.append(piece | _tokens_of({name: values[inside] for name, values in columns.items()}, encoder, tokens))
    filled, trained = int(columns["attention_mask"].sum()), int((columns["labels"] != IGNORED).sum())
    padding = len(columns["input_ids"]) - filled
    if manifest.row_layout.padding == "none":  # these rows have no mask
        columns = {name: values for name, values in columns.items() if name != "attention_mask"}
        columns["max_seqlen"] = columns["max_seqlen"][0]
    return Row(
        path, split, number, shard.path, at, {name: values.tolist() for name, values in columns.items()}, pieces,
        manifest.splits[split].rows, filled, trained, padding, longest, squares,
    )  # fmt: skip


def _branch(path: np.ndarray, before: Sequence[Piece]) -> Piece:
    """Return the keys of a piece for its place in a tree.

    `path` are the places of its path, and `before` the pieces of its row before it.
    """
    if not len(path) or not before:
        return {"path": [], "under": None, "level": 0}
    under = max((number for number, piece in enumerate(before) if piece["start"] <= path[-1]), default=0)
    return {"path": runs_of_places(path), "under": under, "level": before[under]["level"] + 1}


def runs_of_places(places: np.ndarray) -> list[list[int]]:
    """Return ascending places as runs: lists of the first place and the end."""
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    return [[int(run[0]), int(run[-1]) + 1] for run in runs if len(run)]


def conversation(path: Path, places: Sequence[Place], tokens: bool = False) -> Conversation:
    """Read every piece of a conversation, each with the tokens of its path.

    With `tokens`, spans also have the text of each token. Raises DataError or InputMissing if a file is missing or
    damaged.
    """
    manifest, folder = _open_corpus(path, tokens)
    encoder: Encoder | None = None
    pieces = []
    for place in places:
        piece = place_in_corpus(manifest, place)
        if place["row"] is None:
            piece["why"] = why_dropped(manifest, folder, place)
        else:
            row = read_row(manifest, folder, manifest.splits[place["split"]].shards[place["shard"]], place["row"])
            if manifest.format_version == "2.0":
                piece |= row
            else:
                if END in row:
                    piece["path"] = runs_of_places(path_before(row[END], place["start"]))
                sample = sample_of_piece(row, place["start"], place["length"])
                ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
                encoder = encoder_for_row(manifest, folder, row, encoder)
                piece |= {"input_ids": ids, "labels": labels, "text": encoder.decode(ids)}
                piece |= _tokens_of(sample, encoder, tokens)
        pieces.append(piece)
    return Conversation(path, places[0]["number"], pieces)


def _tokens_of(columns: dict[str, np.ndarray], encoder: Encoder, tokens: bool) -> dict[str, Any]:
    """Return the spans of tokens, and the range of their weights if they have any."""
    labels = columns["labels"]
    found: dict[str, Any] = {"spans": spans_of(encoder, columns["input_ids"], labels, tokens)}
    if LOSS_WEIGHT in columns:
        weights = columns[LOSS_WEIGHT][labels != IGNORED]
        found[LOSS_WEIGHT] = [float(weights.min()), float(weights.max())] if len(weights) else []
    return found


def why_dropped(manifest: Manifest, folder: Path, place: Place) -> str:
    """Return why a conversation is in no row, with the numbers that decided."""
    reason, config = place["dropped"], manifest.config
    if reason == "too_long" and config.get("overlong") == "turns":
        return (
            f"no trained turn of its {place['length']:,} tokens ends within a row of {manifest.sequence_length:,} "
            "(overlong: turns)"
        )
    if reason == "too_long":
        return f"its {place['length']:,} tokens exceed a row of {manifest.sequence_length:,} (overlong: drop)"
    if reason in ("min_tokens", "max_tokens", "min_turns", "max_turns"):
        counts = counted(place["length"], "token") if reason.endswith("tokens") else counted(place["turns"], "turn")
        return f"it has {counts}, {reason} is {config.get(reason):,}"
    if reason == "duplicate":
        kept = kept_in_place_of(manifest, folder, place)
        if kept is None:
            return "duplicate of an earlier conversation, which was rejected"
        return f"duplicate of {origin(manifest, kept)} (#{kept['number']:,})"
    if reason == "contaminated":
        listed = listed_drop(manifest, folder, place)
        item = listed["item"]
        where = f"{printable(item['source'])}:{item.get('line', item.get('record'))}"
        return f"overlaps with {where} of an evaluation set: {printable(listed['text'])}"
    if reason == "near_duplicate":
        listed = listed_drop(manifest, folder, place)
        kept, similarity = listed["kept"], listed["similarity"]
        where = f"{printable(kept['source'])}:{kept.get('line', kept.get('record'))}"
        return f"near-duplicate of {where}: {100 * similarity:.0f} % of their runs of tokens are the same"
    entry = manifest.mixture[manifest.sources[place["source"]].entry]
    if reason == "limit":
        return f"over the limit of its source ({printable(entry.path)}: {entry.limit or 0:,}), chosen by the seed"
    if reason == "weight":
        weight = f"{printable(entry.path)}: {entry.weight:g}, weighting: {config.get('weighting')}"
        return f"left out by the weight of its source ({weight}), chosen by the seed"
    if reason == "no_trained_tokens":
        return f"this turn has no trained token in a row of {manifest.sequence_length:,} tokens"
    return DROPPED.get(reason, printable(str(reason)))


def place_in_corpus(manifest: Manifest, place: Place | None) -> Piece:
    """Add the row number and the origin to a place, or to None if the index lacks it."""
    row = row_number(manifest, place) if place else None
    return (place or {"number": None}) | {"row_of_split": row, "origin": origin(manifest, place)}


def read_row(manifest: Manifest, folder: Path, shard: Shard, at: int) -> dict[str, Any]:
    """Read the columns of one row; check the whole shard."""
    check_unchanged(folder, shard)
    [(_, row)] = read_rows(manifest, folder, shard, [at])
    return row


def _open_corpus(path: Path, tokens: bool) -> tuple[Manifest, Path]:
    manifest = load_manifest(path)
    if tokens and manifest.format_version == "2.0":
        raise UsageError("bad_command_line", "--ids: a corpus of format 2.0 contains text, not tokens; omit --ids")
    return manifest, checked_folder(manifest, path)


def encoder_for_row(manifest: Manifest, folder: Path, row: dict[str, Any], encoder: Encoder | None = None) -> Encoder:
    """Open the tokenizer, unless it is given, and check that it has the row's ids."""
    encoder = encoder or open_tokenizer(manifest, folder)
    if row["input_ids"].min() < 0 or row["input_ids"].max() >= encoder.vocab_size:
        raise DataError(
            "bad_row", "the row holds ids that the tokenizer does not have; run packcorpus verify to locate them"
        )
    return encoder


# -- shards ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardFigures:
    """The figures of one shard. In format 2.0, all fields after `rows` are None."""

    shard: Path
    manifest: Path
    split: str
    first_row: int
    rows: int
    tokens: int | None = None
    trained: int | None = None
    fill: float | None = None  # percentage of places that hold a token
    conversations: int | None = None  # or samples
    least: int | None = None  # of them per row
    most: int | None = None
    noun: str = "conversation"  # or sample


def row_of_shard(path: Path, row: int) -> tuple[Path, str, int]:
    """Return the manifest of a shard, its split, and the number of a row in the split.

    `row` is the number in the shard. Raises UsageError if the shard has fewer rows, and InputMissing if there is no
    manifest in its folder.
    """
    manifest, split, before, shard = _shard_of(path)
    if not 0 <= row < shard.rows:
        raise UsageError("not_in_it", f"--row {row}: {path.name} has {shard.rows:,} rows, from 0")
    return manifest, split, before + row


def _shard_of(path: Path) -> tuple[Path, str, int, Shard]:
    """Return (manifest, split, number of the shard's first row in the split, shard)."""
    beside = path.parent / "manifest.json"
    if not beside.is_file():
        fix = lost_hint(beside) or "; move it back to its folder"
        raise InputMissing("manifest_missing", f"{path}: is a shard without a manifest.json beside it{fix}")
    check_copies(beside, path.parent)
    for name, split in load_manifest(beside).splits.items():
        before = 0
        for shard in split.shards:
            if shard.path == path.name:
                return beside, name, before, shard
            before += shard.rows
    raise UsageError("bad_command_line", f"{path}: is not a shard of the corpus in its folder")


def shard_figures(path: Path) -> ShardFigures:
    """Count the figures of a shard from its rows."""
    beside, split, first_row, shard = _shard_of(path)
    manifest = load_manifest(beside)
    if manifest.format_version == "2.0":
        return ShardFigures(path, beside, split, first_row, shard.rows)
    check_unchanged(path.parent, shard)
    length, tokens, trained, counts = manifest.length_of(shard.path), 0, 0, [np.zeros(0, np.int64)]
    with open_shard(manifest, path.parent, shard) as batches:
        for rows in (rows_of(batch, length, manifest.row_layout) for batch in batches):
            counts.append(rows.pieces)
            tokens += int(rows.tokens.sum())
            trained += rows.trained
    held = np.concatenate(counts)
    return ShardFigures(
        path, beside, split, first_row, shard.rows, tokens, trained, 100 * tokens / max(shard.rows * length, 1),
        int(held.sum()), int(held.min(initial=length)), int(held.max(initial=0)),
        "sample" if manifest.ledger.samples else "conversation",
    )  # fmt: skip


# -- tokens as text ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Neighboring tokens of one kind: text or a control token, trained or not."""

    ids: list[int]
    trained: bool
    control: bool


@dataclass(frozen=True, slots=True)
class Span:
    """A run with its text and, if it was requested, the text of each token."""

    text: str
    trained: bool
    control: bool
    ids: list[int]
    tokens: list[str] | None = None


def runs_of(encoder: Encoder, ids: np.ndarray, labels: np.ndarray) -> list[Run]:
    """Split the tokens of one conversation into runs.

    A run ends where training starts or ends. Every control token is its own run.
    """
    runs: list[Run] = []
    marks = encoder.control_strings
    for token, label in zip(ids.tolist(), labels.tolist(), strict=True):
        trained = label != IGNORED
        control = token in marks or token == encoder.unk_id
        last = runs[-1] if runs else None
        if last is None or control or (last.trained, last.control) != (trained, control):
            runs.append(Run([token], trained, control))
        else:
            last.ids.append(token)
    return runs


def spans_of(encoder: Encoder, ids: np.ndarray, labels: np.ndarray, tokens: bool = False) -> list[Span]:
    """Decode the runs of one conversation and, with `tokens`, also each token."""
    spans = []
    for run in runs_of(encoder, ids, labels):
        texts = list(_texts_of_tokens(encoder, run.ids)) if tokens else None
        spans.append(Span(encoder.decode(run.ids), run.trained, run.control, run.ids, texts))
    return spans


def _texts_of_tokens(encoder: Encoder, ids: Sequence[int]) -> Iterator[str]:
    """Yield the text of each token, or of tokens that form one character."""
    held = b""
    for token in ids:
        held += encoder.token_bytes(token)
        try:
            text = held.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                continue
            text = held.decode("utf-8", "replace")
        yield text
        held = b""
    if held:
        yield held.decode("utf-8", "replace")
