"""Assign each piece a row and a start, separately for each group of each split (groups.py).

    pieces of a group ─pack─▶ rows ─shuffle─▶ (row, start) ─▶ the shards of the group

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
from tasks.packing.groups import ONE_GROUP, Groups, shards_of
from tasks.packing.row_companions import Companions
from tasks.storage.splits import SPLITS


@dataclass(slots=True)
class Placed:
    """The row and start of each piece, int32, and the rows of one or two splits."""

    row: np.ndarray  # numbered over all shards, in their order
    start: np.ndarray  # offset of the piece's first place within the row
    edges: np.ndarray  # int64[shards + 1], rows before each shard
    rows_of_splits: dict[str, int]
    lower_bounds: list[tuple[int, str]]  # per split: rows, and the name of the bound

    @property
    def rows(self) -> int:
        return sum(self.rows_of_splits.values())

    def shard(self, chosen: slice | np.ndarray) -> np.ndarray:
        """Return the shard of each chosen piece, int64."""
        return np.searchsorted(self.edges[1:], self.row[chosen], side="right")


def place(
    lengths: np.ndarray, held_out: np.ndarray, groups: dict[str, Groups], config: Config, shards: dict[str, int]
) -> Placed:
    """Pack each group of each split and distribute its rows, in seeded order, over its shards.

    `lengths` are int32[pieces].
    """
    if not held_out.any():
        train = _place_split("train", lengths, groups["train"], config, shards["train"])
        nothing = _place_split("validation", lengths[:0], ONE_GROUP, config, shards["validation"])
        return _joined([train, nothing], train.row, train.start)
    row, start = np.empty(len(lengths), np.int32), np.empty(len(lengths), np.int32)
    placed: list[Placed] = []
    for number, split in enumerate(SPLITS):
        chosen = held_out == bool(number)
        own = _place_split(split, lengths[chosen], groups[split], config, shards[split])
        own.row += placed[0].rows if placed else 0
        row[chosen], start[chosen] = own.row, own.start
        placed.append(own)
    return _joined(placed, row, start)


def repack(
    lengths: np.ndarray,
    of: np.ndarray,
    groups: Groups,
    companions: list[Companions],
    config: Config,
    epoch: int,
    split: str,
    shards: int,
) -> Placed:
    """Pack the pieces of the training split (Pieces.of) again, for epoch 2 or later. `companions` are by group."""
    return _place_split(split, lengths, groups, config, shards, epoch, of, companions)


def remember(companions: list[Companions], placed: Placed, of: np.ndarray, groups: Groups, shards: int) -> None:
    """Add the rows of one more packing of the training split to the companions of each group."""
    for group, own in enumerate(companions):
        inside, members = shards_of(group, groups.count, shards), groups.members(group)
        first, last = placed.edges[inside.start], placed.edges[inside.stop]
        row = placed.row[members]
        own.remember(row - np.int32(first) if first else row, of[members], int(last - first))


def _joined(placed: list[Placed], row: np.ndarray, start: np.ndarray) -> Placed:
    first, second = placed
    return Placed(
        row,
        start,
        np.concatenate([first.edges, first.rows + second.edges[1:]]),
        first.rows_of_splits | second.rows_of_splits,
        first.lower_bounds + second.lower_bounds,
    )


def _place_split(
    split: str,
    lengths: np.ndarray,
    groups: Groups,
    config: Config,
    shards: int,
    epoch: int = 1,
    of: np.ndarray | None = None,
    companions: list[Companions] | None = None,
) -> Placed:
    row, start = (np.empty(len(lengths) if groups.count > 1 else 0, np.int32) for _ in range(2))
    edges, counts, rows, bound = [0], np.zeros(config.sequence_length + 1, np.int64), 0, (0, "")
    for group in range(groups.count):
        members = groups.members(group)
        own = lengths[members]
        packed = pack_group(own, config, split, epoch, group)
        if companions is not None and of is not None:
            companions[group].separate(packed.row, packed.start, of[members], own, packed.rows)
        if groups.count == 1:
            row, start = packed.row, packed.start
        else:
            row[members], start[members] = packed.row + np.int32(rows), packed.start
        inside = len(shards_of(group, groups.count, shards))
        edges += (rows + np.arange(1, inside + 1) * packed.rows // max(inside, 1)).tolist()
        counts += packed.counts
        rows += packed.rows
        bound = packed.bound
    if groups.count > 1 and config.packing:
        # That of all pieces together: the bounds of groups may add up to more than one plan needs.
        bound = bin_packing.lower_bound(counts, config.sequence_length)
    return Placed(row, start, np.array(edges, np.int64), {split: rows}, [bound if rows else (0, "")])


class PackedGroup(NamedTuple):
    """The rows of one group, numbered from 0."""

    row: np.ndarray  # int32[pieces]
    start: np.ndarray  # int32[pieces]
    rows: int
    counts: np.ndarray  # int64[sequence_length + 1], pieces of each length; zeros without packing
    bound: tuple[int, str]  # the number of rows that every packing needs, and the name of the bound


def pack_group(lengths: np.ndarray, config: Config, split: str, epoch: int, group: int) -> PackedGroup:
    """Pack pieces by themselves, and shuffle their rows.

    `lengths` are int32[pieces]. The result follows from the arguments: the settings sequence_length, packing, and seed;
    the split, the epoch, and the number of the group within the split.
    """
    capacity = config.sequence_length
    # Streams: 0 is train, 1 is validation, 2 and above are epochs.
    stream = (1 if split == "validation" else epoch if epoch > 1 else 0) + group * GROUP
    if not config.packing:
        row, nothing = shuffle(len(lengths), config.seed, stream), np.zeros(capacity + 1, np.int64)
        bound = len(lengths), "one conversation a row"
        return PackedGroup(row, np.zeros(len(lengths), np.int32), len(lengths), nothing, bound)
    counts, order = bin_packing.histogram(lengths, capacity), None
    patterns, bound = bin_packing.solve(counts, capacity)
    if epoch > 1:
        order = shuffle(len(lengths), config.seed, (epoch << 10) + group * GROUP)
        patterns = _other_patterns(lengths, order, patterns, capacity)
    # Shuffle before allocating columns over the pieces, since it temporarily takes 20 bytes per row.
    place_of = shuffle(patterns.rows, config.seed, stream)
    row, start = bin_packing.assign(lengths, patterns, order)
    for top in range(0, len(row), bin_packing.CHUNK):
        chunk = slice(top, top + bin_packing.CHUNK)
        row[chunk] = place_of[row[chunk]]
    return PackedGroup(row, start, patterns.rows, counts, bound)


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
