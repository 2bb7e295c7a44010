"""Choose which conversations of equal length share a row.

This happens after the rows are planned:

    source    Pieces of one length go to rows in the order of the data: the first to the row whose pieces are first,
              and so on, again and again.
    similar   In each row, the piece with the rarest length stays. The others are assigned by topic: among pieces of one
              length, the first by topic goes to the row whose staying piece is first by topic, and so on. Then two
              pieces that are nearer to each other's row along an axis swap if both rows together become more similar.
    distinct  While a row has two near-duplicates, one of them swaps with a seeded random piece.
    epochs    While a row has the same pieces as a row of an earlier epoch, one of them swaps with another piece.

Rows and the lengths in them stay the same, and so do fill, bounds, and the ledger. Conversations are compared by token
IDs. IDs that nearly all conversations contain do not count: markers of the template, common words, a default system
prompt. All figures are integers, or floating-point numbers that every machine rounds alike.
"""

from __future__ import annotations

import numpy as np

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.numbers import MOST, draws, hashes, is_in
from packcorpus.tasks.packing.bin_packing import CHUNK
from packcorpus.tasks.storage.token_files import TokenColumns

# Number of values in the direction of a conversation. Random projections preserve angles to about 1/√AXES (Achlioptas
# 2003).
AXES = 32
# Slots in which ids and hashes of runs are counted: 8 MB.
SLOTS = 1 << 20
# An id says nothing about the topic if it makes up more than 1 / COMMON of all tokens.
COMMON = 256
# Largest segment of the order by topic that is not halved. Smaller segments take longer and change little.
ALIKE = 16
# Pairs whose gains are computed at a time: 3 MB, which fit in a cache.
CACHED = 1 << 13
# Passes over the axes of topics. Four instead of two make the pairs of real conversations 5 % more similar.
PASSES = 2

# Rounds of `source`. The first six bring the pieces of rows within 13 % of 20,000 conversations; ten more gain nothing.
GATHERINGS = 6

# Consecutive ids in a run (shingle). The hashes of its runs identify a text.
RUN = 5
# A run is not a sign of copying if it occurs more than FEW times, and more than once per SPREAD conversations.
SPREAD, FEW = 1000, 50
# Each label joins MINIMA minima. The share of pairs with a common label is 98 % if both share 80 % of their runs, and
# 31 % if they share 30 % (Broder 1997; Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, section 3.4).
LABELS, MINIMA = 4, 2
# First stream of `draws`, separate from the streams of splits, epochs, and contents.
STREAM = 1 << 22
# Rounds of swaps. Each round leaves a few in 1,000 of the pieces that met. If most texts are near-duplicates, no number
# of rounds is enough.
ROUNDS = 8

# Swaps tried per piece of a repeated group. This was enough to break up every such row of real conversations.
TRIES = 32


def compared_in(config: Config, tokens: TokenColumns) -> np.ndarray | None:
    """Return the directions or labels by which conversations are compared, or None."""
    if config.neighbors == "similar":
        return directions_of(tokens)
    return labels_of(tokens) if config.neighbors == "distinct" else None


def arrange(row: np.ndarray, start: np.ndarray, kind: np.ndarray, compared: np.ndarray, config: Config) -> None:
    """Swap pieces of the same kind, int[pieces], in place.

    `compared` has the properties (see `compared_in`) of the conversation of each piece.
    """
    if config.neighbors == "similar":
        assign_by_topic(row, start, kind, order_by_topic(compared))
        swap_similar(row, start, kind, compared)
    else:
        part_duplicates(row, start, kind, compared, config.seed)


def _swap(row: np.ndarray, start: np.ndarray, these: np.ndarray | int, those: np.ndarray | int) -> None:
    for column in (row, start):
        column[these], column[those] = column[those], column[these]


# -- source ----------------------------------------------------------------------------------------------------------


def bring_together(row: np.ndarray, start: np.ndarray, kind: np.ndarray) -> None:
    """Swap pieces of the same kind, in place, so that neighbors share rows.

    All arrays are int[pieces], and pieces are in source order. A row is where its pieces are on average. Pieces with
    few others of their kind count more, because they can hardly move.
    """
    pieces, weights = np.argsort(kind, kind="stable"), 1 / np.bincount(kind)[kind]
    for _ in range(GATHERINGS):
        middle = np.bincount(row, weights * np.arange(len(row))) / np.bincount(row, weights)
        places = np.lexsort((middle[row], kind))
        row[pieces], start[pieces] = row[places], start[places]


