"""Read the rows of a shard with the bounds of their pieces.

    shard ─SHA-256─▶ record batches ─read_rows─▶ Rows: ids, labels, positions, and where each piece starts and ends

A piece starts where `position_ids` is 0. EOS does not mark the bounds, because with many templates it ends every turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from tasks.core.errors import DataError
from tasks.storage.corpus_folder import check_listed
from tasks.storage.facts import Shard
from tasks.storage.layout import RowLayout
from tasks.storage.manifest import Manifest
from tasks.storage.schemas import IGNORED, LOSS_WEIGHT
from tasks.storage.shards import bounds_of_pieces, open_shard, row_columns

KNOWN = ("input_ids", "attention_mask", "labels", "position_ids")
# Columns of rows without padding, which can be derived from the positions.
DERIVED = ("seq_lens", "max_seqlen")


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows, and the pieces in them, in their order.

    Padding follows the last piece of a row. With `align`, it also fills the gap between two pieces.
    """

    ids: np.ndarray  # int32[rows, sequence_length]
    labels: np.ndarray  # int32[rows, sequence_length], not shifted
    positions: np.ndarray  # int32[rows, sequence_length]
    filled: np.ndarray  # bool[rows, sequence_length], the places that have a token
    tokens: np.ndarray  # int64[rows], without padding
    pieces: np.ndarray  # int64[rows]
    starts: np.ndarray  # int64[pieces], counted over all places of these rows
    lengths: np.ndarray  # int64[pieces]
    weights: np.ndarray | None = None  # float32[rows, sequence_length], if the corpus has `loss_weight`

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def gaps(self) -> np.ndarray:
        """Return the padding after each piece: int64[pieces].

        It ends at the next piece or at the end of the row.
        """
        length = self.ids.shape[1]
        ends = self.starts + self.lengths
        following = np.append(self.starts[1:], 0)
        following[np.cumsum(self.pieces) - 1] = np.arange(1, len(self) + 1) * length
        return following - ends

    @property
    def trained(self) -> int:
        return int(np.count_nonzero(self.labels != IGNORED))

    def next_labels(self) -> np.ndarray:
        """Return the next token's label for every place: int32[rows, sequence_length].

        The last place of a piece has no label, because the next token is in a different piece, and the first token of a
        piece is never trained on.
        """
        shifted = np.full_like(self.labels, IGNORED)
        shifted[:, :-1] = self.labels[:, 1:]
        shifted.reshape(-1)[self.starts + self.lengths - 1] = IGNORED
        return shifted


def read_rows(manifest: Manifest, folder: Path, shard: Shard) -> Iterator[Rows]:
    """Check the checksum of a shard, and yield its rows in batches.

    Raises DataError or InputMissing, naming the file.
    """
    check_listed(folder, shard)
    with open_shard(manifest, folder, shard, streamed=True) as batches:
        for batch in batches:
            if batch.num_rows:
                pad = manifest.tokenizer.pad_token_id
                yield rows_of(batch, manifest.sequence_length, folder / shard.path, manifest.row_layout, pad)


def rows_of(batch: pa.RecordBatch, length: int, path: Path, layout: RowLayout | None = None, pad: int = 0) -> Rows:
    """Return the rows of a record batch.

    Raises DataError if no export format can hold them, or if a row does not start at position 0.
    """
    if unknown := [name for name in batch.schema.names if name not in (*KNOWN, *DERIVED, LOSS_WEIGHT)]:
        raise DataError(
            "cannot_export", f"{path}: no format can hold the column {unknown[0]}; pack the corpus without it"
        )
    columns = row_columns(batch, length, layout or RowLayout((length,)), pad)
    ids, mask, labels, positions = (columns[name] for name in KNOWN)
    tokens = np.count_nonzero(mask, axis=1).astype(np.int64)
    if not ((positions == 0) & (mask == 1))[:, 0].all():
        raise DataError("bad_row", f"{path}: a row does not start at position 0; run packcorpus verify")
    starts, lengths = bounds_of_pieces(mask, positions)
    pieces = np.bincount(starts // length, minlength=len(ids))
    weights = None
    if LOSS_WEIGHT in batch.schema.names:
        weights = batch.column(LOSS_WEIGHT).flatten().to_numpy().reshape(-1, length)
    return Rows(ids, labels, positions, mask == 1, tokens, pieces, starts, lengths, weights)
