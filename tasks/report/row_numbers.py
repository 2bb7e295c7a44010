"""Number the rows of a corpus over all splits, in the order of the manifest."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tasks.storage.arrow import offsets_of
from tasks.storage.layout import TRAIN_EPOCH_PREFIX
from tasks.storage.manifest import Manifest


class RowNumbers:
    """The rows of a manifest, numbered over all shards and splits in order."""

    def __init__(self, manifest: Manifest):
        splits = manifest.splits
        self._splits = {name: number for number, name in enumerate(splits)}
        self._shards = offsets_of([len(split.shards) for split in splits.values()])
        self._rows = offsets_of([shard.rows for split in splits.values() for shard in split.shards])
        self._lengths = np.array([manifest.length_of_split(name) for name in splits], np.int64)
        self._repacked = np.array([name.startswith(TRAIN_EPOCH_PREFIX) for name in splits], np.bool_)
        self.count = int(self._rows[-1])

    def of_entries(self, batch: pa.RecordBatch) -> np.ndarray:
        """Return the row number of each entry of an index, int64.

        The number is -1 if the entry has no row. Raises ValueError if the manifest lacks the row.
        """
        column, is_placed = batch.column("split"), batch.column("row").is_valid()
        names = column.dictionary.to_pylist()
        known = np.array([*(self._splits.get(name, -1) for name in names), -1])
        split = known[column.indices.fill_null(len(names)).to_numpy()]
        placed = np.flatnonzero(is_placed.to_numpy(zero_copy_only=False))
        split, row = split[placed], batch.column("row").fill_null(0).to_numpy()[placed]
        shard = batch.column("shard").fill_null(-1).to_numpy()[placed] + self._shards[split]
        exists = (split >= 0) & (shard >= self._shards[split]) & (shard < self._shards[split + 1])
        shard = np.where(exists, shard, 0)
        if not (exists & (row >= 0) & (row < np.diff(self._rows, append=0)[shard])).all():
            raise ValueError("it refers to rows that the manifest does not have")
        numbers = np.full(batch.num_rows, -1)
        numbers[placed] = self._rows[shard] + row
        return numbers

    def is_repacked(self, numbers: np.ndarray) -> np.ndarray:
        """Return whether each row repacks the training split for a later epoch."""
        return self._repacked[self._split_of(numbers)]

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """Return the number of places of each row, int64."""
        return self._lengths[self._split_of(numbers)]

    def _split_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the number of the split of each row, and 0 for the row -1."""
        return np.searchsorted(self._rows[self._shards[1:]], numbers, side="right")
