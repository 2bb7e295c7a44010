"""Assign each piece a row and a start.

Every split of the corpus is placed separately:

    pieces of a split ─pack─▶ rows ─shuffle─▶ (row, start) ─▶ the shards of the split

    all pieces ─place─▶ train, validation        pieces of the training split ─pack_split─▶ train_epoch_2, …

Guarantee for epochs: each epoch contains every piece of the training split, in the same number of rows. No group of two
or more pieces shares a row in two epochs, unless no swap with another piece of equal length exists. To achieve this, a
seeded half of the conversations is packed before the rest, conversations of equal length are assigned in a different
order, and groups that still meet again are broken up (company/other_epochs.py). A row filled by one conversation is the
same in every epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate

import numpy as np

from tasks.config import Config
from tasks.core.seeded_order import shuffle
from tasks.packing import bin_packing, several_lengths
from tasks.storage.splits import SPLITS, splits_of

# Distance between the streams for one length of rows and the streams for the next length. The streams of epochs are
# below it.
LENGTH = 1 << 17


@dataclass(slots=True)
class Placed:
    """Row and start of each piece, int32, and the rows of one or two splits."""

    row: np.ndarray  # numbered over all shards, in their order
    start: np.ndarray  # offset of the piece's first place within the row
    edges: np.ndarray  # int64[shards + 1], rows before each shard
    rows_of_splits: dict[str, int]
    lower_bounds: list[tuple[int, str]]  # per split: rows, and the name of the bound
    # If rows have several lengths, per split: the places that every packing needs, and the name of the bound.
    places: list[tuple[int, str]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(self.rows_of_splits.values())

    def slices(self) -> dict[str, slice]:
        """Return the rows of each split."""
        ends = np.cumsum([*self.rows_of_splits.values()]).tolist()
        return {
            split: slice(end - rows, end) for (split, rows), end in zip(self.rows_of_splits.items(), ends, strict=True)
        }

    def shard(self, chosen: slice | np.ndarray) -> np.ndarray:
        """Return the shard of each chosen piece, int64."""
        return np.searchsorted(self.edges[1:], self.row[chosen], side="right")


def place(lengths: np.ndarray, held_out: np.ndarray, config: Config, shards: dict[str, int]) -> Placed:
    """Pack each split and distribute its rows, in seeded order, over its shards.

    `lengths` are int32[pieces].
    """
    if not held_out.any():
        train = pack_split(lengths, config, "train", 1, shards)
        nothing = pack_split(lengths[:0], config, "validation", 1, shards)
        return _joined(train, nothing, train.row, train.start)
    row, start = np.empty(len(lengths), np.int32), np.empty(len(lengths), np.int32)
    placed: list[Placed] = []
    for number, split in enumerate(SPLITS):
        chosen = held_out == bool(number)
        own = pack_split(lengths[chosen], config, split, 1, shards)
        own.row += placed[0].rows if placed else 0
        row[chosen], start[chosen] = own.row, own.start
        placed.append(own)
    return _joined(placed[0], placed[1], row, start)


def _joined(first: Placed, second: Placed, row: np.ndarray, start: np.ndarray) -> Placed:
    return Placed(
        row,
        start,
        np.concatenate([first.edges, first.rows + second.edges[1:]]),
        first.rows_of_splits | second.rows_of_splits,
        first.lower_bounds + second.lower_bounds,
        first.places + second.places,
    )


def pack_split(lengths: np.ndarray, config: Config, split: str, epoch: int, shards: dict[str, int]) -> Placed:
    """Pack one split, and distribute its rows, in seeded order, over its shards.

    `lengths` are int32[pieces], in tokens. Rows of the shortest length come first. The result depends only on the
    arguments: the lengths, the settings of rows and the seed, the split, the epoch, and the number of shards.
    """
    names = splits_of(split, config.row_lengths)
    capacity = config.multiples
    stream = stream_of(split, epoch)
    if not config.packing:
        row, start = shuffle(len(lengths), config.seed, stream), np.zeros(len(lengths), np.int32)
        return _placed(row, start, {names[0]: len(lengths)}, [(len(lengths), "one conversation a row")], [], shards)
    lengths = bin_packing.in_multiples(lengths, config.align)
    counts = bin_packing.histogram(lengths, capacity)
    if len(config.row_lengths) == 1:
        solved, bound = bin_packing.solve(counts, capacity)
        patterns, bounds, places = [solved], [bound], []
    else:
        patterns, bound = several_lengths.solve(counts, config.row_lengths)
        counts_of_lengths = [bin_packing.counts_of(each, capacity) for each in patterns]
        bounds = [
            bin_packing.lower_bound(own[: length + 1], length)
            for own, length in zip(counts_of_lengths, config.row_lengths, strict=True)
        ]
        places = [bound]
    # Neighbors in a source are often alike. In source order, neighbors of equal length would share rows, or would all
    # be in rows of one length.
    order = shuffle(len(lengths), config.seed, (epoch << 10))
    if epoch > 1 and len(patterns) == 1:
        patterns = [_other_patterns(lengths, order, patterns[0], capacity)]
    elif epoch > 1:
        for number, (length, own) in enumerate(zip(config.row_lengths, counts_of_lengths, strict=True)):
            pieces = np.repeat(np.arange(len(own), dtype=np.int32), own)
            own_order = shuffle(len(pieces), config.seed, (epoch << 10) + (number + 1) * LENGTH)
            patterns[number] = _other_patterns(pieces, own_order, patterns[number], length)
    rows = [each.rows for each in patterns]
    # Shuffle before allocating columns over the pieces, since it temporarily takes 20 bytes per row.
    places_of = [shuffle(own, config.seed, stream + number * LENGTH) for number, own in enumerate(rows)]
    for top, place_of in zip(accumulate(rows), places_of[1:], strict=False):
        place_of += np.int32(top)
    place_of = np.concatenate(places_of) if len(places_of) > 1 else places_of[0]
    row, start = bin_packing.assign(lengths, reduce(bin_packing.joined, patterns), order)
    for top in range(0, len(row), bin_packing.CHUNK):
        chunk = slice(top, top + bin_packing.CHUNK)
        row[chunk] = place_of[row[chunk]]
    start *= config.align
    return _placed(row, start, dict(zip(names, rows, strict=True)), bounds, places, shards)


def _placed(
    row: np.ndarray,
    start: np.ndarray,
    rows_of_splits: dict[str, int],
    bounds: list[tuple[int, str]],
    places: list[tuple[int, str]],
    shards: dict[str, int],
) -> Placed:
    edges, top = [np.zeros(1, np.int64)], 0
    for split, rows in rows_of_splits.items():
        edges.append(top + np.arange(1, shards[split] + 1) * rows // max(shards[split], 1))
        top += rows
    bounds = [bound if rows else (0, "") for bound, rows in zip(bounds, rows_of_splits.values(), strict=True)]
    return Placed(row, start, np.concatenate(edges), rows_of_splits, bounds, places)


def stream_of(split: str, epoch: int) -> int:
    """Return the stream of seeded numbers of a split.

    The training split is 0, the held-out split is 1, and epochs are 2 and above.
    """
    return 1 if split == "validation" else epoch if epoch > 1 else 0


def _other_patterns(
    lengths: np.ndarray, order: np.ndarray, patterns: bin_packing.Patterns, capacity: int
) -> bin_packing.Patterns:
    """Find different patterns of the same lengths, in the same number of rows.

    A subset of the pieces is packed first. Its full rows are kept, and all other pieces are packed in further rows. The
    subset is the first half in `order`; it is halved again while the number of rows differs. Returns `patterns` if no
    subset works.
    """
    counts = bin_packing.histogram(lengths, capacity)
    part = len(lengths) // 2
    while part:
        full = bin_packing.full_rows(
            bin_packing.pack(bin_packing.histogram(lengths[order[:part]], capacity), capacity), capacity
        )
        rest = bin_packing.pack(counts - bin_packing.counts_of(full, capacity), capacity)
        if full.rows + rest.rows == patterns.rows:
            return bin_packing.joined(full, rest)
        part //= 2
    return patterns


def hold_out_at_least_one(
    held_out: np.ndarray, stays: np.ndarray, digests: Callable[[], np.ndarray], validation: float
) -> None:
    """Move one content to the other split, in place, if that split is empty.

    This happens only in tiny corpora. `stays` is true for each conversation that is packed. Conversations with equal
    contents (uint64 `digests`) move together. If there is only one content, it is trained on.
    """
    present = held_out[stays]
    if validation == 0 or not len(present) or (present.any() and not present.all()):
        return
    contents = digests()
    chosen = np.flatnonzero(stays)[0 if present[0] else -1]
    moved = contents == contents[chosen]
    if present[0] or not moved[stays].all():
        held_out[moved] = not present[0]
