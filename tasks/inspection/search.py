"""Search the rows of a corpus for a text, and list its rejects.

    vocabulary ─token_bytes─▶ bytes of every token ─take(ids of a batch of rows)─▶ the batch as bytes ─find─▶ places

Tokens are not decoded one by one. The search works on the text that a model sees: a match is within one conversation
and may cross token boundaries. In a tree, it may begin in the tokens that come before a piece, but a match that is all
in them is only found where they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packcorpus.tasks.core.errors import UsageError
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.encoders.tokenizer_files import open_tokenizer
from packcorpus.tasks.inspection.lookup import pieces_in_row, read_rejects, row_number
from packcorpus.tasks.inspection.rows import Piece, Span, place_in_corpus, read_row, spans_of
from packcorpus.tasks.storage.corpus_folder import check_unchanged, checked_folder
from packcorpus.tasks.storage.layout import TRAIN_EPOCH_PREFIX
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.storage.schemas import END, IGNORED, offsets_of, to_arrow
from packcorpus.tasks.storage.shards import (
    RowBatch,
    bounds_of_pieces,
    open_shard,
    path_before,
    rows_of,
    sample_of_piece,
    to_dicts,
)

# Tokens converted to bytes at a time: 4 to 5 bytes each.
_TOKENS = 1 << 22
# Tokens shown on either side of a match.
AROUND = 16


@dataclass(frozen=True)
class SearchResult:
    """The first `limit` conversations that contain a text, and whether there are more."""

    manifest: Path
    search: str
    limit: int
    # Their samples and pieces with the text, without `spans`; with `trained_on` and, in a packed corpus, an `excerpt`.
    conversations: list[Piece]
    more: bool

    @property
    def count(self) -> int:
        """Return the number of conversations, each of which may have several samples."""
        return len({piece["origin"] if piece["number"] is not None else id(piece) for piece in self.conversations})


@dataclass(frozen=True)
class Excerpt:
    """The tokens around a match, and whether others are before and after."""

    spans: list[Span]
    before: bool
    after: bool


@dataclass(frozen=True)
class Rejects:
    """The rejected conversations of a corpus."""

    manifest: Path
    counts: dict[str, int]  # by reason
    rejects: list[dict[str, Any]]  # the first records of rejects.jsonl


@dataclass(frozen=True, slots=True)
class Hit:
    """A match in a conversation."""

    split: str
    shard: int
    row: int  # within the shard
    start: int  # of the conversation or piece; an offset in the row, like the first and the last token of the match
    first: int
    last: int
    trained: bool  # whether any token of the match is trained on


def search(manifest: Manifest, folder: Path, text: str, encoder: Encoder | None = None) -> Iterator[Hit]:
    """Yield the conversations that contain `text`, in the order of the rows.

    Every copy is yielded. Later epochs are skipped, because they hold the same conversations. Raises DataError or
    InputMissing if a file is missing or damaged, and UsageError if the text is empty.
    """
    if not text:
        raise UsageError("bad_command_line", "--search: the text is empty")
    needle = text.encode("utf-8", "replace")
    splits = {name: split for name, split in manifest.splits.items() if not name.startswith(TRAIN_EPOCH_PREFIX)}
    shards = [(name, n, shard) for name, split in splits.items() for n, shard in enumerate(split.shards)]
    vocabulary = None
    if manifest.format_version != "2.0":
        encoder = encoder or open_tokenizer(manifest, folder)
        vocabulary = pa.array([encoder.token_bytes(token) for token in range(encoder.vocab_size)], pa.binary())
    for split, number, shard in shards:
        at, step = 0, max(1, _TOKENS // manifest.length_of(shard.path))
        check_unchanged(folder, shard)
        with open_shard(manifest, folder, shard) as batches:
            for rows in (batch.slice(top, step) for batch in batches for top in range(0, batch.num_rows, step)):
                if vocabulary is None:
                    for row, found in enumerate(to_dicts(rows.select(["text"]))):
                        if text in found["text"]:
                            yield Hit(split, number, at + row, 0, 0, 0, False)
                else:
                    columns = rows_of(rows, manifest.length_of(shard.path), manifest.row_layout)
                    for row, start, first, last, trained in _in_rows(columns, vocabulary, needle):
                        yield Hit(split, number, at + row, start, first, last, trained)
                at += rows.num_rows


def _in_rows(rows: RowBatch, vocabulary: pa.Array, needle: bytes) -> Iterator[tuple[int, int, int, int, bool]]:
    """Yield the first match in each conversation: the last five fields of a Hit."""
    length, labels = rows.ids.shape[1], rows.labels.reshape(-1)
    places, starts, own = _places_to_search(rows, vocabulary, len(needle))
    written, offsets = _bytes_of(rows.ids.reshape(-1)[places], vocabulary)
    at = written.find(needle)
    while at >= 0:
        # The token with the first byte; tokens without bytes have the offset of the next token.
        first = int(np.searchsorted(offsets, at, "right")) - 1
        last = int(np.searchsorted(offsets, at + len(needle), "left")) - 1
        piece = int(np.searchsorted(starts, first, "right")) - 1
        if last < starts[piece + 1] and last >= own[piece]:
            trained = bool((labels[places[max(first, own[piece]) : last + 1]] != IGNORED).any())
            row, start = divmod(int(rows.starts[piece]), length)
            yield row, start, int(places[first]) % length, int(places[last]) % length, trained
            at = written.find(needle, int(offsets[starts[piece + 1]]))
        else:
            at = written.find(needle, at + 1)


def _places_to_search(rows: RowBatch, vocabulary: pa.Array, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the places of all pieces, each with the end of its path before it.

    Also returns where each piece begins among these places, with the end of the last, and where the tokens begin that
    are its own. The end of a path is as long as a match of `size` bytes that ends in the piece may need it.
    """
    places = np.flatnonzero(rows.filled)
    starts = offsets_of(rows.lengths)
    if rows.ends is None:
        return places, starts, starts[:-1]
    length, flat = rows.ids.shape[1], rows.ids.reshape(-1)
    before = [np.zeros(0, np.int64)] * len(rows.starts)
    for piece in np.flatnonzero(rows.positions.reshape(-1)[rows.starts]).tolist():
        row, start = divmod(int(rows.starts[piece]), length)
        path = path_before(rows.ends[row], start) + row * length
        if len(path):
            _, offsets = _bytes_of(flat[path], vocabulary)
            before[piece] = path[max(0, int(np.searchsorted(offsets, offsets[-1] - size, "right")) - 1) :]
    sizes = np.array([len(tail) for tail in before], np.int64)
    places = np.insert(places, np.repeat(starts[:-1], sizes), np.concatenate([*before, np.zeros(0, np.int64)]))
    starts = starts + offsets_of(sizes)
    # The first token of a piece with a path is a copy.
    return places, starts, starts[:-1] + sizes + (sizes > 0)


