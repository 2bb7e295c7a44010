"""Order streamed rows by a pure function, independent of the number of ranks.

    rows of each shard ─seed, epoch─▶ shards in a random order, one line of rows
      ─cut in equal parts─▶ streams ─a few shards at a time─▶ windows, whose rows are shuffled
    step k = the next rows of every stream, the same number of each; a rank reads the streams of its share

    shards   |   4   |  0  |    2    |   3   |  1  |
    streams  |─────────▶|◀──────────|──────────▶|        the second runs backward

Streams differ by at most one row, so no row is left over at the end of an epoch. Each bound between two streams cuts at
most one shard. Both streams read this shard at the same time, because every second stream runs backward. Each shard is
therefore read by one rank, except for at most `ranks - 1` shards, whose rows two ranks divide between them. In general,
no order has fewer shared shards, because the shares of the ranks are equal and the shards are not.

A corpus is shuffled when it is packed, so the rows of a few shards are a fair sample of all rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tasks.core.seeded_order import shuffle
from train.config import STREAM_VERSION

# Every number of ranks up to this one has the same order if it divides the rows of a step.
RANKS = 64
# Number of shards whose rows are mixed at a time. With more streams, it is the number of streams.
MIXED = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of a shard."""

    shard: int
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class Window:
    """Pieces whose rows are shuffled together.

    `start` is the number of rows of the stream before the window.
    """

    start: int
    pieces: tuple[Piece, ...]
    seed: int

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    @property
    def shards(self) -> set[int]:
        return {piece.shard for piece in self.pieces}

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the shard of each row and the row within it, in order, int32[rows] each."""
        order = shuffle(self.rows, self.seed, 0)
        sizes = [piece.rows for piece in self.pieces]
        shards = np.repeat(np.array([piece.shard for piece in self.pieces], np.int32), sizes)
        ranges = [np.arange(piece.first, piece.first + piece.rows, dtype=np.int32) for piece in self.pieces]
        rows = np.concatenate(ranges)
        return shards[order], rows[order]


Stream = tuple[Window, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `first` to `last` (exclusive) of a window of a stream."""

    stream: int
    window: int
    first: int
    last: int


def stream_count(rows_per_step: int) -> int:
    """Return the least number of streams that every possible number of ranks divides."""
    return math.lcm(*(ranks for ranks in range(1, RANKS + 1) if rows_per_step % ranks == 0))


def shards_of_window(streams: int) -> int:
    """Return the maximum number of shards per window.

    At any time, each stream is in one window.
    """
    return max(1, MIXED // streams)


def bounds(rows: int, streams: int) -> list[int]:
    """Return the first row of each stream, and the total number of rows.

    For every number of ranks, the streams of one rank have its share of all rows, rounded down or up.
    """
    return [stream * rows // streams for stream in range(streams + 1)]


def order(epoch: int, rows_of_shards: Sequence[int], seed: int, streams: int) -> list[Stream]:
    """Return the streams of an epoch; every row is in one window of one stream."""
    placed = shuffle(len(rows_of_shards), _number("shards", seed, epoch), 0)
    ends = np.cumsum(np.asarray(rows_of_shards, np.int64)[placed])
    cuts = bounds(int(ends[-1]), streams)
    size = shards_of_window(streams)
    found = []
    for stream, (low, high) in enumerate(pairwise(cuts)):
        pieces = _pieces(rows_of_shards, placed, ends, low, high)
        if stream % 2:
            pieces.reverse()
        windows, start = [], 0
        for top in range(0, len(pieces), size):
            window = Window(start, tuple(pieces[top : top + size]), _number("rows", seed, epoch, stream, top))
            windows.append(window)
            start += window.rows
        found.append(tuple(windows))
    return found


def _pieces(rows_of_shards: Sequence[int], placed: np.ndarray, ends: np.ndarray, low: int, high: int) -> list[Piece]:
    """Return the pieces of shards from row `low` to row `high` of the line."""
    found = []
    for at in range(int(np.searchsorted(ends, low, "right")), int(np.searchsorted(ends, high, "left")) + (high > low)):
        shard, end = int(placed[at]), int(ends[at])
        start = end - rows_of_shards[shard]
        first, last = max(low, start), min(high, end)
        if last > first:
            found.append(Piece(shard, first - start, last - first))
    return found


def _number(*values: object) -> int:
    """Return a seed that differs for different values."""
    return int.from_bytes(hashlib.sha256(repr((STREAM_VERSION, *values)).encode()).digest()[:8], "little")


def share(streams: Sequence[Stream], rank: int, ranks: int) -> Sequence[Stream]:
    """Return the streams of a rank; `ranks` must divide the number of streams."""
    of_rank = len(streams) // ranks
    return streams[rank * of_rank : (rank + 1) * of_rank]


def steps(streams: Sequence[Stream], per_stream: int, start: int = 0) -> Iterator[list[Run]]:
    """Yield the runs of rows of each step, from step `start` on.

    A step takes `per_stream` rows of each stream, or fewer if it is the last step.
    """
    windows = [0] * len(streams)
    ends = [stream[-1].start + stream[-1].rows if stream else 0 for stream in streams]
    for step in range(start, math.ceil(max(ends, default=0) / per_stream)):
        runs = []
        for number, stream in enumerate(streams):
            low, high = step * per_stream, min((step + 1) * per_stream, ends[number])
            while low < high:
                window = stream[windows[number]]
                end = window.start + window.rows
                if low < end:
                    runs.append(Run(number, windows[number], low - window.start, min(high, end) - window.start))
                    low = min(high, end)
                if low >= end:
                    windows[number] += 1
        yield runs


def uses(streams: Sequence[Stream], per_stream: int, start: int = 0) -> list[tuple[int, int]]:
    """Return (stream, window) pairs in the order of first use, from step `start` on."""
    found = [
        (max(window.start // per_stream, start), stream, number)
        for stream, windows in enumerate(streams)
        for number, window in enumerate(windows)
        if window.start + window.rows > start * per_stream
    ]
    return [(stream, number) for _, stream, number in sorted(found)]
