"""Check rows.arrow against statistics counted from the rows, shard by shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np

from tasks.core.errors import DataError
from tasks.storage.facts import RowSums
from tasks.storage.manifest import Manifest
from tasks.storage.row_statistics import ROWS, RowStatistics, add_sums, has_statistics, open_statistics


class RecordedStatistics:
    """The recorded statistics of a corpus.

    A corpus of an earlier version has no rows.arrow, so its rows are counted but not compared.
    """

    def __init__(self, manifest: Manifest, folder: Path):
        self._manifest, self._folder, self._stack = manifest, folder, ExitStack()
        self._splits = [(name, shard) for name, split in manifest.splits.items() for shard in split.shards]
        self._sums = {name: RowStatistics.zeros(0).sums() for name in manifest.splits}
        self._recorded = has_statistics(manifest)
        self._shards: Iterator[RowStatistics] = iter(())

    def __enter__(self) -> Self:
        if self._recorded:
            self._shards = self._stack.enter_context(open_statistics(self._manifest, self._folder))
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def check_shard(self, counted: Sequence[RowStatistics]) -> None:
        """Check the next shard, given the statistics counted from its record batches.

        Raises DataError if a recorded value differs.
        """
        name, shard = self._splits.pop(0)
        own = RowStatistics.joined(counted)
        self._sums[name] = add_sums(self._sums[name], own.sums())
        if not self._recorded:
            return
        recorded = next(self._shards)
        for column in RowStatistics.__slots__:
            found, expected = getattr(own, column), getattr(recorded, column)
            if not np.array_equal(found, expected):
                row = int(np.flatnonzero(found != expected)[0])
                raise DataError(
                    "wrong_figure",
                    f"{self._folder / ROWS}: {column} of row {row} of {shard.path} is recorded as {expected[row]:,}, "
                    f"counted {found[row]:,}",
                )

    def check_sums(self) -> None:
        """Check the sums in the manifest, after the last shard.

        Raises DataError if one differs.
        """
        where = self._folder / "manifest.json"
        if self._recorded and next(self._shards, None) is not None:
            raise DataError("bad_index", f"{self._folder / ROWS}: has more records than the corpus has rows")
        for name, split in self._manifest.splits.items():
            expected = RowSums(**self._sums[name]) if self._recorded else None
            # The ledger check reports splits that the corpus should not have.
            if split.statistics != expected and (split.shards or split.statistics):
                raise DataError(
                    "wrong_figure",
                    f"{where}: statistics of {name} are recorded as {split.statistics}, counted {expected}",
                )
            if split.groups is not None and sum(split.groups) != split.rows:
                raise DataError(
                    "wrong_figure",
                    f"{where}: the groups of {name} have {sum(split.groups):,} rows, but the split has {split.rows:,}",
                )
