"""Count the figures of the report's plots in one pass over the index.

    index.arrow ─batch by batch─┬─▶ tokens of each sample                    ─▶ Histogram
                                ├─▶ pieces in ranges of rows ─range by range─▶ Histograms: padding, pieces of each row
                                └─▶ pieces of the rows that are shown

An index may be larger than memory, and it may be in any order. So the pieces of a row, or of a sample with several
pieces, are collected range by range. Until then, temporary files (verification/partitions.py) hold 12 bytes for each
piece, and 24 more if samples have several pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from packcorpus.tasks.storage.layout import TRAIN_EPOCH_PREFIX
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.schemas import offsets_of, to_arrow, to_numpy
from packcorpus.tasks.storage.shards import open_index
from packcorpus.tasks.verification.partitions import Partitions

RANGE = 1 << 18  # approximate number of pieces that are collected at a time

_IN_ROW = np.dtype([("row", "i8"), ("length", "i4")])
_OF_SAMPLE = np.dtype([("source", "i4"), ("record", "i8"), ("turn", "i4"), ("first", "i4"), ("length", "i4")])


class Histogram:
    """Numbers and how often they occur.

    Memory depends on the number of different numbers. A corpus has few different lengths of conversations, because the
    lengths add up to its tokens: at most √(2 × tokens), which is 1.4 million for 10¹² tokens; thousands in practice.

    `values` are the numbers that occur, ascending. `counts` is how often each of them occurs. Both are int64.
    """

    def __init__(self, numbers: np.ndarray | Sequence[int] = ()) -> None:
        self.values, self.counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.add(np.asarray(numbers, np.int64))

    def add(self, numbers: np.ndarray) -> None:
        """Count further numbers."""
        values, counts = np.unique(numbers, return_counts=True)
        self.values, inverse = np.unique(np.concatenate([self.values, values]), return_inverse=True)
        counts = np.concatenate([self.counts, counts])
        self.counts = np.zeros(len(self.values), np.int64)
        np.add.at(self.counts, inverse, counts)

    def __len__(self) -> int:
        """Return the count of all added numbers."""
        return int(self.counts.sum())

    def above(self, limit: int) -> int:
        """Return the count of numbers above a limit."""
        return int(self.counts[self.values > limit].sum())

    def mean(self) -> float:
        return float((self.values * self.counts).sum()) / max(1, len(self))

    def quantiles(self, shares: Sequence[float]) -> list[int]:
        """Return the quantiles at these shares, by the method "inverted_cdf" of numpy.

        A quantile is the smallest number that at least this share of all numbers does not exceed. There are none
        without numbers.
        """
        places = np.ceil(len(self) * np.array(shares) - 1).clip(0).astype(np.int64)[: len(shares) * bool(len(self))]
        quantiles: list[int] = self.values[np.searchsorted(np.cumsum(self.counts), places, side="right")].tolist()
        return quantiles


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


class Piece(NamedTuple):
    """A piece in a row.

    `turn` is the turn that its sample trains on, or -1 if the sample is a whole conversation.
    """

    start: int
    length: int
    trained: int
    truncated: bool
    source: int
    record: int
    turn: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts over the index.

    Rows that repack the training split for a later epoch are not counted.
    """

    lengths: Histogram = field(default_factory=Histogram)  # tokens of each sample, dropped or not, without copies
    padding: Histogram = field(default_factory=Histogram)  # places without a token in each row
    conversations: Histogram = field(default_factory=Histogram)  # conversations and pieces in each row
    drawn: dict[int, list[Piece]] = field(default_factory=dict)  # row number → pieces of the row, in order


