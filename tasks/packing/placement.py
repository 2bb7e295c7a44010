"""Assign each piece a row and a start, separately for each split.

    pieces ─pack─▶ rows ─shuffle─▶ (row, start)

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
from tasks.core.int32 import check_number
from tasks.core.seeded_order import shuffle
from tasks.packing import bin_packing
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


def place(lengths: np.ndarray, held_out: np.ndarray, config: Config, shards: dict[str, int]) -> Placed:
    """Pack each split and distribute its rows, in seeded order, over its shards.

    `lengths` are int32[pieces].
    """
    if not held_out.any():
        train = _place_one("train", lengths, config, shards["train"])
        nothing = _place_one("validation", lengths[:0], config, shards["validation"])
        return _joined([train, nothing], train.row, train.start)
    row, start = np.empty(len(lengths), np.int32), np.empty(len(lengths), np.int32)
    placed: list[Placed] = []
    for number, split in enumerate(SPLITS):
        chosen = held_out == bool(number)
        own = _place_one(split, lengths[chosen], config, shards[split])
        own.row += placed[0].rows if placed else 0
        row[chosen], start[chosen] = own.row, own.start
        placed.append(own)
    return _joined(placed, row, start)


def repack(
    lengths: np.ndarray, of: np.ndarray, companions: Companions, config: Config, epoch: int, split: str, shards: int
) -> Placed:
    """Pack the pieces of the training split (Pieces.of) again, for epoch 2 or later."""
    placed = _place_one(split, lengths, config, shards, epoch)
    companions.separate(placed.row, placed.start, of, lengths, placed.rows)
    return placed


def _joined(placed: list[Placed], row: np.ndarray, start: np.ndarray) -> Placed:
    first, second = placed
    return Placed(
        row,
        start,
        np.concatenate([first.edges, first.rows + second.edges[1:]]),
        first.rows_of_splits | second.rows_of_splits,
        first.lower_bounds + second.lower_bounds,
    )


def _place_one(split: str, lengths: np.ndarray, config: Config, shards: int, epoch: int = 1) -> Placed:
    groups = _plan(lengths, config, epoch) if config.packing else []
    count = sum(group.patterns.rows for group in groups) if config.packing else len(lengths)
    # Shuffle before allocating columns over the pieces, since it temporarily takes 20 bytes per row.
    # Streams: 0 is train, 1 is validation, 2 and above are epochs.
    place_of = shuffle(count, config.seed, 1 if split == "validation" else epoch if epoch > 1 else 0)
    row, start, bound = _fill(lengths, groups, config)
    for top in range(0, len(row), bin_packing.CHUNK):
        chunk = slice(top, top + bin_packing.CHUNK)
        row[chunk] = place_of[row[chunk]]
    edges = np.arange(shards + 1, dtype=np.int64) * count // max(shards, 1)
    return Placed(row, start, edges, {split: count}, [bound])


class _Group(NamedTuple):
    """Pieces that are packed together."""

    inside: slice
    patterns: bin_packing.Patterns
    order: np.ndarray | None  # int32, order in which pieces of equal length take their places


def _plan(lengths: np.ndarray, config: Config, epoch: int) -> list[_Group]:
    capacity, groups = config.sequence_length, []
    for first in range(0, len(lengths), config.plan_group):
        inside = slice(first, first + config.plan_group)
        patterns, order = bin_packing.pack(bin_packing.histogram(lengths[inside], capacity), capacity), None
        if epoch > 1:
            order = shuffle(len(lengths[inside]), config.seed, epoch << 10)
            patterns = _other_patterns(lengths[inside], order, patterns, capacity)
        groups.append(_Group(inside, patterns, order))
    return groups


def _fill(lengths: np.ndarray, groups: list[_Group], config: Config) -> tuple[np.ndarray, np.ndarray, tuple[int, str]]:
    """Return row and start of each piece, and the lower bound with its name."""
    capacity = config.sequence_length
    if not config.packing:
        rows = np.arange(check_number(len(lengths), "rows"), dtype=np.int32)
        return rows, np.zeros(len(lengths), np.int32), (len(lengths), "one conversation a row")
    if not groups:
        return np.empty(0, np.int32), np.empty(0, np.int32), (0, "")
    found, count = [], 0
    for group in groups:
        row, start = bin_packing.assign(lengths[group.inside], group.patterns, group.order)
        row += count
        found.append((row, start))
        count += group.patterns.rows
    rows, starts = found[0] if len(found) == 1 else map(np.concatenate, zip(*found, strict=True))
    return rows, starts, bin_packing.lower_bound(bin_packing.histogram(lengths, capacity), capacity)


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
