"""Forecast how long the ranks of a step wait for the slowest rank, for a corpus."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tasks.packing.balance.waiting import MOST_ROWS, RowsOfLength, Waiting, forecast_rows
from tasks.row_settings import Balance
from tasks.storage.manifest import Manifest
from tasks.storage.row_statistics import statistics_of_split
from tasks.storage.shards import open_shard, sizes_of
from tasks.storage.splits import splits_of
from tasks.stores.mirror import remote_with

# Rows without padding whose tokens are counted: enough for 16 steps of 512 ranks. In a bucket, only one shard is read.
MOST_COUNTED = 1 << 13


def waiting_of(manifest: Manifest, folder: Path, hidden_size: int) -> list[Waiting]:
    """Forecast the waiting for the training split from its first rows.

    The result is empty if the corpus has no statistics of rows. Raises DataError or InputMissing if rows.arrow, or a
    shard without padding, is missing or damaged.
    """
    parts = []
    for split in splits_of("train", manifest.row_lengths):
        found = statistics_of_split(manifest, folder, split, MOST_ROWS)
        if found is None:
            return []
        length, count = manifest.length_of_split(split), manifest.splits[split].rows
        tokens = _tokens_of_rows(manifest, folder, split)
        some = slice(0, None if tokens is None else len(tokens))
        parts.append(RowsOfLength(found.squares[some], found.trained[some], length, count, tokens))
    settings = manifest.config.get("balance")
    return forecast_rows(parts, Balance(**settings) if settings else None, hidden_size)


def _tokens_of_rows(manifest: Manifest, folder: Path, split: str) -> np.ndarray | None:
    """Return the number of tokens of each of the first rows, int64[rows].

    Returns None if rows are padded, because all of them are equally long.
    """
    if manifest.row_shape.padding == "row":
        return None
    sizes = [np.zeros(0, np.int64)]
    for shard in manifest.splits[split].shards[: 1 if remote_with(folder) else None]:
        if sum(map(len, sizes)) < MOST_COUNTED:
            with open_shard(manifest, folder, shard) as batches:
                sizes += [sizes_of(batch, "input_ids") for batch in batches]
    return np.concatenate(sizes)[:MOST_COUNTED]