def read_figures(manifest: Manifest, folder: Path, drawn: Collection[int] = ()) -> Figures:
    """Read the index once and return the figures.

    They include the pieces of the rows whose numbers (RowNumbers) are in `drawn`. Raises DataError or InputMissing
    if the index is not as recorded, and StorageError if temporary files cannot be written.
    """
    figures, rows = Figures(drawn={row: [] for row in drawn}), RowNumbers(manifest)
    wanted = np.array(list(drawn), np.int64)
    packed, ledger = manifest.packing_metadata.enabled, manifest.ledger
    # A sample of the first packing has several pieces if it is cut or copied.
    has_several = ledger.conversations.split or any(entry.copies != entry.conversations for entry in manifest.mixture)
    ranges = max(1, (ledger.pieces.packed + ledger.conversations.read) // RANGE)
    rows_of_range = max(1, -(-rows.count // ranges))
    with open_index(manifest, folder) as index, ExitStack() as stack:
        by_row = stack.enter_context(Partitions(ranges, _IN_ROW))
        by_sample = stack.enter_context(Partitions(ranges, _OF_SAMPLE))
        for batch in index:
            # A damaged offset would cause a SystemError or crash Python.
            batch.validate(full=True)
            row = rows.of_entries(batch)
            samples = np.empty(batch.num_rows, _OF_SAMPLE)
            for name in ("source", "record", "length", "turn"):
                samples[name] = _numbers(batch, name)
            if "repeated" in batch.schema.names:
                samples["length"] -= batch.column("repeated").fill_null(0).to_numpy()
            if "shared" in batch.schema.names:  # a piece of a tree, which is the end of its sample
                samples["length"] += batch.column("shared").fill_null(0).to_numpy()
            samples["first"] = batch.column("first").fill_null(0).to_numpy()
            samples = samples[~rows.is_repacked(row)]  # the first packing has the same samples
            if has_several:
                # All samples of a record are in one range. Ranges have equal sizes, however records are numbered.
                mixed = samples["record"].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
                by_sample.add((mixed >> np.uint64(32)).astype(np.int64) * ranges >> 32, samples)
            else:
                figures.lengths.add(samples["length"])
            placed, row = batch.filter(to_arrow(row >= 0)), row[row >= 0]
            if packed:
                start, length = _numbers(placed, "start").astype(np.int64), _numbers(placed, "length")
                if ((start < 0) | (length < 1) | (start + length > rows.lengths(row))).any():
                    raise ValueError("it refers to tokens beyond the end of a row")
                in_rows = np.empty(len(row), _IN_ROW)
                in_rows["row"], in_rows["length"] = row, length
                by_row.add(row // rows_of_range, in_rows)
            shown = np.isin(row, wanted)
            to_show = placed.filter(to_arrow(shown))
            columns = [_numbers(to_show, name).tolist() for name in Piece._fields]
            for number, *values in zip(row[shown].tolist(), *columns, strict=True):
                figures.drawn[number].append(Piece(*values))
        for samples in by_sample:
            figures.lengths.add(_lengths(samples))
        for number, pieces in enumerate(by_row if packed else ()):
            row = np.arange(number * rows_of_range, min((number + 1) * rows_of_range, rows.count))
            within = pieces["row"] - number * rows_of_range
            padding = rows.lengths(row) - np.bincount(within, pieces["length"], len(row)).astype(np.int64)
            if (padding < 0).any():
                raise ValueError("it refers to tokens beyond the end of a row")
            counted = ~rows.is_repacked(row)
            figures.padding.add(padding[counted])
            figures.conversations.add(np.bincount(within, minlength=len(row))[counted])
    for pieces_of_row in figures.drawn.values():
        pieces_of_row.sort()
    return figures


def _lengths(samples: np.ndarray) -> np.ndarray:
    """Return the number of tokens of each sample, int64.

    A sample with copies counts once.
    """
    order = np.lexsort((samples["first"], samples["turn"], samples["record"], samples["source"]))
    columns = [samples[name][order] for name in ("source", "record", "turn", "first")]
    is_other = [np.append(True, column[1:] != column[:-1])[: len(order)] for column in columns]
    is_sample = np.logical_or.reduce(is_other[:3])
    lengths = samples["length"][order] * (is_sample | is_other[3]).astype(np.int64)
    return np.add.reduceat(lengths, np.flatnonzero(is_sample)) if len(order) else lengths


def _numbers(batch: pa.RecordBatch, name: str) -> np.ndarray:
    """Return a column; the turn is -1 if conversations are not divided into samples."""
    if name == "turn" and name not in batch.schema.names:
        return np.full(batch.num_rows, -1)
    column = batch.column(name)
    if column.null_count:
        raise ValueError(f"a place lacks its {name}")
    return to_numpy(column)
