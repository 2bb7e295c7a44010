"""Name the splits of a corpus."""

from __future__ import annotations

from collections.abc import Sequence

SPLITS = ("train", "validation")


TRAIN_EPOCH_PREFIX = "train_epoch_"  # plus the number of an epoch: the conversations of train in other rows


def split_names(epochs: int, lengths: Sequence[int] = ()) -> tuple[str, ...]:
    """Return the names of all splits, in the order of their shards.

    The training split is repacked for each epoch after the first. If rows have several `lengths`, each kind of split
    has one split per length: train-512, train-1024, ….
    """
    kinds = (*SPLITS, *(f"{TRAIN_EPOCH_PREFIX}{epoch}" for epoch in range(2, epochs + 1)))
    return tuple(name for kind in kinds for name in splits_of(kind, lengths))


def splits_of(kind: str, lengths: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the splits of one kind.

    If rows have several lengths, there is one split per length; otherwise, the only name is the kind itself.
    """
    return tuple(f"{kind}-{length}" for length in lengths) if len(lengths) > 1 else (kind,)


def kind_of(split: str) -> str:
    """Return train, validation, train_epoch_2, …: a split without its row length."""
    return split.partition("-")[0]


def first_packing(split: str) -> str:
    """Return train or validation: the kind with the same conversations as a split."""
    return "validation" if kind_of(split) == "validation" else "train"


def length_in(split: str, default: int) -> int:
    """Return the row length in the name of a split, or `default` if there is none."""
    _, _, length = split.partition("-")
    return int(length) if length.isdecimal() else default
