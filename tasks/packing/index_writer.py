"""Write index.arrow, an Arrow IPC stream with the place of every conversation.

The index has one row per piece, in source order. A conversation that is not split is one piece. A dropped conversation
has a reason, and its split, shard, row, and start are null. Further copies follow, then the further packings of the
training split, each in source order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from tasks.core.int32 import as_int32
from tasks.packing.ledger import source_numbers
from tasks.packing.pieces import Pieces
from tasks.packing.placement import Placed
from tasks.recipe import Recipe
from tasks.storage.arrow import strings, to_arrow
from tasks.storage.files import atomic_file
from tasks.storage.schemas import DROP_REASONS, INDEX_SCHEMA, REJECTED, SAMPLE_DROP_REASONS, index_schema
from tasks.storage.splits import split_names
from tasks.storage.tokens.token_files import TokenColumns

# Conversations or pieces per record batch; a batch is assembled in one step.
_BATCH = 1 << 16


class IndexWriter:
    """Write the index, packing by packing."""

    def __init__(
        self,
        out: pa.ipc.RecordBatchStreamWriter,
        tokens: TokenColumns,
        recipe: Recipe,
        schema: pa.Schema,
    ):
        self._out, self._tokens, self._recipe, self._schema = out, tokens, recipe, schema
        self._reasons = DROP_REASONS if schema is INDEX_SCHEMA else SAMPLE_DROP_REASONS
        self._sources = source_numbers(recipe)
        self._splits = split_names(recipe.config.epochs, recipe.config.row_lengths)

    def write(self, pieces: Pieces, placed: Placed, with_dropped: bool) -> None:
        """Write the pieces of one packing and the dropped conversations, in source order."""
        top, count = 0, len(pieces.accepted.length)
        # The boundaries of batches do not depend on the parts.
        for first in range(0, count if with_dropped else 0, _BATCH):
            last = min(first + _BATCH, count)
            bottom = bisect_left(
                range(pieces.once), last, top, key=lambda piece: pieces.conversations(slice(piece, piece + 1))[0]
            )
            reason = pieces.accepted.reason[first:last]
            dropped = as_int32(np.flatnonzero((reason > 0) & (reason != REJECTED)) + first, "conversations")
            self._write(slice(top, bottom), dropped, pieces, placed)
            top = bottom
        for first in range(top, len(pieces), _BATCH):
            self._write(slice(first, min(first + _BATCH, len(pieces))), np.empty(0, np.int32), pieces, placed)

    def _write(self, chosen: slice, dropped: np.ndarray, pieces: Pieces, placed: Placed) -> None:
        accepted, of = pieces.accepted, pieces.columns(chosen)
        conversation = np.concatenate([of.conversation, dropped])
        if not len(conversation):
            return
        order = np.argsort(conversation, kind="stable")
        conversation, is_dropped = conversation[order], (order >= len(of.conversation))

        def column(values: np.ndarray, of_dropped: np.ndarray | None = None) -> pa.Array:
            """Build a column; dropped conversations are null unless values for them are given."""
            rest = np.zeros(len(dropped), values.dtype) if of_dropped is None else of_dropped.astype(values.dtype)
            full = np.concatenate([values, rest])[order]
            return to_arrow(full, is_dropped if of_dropped is None else None)

        def names(numbers: pa.Array, all_names: tuple[str, ...]) -> pa.Array:
            return pa.DictionaryArray.from_arrays(numbers, strings(all_names))

        first, last = int(conversation.min()), int(conversation.max()) + 1
        record, turns, digest = (
            self._tokens.column(name, first, last)[conversation - first] for name in ("record", "turns", "digest")
        )
        shard = placed.shard(chosen)
        split, of_split = self._split_of(shard, placed)
        none = np.zeros(len(dropped), np.int32)
        is_cut = of.first + of.taken < accepted.length[of.conversation]
        truncated = is_cut & (self._recipe.config.overlong in ("truncate", "turns"))
        reason = to_arrow((accepted.reason[conversation] - np.uint8(1)).astype(np.int8), ~is_dropped)
        columns = [
            to_arrow(self._sources[accepted.part(conversation)]),
            to_arrow(record + 1),
            names(column(split), self._splits),
            column(of_split),
            column(as_int32(placed.row[chosen] - placed.edges[shard], "rows of a shard")),
            column(placed.start[chosen]),
            column(of.length, accepted.length[dropped]),
            column(of.first),
            column(pieces.trained(chosen, self._tokens), none),
            column(of.separator, none),
            column(truncated, none),
            column(of.closed, none),
            to_arrow(turns),
            to_arrow(digest),
            names(reason, self._reasons),
        ]
        if self._schema is not INDEX_SCHEMA:
            columns.append(to_arrow(self._tokens.column("turn", first, last)[conversation - first]))
        self._out.write_batch(pa.record_batch(columns, self._schema))

    def _split_of(self, shard: np.ndarray, placed: Placed) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the split, int8, and of the shard within it, int32."""
        shards = self._recipe.shards
        firsts = np.cumsum([0, *(shards[split] for split in placed.rows_of_splits)])
        within = np.searchsorted(firsts[1:], shard, side="right")
        numbers = np.array([self._splits.index(split) for split in placed.rows_of_splits], np.int8)
        return numbers[within], as_int32(shard - firsts[within], "shards")


@contextmanager
def index_writer(path: Path, tokens: TokenColumns, recipe: Recipe, with_turns: bool) -> Iterator[IndexWriter]:
    """Open the index at `path` for writing.

    `with_turns` adds the column `turn`, for conversations with several samples. The file appears when the block ends
    without an error.
    """
    schema = index_schema(with_turns)
    with atomic_file(path) as out, pa.ipc.new_stream(pa.PythonFile(out, "w"), schema) as writer:
        yield IndexWriter(writer, tokens, recipe, schema)
