"""Rows of a split as numpy arrays, and the steps of training as batches of them.

shards ─mmap─▶ record batches ─Rows[n]─▶ {"input_ids": int32[L], "labels": int32[L], …}
packings of the training split ─the order of the trainer─▶ Steps ─Batches─▶ {"input_ids": int32[B, L], …}
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, SupportsIndex, overload

import numpy as np
import pyarrow as pa

from packcorpus.tasks.storage.corpus_folder import check_unchanged, reading
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.schemas import END, LOSS_WEIGHT
from packcorpus.tasks.storage.shards import open_shard, to_dicts
from packcorpus.train.data.steps import Order, Step, balance_of, is_in_order, order_of, packings_of

Row = dict[str, Any]

# Shards that a Rows keeps open; each needs a file descriptor.
OPEN_SHARDS = 64
# What a model receives. It must not receive an attention_mask, because conversations would then see each other.
COLUMNS = ("input_ids", "labels", "position_ids", END, LOSS_WEIGHT)


class Rows(Sequence[Row]):
    """The rows of one split, mapped from the shards; nothing is copied.

    `rows[n]` is a dict of numpy arrays, one for each column of the shards (see [Row format](row-format.md)): int32[L]
    `input_ids`, `labels`, and `position_ids`, int8[L] `attention_mask`, and, if the corpus has them, int32[L] `end` and
    float32[L] `loss_weight`, for L tokens in a row. A slice is a list of rows. The arrays are read-only views of the
    files. With `packing: false`, a row has the Python values `messages`, `tools`, and `text`.

    The SHA-256 of a shard is checked when its first row is read. Raises IndexError without such a row, and DataError or
    InputMissing, naming the file, if a shard is damaged or missing.

        rows = packcorpus.open("mine").rows("train")
        print(len(rows), rows[0]["input_ids"].shape)
        longest = max(int(row["position_ids"].max()) + 1 for row in rows)
    """

    def __init__(self, manifest: Manifest, folder: Path, split: str):
        self._manifest, self._folder, self.split = manifest, folder, split
        self._shards = manifest.splits[split].shards
        self._firsts = [0, *accumulate(shard.rows for shard in self._shards)]
        self._opened = lru_cache(OPEN_SHARDS)(self._open)

    def __len__(self) -> int:
        return self._firsts[-1]

    @overload
    def __getitem__(self, number: SupportsIndex) -> Row: ...
    @overload
    def __getitem__(self, number: slice) -> list[Row]: ...
    def __getitem__(self, number: SupportsIndex | slice) -> Row | list[Row]:
        if isinstance(number, slice):
            return [self[row] for row in range(*number.indices(len(self)))]
        wanted = operator.index(number)
        row = wanted + len(self) if wanted < 0 else wanted
        if not 0 <= row < len(self):
            raise IndexError(f"row {wanted:,}: {self.split} has {len(self):,} rows, from 0")
        shard = bisect_right(self._firsts, row) - 1
        return self._row(shard, row - self._firsts[shard])

    def __repr__(self) -> str:
        return f"Rows({self._manifest.name}, {self.split}: {len(self):,} rows)"

    def __reduce__(self) -> tuple[Any, ...]:  # maps cannot be sent to another process
        return Rows, (self._manifest, self._folder, self.split)

    def _open(self, number: int) -> tuple[list[pa.RecordBatch], list[int]]:
        """Return the record batches of a shard, and the numbers of their first rows."""
        shard = self._shards[number]
        check_unchanged(self._folder, shard)
        with open_shard(self._manifest, self._folder, shard) as batches:
            held = [batch for batch in batches if batch.num_rows]
        return held, [0, *accumulate(batch.num_rows for batch in held)]

    def _row(self, shard: int, at: int) -> Row:
        batches, firsts = self._opened(shard)
        number = bisect_right(firsts, at) - 1
        batch = batches[number].slice(at - firsts[number], 1)
        with reading(self._folder / self._shards[shard].path, self._folder):
            if not self._manifest.packing_metadata.enabled:
                return to_dicts(batch)[0]
            return {name: _array(batch.column(name)) for name in batch.schema.names}


def _array(column: pa.Array) -> Any:
    return (column.flatten() if hasattr(column, "flatten") else column).to_numpy()


class Batches:
    """The batches of some epochs, as `Corpus.batches` returns them.

    `len(batches)` is their number. Each iteration starts at the first epoch.

        batches = packcorpus.open("mine").batches(4, epochs=2, framework="torch")
        print(len(batches), next(iter(batches))["labels"].dtype)
    """

    def __init__(self, order: Order, epochs: int, framework: Literal["numpy", "torch"]):
        self._order, self._epochs, self._framework = order, epochs, framework

    @cached_property
    def _steps(self) -> int:
        return len(self._order(0))

    def __len__(self) -> int:
        return self._steps * self._epochs

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for epoch in range(self._epochs):
            for step in self._order(epoch):
                batch = joined([step.rows[row] for row in step.numbers.tolist()])
                yield _as_tensors(batch) if self._framework == "torch" else batch


def joined(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Return rows as one batch, [rows, L], or [1, tokens] if they differ in length."""
    names = [name for name in COLUMNS if name in rows[0]]
    if len({len(row["input_ids"]) for row in rows}) > 1:
        return {name: np.concatenate([row[name] for row in rows])[None] for name in names}
    return {name: np.stack([row[name] for row in rows]) for name in names}


def _as_tensors(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    import torch

    tensors = {name: torch.from_numpy(values) for name, values in batch.items()}
    return tensors | {"labels": tensors["labels"].long()}  # as losses of torch need them


def order_of_split(
    manifest: Manifest, open_rows: Callable[[str], Rows], split: str, batch_size: int, seed: int
) -> Order:
    """Return the order of batches: that of the trainer, or of the shards."""
    counts: Mapping[str, int] = {name: facts.rows for name, facts in manifest.splits.items()}
    if split == "train":
        packings = packings_of(counts, manifest.row_lengths)
        opened = [{length: open_rows(name) for length, name in names.items()} for names in packings]
        groups = [list(manifest.splits[name].groups or [counts[name]]) for names in packings for name in names.values()]
        settings = (balance_of(manifest), groups, batch_size, seed, is_in_order(manifest))
        return order_of(opened, manifest.row_layout.mix, *settings)
    rows = open_rows(split)
    numbers = np.arange(len(rows))
    return lambda epoch: [Step(rows, numbers[first : first + batch_size]) for first in range(0, len(rows), batch_size)]
