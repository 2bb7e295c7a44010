"""Compute the statistics of each row of a plan.

row of each piece, its length and trained tokens ─statistics_of─▶ RowStatistics of all rows
"""

from __future__ import annotations

import numpy as np

from tasks.packing.pieces import Pieces
from tasks.storage.row_statistics import RowStatistics
from tasks.storage.tokens.token_files import TokenColumns


def statistics_of(row: np.ndarray, rows: int, pieces: Pieces, tokens: TokenColumns) -> RowStatistics:
    """Return the statistics of rows 0 to `rows` - 1.

    `row` is the row of each piece, int32[pieces]. Memory: 20 bytes per row, and a constant.
    """
    found = RowStatistics.zeros(rows)
    for chunk in pieces.chunks():
        own, length = row[chunk], pieces.columns(chunk).length
        np.add.at(found.squares, own, length.astype(np.int64) ** 2)
        np.maximum.at(found.longest, own, length)
        np.add.at(found.segments, own, np.int32(1))
        np.add.at(found.trained, own, pieces.trained(chunk, tokens))
    return found
