"""Deal the conversations of a large corpus to groups that are planned separately.

    conversations of all parts ─plan_chunk each─▶ chunks ─deal─▶ groups, each with its own shards

Each group is planned like a separate corpus: no decision about one group depends on another group. Each group must
therefore be a sample of the whole corpus. Groups in source order would hold one source each, and sources with different
lengths need up to 7 % more rows separately than together (bench/packing/groups.py). Groups of single conversations
would have to read a little of everything; a chunk of 1,000 conversations is read in one run.

Chunks are dealt evenly along the corpus: every group gets its share of any run of chunks, such as a source, to within a
few chunks. In random order, the share would be off by its square root. Groups can then differ only as neighboring
chunks of a source differ.

Dealing needs only the number of conversations in each part. Conversations are numbered over all parts, so chunks do not
depend on where parts begin. "Conversation" means a sample here. All samples of one conversation are in the chunk of the
first sample.
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
    """Return the number of groups for some conversations: at least 1, at most `most`.

    `copies` is the number of conversations if each counts as often as it is packed.
    """
    return max(1, min(most, -(-copies // plan_group), -(-conversations // plan_chunk)))


def runs_of(group: int, groups: int, edges: np.ndarray, plan_chunk: int, shards: int, seed: int) -> list[Run]:
    """Return the conversations of a group, as runs.

    `edges` is int64[parts + 1], conversations before each part. `shards` is the number of shards of the training split.
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
    shards. For each group, the corpus is divided into as many equal stretches as the group gets chunks, and the group
    gets one chunk at a random place of each stretch.
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
    """Return the group that fills a shard, and the number of the shard in the group.

    `shards` has the number of shards of each split. Both shard numbers count over all splits, in their order.
    """
    for split, count in shards.items():
        if number < count:
            group = ((number + 1) * groups - 1) // count
            earlier = list(shards.values())[: list(shards).index(split)]
            before = sum(len(shards_of(group, groups, each)) for each in earlier)
            return group, before + number - shards_of(group, groups, count).start
        number -= count
    raise IndexError("the plan has fewer shards")
