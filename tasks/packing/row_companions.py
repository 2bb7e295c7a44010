"""Rows of one epoch that are not those of another: who has stood in a row together is parted in the next.

    row of each piece, sets of earlier epochs ─part_companions─▶ pieces of equal length change places

A set of pieces is known by the sum of a hash of each, so it is 8 bytes a row and epoch that are kept. Rows of one piece
are left alone: they are the same in every packing.
"""

from __future__ import annotations

import numpy as np

from tasks.packing.bin_packing import CHUNK
from tasks.packing.seeded_order import hashes

# Pieces of equal length that are tried, and as many lengths of a row: enough for all rows of real conversations.
TRIES = 32


class Companions:
    """The sets of pieces that stood in a row. A piece is known by its number in `of`, so that copies are one."""

    def __init__(self) -> None:
        self._seen = np.empty(0, np.uint64)

    def remember(self, row: np.ndarray, of: np.ndarray, rows: int) -> None:
        """The sets of one more packing, rows int32[pieces]."""
        self._seen = np.union1d(self._seen, _sums(row, of, rows))

    def part(self, row: np.ndarray, start: np.ndarray, of: np.ndarray, lengths: np.ndarray, rows: int) -> None:
        """Exchange pieces of equal length (in place), so that no set of two or more stands in a row again.

        What stays are rows of whose pieces none has another of its length to change with, or none that helps.
        """
        sums = _sums(row, of, rows)
        again = self._has_seen(sums) & (np.bincount(row, minlength=rows) > 1)
        if not again.any():
            return
        counts = np.bincount(lengths)
        own = np.flatnonzero(again[row])
        # Those whose length is the most common come first within a row.
        own = own[np.lexsort((own, -counts[lengths[own]], row[own]))]
        wanted = np.zeros(len(counts), np.bool_)
        wanted[lengths[own]] = True
        others = np.flatnonzero(wanted[lengths])
        others = others[np.argsort(lengths[others], kind="stable")]
        firsts = np.searchsorted(lengths[others], np.arange(len(counts) + 1))
        for number, piece in enumerate(own.tolist()):
            if again[row[piece]]:
                equal = others[firsts[lengths[piece]] : firsts[lengths[piece] + 1]]
                # Each begins elsewhere, or all would try the same ones.
                tried = np.roll(equal, -(number * TRIES) % max(1, len(equal)))[:TRIES] if len(equal) > TRIES else equal
                self._exchange(piece, tried.tolist(), row, start, of, sums, again)

    def _has_seen(self, sums: np.ndarray) -> np.ndarray:
        """bool, which of these sets stood in a row. They are sorted already, and numpy's isin would sort them anew."""
        if not len(self._seen):
            return np.zeros(len(sums), np.bool_)
        return self._seen[np.searchsorted(self._seen, sums).clip(max=len(self._seen) - 1)] == sums

    def _exchange(
        self,
        piece: int,
        tried: list[int],
        row: np.ndarray,
        start: np.ndarray,
        of: np.ndarray,
        sums: np.ndarray,
        again: np.ndarray,
    ) -> None:
        """Let `piece` change places with the first of `tried` with which both rows become new ones."""
        here = int(row[piece])
        for other in tried:
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
            return


def _sums(row: np.ndarray, of: np.ndarray, rows: int) -> np.ndarray:
    """uint64[rows], for each row the sum of the hashes of its pieces."""
    sums = np.zeros(rows, np.uint64)
    for top in range(0, len(row), CHUNK):
        np.add.at(sums, row[top : top + CHUNK], hashes(of[top : top + CHUNK]))
    return sums
