"""index.arrow: where every accepted conversation stands. An Arrow IPC stream, in source order.

A row for each piece of each conversation, one where nothing was split. A conversation that was dropped has nulls
where a place would be.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from tasks.columns import strings, to_arrow
from tasks.files import atomic_file
from tasks.ledger import source_numbers
from tasks.pieces import Accepted, Pieces
from tasks.placement import SPLITS, Placed
from tasks.recipe import Recipe

INDEX_SCHEMA = pa.schema(
    [
        ("source", pa.int32()),  # place in the manifest's sources
        ("record", pa.int64()),  # line or record number within the source, from 1
        ("split", pa.dictionary(pa.int8(), pa.string())),
        ("shard", pa.int32()),  # number within the split
        ("row", pa.int32()),  # within the shard
        ("start", pa.int32()),  # first place within the row
        ("length", pa.int32()),  # places in the row, the separator included
        ("first", pa.int32()),  # first token of the conversation that stands here; above 0 only where it was split
        ("trained", pa.int32()),  # tokens
        ("separator", pa.bool_()),  # the last place is an EOS that was added behind the template's tokens
        ("truncated", pa.bool_()),
        ("closed", pa.bool_()),  # cut off here, truncated or split: the EOS behind it is not trained
    ]
)

# Rows in a record batch, which are put together at once.
_BATCH_ROWS = 1 << 20


def write_index(
    path: Path, pieces: Pieces, placed: Placed, accepted: Accepted, late: np.ndarray, recipe: Recipe
) -> None:
    """`late` are the accepted conversations that were rejected after all; they are not in the index."""
    gone = np.ones(len(accepted.part), bool)
    gone[pieces.conversation] = gone[late] = False
    dropped = np.flatnonzero(gone)
    # Rows stand in the order of the conversations, so a dropped one stands behind the pieces of those before it.
    dropped_rows = np.searchsorted(pieces.conversation, dropped) + np.arange(len(dropped))
    rows = len(pieces.conversation) + len(dropped)
    with atomic_file(path) as out, pa.ipc.new_stream(pa.PythonFile(out, "w"), INDEX_SCHEMA) as writer:
        for top in range(0, rows, _BATCH_ROWS):
            bottom = min(top + _BATCH_ROWS, rows)
            first, last = np.searchsorted(dropped_rows, [top, bottom]).tolist()
            is_dropped = np.zeros(bottom - top, bool)
            is_dropped[dropped_rows[first:last] - top] = True
            columns = _columns(
                slice(top - first, bottom - last), dropped[first:last], is_dropped, pieces, placed, accepted, recipe
            )
            writer.write_batch(pa.record_batch(columns, INDEX_SCHEMA))


def _columns(
    chosen: slice,
    dropped: np.ndarray,
    is_dropped: np.ndarray,
    pieces: Pieces,
    placed: Placed,
    accepted: Accepted,
    recipe: Recipe,
) -> list[pa.Array]:
    """The columns of some rows: those of the `chosen` pieces and of the conversations `dropped`, where `is_dropped`."""

    def column(values: np.ndarray, kind: type, of_dropped: np.ndarray | None = None, nulls: bool = True) -> pa.Array:
        """A column over the rows, with null (or 0, or a value of its own) for what was dropped."""
        full: np.ndarray = np.zeros(len(is_dropped), kind)
        full[~is_dropped] = values
        if of_dropped is not None:
            full[is_dropped] = of_dropped
        return to_arrow(full, is_dropped if nulls and of_dropped is None else None)

    of_piece = pieces[chosen]
    conversation = of_piece.conversation
    train_shards = recipe.shards["train"]
    shard = placed.shard[chosen]
    held_out = shard >= train_shards
    source = source_numbers(recipe)
    truncated = of_piece.closed & (recipe.config.overlong == "truncate")
    return [
        column(source[accepted.part[conversation]], np.int32, source[accepted.part[dropped]]),
        column(accepted.record[conversation] + 1, np.int64, accepted.record[dropped] + 1),
        pa.DictionaryArray.from_arrays(column(held_out, np.int8), strings(SPLITS)),
        column(shard - train_shards * held_out, np.int32),
        column(placed.row[chosen], np.int32),
        column(placed.start[chosen], np.int32),
        column(of_piece.lengths, np.int32, accepted.length[dropped]),
        column(of_piece.first, np.int32),
        column(of_piece.trained, np.int32, nulls=False),
        column(of_piece.separators(accepted), np.bool_, nulls=False),
        column(truncated, np.bool_, nulls=False),
        column(of_piece.closed, np.bool_, nulls=False),
    ]
