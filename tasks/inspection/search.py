"""Where a text stands in a corpus: found in the tokens themselves, without decoding them one by one.

    vocabulary ─token_bytes─▶ bytes of every token ─take(ids of a batch of rows)─▶ the batch as bytes ─find─▶ places

What is found is what a model sees: the text between the tokens of one conversation, over their boundaries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tasks.core.errors import UsageError
from tasks.encoders.corpus_tokenizer import open_tokenizer
from tasks.encoders.encoder import Encoder
from tasks.inspection.lookup import Place, pieces_in_row, read_rejects, row_number
from tasks.inspection.rows import place_as_object
from tasks.storage.corpus_folder import check_unchanged, corpus_folder
from tasks.storage.manifest import Manifest, Shard, load_manifest
from tasks.storage.schemas import IGNORED
from tasks.storage.shards import open_shard, to_dicts
from tasks.storage.splits import ANEW

# Tokens that are turned to bytes at once: 4 to 5 bytes each.
_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True)
class Hit:
    """A text that was found: the row (within its shard), the conversation's first place in it, the places of the
    tokens that the text touches, and whether any of these is trained on."""

    split: str
    shard: int
    row: int
    start: int
    first: int
    last: int
    trained: bool


def search(manifest: Manifest, folder: Path, text: str, encoder: Encoder | None = None) -> Iterator[Hit]:
    """The conversations that contain `text`, in the order of the rows, each copy once; further packings hold no others.
    Raises DataError or InputMissing where a file is not what it was, UsageError where there is nothing to look for."""
    if not text:
        raise UsageError("bad_command_line", "--search: give the text to look for")
    needle = text.encode("utf-8", "replace")
    splits = {name: split for name, split in manifest.splits.items() if not name.startswith(ANEW)}
    shards = [(name, n, shard) for name, split in splits.items() for n, shard in enumerate(split.shards)]
    if manifest.format_version == "2.0":
        for split, number, shard in shards:
            yield from _in_texts(manifest, folder, split, number, shard, text)
        return
    encoder = encoder or open_tokenizer(manifest, folder)
    vocabulary = pa.array([encoder.token_bytes(token) for token in range(encoder.vocab_size)], pa.binary())
    for split, number, shard in shards:
        at = 0
        check_unchanged(folder, shard)
        with open_shard(manifest, folder, shard) as batches:
            for batch in batches:
                step = max(1, _TOKENS // manifest.sequence_length)
                for top in range(0, batch.num_rows, step):
                    rows = batch.slice(top, step)
                    for row, start, first, last, trained in _in_rows(rows, vocabulary, needle):
                        yield Hit(split, number, at + top + row, start, first, last, trained)
                at += batch.num_rows


def _in_rows(batch: pa.RecordBatch, vocabulary: pa.Array, needle: bytes) -> Iterator[tuple[int, int, int, int, bool]]:
    """(row, first place of the conversation, first and last place of the text, whether it is trained on)."""
    length = batch.schema.field("input_ids").type.list_size
    found = vocabulary.take(batch.column("input_ids").flatten())
    offsets = np.frombuffer(found.buffers()[1], np.int32)[: len(found) + 1]
    written = found.buffers()[2].to_pybytes()
    labels = batch.column("labels").flatten().to_numpy()
    positions = batch.column("position_ids").flatten().to_numpy()
    mask = batch.column("attention_mask").flatten().to_numpy()
    at = written.find(needle)
    while at >= 0:
        # The token that holds the first byte; tokens without bytes have the offset of the next.
        first = int(np.searchsorted(offsets, at, "right")) - 1
        last = int(np.searchsorted(offsets, at + len(needle), "left")) - 1
        start = first - int(positions[first])
        if mask[first] and last - start == positions[last]:  # both in one conversation, and not in the padding
            inside = labels[first : last + 1]
            yield first // length, start % length, first % length, last % length, bool((inside != IGNORED).any())
            later = np.flatnonzero(positions[last + 1 :] == 0)
            end = last + 1 + int(later[0]) if len(later) else len(positions)
            at = written.find(needle, int(offsets[end]))
        else:
            at = written.find(needle, at + 1)


def _in_texts(manifest: Manifest, folder: Path, split: str, number: int, shard: Shard, text: str) -> Iterator[Hit]:
    at = 0
    check_unchanged(folder, shard)
    with open_shard(manifest, folder, shard) as batches:
        for batch in batches:
            for row, found in enumerate(to_dicts(batch.select(["text"]))):
                if text in found["text"]:
                    yield Hit(split, number, at + row, 0, 0, 0, False)
            at += batch.num_rows


def found_as_object(path: Path, text: str, limit: int) -> dict[str, Any]:
    """The same for JSON."""
    manifest = load_manifest(path)
    folder = corpus_folder(manifest, path)
    found = []
    for hit, place in islice(find_text(manifest, folder, text), limit):
        if place:
            found.append(place_as_object(manifest, place) | {"trained_on": hit.trained})
    return {"manifest": str(path), "search": text, "limit": limit, "conversations": found}


def find_text(
    manifest: Manifest, folder: Path, text: str, encoder: Encoder | None = None
) -> Iterator[tuple[Hit, Place | None]]:
    """The first copy of each piece that contains `text`, and what the index says of it."""
    seen = set()
    for hit in search(manifest, folder, text, encoder):
        places = pieces_in_row(manifest, folder, hit.split, hit.shard, hit.row)
        place = next((place for place in places if place["start"] == hit.start), None)
        piece = place and (place["source"], place["record"], place["first"])
        if piece not in seen:
            yield hit, place
        if piece:
            seen.add(piece)


def row_of(manifest: Manifest, hit: Hit) -> int:
    return int(row_number(manifest, {"split": hit.split, "shard": hit.shard, "row": hit.row}) or 0)


def rejects(path: Path) -> Iterator[dict[str, Any]]:
    """The rejected conversations, as rejects.jsonl has them. Raises DataError or InputMissing."""
    manifest = load_manifest(path)
    folder = corpus_folder(manifest, path)
    yield from read_rejects(manifest, folder)
