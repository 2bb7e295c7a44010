"""Assign each piece a row and a start.

Every split of the corpus is placed separately:

    pieces of a split ─pack─▶ rows ─shuffle─▶ (row, start) ─▶ the shards of the split

    all pieces ─place─▶ train, validation        pieces of the training split ─pack_split─▶ train_epoch_2, …

Guarantee for epochs: each epoch contains every piece of the training split, in the same number of rows. No group of two
or more pieces shares a row in two epochs, unless no swap with another piece of equal length exists. To achieve this, a
seeded half of the conversations is packed before the rest, conversations of equal length are assigned in a different
order, and groups that still meet again are broken up (neighbors.py). A row filled by one conversation is the
same in every epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.numbers import shuffle
from packcorpus.tasks.packing import bin_packing, several_lengths
from packcorpus.tasks.packing.column_generation import LITTLE_WORK, rows_of, tokens_of
from packcorpus.tasks.storage.layout import SPLITS

# Distance between the streams for one length of rows and the streams for the next length. The streams of epochs are
# below it.
LENGTH = 1 << 17

Bound = tuple[int, str]  # a number that every packing needs, and the name of its proof


@dataclass(slots=True)
class Placed:
    """Row and start of each piece, int32, and the rows of one or two kinds of splits."""

    row: np.ndarray  # numbered over all shards, in their order
    start: np.ndarray  # offset of the piece's first place within the row
    edges: np.ndarray  # int64[shards + 1], rows before each shard
    rows_of_splits: dict[str, int]
    lower_bounds: list[Bound]  # rows, per split
    places: Sequence[Bound] = ()  # places, per kind of split; only if rows have several lengths

    @property
    def rows(self) -> int:
        return sum(self.rows_of_splits.values())

    def slices(self) -> dict[str, slice]:
        """Return the rows of each split."""
        ends = accumulate(self.rows_of_splits.values())
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
    is_whole = not held_out.any()  # then no column is copied
    train = pack_split(lengths if is_whole else lengths[~held_out], config, SPLITS[0], 1, shards)
    validation = pack_split(lengths[held_out], config, SPLITS[1], 1, shards)
    row, start = train.row, train.start
    if not is_whole:
        row, start = np.empty(len(lengths), np.int32), np.empty(len(lengths), np.int32)
        row[~held_out], start[~held_out] = train.row, train.start
        row[held_out], start[held_out] = validation.row + np.int32(train.rows), validation.start
    return Placed(
        row,
        start,
        np.concatenate([train.edges, train.rows + validation.edges[1:]]),
        train.rows_of_splits | validation.rows_of_splits,
        train.lower_bounds + validation.lower_bounds,
        [*train.places, *validation.places],
    )


def pack_split(lengths: np.ndarray, config: Config, split: str, epoch: int, shards: dict[str, int]) -> Placed:
    """Pack one split, and distribute its rows, in seeded order, over its shards.

    `lengths` are int32[pieces], in tokens. Rows of the shortest length come first. The result depends only on the
    arguments: the lengths, the settings of rows and the seed, the split, the epoch, and the number of shards.
    """
    layout, stream, places = config.rows, stream_of(split, epoch), list[Bound]()
    if config.packing:
        lengths = layout.multiples(lengths)
        # Neighbors in a source are often alike. In source order, neighbors of equal length would share rows, or would
        # all be in rows of one length.
        order = shuffle(len(lengths), config.seed, epoch << 10)
        runs, rows, bounds, places = _runs_of(lengths, order, config, epoch)
        # Shuffle before allocating columns over the pieces, since it temporarily takes 20 bytes per row.
        places_of = [shuffle(count, config.seed, stream + number * LENGTH) for number, count in enumerate(rows)]
        for top, place_of in zip(accumulate(rows), places_of[1:], strict=False):
            place_of += np.int32(top)
        place_of = np.concatenate(places_of) if len(places_of) > 1 else places_of[0]
        row, start = bin_packing.assign(lengths, runs, order)
        for top in range(0, len(row), bin_packing.CHUNK):
            chunk = slice(top, top + bin_packing.CHUNK)
            row[chunk] = place_of[row[chunk]]
        start *= layout.align
    else:
        row, start = shuffle(len(lengths), config.seed, stream), np.zeros(len(lengths), np.int32)
        rows, bounds = [len(lengths)], [(len(lengths), "one conversation a row")]
    names, edges, top = layout.splits(split), [np.zeros(1, np.int64)], 0
    for name, count in zip(names, rows, strict=True):
        edges.append(top + np.arange(1, shards[name] + 1) * count // max(shards[name], 1))
        top += count
    bounds = [bound if count else (0, "") for bound, count in zip(bounds, rows, strict=True)]
    return Placed(row, start, np.concatenate(edges), dict(zip(names, rows, strict=True)), bounds, places)


def _runs_of(
    lengths: np.ndarray, order: np.ndarray, config: Config, epoch: int
) -> tuple[bin_packing.Runs, list[int], list[Bound], list[Bound]]:
    """Return what all rows hold, their numbers, and their bounds.

    The numbers and the first bounds are of the rows of each length; the last are those of all places.
    For epochs after the first, other rows are searched for each length of rows: as many, with the same lengths. A
    subset of the pieces is packed first. Its full rows are kept, and all other pieces are packed in further rows. The
    subset is the first half in `order`; it is halved again while the number of rows differs. If no subset works, the
    rows stay the same.
    """
    layout = config.rows
    capacities = [length // layout.align for length in layout.lengths]
    packed, bounds, places = several_lengths.solve(bin_packing.histogram(lengths, layout.capacity), capacities)
    for number, (usual, capacity) in enumerate(zip(packed, capacities, strict=True) if epoch > 1 else ()):
        if len(packed) > 1:
            counts = bin_packing.counts_of(usual, capacity)
            lengths = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
            order = shuffle(len(lengths), config.seed, (epoch << 10) + (number + 1) * LENGTH)
        counts, part = bin_packing.histogram(lengths, capacity), len(lengths) // 2
        while part:
            some, _ = bin_packing.solve(bin_packing.histogram(lengths[order[:part]], capacity), capacity, LITTLE_WORK)
            full = [(row, copies) for row, copies in some if tokens_of(row) == capacity]
            rest, _ = bin_packing.solve(counts - bin_packing.counts_of(full, capacity), capacity, LITTLE_WORK)
            if rows_of(full) + rows_of(rest) == rows_of(usual):
                packed[number] = full + rest
                break
            part //= 2
    return bin_packing.Runs.of(chain(*packed)), [*map(rows_of, packed)], bounds, [places] if places else []


def number_rows_by_source(placed: Placed) -> None:
    """Renumber the rows of each split in place, by their first pieces.

    Pieces are in source order. Every row keeps its pieces, and every shard its number of rows.
    """
    firsts = np.full(placed.rows, len(placed.row), np.int32)
    np.minimum.at(firsts, placed.row, np.arange(len(placed.row), dtype=np.int32))
    place_of = np.empty(placed.rows, np.int32)
    for rows in placed.slices().values():
        place_of[rows.start + np.argsort(firsts[rows])] = np.arange(rows.start, rows.stop, dtype=np.int32)
    for top in range(0, len(placed.row), bin_packing.CHUNK):
        chunk = slice(top, top + bin_packing.CHUNK)
        placed.row[chunk] = place_of[placed.row[chunk]]


def stream_of(split: str, epoch: int) -> int:
    """Return the stream of seeded numbers of a split.

    The training split is 0, the held-out split is 1, and epochs are 2 and above.
    """
    return 1 if split == "validation" else epoch if epoch > 1 else 0
