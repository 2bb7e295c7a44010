"""Read the index of a corpus and distribute its entries over partitions.

    index.arrow ─read_index─▶ Index      by_shard      the pieces of one shard
                                         by_content    all entries of contents with similar digests

All entries of a conversation have its content, so a partition has conversations as a whole, and all conversations with
the same content. An index may be larger than memory, and it may be in any order, because neither the corpus nor the
code that wrote it is trusted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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

RANGE = 12 << 20  # approximate bytes of the index in a range of digests: about 2^18 entries

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
class Index:
    """The entries of an index in partitions, and sums over all of them."""

    by_shard: Partitions  # of PIECE; one partition per shard, over all splits of the manifest
    by_content: Partitions  # of ENTRY
    trained: np.ndarray  # int64[sources + 1], tokens; the last is of sources that are not in the manifest
    placed: int = 0  # pieces in rows
    separators: int = 0


def kinds_of_splits(manifest: Manifest) -> list[str]:
    """Return the kinds of splits by their number in ENTRY.

    If rows have several lengths, several splits are of one kind.
    """
    return list(dict.fromkeys([*SPLITS, *map(kind_of, manifest.splits)]))


@contextmanager
def read_index(manifest: Manifest, folder: Path) -> Iterator[Index]:
    """Check and count the columns of an index, and distribute its entries.

    Raises DataError if a column has null values or numbers that are not allowed.
    """
    path, names, kinds = folder / "index.arrow", list(manifest.splits), kinds_of_splits(manifest)
    # By the number of a split. The last element is for unknown splits, which have number -1.
    shards = np.array([*(len(split.shards) for split in manifest.splits.values()), 0])
    kind_of_split = np.array([*(kinds.index(kind_of(name)) for name in names), -1])
    sources, ranges = len(manifest.sources), max(1, -(-path.stat().st_size // RANGE))
    wrong: dict[str, None] = {}
    with Partitions(int(shards.sum()), PIECE) as by_shard, Partitions(ranges, ENTRY) as by_content:
        index = Index(by_shard, by_content, np.zeros(sources + 1, np.int64))
        for block in _blocks(manifest, folder):
            wrong |= dict.fromkeys(_problems(block))
            if wrong:
                continue
            numbers = {name: to_numpy(block.column(name)) for name in _numeric(block)}
            index.separators += int(np.count_nonzero(numbers["separator"]))
            source = np.minimum(numbers["source"], sources)
            index.trained += np.bincount(source, numbers["trained"], sources + 1).astype(np.int64)
            split, entries = _numbers(block.column("split"), names), np.empty(block.num_rows, ENTRY)
            for name in numbers.keys() & set(ENTRY.names or ()):
                entries[name] = numbers[name]
            entries["turn"] = numbers.get("turn", -1)
            entries["first"] = _filled(block.column("first"))
            entries["split"] = kind_of_split[split]
            entries["dropped"] = _numbers(block.column("dropped"), SAMPLE_DROP_REASONS)
            upper = (entries["digest"] >> np.uint64(32)).astype(np.int64)
            by_content.add(upper * ranges >> 32, entries)  # digests are evenly distributed
            in_row = to_numpy(block.column("row").is_valid())
            index.placed += int(np.count_nonzero(in_row))
            shard = _filled(block.column("shard"))
            exists = in_row & (shard >= 0) & (shard < shards[split])
            pieces, placed = np.empty(np.count_nonzero(exists), PIECE), block.filter(to_arrow(exists))
            for name in PIECE.names or ():
                pieces[name] = to_numpy(placed.column(name))
            firsts = np.cumsum(shards) - shards
            by_shard.add(firsts[split[exists]] + shard[exists], pieces)
        for problem in wrong:
            raise DataError("bad_index", f"{path}: {problem}")
        yield index


def _blocks(manifest: Manifest, folder: Path) -> Iterator[pa.RecordBatch]:
    with open_index(manifest, folder) as reader:
        for batch in reader:
            batch.validate()
            for top in range(0, batch.num_rows, BLOCK):
                yield batch.slice(top, BLOCK)


def _numeric(block: pa.RecordBatch) -> list[str]:
    return [name for name in block.schema.names if name not in (*PLACE, "dropped")]


def _problems(block: pa.RecordBatch) -> Iterator[str]:
    """Yield the columns with null values or with numbers that are not allowed."""
    placed = block.column("row").is_valid()
    for name in block.schema.names:
        column = block.column(name)
        if name in PLACE:
            right = column.is_valid().equals(placed)
        else:
            right = column.is_null().equals(placed) if name == "dropped" else not column.null_count
        if not right:
            yield f"{name} has null values that are not allowed"
    for name, least in (("length", 1), ("source", 0)):
        smallest = pc.min(block.column(name)).as_py()
        if smallest is not None and smallest < least:
            yield f"an entry has an invalid {name}"


def _numbers(names: pa.Array, known: tuple[str, ...] | list[str]) -> np.ndarray:
    """Return the index of each name in `known`, or -1 for unknown names and for null."""
    return _filled(pc.index_in(names.cast(pa.string()), strings(known)))


def _filled(numbers: pa.Array) -> np.ndarray:
    """Return int32 numbers, with -1 for null.

    `fill_null` would import pandas, like the functions that storage/arrow.py replaces.
    """
    return to_numpy(pc.coalesce(numbers, to_arrow(np.full(len(numbers), -1, np.int32))))
