"""The number of rows that no packing can go below.

    counts (conversations of each length) → lower_bound → rows, name of the bound

Three bounds, the highest wins; integers throughout, so every machine gets the same answer:

* ``ceil(tokens/length)``: rows must hold all tokens.
* ``L2``: a conversation longer than half a row shares its row with none of its kind. Martello & Toth, "Lower bounds
  and reduction procedures for the bin packing problem", Discrete Applied Mathematics 28 (1990). All thresholds in
  one pass over cumulative sums.
* ``DFF``: lengths are replaced by values such that whatever fits in a row has values that fit too, then the first
  bound is taken. The family f2 of Carlier, Clautiaux & Moukrim, Computers & Operations Research 34 (2007); every
  member is a bound by itself, so any subset of them may be tried.

L2 is what matters on conversations: at 512 it proves 8,740 rows where the tokens alone ask for 8,721. DFF proves
best-fit-decreasing optimal on lengths spread evenly (100,000 lengths in 1..512: 50,179 rows; L2 says 50,169). The
u(k) of Fekete & Schepers (2001) never beat these two in twenty trials and was left out.
"""

from __future__ import annotations

import numpy as np

# f2 costs one value for each distinct length and member; this many take 0.1 s. It suffices for all members up to
# capacity 2048; above, where there are more distinct lengths, members are spread over the range.
DFF_ELEMENTS = 1 << 22
# Values at a time: 0.5 MB of them stay in the cache.
BLOCK_ELEMENTS = 1 << 16


def lower_bound(counts: np.ndarray, capacity: int) -> tuple[int, str]:
    """Rows that no packing of `counts` can go below, and the name of the bound that says so.

    counts: integers, shape (capacity + 1,): conversations of each length in tokens. Of equal bounds the simplest
    is named; no conversations give 0.
    """
    counts = np.asarray(counts, dtype=np.int64)
    lengths = np.flatnonzero(counts)
    copies = counts[lengths]
    best = (-(-int(lengths @ copies) // capacity), "ceil(tokens/length)")
    for rows, name in ((_l2(counts, capacity), "L2"), (_dff(lengths, copies, capacity), "DFF")):
        if rows > best[0]:
            best = (rows, name)
    return best


def _l2(counts: np.ndarray, capacity: int) -> int:
    """Martello & Toth's L2, the maximum over all thresholds alpha in 0..capacity/2.

    Conversations above capacity - alpha stand alone. Those above half a row need a row each; what these leave free
    can take conversations of alpha and more, and what does not fit there needs further rows.
    """
    fewer = np.concatenate(([0], np.cumsum(counts)))  # fewer[i]: conversations shorter than i
    tokens = np.concatenate(([0], np.cumsum(counts * np.arange(capacity + 1))))
    half = capacity // 2
    alpha = np.arange(half + 1)
    paired = fewer[capacity - alpha + 1] - fewer[half + 1]
    free = paired * capacity - (tokens[capacity - alpha + 1] - tokens[half + 1])
    overflow = np.maximum(0, tokens[half + 1] - tokens[alpha] - free)
    return int((fewer[capacity + 1] - fewer[half + 1] + -(-overflow // capacity)).max())


def _dff(lengths: np.ndarray, copies: np.ndarray, capacity: int) -> int:
    """The best of f2(k), k in 1..capacity/2: a row is worth 2 * (capacity // k) and a conversation `_f2`."""
    members = capacity // 2
    tried = min(members, max(1, DFF_ELEMENTS // max(1, len(lengths))))
    k = 1 + np.arange(tried) * members // tried
    best = 0
    step = max(1, BLOCK_ELEMENTS // max(1, len(lengths)))
    for some in (k[first : first + step, None] for first in range(0, tried, step)):
        worth = _f2(lengths, some, capacity) @ copies
        best = max(best, int((-(-worth // (2 * (capacity // some[:, 0])))).max()))
    return best


def _f2(lengths: np.ndarray, k: np.ndarray, capacity: int) -> np.ndarray:
    """Values of `lengths` under f2(k): twice the k's in a length up to half a row, above it what they leave over."""
    long = 2 * (capacity // k - (capacity - lengths) // k)
    return np.where(2 * lengths > capacity, long, np.where(2 * lengths == capacity, capacity // k, 2 * (lengths // k)))
