"""Choose the conversations of the validation split.

    group of each conversation ─ a share of all hashes ─▶ held out
    `split` of its source      ─ validation, train     ─▶ held out, or not; the same groups of other sources follow

A group is the hash of a content, of a prompt, or of the value of a key (`validation_by`). All conversations of a group
are on one side. A share of the hashes is about a share of the conversations, and the choice does not depend on the rest
of the corpus. What a source with `split: validation` holds is nowhere trained on: the same groups in sources without a
`split` are held out, too, and those of a source with `split: train` are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.errors import DataError, UsageError
from packcorpus.tasks.core.numbers import is_in
from packcorpus.tasks.core.printable import counted, suggest
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
    for chunk, groups in _groups(tokens, recipe, 0, count if share else 0):
        held.flags[chunk] = groups < np.uint64(int(share * 2**64))
    of_splits = {split: _groups_of(tokens, recipe, split) for split in ("train", "validation")}
    if any(map(len, of_splits.values())):
        held.fixed = np.zeros(count, np.bool_)
        for chunk, groups in _groups(tokens, recipe, 0, count):
            in_train, in_validation = (is_in(groups, of_splits[split]) for split in ("train", "validation"))
            held.flags[chunk] = (held.flags[chunk] & ~in_train) | in_validation
            held.fixed[chunk] = in_train | in_validation
        for inside in _of_split(tokens, recipe, "train"):
            held.flags[inside] = False
    return held


def check_group_key(config: Config, accepted: int, without_key: int) -> None:
    """Raise UsageError if no conversation has the key that `validation_by` names."""
    if accepted and accepted == without_key:
        known = ("conversation", "prompt")
        raise UsageError(
            "bad_setting",
            f"validation_by: {config.validation_by} is neither {' nor '.join(known)} nor a key of the records: none of "
            f"{counted(accepted, 'conversation')} has it{suggest(config.validation_by, known)}",
        )


def check_sides(held_out: np.ndarray, stays: np.ndarray, tokens: TokenColumns, recipe: Recipe) -> None:
    """Raise DataError if a source for training and one for validation share a group.

    `stays` marks the conversations that are packed: bool[samples].
    """
    in_train = [inside for inside in _of_split(tokens, recipe, "train") if stays[inside].any()]
    if not in_train or not (held_out & stays).any():
        return
    is_held = held_out & stays
    held = np.unique(np.concatenate([g[is_held[c]] for c, g in _groups(tokens, recipe, 0, tokens.edges[-1])]))
    for inside in in_train:
        for chunk, groups in _groups(tokens, recipe, inside.start, inside.stop):
            shared = stays[chunk] & is_in(groups, held)
            if shared.any():
                at = int(np.argmax(shared))
                other = next(
                    c.start + int(np.argmax(found))
                    for c, g in _groups(tokens, recipe, 0, tokens.edges[-1])
                    if (found := (g == groups[at]) & is_held[c]).any()
                )
                places = [_place(tokens, recipe, number) for number in (chunk.start + at, other)]
                by = recipe.config.validation_by
                what = {"conversation": "content", "prompt": "prompt"}.get(by, f"value of {by}")
                drop = "set duplicates: exact, or " * (by == "conversation")
                raise DataError(
                    "both_splits",
                    f"{places[0]}: its source has split: train, but the same {what} is held out as {places[1]}, by a "
                    f"source with split: validation; {drop}remove split: train",
                )


def hold_out_at_least_one(
    held_out: np.ndarray,
    stays: np.ndarray,
    groups: Callable[[], np.ndarray],
    validation: float,
    fixed: np.ndarray | None = None,
) -> None:
    """Move one group to the other split, in place, if that split is empty.

    This happens only in tiny corpora. `stays` is true for each conversation that is packed, and `fixed` for each that
    cannot move. Conversations of a group (uint64) move together. If there is only one group, it is trained on.
    """
    present = held_out[stays]
    if validation == 0 or not len(present) or (present.any() and not present.all()):
        return
    candidates = np.flatnonzero(stays if fixed is None else stays & ~fixed)
    if not len(candidates):
        return
    of = groups()
    moved = of == of[candidates[0 if present[0] else -1]]
    if present[0] or not moved[stays].all():
        held_out[moved] = not present[0]


def is_of_validation(tokens: TokenColumns, recipe: Recipe) -> np.ndarray:
    """Return whether the source has `split: validation`: bool[samples]."""
    flags = np.zeros(tokens.edges[-1], np.bool_)
    for inside in _of_split(tokens, recipe, "validation"):
        flags[inside] = True
    return flags


def _groups(tokens: TokenColumns, recipe: Recipe, first: int, last: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield slices of conversations, and the group of each, uint64."""
    for top in range(first, last, CHUNK):
        bottom = min(top + CHUNK, last)
        yield slice(top, bottom), tokens.column(recipe.config.grouped_by, top, bottom)


def _of_split(tokens: TokenColumns, recipe: Recipe, split: str) -> Iterator[slice]:
    """Yield the conversations of each part whose source has this `split`."""
    for part, (first, last) in zip(recipe.parts, zip(tokens.edges, tokens.edges[1:], strict=False), strict=True):
        if recipe.config.sources[part.file.entry].split == split and first < last:
            yield slice(first, last)


def _groups_of(tokens: TokenColumns, recipe: Recipe, split: str) -> np.ndarray:
    """Return the groups of all sources with this `split`, sorted."""
    parts = _of_split(tokens, recipe, split)
    found = [groups for part in parts for _, groups in _groups(tokens, recipe, part.start, part.stop)]
    return np.unique(np.concatenate(found)) if found else np.empty(0, np.uint64)


def _place(tokens: TokenColumns, recipe: Recipe, number: int) -> str:
    """Return FILE:RECORD of a conversation."""
    part = int(np.searchsorted(tokens.edges, number, side="right")) - 1
    record = int(tokens.column("record", number, number + 1)[0])
    return f"{recipe.parts[part].file.name}:{record + 1}"
