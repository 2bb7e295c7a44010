"""Deal the conversations of a large corpus to groups that are planned apart.

    conversations of all parts ─plan_chunk each─▶ chunks ─deal─▶ groups, each with shards of its own

Each group is planned as a corpus of its own would be: nothing that is decided about one depends on another. It must
therefore be a sample of the whole corpus. Groups in source order would hold one source each, and sources of different
lengths need up to 7 % more rows apart than together (bench/packing/groups.py). Groups of single conversations would
read a little of everything; a chunk of 1,000 is read in one run.

Chunks are dealt evenly along the corpus: of any run of chunks, such as a source, every group gets its share, to within
a few chunks. In random order it would be off by the square root of its share. What is left are differences between
neighboring chunks of a source.

Only the number of conversations of each part is needed. Numbers count over all parts, so that a chunk does not depend
on where parts begin. "Conversation" means a sample: one that is divided into samples is in the chunk of its first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tasks.core.seeded_order import CHUNKS, draws


class Run(NamedTuple):
    """Neighboring rows [first, last) of the token file of one part."""

    part: int
    first: int
    last: int


def groups_of(conversations: int, copies: int, plan_group: int, plan_chunk: int, most: int) -> int:
    """Return in how many groups so many conversations are planned: at least one, and at most `most`.

    `copies` is how many there are if each counts as often as it is packed.
    """
    return max(1, min(most, -(-copies // plan_group), -(-conversations // plan_chunk)))


def runs_of(group: int, groups: int, edges: np.ndarray, plan_chunk: int, shards: int, seed: int) -> list[Run]:
    """Return the conversations of a group.

    `edges` is int64[parts + 1], conversations before each part; `shards` are those of the training split.
    """
    found: list[Run] = []
    count = int(edges[-1])
    if not count:
        return found
    own = np.flatnonzero(deal(-(-count // plan_chunk), shards, groups, seed, CHUNKS) == group)
    # Neighboring chunks are one run, and a run ends where a part does.
    apart = np.diff(own) != 1
    begins = own[np.append(True, apart)] * plan_chunk
    ends = np.minimum((own[np.append(apart, True)] + 1) * plan_chunk, count)
    for top, bottom in zip(begins.tolist(), ends.tolist(), strict=True):
        part = int(np.searchsorted(edges, top, side="right")) - 1
        while top < bottom:
            end = min(bottom, int(edges[part + 1]))
            if top < end:
                found.append(Run(part, top - int(edges[part]), end - int(edges[part])))
            top, part = end, part + 1
    return found


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


def place_of_shard(number: int, groups: int, shards: dict[str, int]) -> tuple[int, int]:
    """Return the group that fills a shard, and the number of the shard among those of the group.

    `shards` has the number of shards of each split; `number` counts over all splits, in their order. So does the number
    within the group.
    """
    for split, count in shards.items():
        if number < count:
            group = ((number + 1) * groups - 1) // count
            earlier = list(shards.values())[: list(shards).index(split)]
            before = sum(len(shards_of(group, groups, each)) for each in earlier)
            return group, before + number - shards_of(group, groups, count).start
        number -= count
    raise IndexError("the plan has fewer shards")
