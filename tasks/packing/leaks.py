"""Count the prompts that the training split and the validation split share.

    prompts of held-out conversations ─┬─ the same hash                                  ─▶ shared
    prompts of trained conversations ──┴─ a common label ─▶ pairs ─ most of their runs   ─▶ near

A model that has seen an answer to a prompt is not tested by another answer to it. Two prompts are near if the Jaccard
index of their runs of RUN token ids is at least SIMILAR, and also without the runs that are frequent in the corpus:
markers of the template, system prompts, phrases that everybody uses. Pairs are found by labels of MinHash (Broder
1997), so a few are missed, and confirmed by the runs themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from packcorpus.tasks.core.numbers import hashes, is_in
from packcorpus.tasks.packing.near_duplicates import ALIKE, CACHED, SIMILAR, SKETCH, counts_of, runs_of
from packcorpus.tasks.packing.neighbors import FEW, SPREAD, ids_of
from packcorpus.tasks.packing.pieces import CHUNK, Pieces
from packcorpus.tasks.storage.token_files import TokenColumns

# Runs are counted in up to COUNTED prompts at equal distances, in SLOTS slots: 8 MB.
COUNTED, SLOTS = 1 << 16, 1 << 20
# Of a longer prompt, its last tokens are compared. With more prompts, those that are near are not counted: they would
# take more than 500 MB.
LONGEST, MOST = 1 << 9, 1 << 22

_MASKS = (hashes(np.arange(SKETCH)) >> np.uint64(32)).astype(np.uint32)


def count_leaks(pieces: Pieces, tokens: TokenColumns, has_all: bool = True) -> dict[str, Any] | None:
    """Return how many conversations are held out, and counts of their prompts.

    The result is HeldOutFacts (storage/facts.py), or None if nothing is held out. A hash that is that of the content
    says that there is no prompt. Near prompts are only counted with `has_all`, because a sample has few of the pairs.
    """
    accepted = pieces.accepted
    left = accepted.left()
    held = int(np.count_nonzero(left & accepted.held_out))
    if not held:
        return None
    prompts = np.unique(np.concatenate([values for _, values in _prompts(left & accepted.held_out, tokens)]))
    shared = np.zeros(len(prompts), np.bool_)
    for _, values in _prompts(left & ~accepted.held_out, tokens) if len(prompts) else ():
        found = values[is_in(values, prompts)]
        shared[np.searchsorted(prompts, found)] = True
    near = _count_near(left, prompts[~shared], tokens) if has_all else None
    return {
        "conversations": held,
        "percent": round(100 * held / int(np.count_nonzero(left)), 4),
        "prompts": len(prompts),
        "shared": int(np.count_nonzero(shared)),
    } | ({} if near is None else {"near": near})


def _prompts(chosen: np.ndarray, tokens: TokenColumns) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield numbers and prompts, uint64, of chosen conversations, bool[samples]."""
    for top in range(0, len(chosen), CHUNK):
        numbers = np.flatnonzero(chosen[top : top + CHUNK])
        prompts, contents = (tokens.column(name, top, top + CHUNK)[numbers] for name in ("prompt", "digest"))
        has_prompt = prompts != contents
        yield numbers[has_prompt] + top, prompts[has_prompt]


# -- near prompts ----------------------------------------------------------------------------------------------------


def _count_near(left: np.ndarray, wanted: np.ndarray, tokens: TokenColumns) -> int | None:
    """Count the wanted prompts, uint64, that are near to another one.

    Each prompt is read from its first conversation that is packed. Returns None if there are too many.
    """
    if not len(wanted) or np.count_nonzero(left) > MOST:
        return None if len(wanted) else 0
    numbers, prompts = (np.concatenate(columns) for columns in zip(*_prompts(left, tokens), strict=True))
    firsts = np.sort(np.unique(prompts, return_index=True)[1])
    numbers, is_wanted = numbers[firsts], is_in(prompts[firsts], wanted)
    texts = _Texts(tokens, numbers)
    pairs = _pairs(texts.sketches(), is_wanted)
    runs = texts.runs_of(np.unique(pairs))
    near = set[int]()
    for one, other in pairs.tolist():
        if one not in near and all(map(_are_similar, runs[one], runs[other])):
            near.add(one)
    return len(near)


def _are_similar(runs: np.ndarray, others: np.ndarray) -> bool:
    common = len(np.intersect1d(runs, others, assume_unique=True))
    return common >= SIMILAR * (len(runs) + len(others) - common)


class _Runs(NamedTuple):
    """Runs, uint64, the prompt of each, in order, and whether it counts."""

    runs: np.ndarray
    owners: np.ndarray
    counts: np.ndarray


