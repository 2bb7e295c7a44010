"""Swap conversations of equal length to join similar ones or part near-duplicates.

    similar   In each row, the piece with the rarest length stays. The others are dealt by topic: among pieces of one
              length, the first by topic goes to the row whose staying piece is first by topic, and so on. Then two
              pieces that are nearer to each other's row along an axis swap if both rows together become more similar.
    apart     While a row has two pieces with a label in common, one of them swaps with a seeded random piece.

The rows and the lengths in them do not change.
"""

from __future__ import annotations

import numpy as np

from tasks.config import Config
from tasks.core.int32 import MOST
from tasks.core.seeded_order import draws
from tasks.packing.company.sketches import directions, near_duplicates, order_by_topic
from tasks.storage.tokens.token_files import TokenColumns

# First stream of `draws`, separate from the streams of splits, epochs, and contents.
STREAM = 1 << 22

# Rounds of swaps. Each round leaves a few in 1,000 of the pieces that met. If most texts are near-duplicates, no number
# of rounds is enough.
ROUNDS = 8

# Pairs whose gains are computed at a time: 3 MB, which fit in a cache.
CACHED = 1 << 13

# Passes over the axes of topics. Four instead of two make the pairs of real conversations 5 % more similar.
PASSES = 2


def compared_in(config: Config, tokens: TokenColumns) -> np.ndarray | None:
    """Return the properties by which `company` compares conversations.

    They are directions, int8[conversations, AXES], for `similar`; labels, uint64[conversations, LABELS], for `apart`;
    and None for `random`.
    """
    if config.company == "similar":
        return directions(tokens)
    return near_duplicates(tokens) if config.company == "apart" else None


def arrange(row: np.ndarray, start: np.ndarray, kind: np.ndarray, compared: np.ndarray, config: Config) -> None:
    """Swap pieces of the same kind, int[pieces], in place.

    `compared` has the properties (see `compared_in`) of the conversation of each piece.
    """
    if config.company == "similar":
        deal_by_topic(row, start, kind, order_by_topic(compared))
        swap_similar(row, start, kind, compared)
    else:
        apart(row, start, kind, compared, config.seed)


def deal_by_topic(row: np.ndarray, start: np.ndarray, kind: np.ndarray, rank: np.ndarray) -> None:
    """Swap pieces of the same kind, in place, so that each row has close ranks.

    All arrays are int[pieces].
    """
    if not len(row):
        return
    # In each row, the piece that has the fewest others of its kind stays; among equals, the longest piece.
    order = np.lexsort((np.arange(len(row)), -kind, np.bincount(kind)[kind], row))
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = row[order][1:] != row[order][:-1]
    stays = order[is_first]
    topic = np.empty(int(row.max()) + 1, rank.dtype)
    topic[row[stays]] = rank[stays]
    pieces = np.sort(order[~is_first])
    places = pieces[np.lexsort((start[pieces], row[pieces], topic[row[pieces]], kind[pieces]))]
    pieces = pieces[np.lexsort((pieces, rank[pieces], kind[pieces]))]
    row[pieces], start[pieces] = row[places], start[places]


def swap_similar(row: np.ndarray, start: np.ndarray, kind: np.ndarray, topics: np.ndarray) -> None:
    """Swap pieces of the same kind, in place, if rows become more similar.

    Makes PASSES passes over all axes. `topics` are int8[pieces, axes]; the other arrays are int[pieces]. The similarity
    of a row is the sum of the products of its topics, pair by pair.
    """
    rows = int(row.max(initial=-1)) + 1
    # The largest gain is the product of two differences of topics for each axis and piece of a row.
    most = int(np.bincount(row).max(initial=0)) * topics.shape[1] << 16
    sum_type = np.int32 if most <= MOST else np.int64
    sums = np.stack([np.bincount(row, column, rows).astype(sum_type) for column in topics.T], axis=1)
    for axis in [*range(topics.shape[1])] * PASSES:
        pieces = np.lexsort((topics[:, axis], kind))
        holders = np.lexsort((sums[row, axis], kind))
        gain = _gain(row, topics, sums, pieces, holders)
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


def _gain(row: np.ndarray, topics: np.ndarray, sums: np.ndarray, these: np.ndarray, those: np.ndarray) -> np.ndarray:
    """Return the similarity that the rows of each pair gain if it swaps: int64[pairs].

    The gain is 0 if both pieces are in the same row.
    """
    gain = np.zeros(len(these), np.int64)
    for top in range(0, len(these), CACHED):
        a, b = these[top : top + CACHED], those[top : top + CACHED]
        difference = topics[a].astype(sums.dtype) - topics[b]
        # Products with the rest of the other row, minus products with the rest of the piece's own row.
        rest = sums[row[b]]
        rest -= sums[row[a]]
        rest += difference
        gain[top : top + CACHED] = np.where(row[a] == row[b], 0, np.einsum("ij,ij->i", difference, rest))
    return gain


def apart(row: np.ndarray, start: np.ndarray, kind: np.ndarray, labels: np.ndarray, seed: int) -> None:
    """Swap pieces of the same kind, in place, until no row has a label twice.

    Stops after ROUNDS rounds. `labels` are unsigned[pieces, n]; the other arrays are int[pieces].
    """
    met = meetings(row, labels)
    if not len(met):
        return
    by_kind = np.argsort(kind, kind="stable")
    firsts = np.searchsorted(kind[by_kind], np.arange(int(kind.max()) + 2))
    for number in range(ROUNDS):
        low, high = firsts[kind[met]], firsts[kind[met] + 1]
        picks = draws(len(met), seed, STREAM + number) % (high - low).astype(np.uint64)
        others = by_kind[low + picks.astype(np.int64)]
        # A piece takes part in at most one swap per round, the first.
        pairs = np.stack([met, others], axis=1).reshape(-1)
        _, first, piece = np.unique(pairs, return_index=True, return_inverse=True)
        chosen = (first[piece] // 2 == np.arange(len(pairs)) // 2).reshape(-1, 2).all(axis=1)
        these, those = met[chosen], others[chosen]
        before = row.copy(), start.copy()
        _swap(row, start, these, those)
        now = meetings(row, labels)
        if len(now) < len(met):
            met = now
        else:
            row[:], start[:] = before
        if not len(met):
            return


def _swap(row: np.ndarray, start: np.ndarray, these: np.ndarray, those: np.ndarray) -> None:
    for column in (row, start):
        column[these], column[those] = column[those], column[these]


def meetings(row: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the pieces that share a label with an earlier piece of their row: int64."""
    found = np.zeros(len(row), np.bool_)
    for label in labels.T:
        order = np.lexsort((np.arange(len(row)), label, row))
        same = (row[order][1:] == row[order][:-1]) & (label[order][1:] == label[order][:-1])
        found[order[1:][same]] = True
    return np.flatnonzero(found)
