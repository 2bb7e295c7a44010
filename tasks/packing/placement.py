"""Assign each piece a row and a start, separately for each split of the corpus or of a group (groups/).

    pieces of a split ─pack─▶ rows ─shuffle─▶ (row, start) ─▶ the shards of the split

    all pieces ─place─▶ train, validation        pieces of the training split ─repack─▶ train_epoch_2, …

Guarantee for epochs: each contains every piece of the training split, in the same number of rows, and no group of two
or more pieces shares a row in two epochs, unless no swap with another piece of equal length exists. To achieve this, a
seeded half of the conversations is packed before the rest, conversations of equal length are assigned in another
order, and groups that still meet again are broken up (row_companions.py). A row filled by one conversation is the same
in every epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tasks.config import Config
from tasks.core.seeded_order import GROUP, shuffle
from tasks.packing import bin_packing
from tasks.storage.splits import SPLITS


@dataclass(slots=True)
class Placed:
    """The row and start of each piece, int32, and the rows of one or two splits."""

    row: np.ndarray  # numbered over all shards, in their order
    start: np.ndarray  # offset of the piece's first place within the row
    edges: np.ndarray  # int64[shards + 1], rows before each shard
    rows_of_splits: dict[str, int]
    lower_bounds: list[tuple[int, str]]  # per split: rows, and the name of the bound
    counts: list[np.ndarray]  # per split: int64[multiples + 1], pieces of each length; zeros without packing

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


def place(lengths: np.ndarray, held_out: np.ndarray, config: Config, shards: dict[str, int], group: int = 0) -> Placed:
    """Pack each split and distribute its rows, in seeded order, over its shards.

    `lengths` are int32[pieces]. The order of rows depends on the number of the group.
    """
    if not held_out.any():
        train = _place_split("train", lengths, config, shards["train"], group)
        nothing = _place_split("validation", lengths[:0], config, shards["validation"], group)
        return _joined([train, nothing], train.row, train.start)
    row, start = np.empty(len(lengths), np.int32), np.empty(len(lengths), np.int32)
    placed: list[Placed] = []
    for number, split in enumerate(SPLITS):
        chosen = held_out == bool(number)
        own = _place_split(split, lengths[chosen], config, shards[split], group)
        own.row += placed[0].rows if placed else 0
        row[chosen], start[chosen] = own.row, own.start
        placed.append(own)
    return _joined(placed, row, start)


def repack(lengths: np.ndarray, config: Config, epoch: int, split: str, shards: int, group: int = 0) -> Placed:
    """Pack the pieces of the training split again, for epoch 2 or later."""
    return _placed(pack_group(lengths, config, split, epoch, group), split, shards)


def _joined(placed: list[Placed], row: np.ndarray, start: np.ndarray) -> Placed:
    first, second = placed
    return Placed(
        row,
        start,
        np.concatenate([first.edges, first.rows + second.edges[1:]]),
        first.rows_of_splits | second.rows_of_splits,
        first.lower_bounds + second.lower_bounds,
        first.counts + second.counts,
    )


def _place_split(split: str, lengths: np.ndarray, config: Config, shards: int, group: int) -> Placed:
    return _placed(pack_group(lengths, config, split, 1, group), split, shards)


def _placed(packed: PackedGroup, split: str, shards: int) -> Placed:
    edges = np.arange(shards + 1) * packed.rows // max(shards, 1)
    bound = packed.bound if packed.rows else (0, "")
    return Placed(packed.row, packed.start, edges, {split: packed.rows}, [bound], [packed.counts])


# The bound without packing.
ALONE = "one conversation a row"


class PackedGroup(NamedTuple):
    """The rows of one split of a group or of the corpus, numbered from 0."""

    row: np.ndarray  # int32[pieces]
    start: np.ndarray  # int32[pieces]
    rows: int
    counts: np.ndarray  # int64[multiples + 1], pieces of each length in multiples; zeros without packing
    bound: tuple[int, str]  # the number of rows that every packing needs, and the name of the bound


def pack_group(lengths: np.ndarray, config: Config, split: str, epoch: int, group: int) -> PackedGroup:
    """Pack pieces by themselves, and shuffle their rows.

    `lengths` are int32[pieces], in tokens. The result follows from the arguments: the settings sequence_length, align,
    packing, and seed; the split, the epoch, and the number of the group within the split.
    """
    capacity = config.multiples
    stream = stream_of(split, epoch, group)
    if not config.packing:
        row, nothing = shuffle(len(lengths), config.seed, stream), np.zeros(capacity + 1, np.int64)
        bound = len(lengths), ALONE
        return PackedGroup(row, np.zeros(len(lengths), np.int32), len(lengths), nothing, bound)
    lengths = bin_packing.in_multiples(lengths, config.align)
    counts = bin_packing.histogram(lengths, capacity)
    patterns, bound = bin_packing.solve(counts, capacity)
    # Neighbors in a source are often alike: in source order, those of equal length would share rows.
    order = shuffle(len(lengths), config.seed, (epoch << 10) + group * GROUP)
    if epoch > 1:
        patterns = _other_patterns(lengths, order, patterns, capacity)
    # Shuffle before allocating columns over the pieces, since it temporarily takes 20 bytes per row.
    place_of = shuffle(patterns.rows, config.seed, stream)
    row, start = bin_packing.assign(lengths, patterns, order)
    for top in range(0, len(row), bin_packing.CHUNK):
        chunk = slice(top, top + bin_packing.CHUNK)
        row[chunk] = place_of[row[chunk]]
    start *= config.align
    return PackedGroup(row, start, patterns.rows, counts, bound)


def stream_of(split: str, epoch: int, group: int) -> int:
    """Return the stream of seeded numbers of a split: 0 is train, 1 is validation, 2 and above are epochs."""
    return (1 if split == "validation" else epoch if epoch > 1 else 0) + group * GROUP


def bound_of(rows: int, counts: np.ndarray, config: Config) -> tuple[int, str]:
    """Return the lower bound of all groups of a split with its name; `counts` are its pieces of each length.

    The bounds of groups may add up to more than one plan needs.
    """
    if not config.packing:
        return rows, ALONE
    return bin_packing.lower_bound(counts, config.multiples) if rows else (0, "")


def _other_patterns(
    lengths: np.ndarray, order: np.ndarray, patterns: bin_packing.Patterns, capacity: int
) -> bin_packing.Patterns:
    """Find other patterns of the same lengths, in as many rows.

    They are the full rows of a part of the pieces, then rows of the rest.

    The part is the first half in `order`, halved again as long as the number of rows differs. Returns `patterns` if no
    part works.
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
    """Move one content to the other split (in place) if that split is empty.

    This happens only in tiny corpora.

    `stays` is true for each conversation that is packed. Equal contents (uint64 `digests`) move together. If there is
    only one content, it is trained on.
    """
    present = held_out[stays]
    if validation == 0 or not len(present) or (present.any() and not present.all()):
        return
    contents = digests()
    chosen = np.flatnonzero(stays)[0 if present[0] else -1]
    moved = contents == contents[chosen]
    if present[0] or not moved[stays].all():
        held_out[moved] = not present[0]
