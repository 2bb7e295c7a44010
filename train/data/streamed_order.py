"""The order of streamed rows: a pure function, the same for every number of ranks.

    rows of each shard ─seed, epoch─▶ shards in a random order, one line of rows
      ─cut in equal parts─▶ streams ─a few shards at a time─▶ windows, whose rows are shuffled
    step k = the next rows of every stream, as many of each; a rank reads the streams of its share

    shards   |   4   |  0  |    2    |   3   |  1  |
    streams  |─────────▶|◀──────────|──────────▶|        the second runs backward

The streams have equally many rows, or one more, so that no row is left over at the end of an epoch. At most one shard
is cut at each bound between two streams, and both read it at the same time, because every second stream runs backward.
Each shard is therefore read by one rank, except for at most `ranks - 1`, whose rows two ranks divide between them. No
order has fewer in general: the ranks' shares are equal, and the shards are not.

A corpus is shuffled when it is packed, so the rows of some shards are like those of all.
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

# Any number of ranks up to this that divides the rows of a step has the same order.
RANKS = 64
# Shards whose rows are mixed at a time; more if there are more streams.
MIXED = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of a shard."""

    shard: int
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class Window:
    """Pieces whose rows are shuffled together. `start` counts the rows of the stream before it."""

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
        """Return the shards and the rows within them, int32[rows] each, in order."""
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
    """Return the number of streams: the smallest that every possible number of ranks divides."""
    return math.lcm(*(ranks for ranks in range(1, RANKS + 1) if rows_per_step % ranks == 0))


def shards_of_window(streams: int) -> int:
    """Return the most shards that a window has. At a time, each stream is in one window."""
    return max(1, MIXED // streams)


def bounds(rows: int, streams: int) -> list[int]:
    """Return where each stream begins, and the end.

    The rows of any share of the streams that a rank may have are its share of all rows, rounded down or up.
    """
    return [stream * rows // streams for stream in range(streams + 1)]


def order(epoch: int, rows_of_shards: Sequence[int], seed: int, streams: int) -> list[Stream]:
    """Return the streams of an epoch. Every row is in one window of one stream."""
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
    """Return the streams of a rank; `ranks` divides their number."""
    of_rank = len(streams) // ranks
    return streams[rank * of_rank : (rank + 1) * of_rank]


def steps(streams: Sequence[Stream], per_stream: int, start: int = 0) -> Iterator[list[Run]]:
    """Yield what each step takes, from step `start` on: `per_stream` rows of each stream, fewer in the last step."""
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
    """Return (stream, window) in the order in which they are first needed, from step `start` on."""
    found = [
        (max(window.start // per_stream, start), stream, number)
        for stream, windows in enumerate(streams)
        for number, window in enumerate(windows)
        if window.start + window.rows > start * per_stream
    ]
    return [(stream, number) for _, stream, number in sorted(found)]
