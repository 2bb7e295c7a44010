"""Name the splits of a corpus."""

from __future__ import annotations

from collections.abc import Sequence

SPLITS = ("train", "validation")


TRAIN_EPOCH_PREFIX = "train_epoch_"  # and the number of an epoch: a split with the conversations of train in other rows


def split_names(epochs: int, lengths: Sequence[int] = ()) -> tuple[str, ...]:
    """Return all splits in the order of their shards. The training split is repacked for each epoch after the first.

    If rows have several `lengths`, each kind of split is one split for each of them: train-512, train-1024, ….
    """
    kinds = (*SPLITS, *(f"{TRAIN_EPOCH_PREFIX}{epoch}" for epoch in range(2, epochs + 1)))
    return tuple(name for kind in kinds for name in splits_of(kind, lengths))


def splits_of(kind: str, lengths: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the splits of one kind: the kind alone, or one for each length if there are several."""
    return tuple(f"{kind}-{length}" for length in lengths) if len(lengths) > 1 else (kind,)


def kind_of(split: str) -> str:
    """Return train, validation, or train_epoch_2, …: the split without the length of its rows."""
    return split.partition("-")[0]


def first_packing(split: str) -> str:
    """Return train or validation: the kind of split whose conversations are those of a split."""
    return "validation" if kind_of(split) == "validation" else "train"


def length_in(split: str, default: int) -> int:
    """Return the length of the rows of a split by its name, or `default` if it names none."""
    _, _, length = split.partition("-")
    return int(length) if length.isdecimal() else default