# -- similar ---------------------------------------------------------------------------------------------------------


def directions_of(tokens: TokenColumns) -> np.ndarray:
    """Return the direction of each conversation: int8[conversations, AXES].

    Directions have a length of 127. The rarer an id, the more it counts. The bits of its hash are its direction.
    """
    counts = np.zeros(SLOTS, np.int64)
    for _, _, values in tokens.contents():
        counts += np.bincount(ids_of(values) & (SLOTS - 1), minlength=SLOTS)
    # The number of bits is an integer logarithm. An id seen once is similar to nothing.
    weights = np.frexp(float(counts.sum() // COMMON))[1] - np.frexp(counts.astype(np.float64))[1]
    weights = np.where(counts > 1, weights.clip(min=0), 0).astype(np.int32)
    signs = hashes(np.arange(SLOTS))
    directions = np.zeros((tokens.edges[-1], AXES), np.int8)
    for first, offsets, values in tokens.contents():
        slots = ids_of(values) & (SLOTS - 1)
        weight, sign = weights[slots], signs[slots].astype(np.uint32).view(np.int32)
        sums = np.empty((len(offsets) - 1, AXES), np.float64)
        for axis in range(AXES):
            negative = sign << axis >> 31  # -1 if the bit is set
            sums[:, axis] = np.add.reduceat((weight ^ negative) - negative, offsets[:-1])
        length = np.sqrt((sums * sums).sum(axis=1, keepdims=True))
        units = np.divide(sums, length, where=length > 0, out=np.zeros_like(sums))
        directions[first : first + len(sums)] = np.rint(127 * units)
    return directions


def order_by_topic(axes: np.ndarray) -> np.ndarray:
    """Return a rank for each direction; similar directions are close: int32[n].

    `axes` are int8[n, AXES]. The directions are halved at the median of the axis along which they differ most. Then
    each half is halved, and so on.
    """
    order = np.argsort(hashes(np.arange(len(axes))), kind="stable")  # ties, such as equal contents, are in any order
    edges = np.array([0, len(order)])
    while len(order) and np.diff(edges).max() > ALIKE:
        sizes = np.diff(edges)
        widest, most = np.zeros(len(sizes), np.int64), np.full(len(sizes), -1.0)  # axis with the largest variance
        for axis in range(AXES):
            values = axes[order, axis].astype(np.int64)
            sums, squares = np.add.reduceat(values, edges[:-1]), np.add.reduceat(values * values, edges[:-1])
            variance = squares / sizes - (sums / sizes) ** 2
            widest[variance > most] = axis
            most = np.maximum(most, variance)
        segment = np.repeat(np.arange(len(sizes)), sizes)
        values = axes[order, widest[segment]].astype(np.int64)
        order = order[np.argsort(segment << 8 | (values + 128), kind="stable")]
        edges = np.unique(np.concatenate([edges, (edges[:-1] + edges[1:]) // 2]))
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return rank


def assign_by_topic(row: np.ndarray, start: np.ndarray, kind: np.ndarray, rank: np.ndarray) -> None:
    """Swap pieces of the same kind, in place, so that each row has close ranks.

    All arrays are int[pieces].
    """
    if not len(row):
        return
    # In each row, the piece that has the fewest others of its kind stays; among equals, the longest piece.
    order = np.lexsort((np.arange(len(row)), -kind, np.bincount(kind)[kind], row))
    is_first = np.append(True, row[order][1:] != row[order][:-1])
    stays = order[is_first]
    topic = np.empty(int(row.max()) + 1, rank.dtype)
    topic[row[stays]] = rank[stays]
    pieces = np.sort(order[~is_first])
    places = pieces[np.lexsort((start[pieces], row[pieces], topic[row[pieces]], kind[pieces]))]
    pieces = pieces[np.lexsort((pieces, rank[pieces], kind[pieces]))]
    row[pieces], start[pieces] = row[places], start[places]


def swap_similar(row: np.ndarray, start: np.ndarray, kind: np.ndarray, topics: np.ndarray) -> None:
    """Swap pieces of the same kind, in place, if rows become more similar.

    `topics` are int8[pieces, axes]; the other arrays are int[pieces]. The similarity of a row is the sum of the
    products of its topics, pair by pair.
    """
    rows = int(row.max(initial=-1)) + 1
    # The largest gain is the product of two differences of topics for each axis and piece of a row.
    most = int(np.bincount(row).max(initial=0)) * topics.shape[1] << 16
    sum_type = np.int32 if most <= MOST else np.int64
    sums = np.stack([np.bincount(row, column, rows).astype(sum_type) for column in topics.T], axis=1)
    for axis in [*range(topics.shape[1])] * PASSES:
        pieces = np.lexsort((topics[:, axis], kind))
        holders = np.lexsort((sums[row, axis], kind))
        gain = np.zeros(len(pieces), np.int64)
        for top in range(0, len(pieces), CACHED):
            a, b = pieces[top : top + CACHED], holders[top : top + CACHED]
            difference = topics[a].astype(sum_type) - topics[b]
            # Products with the rest of the other row, minus products with the rest of the piece's own row.
            rest = sums[row[b]]
            rest -= sums[row[a]]
            rest += difference
            gain[top : top + CACHED] = np.where(row[a] == row[b], 0, np.einsum("ij,ij->i", difference, rest))
        # A gain is valid only if both rows have no other swap, so a swap must be the best of both its rows.
        best = np.zeros(rows, np.int64)
        number = np.empty(len(gain), np.int64)  # the rank of the gain, from 1: no two are equal
        number[np.argsort(gain, kind="stable")] = np.arange(1, len(gain) + 1)
        for side in (pieces, holders):
            np.maximum.at(best, row[side], number)
        chosen = (gain > 0) & (best[row[pieces]] == number) & (best[row[holders]] == number)
        these, those = pieces[chosen], holders[chosen]
        change = topics[those].astype(sum_type) - topics[these]
        sums[row[these]] += change
        sums[row[those]] -= change
        _swap(row, start, these, those)


# -- distinct --------------------------------------------------------------------------------------------------------


def labels_of(tokens: TokenColumns) -> np.ndarray:
    """Return the labels of each conversation: uint64[conversations, LABELS].

    Near-duplicates have a label in common. A conversation without rare runs has unique labels.
    """
    counts = np.zeros(SLOTS, np.int64)
    for _, offsets, values in tokens.contents():
        counts += np.bincount(_runs(values, offsets)[0] & np.uint64(SLOTS - 1), minlength=SLOTS)
    is_common = counts > max(FEW, tokens.edges[-1] // SPREAD)
    labels = np.empty((tokens.edges[-1], LABELS), np.uint64)
    for first, offsets, values in tokens.contents():
        runs, owners = _runs(values, offsets)
        is_rare = ~is_common[(runs & np.uint64(SLOTS - 1)).astype(np.int64)]
        runs, owners = runs[is_rare], owners[is_rare]
        present, starts = np.unique(owners, return_index=True)
        for label in range(LABELS):
            of_batch = hashes(np.arange(first, first + len(offsets) - 1) * LABELS + label)
            if len(runs):
                joined = np.zeros(len(present), np.uint64)
                for number in range(label * MINIMA, (label + 1) * MINIMA):
                    joined = hashes(joined ^ np.minimum.reduceat(hashes(runs ^ np.uint64(number)), starts))
                of_batch[present] = joined
            labels[first : first + len(of_batch), label] = of_batch
    return labels


def ids_of(values: np.ndarray) -> np.ndarray:
    """Return the ids of tokens, whether they are trained or not."""
    return values ^ (values >> 31)


def _runs(values: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hash, uint64, and conversation, int64, of each run of RUN ids.

    A run is within one conversation.
    """
    owners = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    count = max(0, len(values) - RUN + 1)
    ids, runs = ids_of(values).astype(np.uint64), np.zeros(count, np.uint64)
    for number in range(RUN):
        runs = hashes(runs ^ ids[number : number + count])
    inside = owners[:count] == owners[len(owners) - count :]
    return runs[inside], owners[:count][inside]


def part_duplicates(row: np.ndarray, start: np.ndarray, kind: np.ndarray, labels: np.ndarray, seed: int) -> None:
    """Swap pieces of the same kind, in place, until no row has a label twice.

    Stops after ROUNDS rounds. `labels` are unsigned[pieces, n]; the other arrays are int[pieces].
    """
    met = meetings(row, labels)
    by_kind = np.argsort(kind, kind="stable")
    firsts = np.searchsorted(kind[by_kind], np.arange(int(kind.max(initial=0)) + 2))
    for number in range(ROUNDS if len(met) else 0):
        low, high = firsts[kind[met]], firsts[kind[met] + 1]
        picks = draws(len(met), seed, STREAM + number) % (high - low).astype(np.uint64)
        others = by_kind[low + picks.astype(np.int64)]
        # A piece takes part in at most one swap per round, the first.
        pairs = np.stack([met, others], axis=1).reshape(-1)
        _, first, piece = np.unique(pairs, return_index=True, return_inverse=True)
        chosen = (first[piece] // 2 == np.arange(len(pairs)) // 2).reshape(-1, 2).all(axis=1)
        _swap(row, start, met[chosen], others[chosen])
        now = meetings(row, labels)
        if len(now) < len(met):
            met = now
        else:
            _swap(row, start, met[chosen], others[chosen])
        if not len(met):
            return


def meetings(row: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the pieces that share a label with an earlier piece of their row: int64."""
    meets = np.zeros(len(row), np.bool_)
    for label in labels.T:
        order = np.lexsort((np.arange(len(row)), label, row))
        same = (row[order][1:] == row[order][:-1]) & (label[order][1:] == label[order][:-1])
        meets[order[1:][same]] = True
    return np.flatnonzero(meets)


# -- epochs ----------------------------------------------------------------------------------------------------------


class EarlierRows:
    """The groups of pieces that shared a row in earlier epochs.

    Pieces are identified by `of`, so copies count as the same piece. A group is identified by the sum of the hashes of
    its pieces, so memory is 8 bytes per row and epoch. Rows of a single piece are the same in every packing.
    """

    def __init__(self) -> None:
        self._seen = np.empty(0, np.uint64)

    def remember(self, row: np.ndarray, of: np.ndarray, rows: int) -> None:
        """Add the groups of one more packing; `row` is int32[pieces]."""
        self._seen = np.concatenate([self._seen, _sums(row, of, rows)])
        self._seen.sort()  # np.union1d takes ten times as long

    def separate(self, row: np.ndarray, start: np.ndarray, of: np.ndarray, lengths: np.ndarray, rows: int) -> None:
        """Swap pieces of equal length (in place) so that no group shares a row again.

        A row keeps its group if no other piece has the length of one of its pieces, or if no swap that is tried helps.
        """
        sums = _sums(row, of, rows)
        again = is_in(sums, self._seen) & (np.bincount(row, minlength=rows) > 1)
        if not again.any():
            return
        counts = np.bincount(lengths)
        pieces = np.flatnonzero(again[row])
        # Within a row, pieces of the most common length come first.
        pieces = pieces[np.lexsort((pieces, -counts[lengths[pieces]], row[pieces]))]
        wanted = np.zeros(len(counts), np.bool_)
        wanted[lengths[pieces]] = True
        others = np.flatnonzero(wanted[lengths])
        others = others[np.argsort(lengths[others], kind="stable")]
        firsts = np.searchsorted(lengths[others], np.arange(len(counts) + 1))
        for number, piece in enumerate(pieces.tolist()):
            here = int(row[piece])
            if not again[here]:
                continue
            equal = others[firsts[lengths[piece]] : firsts[lengths[piece] + 1]]
            # Each piece starts at another offset; otherwise all would try the same candidates.
            tried = np.roll(equal, -(number * TRIES) % max(1, len(equal)))[:TRIES] if len(equal) > TRIES else equal
            for other in tried.tolist():
                there = int(row[other])
                gain = hashes(of[[other]]) - hashes(of[[piece]])
                if there == here or not gain.any():
                    continue
                new = np.concatenate([sums[[here]] + gain, sums[[there]] - gain])
                if is_in(new, self._seen).any():
                    continue
                sums[here], sums[there] = new
                again[here] = again[there] = False
                _swap(row, start, piece, other)
                break


def _sums(row: np.ndarray, of: np.ndarray, rows: int) -> np.ndarray:
    """Return the sum of the hashes of the pieces of each row: uint64[rows]."""
    sums = np.zeros(rows, np.uint64)
    for top in range(0, len(row), CHUNK):
        np.add.at(sums, row[top : top + CHUNK], hashes(of[top : top + CHUNK]))
    return sums
