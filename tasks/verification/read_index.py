"""Read the index of a corpus and distribute its entries over partitions.

    index.arrow ─read_index─▶ Index      by_shard          the pieces of one shard
                                         by_conversation   all entries of neighboring conversations, in source order

An index may be larger than memory, and it may be in any order, because neither the corpus nor the code that wrote it is
trusted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.core.errors import DataError
from tasks.storage.arrow import strings, to_arrow, to_numpy
from tasks.storage.layout import SPLITS, kind_of
from tasks.storage.manifest import Manifest
from tasks.storage.schemas import SAMPLE_DROP_REASONS
from tasks.storage.shards import open_index
from tasks.verification.partitions import Partitions

BLOCK = 1 << 16  # entries of the index that are handled at a time

RANGE = 1 << 18  # approximate number of entries in a range of conversations

# Columns that are null if a conversation was dropped. `dropped` is null otherwise. Other columns have no nulls.
PLACE = {"split", "shard", "row", "start", "first"}

PIECE = np.dtype(
    [
        ("row", "i4"), ("start", "i4"), ("length", "i4"), ("trained", "i4"), ("separator", "?"), ("truncated", "?"),
        ("closed", "?"),
    ]
)  # fmt: skip

# `split` is an index into `kinds_of_splits`, and `dropped` is an index into SAMPLE_DROP_REASONS; -1 is null or unknown.
# `first` is -1 if the conversation was dropped. `turn` is -1 if the index has no such column.
ENTRY = np.dtype(
    [
        ("source", "i4"), ("record", "i8"), ("turn", "i4"), ("first", "i4"), ("split", "i2"), ("length", "i4"),
        ("trained", "i4"), ("separator", "?"), ("truncated", "?"), ("turns", "i4"), ("digest", "u8"), ("dropped", "i1"),
    ]
)  # fmt: skip


@dataclass(slots=True)
class Totals:
    """Sums over an index.

    Sources that are not in the manifest count as one additional source.
    """

    trained: np.ndarray  # int64[sources + 1], tokens
    entries: np.ndarray  # int64[sources + 1]
    least: np.ndarray  # int64[sources + 1], the smallest record
    most: np.ndarray  # int64[sources + 1], the largest record
    placed: int = 0  # pieces in rows
    separators: int = 0
    nulls: set[str] = field(default_factory=set)  # columns with null values that are not allowed
    too_small: set[str] = field(default_factory=set)  # columns with a value below the allowed minimum


@dataclass(slots=True)
class Index:
    """The entries of an index in partitions, and sums over all of them."""

    totals: Totals
    by_shard: Partitions  # of PIECE; one partition per shard, over all splits of the manifest
    # Of ENTRY; a conversation is in one partition, and partitions are in the order of source and record.
    by_conversation: Partitions


def kinds_of_splits(manifest: Manifest) -> list[str]:
    """Return the kinds of splits by their number in ENTRY.

    If rows have several lengths, several splits are of one kind.
    """
    return list(dict.fromkeys([*SPLITS, *map(kind_of, manifest.splits)]))


@contextmanager
def read_index(manifest: Manifest, folder: Path) -> Iterator[Index]:
    """Check and count the columns of an index, then distribute its entries.

    Reads the index twice. Raises DataError if a column has null values or numbers that are not allowed.
    """
    totals = _count(manifest, folder)
    shards = [len(split.shards) for split in manifest.splits.values()]
    ranges = max(1, -(-int(totals.entries.sum()) // RANGE))
    with ExitStack() as stack:
        by_shard = stack.enter_context(Partitions(sum(shards), PIECE))
        by_conversation = stack.enter_context(Partitions(ranges, ENTRY))
        names, kinds = list(manifest.splits), kinds_of_splits(manifest)
        # The arrays are indexed by split number. Their last element is for unknown splits, which have number -1.
        kind_numbers = np.array([*(kinds.index(kind_of(name)) for name in names), -1])
        known, of_splits = np.full(len(names) + 1, -1), np.zeros(len(names) + 1, np.int64)
        for split, (name, count) in enumerate(zip(manifest.splits, shards, strict=True)):
            known[names.index(name)], of_splits[names.index(name)] = sum(shards[:split]), count
        for block in _blocks(manifest, folder):
            entries = _entries(block, names)
            split_of_entry = entries["split"].astype(np.int64)
            entries["split"] = kind_numbers[split_of_entry]
            by_conversation.add(range_of(entries, totals, ranges), entries)
            in_row = block.column("row").is_valid()
            placed, split = block.filter(in_row), split_of_entry[to_numpy(in_row)]
            shard = _numpy(placed, "shard").astype(np.int64)
            exists = (known[split] >= 0) & (shard >= 0) & (shard < of_splits[split])
            pieces = np.empty(len(shard), PIECE)
            for name in PIECE.names or ():
                pieces[name] = _numpy(placed, name)
            by_shard.add((known[split] + shard)[exists], pieces[exists])
        yield Index(totals, by_shard, by_conversation)


def _blocks(manifest: Manifest, folder: Path) -> Iterator[pa.RecordBatch]:
    with open_index(manifest, folder) as reader:
        for batch in reader:
            batch.validate()
            for top in range(0, batch.num_rows, BLOCK):
                yield batch.slice(top, BLOCK)


def _count(manifest: Manifest, folder: Path) -> Totals:
    path, sources = folder / "index.arrow", len(manifest.sources)
    limits = np.iinfo(np.int64)
    totals = Totals(
        np.zeros(sources + 1, np.int64),
        np.zeros(sources + 1, np.int64),
        np.full(sources + 1, limits.max),
        np.full(sources + 1, limits.min),
    )
    names: list[str] = []
    for block in _blocks(manifest, folder):
        names = block.schema.names
        placed = block.column("row").is_valid()
        for name in names:
            column = block.column(name)
            if name in PLACE:
                right = column.is_valid().equals(placed)
            else:
                right = column.is_null().equals(placed) if name == "dropped" else not column.null_count
            if not right:
                totals.nulls.add(name)
        for name, least in (("length", 1), ("source", 0)):
            smallest = pc.min(block.column(name)).as_py()
            if smallest is not None and smallest < least:
                totals.too_small.add(name)
        if totals.nulls or totals.too_small:
            continue
        totals.placed += placed.true_count
        totals.separators += pc.sum(block.column("separator")).as_py() or 0
        source, record = np.minimum(_numpy(block, "source"), sources), _numpy(block, "record")
        totals.trained += np.bincount(source, _numpy(block, "trained"), sources + 1).astype(np.int64)
        totals.entries += np.bincount(source, minlength=sources + 1)
        heads = np.flatnonzero(np.append(True, source[1:] != source[:-1]))
        np.minimum.at(totals.least, source[heads], np.minimum.reduceat(record, heads))
        np.maximum.at(totals.most, source[heads], np.maximum.reduceat(record, heads))
    for name in (name for name in names if name in totals.nulls):
        raise DataError("bad_index", f"{path}: {name} has null values that are not allowed")
    for name in (name for name in ("length", "source") if name in totals.too_small):
        raise DataError("bad_index", f"{path}: an entry has an invalid {name}")
    return totals


def range_of(entries: np.ndarray, totals: Totals, ranges: int) -> np.ndarray:
    """Return the number of the partition of each entry.

    Partitions ascend by source and record, and have about equal sizes. Sizes differ more if the record numbers of a
    source have large gaps, which is rare and harmless.
    """
    source = np.minimum(entries["source"], len(totals.entries) - 1)
    before = np.cumsum(totals.entries) - totals.entries
    # float64, because the records of a damaged index may be any numbers. Rounding keeps their order.
    least = totals.least.astype(np.float64)
    each = totals.entries / np.maximum(totals.most.astype(np.float64) - least + 1, 1)
    inside = np.minimum((entries["record"] - least[source]) * each[source], totals.entries[source])
    place = (before[source] + inside) * (ranges / max(1, int(totals.entries.sum())))
    return np.minimum(place.astype(np.int64), ranges - 1)


def _entries(block: pa.RecordBatch, splits: list[str]) -> np.ndarray:
    entries = np.empty(block.num_rows, ENTRY)
    for name in ("source", "record", "length", "trained", "separator", "truncated", "turns", "digest"):
        entries[name] = _numpy(block, name)
    entries["first"] = _filled(block.column("first"))
    entries["turn"] = _numpy(block, "turn") if "turn" in block.schema.names else -1
    entries["split"] = _numbers(block.column("split"), splits)
    entries["dropped"] = _numbers(block.column("dropped"), SAMPLE_DROP_REASONS)
    return entries


def _numpy(block: pa.RecordBatch, name: str) -> np.ndarray:
    return to_numpy(block.column(name))


def _numbers(names: pa.Array, known: tuple[str, ...] | list[str]) -> np.ndarray:
    """Return the index of each name in `known`, or -1 for unknown names and for null."""
    return _filled(pc.index_in(names.cast(pa.string()), strings(known)))


def _filled(numbers: pa.Array) -> np.ndarray:
    """Return int32 numbers, with -1 for null.

    `fill_null` would import pandas, like the functions that storage/arrow.py replaces.
    """
    return to_numpy(pc.coalesce(numbers, to_arrow(np.full(len(numbers), -1, np.int32))))
