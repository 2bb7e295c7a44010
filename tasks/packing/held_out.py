"""Choose the conversations of the validation split.

    digest of each conversation ─ a share of all digests ─▶ held out
    `split` of its source        ─ validation, train      ─▶ held out, or not; equal contents of other sources follow

A share of the digests is a share of the conversations, and the choice does not depend on the rest of the corpus. What a
source with `split: validation` holds is nowhere trained on: conversations with the same content in sources without a
`split` are held out, too. The same holds for `split: train`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.token_files import TokenColumns

CHUNK = 1 << 18  # conversations processed at a time


@dataclass(slots=True)
class HeldOut:
    """Which conversations are held out, and which of them cannot change sides.

    `fixed` marks conversations that a source with a `split` decides; None if there is no such source.
    """

    flags: np.ndarray  # bool[samples]
    fixed: np.ndarray | None = None  # bool[samples]


def hold_out(tokens: TokenColumns, recipe: Recipe) -> HeldOut:
    """Hold out a share of all conversations, and the sources that are for validation."""
    share, count = recipe.config.validation, tokens.edges[-1]
    held = HeldOut(np.zeros(count, np.bool_))
    for chunk, groups in _groups(tokens, 0, count if share else 0):
        held.flags[chunk] = groups < np.uint64(int(share * 2**64))
    of_splits = {split: _groups_of(tokens, recipe, split) for split in ("train", "validation")}
    if any(map(len, of_splits.values())):
        held.fixed = np.zeros(count, np.bool_)
        for chunk, groups in _groups(tokens, 0, count):
            in_train, in_validation = (_is_in(groups, of_splits[split]) for split in ("train", "validation"))
            held.flags[chunk] = (held.flags[chunk] & ~in_train) | in_validation
            held.fixed[chunk] = in_train | in_validation
        for inside in _of_split(tokens, recipe, "train"):
            held.flags[inside] = False
    return held


def check_sides(held_out: np.ndarray, stays: np.ndarray, tokens: TokenColumns, recipe: Recipe) -> None:
    """Raise DataError if a source for training and one for validation share a content.

    `stays` marks the conversations that are packed: bool[samples].
    """
    in_train = [inside for inside in _of_split(tokens, recipe, "train") if stays[inside].any()]
    if not in_train or not (held_out & stays).any():
        return
    held = np.unique(np.concatenate([g[(held_out & stays)[c]] for c, g in _groups(tokens, 0, tokens.edges[-1])]))
    for inside in in_train:
        for chunk, groups in _groups(tokens, inside.start, inside.stop):
            shared = stays[chunk] & _is_in(groups, held)
            if shared.any():
                at = int(np.argmax(shared))
                other = next(
                    c.start + int(np.argmax(found))
                    for c, g in _groups(tokens, 0, tokens.edges[-1])
                    if (found := (g == groups[at]) & (held_out & stays)[c]).any()
                )
                places = [_place(tokens, recipe, number) for number in (chunk.start + at, other)]
                raise DataError(
                    "both_splits",
                    f"{places[0]}: its source has split: train, but the same content is held out as {places[1]}, by a "
                    "source with split: validation; set duplicates: drop, or remove split: train",
                )


def hold_out_at_least_one(
    held_out: np.ndarray,
    stays: np.ndarray,
    digests: Callable[[], np.ndarray],
    validation: float,
    fixed: np.ndarray | None = None,
) -> None:
    """Move one content to the other split, in place, if that split is empty.

    This happens only in tiny corpora. `stays` is true for each conversation that is packed, and `fixed` for each that
    cannot move. Conversations with equal contents (uint64 `digests`) move together. If there is only one content, it is
    trained on.
    """
    present = held_out[stays]
    if validation == 0 or not len(present) or (present.any() and not present.all()):
        return
    candidates = np.flatnonzero(stays if fixed is None else stays & ~fixed)
    if not len(candidates):
        return
    contents = digests()
    moved = contents == contents[candidates[0 if present[0] else -1]]
    if present[0] or not moved[stays].all():
        held_out[moved] = not present[0]


def is_of_validation(tokens: TokenColumns, recipe: Recipe) -> np.ndarray:
    """Return whether the source has `split: validation`: bool[samples]."""
    flags = np.zeros(tokens.edges[-1], np.bool_)
    for inside in _of_split(tokens, recipe, "validation"):
        flags[inside] = True
    return flags


def _groups(tokens: TokenColumns, first: int, last: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield slices of conversations, and what decides the side of each, uint64."""
    for top in range(first, last, CHUNK):
        bottom = min(top + CHUNK, last)
        yield slice(top, bottom), tokens.column("digest", top, bottom)


def _of_split(tokens: TokenColumns, recipe: Recipe, split: str) -> Iterator[slice]:
    """Yield the conversations of each part whose source has this `split`."""
    for part, (first, last) in zip(recipe.parts, zip(tokens.edges, tokens.edges[1:], strict=False), strict=True):
        if recipe.config.sources[part.file.entry].split == split and first < last:
            yield slice(first, last)


def _groups_of(tokens: TokenColumns, recipe: Recipe, split: str) -> np.ndarray:
    """Return what decides the sides of all sources with this `split`, sorted."""
    parts = _of_split(tokens, recipe, split)
    found = [groups for part in parts for _, groups in _groups(tokens, part.start, part.stop)]
    return np.unique(np.concatenate(found)) if found else np.empty(0, np.uint64)


def _is_in(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return whether each value is among `known`, which is sorted."""
    if not len(known):
        return np.zeros(len(values), np.bool_)
    return np.asarray(known[np.searchsorted(known, values).clip(max=len(known) - 1)] == values)


def _place(tokens: TokenColumns, recipe: Recipe, number: int) -> str:
    """Return FILE:RECORD of a conversation."""
    part = int(np.searchsorted(tokens.edges, number, side="right")) - 1
    record = int(tokens.column("record", number, number + 1)[0])
    return f"{recipe.parts[part].file.name}:{record + 1}"
