"""Count the index of a corpus for the plots of the report.

index.arrow ─ pieces ─▶ tokens per row, conversations per row, tokens per conversation
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa

from tasks.storage.manifest import Manifest
from tasks.storage.shards import open_index
from tasks.storage.splits import TRAIN_EPOCH_PREFIX

COLUMNS = ["source", "record", "split", "shard", "row", "start", "length", "trained", "truncated", "turn"]


@dataclass(frozen=True, slots=True)
class Figures:
    """Columns of the index and their sums. Rows are numbered over all splits, in the order of the manifest."""

    lengths: np.ndarray  # int64, tokens per sample, nearly always a conversation, counted once; all of a dropped one
    repacked: np.ndarray  # bool[rows], conversations of train, for a later epoch
    filled: np.ndarray  # int64[rows], tokens
    padding: np.ndarray  # int64[rows], places without a token
    conversations: np.ndarray  # int64[rows], conversations and pieces
    source: np.ndarray  # of each piece in a row, sorted by row and start
    record: np.ndarray
    turn: np.ndarray  # that a sample trains on, -1 if it is a whole conversation
    start: np.ndarray
    length: np.ndarray
    trained: np.ndarray
    truncated: np.ndarray
    first_piece: np.ndarray  # int64[rows + 1], offset of the first piece of each row


def read_figures(manifest: Manifest, folder: Path) -> Figures:
    """Read the index. Raises DataError or InputMissing if it is not as recorded."""
    with open_index(manifest, folder) as reader:
        index = reader.read_all().unify_dictionaries()
        # A damaged offset would be a SystemError or a crash of Python.
        index.validate(full=True)
        rows_of_splits = [split.rows for split in manifest.splits.values()]
        rows = sum(rows_of_splits)
        placed = index.select([name for name in index.schema.names if name in COLUMNS]).filter(index["row"].is_valid())
        row = _row_numbers(manifest, placed)
        if len(row) and not 0 <= row.min() <= row.max() < rows:
            raise ValueError("it refers to rows that the manifest does not have")
        start = placed["start"].to_numpy()
        order = np.lexsort((start, row))
        length = placed["length"].to_numpy()[order]
        pieces = np.bincount(row, minlength=rows)
        filled = np.bincount(row[order], weights=length, minlength=rows).astype(np.int64)
        if manifest.packing_metadata.enabled and len(row):
            ends, rooms = start[order].astype(np.int64) + length, _lengths_of_rows(manifest)
            if start.min() < 0 or length.min() < 1 or (ends > rooms[row[order]]).any() or (filled > rooms).any():
                raise ValueError("it refers to tokens beyond the end of a row")
        return Figures(
            lengths=_lengths(index),
            repacked=np.repeat([name.startswith(TRAIN_EPOCH_PREFIX) for name in manifest.splits], rows_of_splits),
            filled=filled,
            padding=_lengths_of_rows(manifest) - filled,
            conversations=pieces,
            source=placed["source"].to_numpy()[order],
            record=placed["record"].to_numpy()[order],
            turn=_turns(placed)[order],
            start=start[order],
            length=length,
            trained=placed["trained"].to_numpy()[order],
            truncated=placed["truncated"].to_numpy()[order],
            first_piece=np.concatenate([[0], np.cumsum(pieces)]),
        )


def _lengths_of_rows(manifest: Manifest) -> np.ndarray:
    """Return the length of each row, int64, numbered over all splits."""
    lengths = [manifest.length_of_split(name) for name in manifest.splits]
    return np.repeat(np.array(lengths, np.int64), [split.rows for split in manifest.splits.values()])


def _lengths(index: pa.Table) -> np.ndarray:
    """Return the tokens of the first copy of each sample, int64, in source order; the index may be in any order."""
    source, record, turn = index["source"].to_numpy(), index["record"].to_numpy(), _turns(index)
    first, length = index["first"].fill_null(0).to_numpy(), index["length"].to_numpy().astype(np.int64)
    order = np.lexsort((first, turn, record, source))
    columns = [values[order] for values in (source, record, turn, first)]
    of_sample, of_piece = (
        np.logical_or.reduce([values[1:] != values[:-1] for values in own]) for own in (columns[:3], columns)
    )
    length = length[order] * np.append(True, of_piece)[: len(order)]  # further copies count as 0
    return np.add.reduceat(length, np.flatnonzero(np.append(True, of_sample))) if len(length) else length


def _turns(index: pa.Table) -> np.ndarray:
    if "turn" in index.schema.names and index["turn"].null_count:
        raise ValueError("a place lacks its turn")
    return index["turn"].to_numpy() if "turn" in index.schema.names else np.full(len(index), -1)


def _row_numbers(manifest: Manifest, placed: pa.Table) -> np.ndarray:
    """Return the row of each piece, numbered over all splits, int64."""
    tops = accumulate((shard.rows for split in manifest.splits.values() for shard in split.shards), initial=0)
    first_rows = [[next(tops) for _ in split.shards] for split in manifest.splits.values()]
    chunks = placed["split"].chunks
    if not chunks:
        return np.zeros(0, np.int64)
    codes = np.concatenate([chunk.indices.to_numpy() for chunk in chunks])
    shard, row = placed["shard"].to_numpy(), placed["row"].to_numpy().astype(np.int64)
    tops_of = dict(zip(manifest.splits, first_rows, strict=True))
    for code, split in enumerate(chunks[0].dictionary.to_pylist()):
        own = codes == code
        if own.any():
            row[own] += np.array(tops_of[split], np.int64)[shard[own]]
    return row
