"""Swap conversations of equal length between rows, so that similar ones share rows, or near-duplicates do not.

    similar   the piece with the rarest length of each row stays; the others are dealt by topic: of the pieces of a
              length, the first by topic gets the place in the row whose own is first, and so on. Then pairs that are
              nearer to each other's row along an axis swap if both rows together become more similar
    apart     while a row has two pieces with a label in common, one of them swaps with a seeded other one

Which rows there are, and the lengths in them, do not change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tasks.config import Config
from tasks.core.int32 import MOST
from tasks.core.seeded_order import draws
from tasks.packing.company.embeddings import embedded_directions, embedded_duplicates
from tasks.packing.company.sketches import directions, near_duplicates, order_by_topic
from tasks.storage.token_files import TokenColumns

# Streams of `draws`, apart from those of splits, epochs, and contents.
STREAM = 1 << 22

# Rounds of swaps. Each leaves a few of 1,000 of the pieces that met; if most texts are near-duplicates, no number of
# rounds would be enough.
ROUNDS = 8

# Pairs whose gains are computed at a time: 3 MB, which a cache holds.
CACHED = 1 << 13

# Passes over the axes of topics. Four instead of two make the pairs of real conversations 5 % more similar.
PASSES = 2


class Company(NamedTuple):
    """Who may share a row."""

    topics: np.ndarray | None = None  # int8[conversations, AXES], directions: close ones share rows
    labels: np.ndarray | None = None  # unsigned[conversations, n]: those with one in common do not

    @classmethod
    def of(cls, config: Config, tokens: TokenColumns) -> Company:
        """Read what the setting `company` needs of all conversations; for `random`, that is nothing."""
        by_text = config.company_by == "text"
        if config.company == "similar":
            return cls(topics=directions(tokens) if by_text else embedded_directions(tokens))
        if config.company == "apart":
            return cls(labels=near_duplicates(tokens) if by_text else embedded_duplicates(tokens))
        return cls()

    @property
    def matters(self) -> bool:
        return self.topics is not None or self.labels is not None

    def arrange(self, row: np.ndarray, start: np.ndarray, kind: np.ndarray, of: np.ndarray, seed: int) -> None:
        """Swap pieces of a kind, in place; `kind` and their conversations, `of`, are int[pieces]."""
        if self.topics is not None:
            topics = self.topics[of]
            deal_by_topic(row, start, kind, order_by_topic(topics))
            swap_similar(row, start, kind, topics)
        elif self.labels is not None:
            apart(row, start, kind, self.labels[of], seed)


def deal_by_topic(row: np.ndarray, start: np.ndarray, kind: np.ndarray, rank: np.ndarray) -> None:
    """Swap pieces of a kind (in place) so that those of a row are close by `rank`. All are int[pieces]."""
    if not len(row):
        return
    # In each row, the piece with the fewest others to swap with stays, the longest of them.
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
    """Swap pieces of a kind (in place) while rows become more similar, for PASSES over all axes.

    `topics` are int8[pieces, axes], the others int[pieces]. The similarity of a row is the sum of the products of its
    topics, pair by pair.
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
        # Gains hold for one swap of a row at a time: the best of both rows takes place.
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
    """Return how much more similar the rows of each pair become if it swaps: int64[pairs], 0 within a row."""
    gain = np.zeros(len(these), np.int64)
    for top in range(0, len(these), CACHED):
        a, b = these[top : top + CACHED], those[top : top + CACHED]
        difference = topics[a].astype(sums.dtype) - topics[b]
        # Products with the rest of the other's row, less those with the rest of its own.
        rest = sums[row[b]]
        rest -= sums[row[a]]
        rest += difference
        gain[top : top + CACHED] = np.where(row[a] == row[b], 0, np.einsum("ij,ij->i", difference, rest))
    return gain


def apart(row: np.ndarray, start: np.ndarray, kind: np.ndarray, labels: np.ndarray, seed: int) -> None:
    """Swap pieces of a kind (in place) until no row has two with a label in common, or ROUNDS are over.

    `labels` are unsigned[pieces, n], the others int[pieces].
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
        # A piece takes part in one swap of a round: the first.
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
    """Return the pieces that have a label in common with an earlier piece of their row: int64."""
    found = np.zeros(len(row), np.bool_)
    for label in labels.T:
        order = np.lexsort((np.arange(len(row)), label, row))
        same = (row[order][1:] == row[order][:-1]) & (label[order][1:] == label[order][:-1])
        found[order[1:][same]] = True
    return np.flatnonzero(found)
