"""Where each piece stands: pieces ─pack─▶ rows ─shuffle─▶ (shard, row, start), for each split by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasks import packing
from tasks.config import Config
from tasks.pieces import Accepted, Pieces

SPLITS = ("train", "validation")


@dataclass(slots=True)
class Placed:
    """Columns over the pieces, int32, and the rows that they make."""

    shard: np.ndarray  # number over all splits, train first
    row: np.ndarray  # within the shard
    start: np.ndarray  # first place within the row
    rows_of_shards: np.ndarray  # int64[shards]
    rows_of_splits: dict[str, int]
    lower_bounds: list[tuple[int, str]]  # of each split: rows, and the name of the bound

    @property
    def rows(self) -> int:
        return sum(self.rows_of_splits.values())


def place(pieces: Pieces, accepted: Accepted, config: Config, shards: dict[str, int]) -> Placed:
    """Pack each split and deal its rows, in seeded random order, to its shards."""
    hold_out_at_least_one(accepted.held_out, pieces.conversation, config.validation)
    held_out = accepted.held_out[pieces.conversation]
    shard, row, start = (np.zeros(len(held_out), np.int32) for _ in range(3))
    rows_of_shards, rows_of_splits, lower_bounds = [], {}, []
    first_shard = 0
    for number, split in enumerate(SPLITS):
        chosen = np.flatnonzero(held_out == bool(number))
        rows, start[chosen], count, bound = _pack(pieces.lengths[chosen], config)
        edges = np.arange(shards[split] + 1, dtype=np.int64) * count // max(shards[split], 1)
        shuffled = shuffle(count, config.seed, number)
        shard_of_row = np.searchsorted(edges[1:], shuffled, side="right")
        shard[chosen] = (shard_of_row + first_shard).astype(np.int32)[rows]
        row[chosen] = (shuffled - edges[shard_of_row]).astype(np.int32)[rows]
        rows_of_shards.append(np.diff(edges))
        rows_of_splits[split] = count
        lower_bounds.append(bound)
        first_shard += shards[split]
    return Placed(shard, row, start, np.concatenate(rows_of_shards), rows_of_splits, lower_bounds)


def _pack(lengths: np.ndarray, config: Config) -> tuple[np.ndarray, np.ndarray, int, tuple[int, str]]:
    """Row and start of each piece, the number of rows, and the lower bound with its name."""
    rows, starts = np.arange(len(lengths), dtype=np.int32), np.zeros(len(lengths), np.int32)
    if not config.packing:
        return rows, starts, len(lengths), (len(lengths), "one conversation a row")
    if not len(lengths):
        return rows, starts, 0, (0, "")
    count = 0
    for first in range(0, len(lengths), config.plan_group):
        group = slice(first, first + config.plan_group)
        patterns = packing.pack(packing.histogram(lengths[group], config.sequence_length), config.sequence_length)
        row, starts[group] = packing.assign(lengths[group], patterns)
        rows[group] = row + count
        count += patterns.rows
    bound = packing.lower_bound(packing.histogram(lengths, config.sequence_length), config.sequence_length)
    return rows, starts, count, bound


def hold_out_at_least_one(held_out: np.ndarray, conversations: np.ndarray, validation: float) -> None:
    """Where all of a tiny corpus lies on one side of the split, move one conversation over (in place).

    `conversations` are those of the pieces, in order.
    """
    if validation == 0 or not len(conversations):
        return
    present = conversations[np.diff(conversations, prepend=-1) > 0]
    if held_out[present].all():
        held_out[present[0]] = False
    elif len(present) > 1 and not held_out[present].any():
        held_out[present[-1]] = True


def shuffle(count: int, seed: int, stream: int) -> np.ndarray:
    """A permutation of 0..count-1 (int64) that no release of numpy changes: numbers in the order of a hash of them.

    The hash is splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), which gives
    each number another value. Each `stream` of a seed has an order of its own.
    """
    golden = 0x9E3779B97F4A7C15
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(golden)
        z += np.uint64((2 * seed + stream + 1) * 0xD1B54A32D192ED03 % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    place_of = np.empty(count, np.int64)
    place_of[np.argsort(z, kind="stable")] = np.arange(count)
    return place_of
