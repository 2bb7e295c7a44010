"""Find the samples of a corpus that begin alike, and put them in trees.

    samples ─sort─▶ in the order of their tokens, and what each has in common with the one before ─join─▶ trees

Sorted samples are the leaves of a tree of tokens, in which two samples part at one node. Trees of rows are joined from
the leaves to the root: what meets at a node becomes one tree if it is not longer than a row. Otherwise, it is packed
into as few trees as best-fit-decreasing needs, each of which stores the tokens above the node.

A sample shares only tokens before the first one that it trains on. So the first sample of a tree is the one that trains
on the earliest token, and the others lose nothing.

Memory: READ tokens that are compared at a time, and at most 800 bytes per sample (bench/packing/trees.py --plan).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from packcorpus.tasks.storage.token_files import TokenColumns

# Samples with fewer tokens in common are not brought together, so that rows stay mixed.
LEAST = 16
READ = 1 << 24  # tokens compared at a time
# Tokens compared at least: a page of a file has 1,024.
STEP = 32


def prompts_of(tokens: TokenColumns) -> np.ndarray:
    """Return the tokens before the first trained one: int32[samples]."""
    prompts = np.empty(tokens.edges[-1], np.int32)
    for first, offsets, values in tokens.contents():
        trained = np.append(np.flatnonzero(values >= 0), len(values))
        begins = np.minimum(trained[np.searchsorted(trained, offsets[:-1])], offsets[1:])
        prompts[first : first + len(begins)] = begins - offsets[:-1]
    return prompts


def sort_samples(tokens: TokenColumns, samples: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return samples in the order of their tokens, and how far neighbors are alike.

    `samples` are numbers of token files, and `lengths` are their tokens. The results are int64[samples]: the place in
    `samples` of each, and the tokens that it begins with like the one before. A sample precedes those that continue it,
    and equal samples stay in their order.
    """
    order, common = np.arange(len(samples)), np.zeros(len(samples), np.int64)
    is_open = np.arange(len(samples)) > 0  # whether a sample is like the one before as far as they were compared
    depth, longest = 0, int(lengths.max(initial=0))
    while is_open.any():
        places = np.flatnonzero(is_open | np.append(is_open[1:], False))
        size = min(max(READ // len(places), STEP), longest + 1 - depth)
        block = tokens.block(samples[order[places]], depth, size)
        begins = ~is_open[places]
        group = np.cumsum(begins)
        is_mixed = np.zeros(group[-1] + 1, np.bool_)
        is_mixed[group[1:][(block[1:] != block[:-1]).any(axis=1) & ~begins[1:]]] = True
        mixed = np.flatnonzero(is_mixed[group])
        if len(mixed):
            keys = np.column_stack([group[mixed], block[mixed]]).astype(">i4")
            moved = mixed[np.argsort(keys.view(f"V{keys.strides[0]}").ravel(), kind="stable")]
            block[mixed], order[places[mixed]] = block[moved], order[places[moved]]
        differs = block[1:] != block[:-1]
        is_like = ~differs.any(axis=1)
        later = ~begins[1:]
        common[places[1:]] += np.where(is_like, size, differs.argmax(axis=1)) * later
        is_open[places[1:]] = later & is_like & (block[1:, -1] > 0)
        depth += size
    ends = lengths[order]
    common[1:] = np.minimum(common[1:], np.minimum(ends[1:], ends[:-1]))
    return order, common


class Part(NamedTuple):
    """A tree: a list of samples, linked by `Joined.after`."""

    size: int  # tokens
    prompt: int  # of the first sample, which has the fewest
    first: int
    last: int


@dataclass(slots=True)
class _Node:
    """A node of the tree of tokens that sorted samples pass."""

    depth: int  # tokens above it
    parts: list[Part] = field(default_factory=list)
    stored: int = 0  # tokens below it that any trees store at least


@dataclass(slots=True)
class Joined:
    """Trees of samples, which are numbered from 0."""

    after: list[int]  # the next sample of the tree; -1 at its end
    shared: list[int]  # tokens that are not stored again; 0 if a tree begins
    least: int = 0  # tokens that any trees store

    def join(self, parts: list[Part], depth: int, room: int) -> list[Part]:
        """Join trees with `depth` tokens in common into few of at most `room` tokens.

        A tree with a shorter prompt than LEAST shares too little with others, but one other tree may follow it.
        """
        hosts = sorted((part for part in parts if part.prompt < LEAST), key=lambda part: (-part.size, -part.first))
        trees = self._pack([part for part in parts if part.prompt >= LEAST], depth, room)
        joined = list[Part]()
        for tree in sorted(trees, key=lambda part: (-part.size, part.first)):
            saved = min(tree.prompt, depth) - 1
            left = room - tree.size + saved - hosts[-1].size if hosts else -1
            if left >= 0 and (saved >= left or len(trees) == 1):
                tree = self._joined([hosts.pop(), tree], depth)
            joined.append(tree)
        return hosts + joined

    def _pack(self, parts: list[Part], depth: int, room: int) -> list[Part]:
        if len(parts) < 2:
            return parts
        saved = [min(part.prompt, depth) - 1 for part in parts]
        gains = [part.size - tokens for part, tokens in zip(parts, saved, strict=True)]
        if sum(gains) + min(saved) <= room:  # what the first part shares is stored once
            return [self._joined(parts, depth)]
        capacity = room - max(saved)
        bins, free = list[list[int]](), list[tuple[int, int]]()
        for number in sorted(range(len(parts)), key=lambda number: -gains[number]):
            at = bisect_left(free, (gains[number], -1))
            left, bin_ = free.pop(at) if at < len(free) else (capacity, len(bins))
            if bin_ == len(bins):
                bins.append([])
            bins[bin_].append(number)
            if left > gains[number]:
                insort(free, (left - gains[number], bin_))
        packed = list[Part]()
        for numbers in bins:
            some, first = [parts[number] for number in numbers], min(saved[number] for number in numbers)
            left = room - first - sum(gains[number] for number in numbers)
            # A tree that leaves more of a row empty than it saves is not joined: its parts may fill other rows.
            is_joined = sum(saved[number] for number in numbers) - first >= left
            packed += [self._joined(some, depth)] if is_joined else some
        return packed

    def _joined(self, parts: list[Part], depth: int) -> Part:
        first, *others = sorted(parts, key=lambda part: (part.prompt, part.first))
        size, last = first.size, first.last
        for part in others:
            self.after[last], last = part.first, part.last
            self.shared[part.first] = shared = min(part.prompt, depth) - 1
            size += part.size - shared
        return Part(size, first.prompt, first.first, last)


def join_samples(lengths: list[int], prompts: list[int], common: list[int], room: int) -> Joined:
    """Join sorted samples into trees of at most `room` tokens.

    `lengths` are the tokens of the samples, none of them longer than `room`, `prompts` those before the first trained
    one, and `common` is what each begins with like the one before.

    `least` is a proof. The trees that hold the tokens below a node each store the tokens above it, too. So if trees
    store at least S tokens below a node of depth d, there are at least S / (room - d) of them, and each token on the
    way from the node above is stored as often.
    """
    joined = Joined([-1] * len(lengths), [0] * len(lengths))
    path = [_Node(0)]

    def add(below: _Node) -> None:
        """Add what is below a node to the node above it."""
        above = path[-1]
        trees = max(1, -(-below.stored // (room - below.depth))) if below.depth < room else 1
        above.stored += below.stored + (below.depth - above.depth) * trees
        above.parts += below.parts

    for sample, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        below = _Node(length, [Part(length, prompt, sample, sample)])
        depth = common[sample + 1] if sample + 1 < len(lengths) else 0
        while path[-1].depth > depth:
            add(below)
            below = path.pop()
            if below.depth >= LEAST and len(below.parts) > 1:
                below.parts = joined.join(below.parts, below.depth, room)
        if path[-1].depth < depth:
            path.append(_Node(depth))
        add(below)
    joined.least = path[0].stored
    return joined
