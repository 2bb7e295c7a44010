"""Put the rows of a plan in the order of `balance`, split by split.

Only the numbers of rows change. Every row keeps its conversations, and every shard keeps its number of rows.
"""

from __future__ import annotations

import numpy as np

from tasks.config import Config
from tasks.packing.balance.balanced_order import balanced_order
from tasks.packing.pieces import CHUNK
from tasks.packing.placement import Placed, stream_of
from tasks.storage.row_statistics import RowStatistics


def put_in_order(placed: Placed, statistics: RowStatistics, config: Config, epoch: int) -> RowStatistics:
    """Renumber the rows of `placed` in place, and return the reordered statistics.

    Requires `balance`. The rows must be in random order.
    """
    assert config.balance
    order = np.empty(placed.rows, np.int32)
    for split, rows in placed.slices().items():
        own = statistics.take(rows)
        order[rows] = rows.start + balanced_order(
            own.squares,
            own.trained,
            config.balance.ranks,
            config.balance.rows_per_rank,
            config.sequence_length,
            config.seed,
            stream_of(split, epoch),
        )
    place_of = np.empty_like(order)
    place_of[order] = np.arange(len(order), dtype=np.int32)
    for top in range(0, len(placed.row), CHUNK):
        chunk = slice(top, top + CHUNK)
        placed.row[chunk] = place_of[placed.row[chunk]]
    return statistics.take(order)
