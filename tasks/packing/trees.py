"""Store what the samples of a conversation begin with once: trees of pieces.

    sample 1    system user 1 ▓answer 1▓
    sample 2    system user 1 answer 1 user 2 ▓answer 2▓             shared: what is before `1 answer 1 user 2 …`

    a tree      system user 1 ▓answer 1▓ │ 1 answer 1 user 2 ▓answer 2▓
    position    0 1    2    3  4      5    3 4      5  6    7 8      9

The first piece of a tree is a whole sample. Every other piece begins with a copy of the last token that its sample
shares with the tree, from which its next token is predicted. A tree is placed like a single piece of its length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from packcorpus.tasks.core.numbers import as_int32
from packcorpus.tasks.packing.placement import Placed

if TYPE_CHECKING:
    from packcorpus.tasks.packing.pieces import Pieces


def cut_trees(
    firsts: np.ndarray | None, lengths: np.ndarray, kept: np.ndarray, alike: np.ndarray, room: int
) -> np.ndarray:
    """Return how many tokens of each sample its tree has before it: int32[samples].

    0 begins a tree. `firsts` is the first sample of each conversation, `lengths` are the tokens of the samples, `kept`
    is whether one may be in a tree, and `alike` is what each has in common with the sample before. A tree has at most
    `room` tokens.
    """
    shared = np.zeros(len(lengths), np.int32)
    for top, bottom in pairwise([] if firsts is None else [*firsts.tolist(), len(lengths)]):
        if bottom - top < 2:
            continue
        numbers, common, least = list[int](), list[int](), room
        columns = range(top, bottom), kept[top:bottom].tolist(), alike[top:bottom].tolist()
        for number, is_kept, tokens in zip(*columns, strict=True):
            least = min(least, tokens)  # two samples have in common what each has with a sample between them
            if is_kept:
                numbers.append(number)
                common.append(least if len(numbers) > 1 else 0)
                least = room
        shared[numbers] = fewest_again(lengths[numbers].tolist(), common, room)
    return shared


def fewest_again(lengths: list[int], alike: list[int], room: int) -> list[int]:
    """Return what each sample shares if trees have at most `room` tokens.

    `lengths` are the tokens of the samples, and `alike` what each has in common with the one before. The values are
    those of `alike`, and 0 where a tree begins. The fewest possible tokens are stored.
    """
    if sum(lengths) - sum(alike) <= room:
        return alike
    again, begins = [0], list[int]()  # what the samples before a tree store again at least, and where their tree begins
    for last in range(len(lengths)):
        size, best = 0, (1 << 62, 0)
        for first in range(last, -1, -1):
            # `size` is that of the samples after the first one of the tree, without what they share.
            if size + lengths[first] <= room:
                best = min(best, (again[first] + alike[first], first))
            size += lengths[first] - alike[first]
            if size >= room:
                break
        again.append(best[0])
        begins.append(best[1])
    kept, last = list(alike), len(lengths)
    while last:
        last = begins[last - 1]
        kept[last] = 0
    return kept


@dataclass(frozen=True, slots=True)
class Units:
    """What is placed as a whole: trees, and pieces that are in none."""

    lengths: np.ndarray  # int32[units]
    held_out: np.ndarray  # bool[units]
    firsts: np.ndarray | None = None  # int32[units], the first piece of each; None if each piece is one
    starts: np.ndarray | None = None  # int32[pieces], the start of each piece in its unit

    @classmethod
    def of(cls, pieces: Pieces) -> Units:
        lengths, held_out = pieces.lengths(), pieces.held_out()
        if pieces.shared is None:
            return cls(lengths, held_out)
        begins = np.empty(len(pieces), np.bool_)
        for chunk in pieces.chunks():
            begins[chunk] = pieces.columns(chunk).shared == 0
        firsts = np.flatnonzero(begins)
        ends = np.cumsum(lengths, dtype=np.int64)
        before = (ends - lengths)[firsts]
        starts = ends - lengths - np.repeat(before, np.diff(firsts, append=len(pieces)))
        of_units = np.diff(before, append=ends[-1:])
        return cls(
            as_int32(of_units, "tokens of a tree"),
            held_out[firsts],
            as_int32(firsts, "pieces"),
            as_int32(starts, "places of a row"),
        )

    def first(self, values: np.ndarray) -> np.ndarray:
        """Return the values of the first piece of each unit."""
        return values if self.firsts is None else values[self.firsts]

    def spread(self, placed: Placed) -> Placed:
        """Return the places of all pieces, given those of the units."""
        if self.firsts is None or self.starts is None:
            return placed
        counts = np.diff(self.firsts, append=len(self.starts))
        return replace(placed, row=np.repeat(placed.row, counts), start=np.repeat(placed.start, counts) + self.starts)