def _bytes_of(ids: np.ndarray, vocabulary: pa.Array) -> tuple[bytes, np.ndarray]:
    """Return the bytes of tokens, and where each begins, with the end of the last."""
    found = vocabulary.take(to_arrow(ids))
    data = found.buffers()[2]
    return data.to_pybytes() if data else b"", np.frombuffer(found.buffers()[1], np.int32)[: len(found) + 1]


def find_conversations(path: Path, text: str, limit: int) -> SearchResult:
    """Return the first `limit` conversations with a text; of copies, the first."""
    manifest = load_manifest(path)
    folder = checked_folder(manifest, path)
    encoder = open_tokenizer(manifest, folder) if manifest.packing_metadata.enabled else None
    found, seen, records = list[Piece](), set[tuple[Any, ...]](), set[tuple[Any, ...]]()
    for hit in search(manifest, folder, text, encoder):
        places = pieces_in_row(manifest, folder, hit.split, hit.shard, hit.row)
        place = next((place for place in places if place["start"] == hit.start), None)
        if place:
            key = place["source"], place["record"], place.get("turn"), place["first"]
            if key in seen:
                continue
            seen.add(key)
        record = (place["source"], place["record"]) if place else (len(found),)
        if len(records) == limit and record not in records:
            return SearchResult(path, text, limit, found, True)
        records.add(record)
        # A hit has a row even if a damaged index does not list it.
        row = int(row_number(manifest, {"split": hit.split, "shard": hit.shard, "row": hit.row}) or 0)
        piece = place_in_corpus(manifest, place) | {"trained_on": hit.trained, "split": hit.split, "row_of_split": row}
        found.append(piece | {"excerpt": _excerpt(manifest, folder, hit, encoder) if encoder else None})
    return SearchResult(path, text, limit, found, False)


def _excerpt(manifest: Manifest, folder: Path, hit: Hit, encoder: Encoder) -> Excerpt:
    """Decode the tokens around a match."""
    row = read_row(manifest, folder, manifest.splits[hit.split].shards[hit.shard], hit.row)
    starts, lengths = bounds_of_pieces(row["attention_mask"][None], row["position_ids"][None])
    length = int(lengths[np.searchsorted(starts, hit.start)])
    sample = sample_of_piece(row, hit.start, length)
    before = len(sample["input_ids"]) - length
    path = path_before(row[END], hit.start) if before else np.zeros(0, np.int64)
    first, last = (
        before + place - hit.start if place >= hit.start else int(np.searchsorted(path, place))
        for place in (hit.first, hit.last)
    )
    shown = slice(max(0, first - AROUND), last + 1 + AROUND)
    spans = spans_of(encoder, sample["input_ids"][shown], sample["labels"][shown])
    return Excerpt(spans, before=shown.start > 0, after=shown.stop < before + length)


def find_rejects(path: Path, limit: int) -> Rejects:
    """Return the first `limit` rejected conversations."""
    manifest = load_manifest(path)
    counts = {reason: n for reason, n in manifest.ledger.conversations.rejected.items() if n}
    rejects = read_rejects(manifest, checked_folder(manifest, path)) if counts else iter(())
    return Rejects(path, counts, list(islice(rejects, limit)))
