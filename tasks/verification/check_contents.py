"""Check that no content is in both splits and, if duplicates are dropped, that none is packed twice.

Contents are compared by digest. Conversations with the same digest may be anywhere, so they are distributed over ranges
of digests: memory is bounded by one range.
"""

from __future__ import annotations

import numpy as np

from tasks.storage.manifest import Manifest
from tasks.verification.partitions import Partitions
from tasks.verification.rules import Conversations, Rules

RANGE = 1 << 20  # conversations of a range of digests, about

_CONTENT = np.dtype([("digest", "u8"), ("length", "i8"), ("source", "i4"), ("record", "i8"), ("validation", "?")])


class Contents:
    """The contents of all packed conversations."""

    def __init__(self, manifest: Manifest, conversations: int):
        """`conversations` is about how many there are, at most."""
        self._once = manifest.config.get("duplicates") == "drop"
        self._ranges = max(1, -(-conversations // RANGE))
        self._parts = Partitions(self._ranges, _CONTENT)

    def add(self, seen: Conversations) -> None:
        """Add the conversations of a block; blocks are in the order of source and record."""
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
            (again, "is packed, and another one with the same content is, too"),
        ):
            first = np.sort(np.concatenate(found), order=["source", "record"])[:1]
            rules.require(np.zeros(len(first), bool), rule, {name: first[name] for name in ("source", "record")})

    def close(self) -> None:
        self._parts.close()
