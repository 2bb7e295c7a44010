"""Check that no content is in both splits, or packed twice.

Content may only be packed twice if the config does not drop duplicates. Contents are compared by digest. Conversations
with the same digest may be anywhere in the index, so they are distributed over ranges of digests. Memory is bounded by
one range.
"""

from __future__ import annotations

import numpy as np

from tasks.storage.manifest import Manifest
from tasks.verification.partitions import Partitions
from tasks.verification.rules import Conversations, Rules

RANGE = 1 << 20  # approximate number of conversations in a range of digests

_CONTENT = np.dtype([("digest", "u8"), ("length", "i8"), ("source", "i4"), ("record", "i8"), ("validation", "?")])


class Contents:
    """The contents of all packed conversations."""

    def __init__(self, manifest: Manifest, conversations: int):
        """Choose the number of ranges; `conversations` is an upper bound."""
        self._once = manifest.config.get("duplicates") == "drop"
        self._ranges = max(1, -(-conversations // RANGE))
        self._parts = Partitions(self._ranges, _CONTENT)

    def add(self, seen: Conversations) -> None:
        """Add the conversations of a block.

        Blocks are in the order of source and record.
        """
        placed = np.flatnonzero(seen["placed"])
        rows = np.empty(len(placed), _CONTENT)
        for name in _CONTENT.names or ():
            rows[name] = seen[name][placed]
        upper = (rows["digest"] >> np.uint64(32)).astype(np.int64)
        self._parts.add(upper * self._ranges >> 32, rows)  # digests are evenly distributed

    def check(self, rules: Rules) -> None:
        both, again = [np.empty(0, _CONTENT)], [np.empty(0, _CONTENT)]
        for rows in self._parts:
            digest, validation = rows["digest"], rows["validation"]
            both.append(rows[validation][np.isin(digest[validation], digest[~validation])][:1])
            if self._once:
                order = np.lexsort((rows["length"], digest))
                same = (np.diff(digest[order]) == 0) & (np.diff(rows["length"][order]) == 0)
                again.append(rows[np.sort(order[1:][same])][:1])
        for found, rule in (
            (both, "is in the validation split, and the same content is in the training split"),
            (again, "is packed, although another packed conversation has the same content"),
        ):
            first = np.sort(np.concatenate(found), order=["source", "record"])[:1]
            rules.require(np.zeros(len(first), bool), rule, {name: first[name] for name in ("source", "record")})

    def close(self) -> None:
        self._parts.close()
