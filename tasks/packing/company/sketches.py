"""Find topics and near-duplicates of conversations from their token ids.

    tokens ─rare ids, projected─▶ Topics: a direction for each conversation ─order_by_topic─▶ a rank for each
           ─rare runs of ids, hashed─▶ labels: near-duplicates have one in common

Both ignore ids that nearly all conversations contain: markers of the template, common words, a default system prompt.
All figures are integers, or floating-point numbers that every machine rounds alike.
"""

from __future__ import annotations

import numpy as np

from tasks.core.seeded_order import hashes
from tasks.storage.tokens.token_files import TokenColumns

# Number of values in the direction of a conversation. Random projections preserve angles to about 1/√AXES (Achlioptas
# 2003).
AXES = 32

# Slots in which ids and hashes of runs are counted: 8 MB.
SLOTS = 1 << 20

# An id says nothing about the topic if it makes up more than 1 / COMMON of all tokens.
COMMON = 256

# Largest segment of the order that is not halved. Smaller segments take longer and change little.
ALIKE = 16

# Consecutive ids in a run (shingle). The hashes of its runs identify a text.
RUN = 5

# A run is not a sign of copying if it occurs more than FEW times, and more than once per SPREAD conversations.
SPREAD, FEW = 1000, 50

# Each label joins MINIMA minima. The share of pairs with a common label is 98 % if both share 80 % of their runs, and
# 31 % if they share 30 % (Broder 1997; Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, section 3.4).
LABELS, MINIMA = 4, 2


def order_by_topic(axes: np.ndarray) -> np.ndarray:
    """Return a rank for each of n directions; similar directions are close: int32[n].

    The directions are halved at the median of the axis along which they differ most. Then each half is halved, and so
    on. `axes` are int8[n, AXES].
    """
    order = np.argsort(hashes(np.arange(len(axes))), kind="stable")  # ties, such as equal contents, are in any order
    edges = np.array([0, len(order)])
    while len(order) and np.diff(edges).max() > ALIKE:
        segment = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
        widest = _widest_axis(axes, order, edges)
        values = axes[order, widest[segment]].astype(np.int64)
        order = order[np.argsort(segment << 8 | (values + 128), kind="stable")]
        middles = (edges[:-1] + edges[1:]) // 2
        edges = np.unique(np.concatenate([edges, middles]))
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return rank


def _widest_axis(axes: np.ndarray, order: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the axis with the largest variance in each segment: int64[segments]."""
    sizes = np.diff(edges).astype(np.float64)
    widest, most = np.zeros(len(sizes), np.int64), np.full(len(sizes), -1.0)
    for axis in range(AXES):
        values = axes[order, axis].astype(np.int64)
        sums, squares = np.add.reduceat(values, edges[:-1]), np.add.reduceat(values * values, edges[:-1])
        variance = squares / sizes - (sums / sizes) ** 2
        widest[variance > most] = axis
        most = np.maximum(most, variance)
    return widest


def directions(tokens: TokenColumns) -> np.ndarray:
    """Return the direction of each conversation: int8[conversations, AXES].

    Directions have a length of 127. The rarer an id, the more it counts. The bits of its hash are its direction.
    """
    counts = np.zeros(SLOTS, np.int64)
    for _, _, values in tokens.contents():
        counts += np.bincount(_ids(values) & (SLOTS - 1), minlength=SLOTS)
    weights = _bits(counts.sum() // COMMON) - _bits(counts)
    weights = np.where(counts > 1, weights.clip(min=0), 0).astype(np.int32)  # an id seen once is similar to nothing
    signs = hashes(np.arange(SLOTS))
    found = np.zeros((tokens.edges[-1], AXES), np.int8)
    for first, offsets, values in tokens.contents():
        chosen = slice(first, first + len(offsets) - 1)
        slots = _ids(values) & (SLOTS - 1)
        weight, sign = weights[slots], signs[slots].astype(np.uint32).view(np.int32)
        sums = np.empty((len(offsets) - 1, AXES), np.float64)
        for axis in range(AXES):
            negative = sign << axis >> 31  # -1 if the bit is set
            sums[:, axis] = np.add.reduceat((weight ^ negative) - negative, offsets[:-1])
        length = np.sqrt((sums * sums).sum(axis=1, keepdims=True))
        found[chosen] = np.rint(127 * np.divide(sums, length, where=length > 0, out=np.zeros_like(sums)))
    return found


def near_duplicates(tokens: TokenColumns) -> np.ndarray:
    """Return the labels of each conversation: uint64[conversations, LABELS].

    Near-duplicates have a label in common. A conversation without rare runs has unique labels.
    """
    counts = np.zeros(SLOTS, np.int64)
    for _, offsets, values in tokens.contents():
        runs, _ = _runs(values, offsets)
        counts += np.bincount(runs & np.uint64(SLOTS - 1), minlength=SLOTS)
    is_common = counts > max(FEW, tokens.edges[-1] // SPREAD)
    found = np.empty((tokens.edges[-1], LABELS), np.uint64)
    for first, offsets, values in tokens.contents():
        runs, owners = _runs(values, offsets)
        is_rare = ~is_common[(runs & np.uint64(SLOTS - 1)).astype(np.int64)]
        runs, owners = runs[is_rare], owners[is_rare]
        present, starts = np.unique(owners, return_index=True)
        for label in range(LABELS):
            # A conversation without rare runs keeps a unique label.
            own = hashes(np.arange(first, first + len(offsets) - 1) * LABELS + label)
            if len(runs):
                joined = np.zeros(len(present), np.uint64)
                for number in range(label * MINIMA, (label + 1) * MINIMA):
                    joined = hashes(joined ^ np.minimum.reduceat(hashes(runs ^ np.uint64(number)), starts))
                own[present] = joined
            found[first : first + len(offsets) - 1, label] = own
    return found


def _ids(values: np.ndarray) -> np.ndarray:
    """Return the ids of tokens, whether they are trained or not."""
    return values ^ (values >> 31)


def _runs(values: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hash, uint64, and conversation, int64, of each run of RUN ids.

    A run is within one conversation.
    """
    owners = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    count = max(0, len(values) - RUN + 1)
    ids, runs = _ids(values).astype(np.uint64), np.zeros(count, np.uint64)
    for number in range(RUN):
        runs = hashes(runs ^ ids[number : number + count])
    inside = owners[:count] == owners[len(owners) - count :]
    return runs[inside], owners[:count][inside]


def _bits(counts: np.ndarray | int) -> np.ndarray:
    """Return the number of bits of each count: an integer logarithm."""
    return np.frexp(np.asarray(counts, np.float64))[1]
