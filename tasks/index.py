"""index.arrow: where every accepted conversation stands. An Arrow IPC stream, in source order.

A row for each piece of each conversation, one where nothing was split. A conversation that was dropped has nulls
where a place would be.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

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


def write_index(
    path: Path, pieces: Pieces, placed: Placed, accepted: Accepted, late: np.ndarray, recipe: Recipe
) -> None:
    """`late` are the accepted conversations that were rejected after all; they are not in the index."""
    gone = np.ones(len(accepted.part), bool)
    gone[pieces.conversation] = gone[late] = False
    dropped = np.flatnonzero(gone)
    conversation = np.concatenate([pieces.conversation, dropped])
    order = np.argsort(conversation, kind="stable")
    conversation = conversation[order]
    is_dropped = order >= len(pieces.conversation)

    def column(values: np.ndarray, kind: type, nulls: bool = True) -> pa.Array:
        """A column over the pieces, with null (or 0) for what was dropped."""
        full: np.ndarray = np.concatenate([values, np.zeros(len(dropped), values.dtype)])[order].astype(kind)
        return pa.array(full, mask=is_dropped if nulls else None)

    train_shards = recipe.shards["train"]
    held_out = placed.shard >= train_shards
    lengths = np.concatenate([pieces.lengths, accepted.length[dropped]])[order]
    truncated = pieces.closed & (recipe.config.overlong == "truncate")
    columns = [
        pa.array(source_numbers(recipe)[accepted.part[conversation]]),
        pa.array(accepted.record[conversation] + 1),
        pa.DictionaryArray.from_arrays(column(held_out, np.int8), pa.array(SPLITS)),
        column(placed.shard - train_shards * held_out, np.int32),
        column(placed.row, np.int32),
        column(placed.start, np.int32),
        pa.array(lengths.astype(np.int32)),
        column(pieces.first, np.int32),
        column(pieces.trained, np.int32, nulls=False),
        column(pieces.separators(accepted), np.bool_, nulls=False),
        column(truncated, np.bool_, nulls=False),
        column(pieces.closed, np.bool_, nulls=False),
    ]
    with atomic_file(path) as out, pa.ipc.new_stream(pa.PythonFile(out, "w"), INDEX_SCHEMA) as writer:
        writer.write_table(pa.Table.from_arrays(columns, schema=INDEX_SCHEMA), max_chunksize=1 << 20)
