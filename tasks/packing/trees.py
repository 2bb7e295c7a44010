"""Store what samples begin with once: trees of pieces.

    sample 1    system user 1 ▓answer 1▓
    sample 2    system user 1 answer 1 user 2 ▓answer 2▓             shared: what is before `1 answer 1 user 2 …`

    a tree      system user 1 ▓answer 1▓ │ 1 answer 1 user 2 ▓answer 2▓
    position    0 1    2    3  4      5    3 4      5  6    7 8      9

The first piece of a tree is a whole sample. Every other piece begins with a copy of the last token that its sample
shares with the tree, from which its next token is predicted. A tree is placed like a single piece of its length.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise

import numpy as np

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.numbers import as_int32
from packcorpus.tasks.packing.families import join_samples, prompts_of, sort_samples
from packcorpus.tasks.packing.pieces import Pieces
from packcorpus.tasks.packing.placement import Placed
from packcorpus.tasks.storage.token_files import TokenColumns

NONE = partial(np.empty, 0, np.int32)


def with_trees(pieces: Pieces, tokens: TokenColumns, config: Config) -> Pieces:
    """Put the pieces in trees, as `share` says.

    Pieces of a conversation that is cut are in no tree, and pieces of different splits are not in one.
    """
    if config.share == "conversation":
        kept = np.zeros(len(pieces.accepted.length), np.bool_)
        kept[pieces.of[pieces.is_whole()]] = True
        firsts, alike = pieces.accepted.samples.firsts, tokens.column("shared")
        shared = cut_trees(firsts, pieces.accepted.length, kept, alike, config.sequence_length)
        return replace(pieces, shared=shared[pieces.conversations(slice(None))])
    if config.share == "all":
        return join(pieces, tokens, config.sequence_length)
    return pieces


def join(pieces: Pieces, tokens: TokenColumns, room: int) -> Pieces:
    """Put pieces that begin alike in trees of at most `room` tokens.

    Trees are in the order of their first pieces. In a dry run, a sample may stand for several, of which nothing else is
    known. Then the trees of the samples are repeated.
    """
    once, rows = tokens.distinct()
    samples, known = pieces.conversations(slice(None)), np.ones(len(pieces), np.bool_)
    if rows is not None:
        samples = rows[samples]
        if len(rows) > once.edges[-1]:
            known[:] = False
            known[np.unique(samples, return_index=True)[1]] = True
    prompts, lengths, is_whole, held_out = prompts_of(once), once.column("length"), pieces.is_whole(), pieces.held_out()
    shared, after = np.zeros(len(pieces), np.int32), np.full(len(pieces), -1)
    least = np.bincount(held_out[~is_whole], pieces.lengths()[~is_whole], minlength=2).astype(np.int64)
    for side in (0, 1):
        chosen = np.flatnonzero(known & is_whole & (held_out == side))
        distinct, number_of = np.unique(samples[chosen], return_inverse=True)
        order, common = sort_samples(once, distinct, lengths[distinct])
        # The copies of a sample follow it.
        place_of = np.argsort(order)[number_of]
        by_place = np.argsort(place_of, kind="stable")
        chosen, places = chosen[by_place], place_of[by_place]
        of = samples[chosen]
        common = np.where(np.diff(places, prepend=-1) == 0, lengths[of], common[places])
        trees = join_samples(lengths[of].tolist(), prompts[of].tolist(), common.tolist(), room)
        shared[chosen] = trees.shared
        following = np.array(trees.after, np.int64)
        after[chosen] = np.where(following < 0, -1, chosen[following])
        least[side] += trees.least
    pieces = replace(pieces, shared=shared, order=_in_order(after), least=least)
    return pieces if known.all() else _repeated(pieces, samples, known)


def _repeated(pieces: Pieces, samples: np.ndarray, known: np.ndarray) -> Pieces:
    """Repeat the trees of known pieces for all pieces of the same samples."""
    assert pieces.shared is not None
    assert pieces.order is not None
    order = pieces.order[known[pieces.order]]
    place_of, shared_of, tree_of = (np.zeros(int(samples.max()) + 1, np.int32) for _ in range(3))
    place_of[samples[order]] = np.arange(len(order))
    shared_of[samples[order]] = pieces.shared[order]
    tree_of[samples[order]] = np.cumsum(pieces.shared[order] == 0)
    by_sample = np.argsort(samples, kind="stable")
    repetition = np.empty(len(samples), np.int64)
    repetition[by_sample] = np.arange(len(samples)) - np.searchsorted(samples[by_sample], samples[by_sample])
    order = as_int32(np.lexsort((place_of[samples], repetition)), "pieces")
    trees = np.column_stack([tree_of[samples], repetition])[order]
    continues = np.append(False, (trees[1:] == trees[:-1]).all(axis=1))
    shared = np.zeros_like(pieces.shared)
    shared[order] = shared_of[samples[order]] * (continues & pieces.is_whole()[order])
    return replace(pieces, shared=shared, order=order, least=None)


def _in_order(after: np.ndarray) -> np.ndarray:
    """Return the pieces tree by tree: int32[pieces].

    Trees are in the order of their first pieces. `after` is the next piece of the tree of each piece, or -1.
    """
    is_first = np.ones(len(after), np.bool_)
    is_first[after[after >= 0]] = False
    follows, trees = after.tolist(), list[list[int]]()
    for piece in np.flatnonzero(is_first).tolist():
        tree = list[int]()
        while piece >= 0:
            tree.append(piece)
            piece = follows[piece]
        trees.append(tree)
    return np.fromiter(chain(*sorted(trees, key=min)), np.int32, len(after))


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
    order: np.ndarray | None = None  # int32[pieces], unit by unit; None if each piece is one
    firsts: np.ndarray = field(default_factory=NONE)  # int32[units], where each begins in `order`
    starts: np.ndarray = field(default_factory=NONE)  # int32[pieces], the start in its unit of each piece in `order`

    @classmethod
    def of(cls, pieces: Pieces) -> Units:
        lengths, held_out = pieces.lengths(), pieces.held_out()
        if pieces.shared is None:
            return cls(lengths, held_out)
        order = np.arange(len(pieces), dtype=np.int32) if pieces.order is None else pieces.order
        lengths, held_out = lengths[order], held_out[order]
        firsts = np.flatnonzero(pieces.shared[order] == 0)
        ends = np.cumsum(lengths, dtype=np.int64)
        before = (ends - lengths)[firsts]
        starts = ends - lengths - np.repeat(before, np.diff(firsts, append=len(pieces)))
        of_units = np.diff(before, append=ends[-1:])
        return cls(
            as_int32(of_units, "tokens of a tree"),
            held_out[firsts],
            order,
            as_int32(firsts, "pieces"),
            as_int32(starts, "places of a row"),
        )

    def first(self, values: np.ndarray) -> np.ndarray:
        """Return the values of the first piece of each unit."""
        return values if self.order is None else values[self.order[self.firsts]]

    def spread(self, placed: Placed) -> Placed:
        """Return the places of all pieces, given those of the units."""
        if self.order is None:
            return placed
        counts = np.diff(self.firsts, append=len(self.starts))
        row, start = np.empty_like(self.starts), np.empty_like(self.starts)
        row[self.order] = np.repeat(placed.row, counts)
        start[self.order] = np.repeat(placed.start, counts) + self.starts
        return replace(placed, row=row, start=start)
