"""Break up groups of pieces that shared a row in an earlier epoch.

    row of each piece, groups of earlier epochs ─Companions.separate─▶ pieces of equal length swap places

A group is identified by the sum of the hashes of its pieces, so memory is 8 bytes per row and epoch. Rows of a single
piece are left alone: they are the same in every packing.
"""

from __future__ import annotations

import numpy as np

from tasks.core.seeded_order import hashes
from tasks.packing.bin_packing import CHUNK

# Swaps tried per piece of a repeated group. This was enough to break up every such row of real conversations.
TRIES = 32


class Companions:
    """Groups of pieces that have shared a row.

    Pieces are identified by `of`, so copies count as the same piece.
    """

    def __init__(self) -> None:
        self._seen = np.empty(0, np.uint64)

    def remember(self, row: np.ndarray, of: np.ndarray, rows: int) -> None:
        """Add the groups of one more packing; `row` is int32[pieces]."""
        self._seen = np.concatenate([self._seen, _sums(row, of, rows)])
        self._seen.sort()  # np.union1d takes ten times as long

    def separate(self, row: np.ndarray, start: np.ndarray, of: np.ndarray, lengths: np.ndarray, rows: int) -> None:
        """Swap pieces of equal length (in place) so that no group shares a row again.

        A row keeps its group if no other piece has the length of one of its pieces, or if no swap that is tried helps.
        """
        sums = _sums(row, of, rows)
        again = self._has_seen(sums) & (np.bincount(row, minlength=rows) > 1)
        if not again.any():
            return
        counts = np.bincount(lengths)
        own = np.flatnonzero(again[row])
        # Within a row, pieces of the most common length come first.
        own = own[np.lexsort((own, -counts[lengths[own]], row[own]))]
        wanted = np.zeros(len(counts), np.bool_)
        wanted[lengths[own]] = True
        others = np.flatnonzero(wanted[lengths])
        others = others[np.argsort(lengths[others], kind="stable")]
        firsts = np.searchsorted(lengths[others], np.arange(len(counts) + 1))
        for number, piece in enumerate(own.tolist()):
            here = int(row[piece])
            if not again[here]:
                continue
            equal = others[firsts[lengths[piece]] : firsts[lengths[piece] + 1]]
            # Each piece starts at another offset; otherwise all would try the same candidates.
            tried = np.roll(equal, -(number * TRIES) % max(1, len(equal)))[:TRIES] if len(equal) > TRIES else equal
            for other in tried.tolist():
                there = int(row[other])
                gain = hashes(of[[other]]) - hashes(of[[piece]])
                if there == here or not gain.any():
                    continue
                new = np.concatenate([sums[[here]] + gain, sums[[there]] - gain])
                if self._has_seen(new).any():
                    continue
                sums[here], sums[there] = new
                again[here] = again[there] = False
                for column in (row, start):
                    column[piece], column[other] = column[other], column[piece]
                break

    def _has_seen(self, sums: np.ndarray) -> np.ndarray:
        """Return which of these groups have shared a row, bool.

        `_seen` is sorted already; np.isin would sort it again.
        """
        if not len(self._seen):
            return np.zeros(len(sums), np.bool_)
        return self._seen[np.searchsorted(self._seen, sums).clip(max=len(self._seen) - 1)] == sums


def _sums(row: np.ndarray, of: np.ndarray, rows: int) -> np.ndarray:
    """Return the sum of the hashes of the pieces of each row: uint64[rows]."""
    sums = np.zeros(rows, np.uint64)
    for top in range(0, len(row), CHUNK):
        np.add.at(sums, row[top : top + CHUNK], hashes(of[top : top + CHUNK]))
    return sums
