"""Deal the conversations of a large corpus to groups that are planned one by one.

    pieces of a split ─plan_chunk conversations each─▶ chunks ─deal─▶ groups, each with shards of its own

Each group is planned as a corpus of its own would be: nothing that is decided about one depends on another. It must
therefore be a sample of the whole corpus. Groups in source order would hold one source each, and sources of different
lengths need up to 7 % more rows apart than together (bench/groups.py). Groups of single conversations would read a
little of everything; a chunk of 1,000 is read in one run.

Chunks are dealt evenly along the corpus: of any run of chunks, such as a source, every group gets its share, to within
a few chunks. In random order it would be off by the square root of its share. What is left are differences between
neighboring chunks of a source.

All further copies of a conversation are in the group of the first one. The groups of the training split are the same in
all epochs, so that a group can keep its conversations apart by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasks.config import Config
from tasks.core.seeded_order import CHUNKS, draws
from tasks.packing.pieces import Pieces, indexes_where
from tasks.storage.splits import SPLITS


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of one split."""

    count: int = 1
    of: np.ndarray | None = None  # uint16[pieces of the split], the group of each; None if there is one group

    def members(self, group: int) -> slice | np.ndarray:
        """Return the pieces of a group, by their number among the pieces of the split."""
        return slice(None) if self.of is None else indexes_where(self.of == group)


ONE_GROUP = Groups()


def group_pieces(
    pieces: Pieces, held_out: np.ndarray, config: Config, shards: dict[str, int], most: int
) -> dict[str, Groups]:
    """Deal the pieces of each split to groups, at most `most` and one for each shard.

    `held_out` is bool[pieces].
    """
    return {
        split: _group_split(pieces, held_out, bool(number), config, shards[split], most)
        for number, split in enumerate(SPLITS)
    }


def _group_split(
    pieces: Pieces, held_out: np.ndarray, validation: bool, config: Config, shards: int, most: int
) -> Groups:
    count = int(np.count_nonzero(held_out == validation))
    groups = min(most, shards, -(-count // config.plan_group))
    if groups <= 1:
        return ONE_GROUP
    # A chunk is known by its first conversation: further copies, and all pieces of one conversation, are in the same.
    firsts = indexes_where(held_out[: pieces.once] == validation)[:: config.plan_chunk]
    edges = np.unique(pieces.conversations(firsts))
    if (groups := min(groups, len(edges))) <= 1:
        return ONE_GROUP
    dealt = deal(len(edges), shards, groups, config.seed, CHUNKS + validation)
    of, end = np.empty(count, np.uint16), 0
    for some in pieces.chunks():
        own = pieces.conversations(some)[held_out[some] == validation]
        of[end : end + len(own)] = dealt[np.searchsorted(edges, own, side="right") - 1]
        end += len(own)
    return Groups(groups, of)


def deal(chunks: int, shards: int, groups: int, seed: int, stream: int) -> np.ndarray:
    """Return the group of each chunk, uint16[chunks].

    `groups` is at most `chunks` and `shards`. Each group gets at least one chunk, and chunks in proportion to its
    shards, evenly along the corpus: one, at a random place, of each of as many equal stretches as it gets chunks.
    """
    firsts = np.array([shards_of(group, groups, shards).start for group in range(groups)] + [shards])
    share = 1 + np.diff((chunks - groups) * firsts // shards)
    group = np.repeat(np.arange(groups, dtype=np.uint16), share)
    nth = np.arange(chunks) - np.repeat(np.cumsum(share) - share, share)
    # In 32 bits: 0 is the start of the corpus, 2^32 its end.
    place = ((nth << 32) + (draws(chunks, seed, stream) >> np.uint64(32)).astype(np.int64)) // share[group]
    return group[np.argsort(place, kind="stable")]


def shards_of(group: int, groups: int, shards: int) -> range:
    """Return the shards of a split that a group fills."""
    return range(shards * group // groups, shards * (group + 1) // groups)