class _Texts:
    """The tokens of prompts, given by the numbers of their conversations, ascending."""

    def __init__(self, tokens: TokenColumns, numbers: np.ndarray):
        self._tokens, self._numbers = tokens, numbers
        self._lengths = np.full(len(numbers), -1, np.int32)  # tokens of the prompts; -1 until it is known
        self._is_frequent = np.zeros(SLOTS, np.bool_)
        some = np.arange(0, len(numbers), max(1, -(-len(numbers) // COUNTED)))
        counts = counts_of((_slots(found.runs) for found in self._runs(some)), SLOTS)
        self._is_frequent = counts > max(FEW, len(some) // SPREAD)

    def sketches(self) -> np.ndarray:
        """Return the minima of each prompt: uint32[prompts, SKETCH].

        If none of its runs counts, they are all 0.
        """
        sketches = np.zeros((len(self._numbers), SKETCH), np.uint32)
        for found in self._runs():
            owners = found.owners[found.counts]
            starts = np.flatnonzero(np.append(True, owners[1:] != owners[:-1])[: len(owners)])
            high = (found.runs[found.counts] >> np.uint64(32)).astype(np.uint32)
            for number in range(SKETCH if len(starts) else 0):
                # An exclusive-or with random bits permutes the hashes.
                sketches[owners[starts], number] = np.minimum.reduceat(high ^ _MASKS[number], starts)
        return sketches

    def runs_of(self, chosen: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Return the distinct runs of chosen prompts, and those of them that count."""
        runs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for found in self._runs(chosen):
            own, starts = np.unique(found.owners, return_index=True)
            for number, inside in zip(own.tolist(), np.split(np.arange(len(found.owners)), starts[1:]), strict=False):
                every = found.runs[inside]
                runs[number] = np.unique(every), np.unique(every[found.counts[inside]])
        return runs

    def _runs(self, chosen: np.ndarray | None = None) -> Iterator[_Runs]:
        """Yield the runs of all or of chosen prompts, about CACHED tokens at a time."""
        for first, offsets, values in self._tokens.contents():
            edges = [first, first + len(offsets) - 1]
            owners = np.arange(*np.searchsorted(self._numbers, edges).tolist())
            if chosen is not None:
                owners = owners[is_in(owners, chosen)]
            if not len(owners):
                continue
            own = self._numbers[owners] - first
            if (self._lengths[owners] < 0).any():
                # The prompt ends before the first trained token.
                trained = np.append(np.flatnonzero(values >= 0), len(values))
                ends = np.minimum(trained[np.searchsorted(trained, offsets[own])], offsets[own + 1])
                self._lengths[owners] = ends - offsets[own]
            ends = offsets[own] + self._lengths[owners]
            starts = np.maximum(offsets[own], ends - LONGEST)
            sums = np.cumsum(ends - starts)
            cuts = np.unique(np.searchsorted(sums, np.arange(CACHED, sums[-1], CACHED)))
            for inside in np.split(np.arange(len(own)), cuts):
                if len(inside):
                    runs, of = _runs_in(values, starts[inside], ends[inside])
                    yield _Runs(runs, owners[inside][of], ~self._is_frequent[_slots(runs)])


def _runs_in(values: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the runs within ranges of tokens, and the range of each."""
    lengths = ends - starts
    before = np.cumsum(lengths) - lengths
    ids = values[np.arange(lengths.sum()) + np.repeat(starts - before, lengths)]
    runs, owners = runs_of(ids_of(ids)), np.repeat(np.arange(len(starts)), lengths)
    count = len(runs)
    inside = owners[:count] == owners[len(ids) - count :]
    return runs[inside], owners[:count][inside]


def _slots(runs: np.ndarray) -> np.ndarray:
    return (runs & np.uint64(SLOTS - 1)).astype(np.int64)


def _pairs(sketches: np.ndarray, is_wanted: np.ndarray) -> np.ndarray:
    """Return pairs of a wanted prompt and another that may be near: int64[n, 2]."""
    counts = sketches.any(axis=1)
    wanted, others = np.flatnonzero(is_wanted & counts), np.flatnonzero(~is_wanted & counts)
    found = [np.empty((0, 2), np.int64)]
    for number in range(0, SKETCH if len(others) else 0, 2):
        labels = sketches[:, number].astype(np.uint64) << np.uint64(32) | sketches[:, number + 1]
        order = others[np.argsort(labels[others], kind="stable")]
        of_others = labels[order]
        for side in ("left", "right"):  # the first and the last one with the label
            at = np.searchsorted(of_others, labels[wanted], side) - (side == "right")
            at = at.clip(0, len(order) - 1)
            same = of_others[at] == labels[wanted]
            found.append(np.stack([wanted[same], order[at[same]]], axis=1))
    pairs = np.unique(np.concatenate(found), axis=0)
    return pairs[(sketches[pairs[:, 0]] == sketches[pairs[:, 1]]).sum(axis=1) >= ALIKE]
