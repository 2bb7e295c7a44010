"""Name the splits of a corpus."""

from __future__ import annotations

SPLITS = ("train", "validation")


TRAIN_EPOCH_PREFIX = "train_epoch_"  # and the number of an epoch: a split with the conversations of train in other rows


def split_names(epochs: int) -> tuple[str, ...]:
    """Return all splits in the order of their shards. The training split is repacked for each epoch after the first."""
    return (*SPLITS, *(f"{TRAIN_EPOCH_PREFIX}{epoch}" for epoch in range(2, epochs + 1)))
