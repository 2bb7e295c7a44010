"""Open the shards, index, and rows.arrow of a corpus, and check that they fit it.

    manifest + shard ─open_shard─▶ record batches ─rows_of─▶ RowBatch: columns, and the bounds of pieces
                     ─read_rows──▶ rows by number         to_dicts ─▶ rows of a batch as dicts
    manifest         ─open_index─▶ reader of index.arrow
                     ─read_statistics, statistics_of_split─▶ RowStatistics: what each row costs, in 20 bytes

All readers of a corpus use this module. The size, the schema, and its metadata (format version, key, sequence length)
are checked when a file is opened, and the number of rows of a shard after its last batch. The SHA-256 of the index and
of rows.arrow is always checked. The SHA-256 of a shard is checked if the reader asks for it.
"""

from __future__ import annotations

import hashlib
import mmap
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.storage.corpus_folder import check_digest, check_unchanged, find_listed, listed_file, reading
from packcorpus.tasks.storage.layout import RowLayout
from packcorpus.tasks.storage.manifest import Manifest, repair_hint
from packcorpus.tasks.storage.schemas import (
    END,
    IGNORED,
    LOSS_WEIGHT,
    ROWS_SCHEMA,
    conversation_schema,
    index_schema,
    row_schema,
    to_arrow,
    to_numpy,
)


class ListedFile(Protocol):
    """A file of a corpus; `sha256` is None if no manifest records it."""

    @property
    def path(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def sha256(self) -> str | None: ...


class ListedShard(ListedFile, Protocol):
    @property
    def rows(self) -> int: ...


def shard_schema(manifest: Manifest, shard: str = "") -> pa.Schema:
    """Return the schema of a shard, including its metadata.

    `shard` is its path. Shards whose rows have the same length have the same schema.
    """
    length = manifest.length_of(shard)
    if not manifest.packing_metadata.enabled:
        return conversation_schema(length, manifest.key, manifest.key_version)
    return row_schema(manifest.row_layout, length, manifest.key, manifest.format_version)


@contextmanager
def open_shard(
    manifest: Manifest, folder: Path, shard: ListedShard, verified: bool = False, *, streamed: bool = False
) -> Iterator[Iterator[pa.RecordBatch]]:
    """Open a shard and yield its record batches.

    The batches are views of a map of the file or, with `verified`, of bytes whose SHA-256 was checked. With `streamed`,
    the pages of a batch are released when the next batch is requested, because mapped pages count as memory of the
    process. Raises DataError or InputMissing, naming the file, if it is not the file that the manifest describes.
    """
    path = folder / shard.path
    data = read_verified(folder, shard) if verified else _map(folder, shard)

    def batches(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        rows = 0
        for batch in reader:
            batch.validate()  # slicing a batch whose columns are too short would end the process
            rows += batch.num_rows
            yield batch
            if streamed and isinstance(data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                data.madvise(mmap.MADV_DONTNEED)
        check_row_count(path, rows, shard.rows, folder)

    with reading(path, folder), pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        check_schema(path, reader.schema, shard_schema(manifest, shard.path), folder)
        yield batches(reader)


@contextmanager
def open_index(manifest: Manifest, folder: Path, verified: bool = False) -> Iterator[pa.RecordBatchReader]:
    """Open index.arrow, check its size, SHA-256, and schema, and yield its reader.

    The file is read, not mapped, and its batches are not validated. Raises DataError or InputMissing, like
    `open_shard`.
    """
    file = listed_file(manifest, folder, "index.arrow")
    path = folder / file.path
    if not verified:
        check_unchanged(folder, file)
    with ExitStack() as stack:
        stack.enter_context(reading(path, folder))
        source = read_verified(folder, file) if verified else stack.enter_context(pa.OSFile(str(path)))
        reader = stack.enter_context(pa.ipc.open_stream(source))
        kinds = manifest.ledger.samples is not None, manifest.splits_at_turns, manifest.is_grouped
        schema = index_schema(*kinds, manifest.row_layout.is_shared)
        if not reader.schema.equals(schema, check_metadata=True):
            what = f"is not an index (columns {describe_columns(reader.schema)})"
            raise DataError("bad_index", f"{path}: {what}; {repair_hint(folder)}")
        yield reader


def _map(folder: Path, file: ListedFile) -> mmap.mmap:
    path = find_listed(folder, file.path, file.bytes)
    with reading(path, folder), path.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)


def read_verified(folder: Path, file: ListedFile, mapped: bool = False) -> pa.Buffer:
    """Read or map a file of a corpus; check its size and any recorded SHA-256.

    A map changes if the file changes later. Raises DataError or InputMissing, naming the file.
    """
    path = find_listed(folder, file.path, file.bytes)
    if mapped:
        data = pa.py_buffer(_map(folder, file))
    else:
        with reading(path, folder):
            data = pa.py_buffer(path.read_bytes())
    if file.sha256:
        check_digest(path, hashlib.sha256(data).hexdigest(), file.sha256, folder)
    return data


def check_schema(path: Path, found: pa.Schema, expected: pa.Schema, folder: Path) -> None:
    """Raise DataError if the metadata or columns of a shard are not as expected."""
    if found.metadata != expected.metadata:
        differs = f"metadata {describe_metadata(found)}, expected {describe_metadata(expected)}"
    elif not found.equals(expected):
        differs = f"columns {describe_columns(found)}"
    else:
        return
    raise DataError("foreign_shard", f"{path}: does not belong to this corpus ({differs}); {repair_hint(folder)}")


def check_row_count(path: Path, found: int, recorded: int, folder: Path) -> None:
    if found != recorded:
        raise DataError(
            "wrong_count", f"{path}: holds {found:,} rows, but {recorded:,} are recorded; {repair_hint(folder)}"
        )


def read_rows(
    manifest: Manifest, folder: Path, shard: ListedShard, numbers: Sequence[int]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows of a shard with their numbers; `numbers` are ascending.

    The values of a row are numpy arrays of the row length or, in format 2.0, Python values. With `padding: none`, the
    arrays are as long as the stored row, and an `attention_mask` is added. Raises DataError or InputMissing, like
    `open_shard`.
    """
    if not numbers:
        return
    packed, length = manifest.packing_metadata.enabled, manifest.length_of(shard.path)
    with open_shard(manifest, folder, shard) as batches:
        top = 0
        for batch in batches:
            for number in numbers[bisect_left(numbers, top) : bisect_left(numbers, top + batch.num_rows)]:
                row = batch.slice(number - top, 1)
                yield number, _row_arrays(row, manifest, length) if packed else to_dicts(row)[0]
            top += batch.num_rows
            if top > numbers[-1]:
                return


def _row_arrays(row: pa.RecordBatch, manifest: Manifest, length: int) -> dict[str, Any]:
    if manifest.row_layout.padding == "none":
        size, columns = len(row.column("input_ids")[0]), row_columns(row, length, manifest.row_layout)
        return {name: values[0, :size] for name, values in columns.items()} | {
            "seq_lens": _values(row, "seq_lens"),
            "max_seqlen": to_numpy(row.column("max_seqlen")),
        }
    columns = {name: row.column(name).flatten().to_numpy() for name in row.schema.names}
    for name, values in columns.items():
        if len(values) != length:
            raise ValueError(f"a row has {len(values):,} {name}, expected {length:,}")
    return columns


def row_columns(batch: pa.RecordBatch, length: int, layout: RowLayout, pad: int = 0) -> dict[str, np.ndarray]:
    """Return the columns of packed rows, [rows, length] each.

    The columns are input_ids, attention_mask, labels, and position_ids. Rows that are stored without padding are padded
    with `pad` and get a mask, so that they equal the rows of a corpus with `padding: row`. Raises ValueError if such a
    row is empty or too long, or if its columns have different lengths.
    """
    names = ("input_ids", "attention_mask", "labels", "position_ids")
    if layout.padding == "row":
        return {name: _values(batch, name).reshape(-1, length) for name in names}
    sizes = sizes_of(batch, "input_ids")
    for name in ("labels", "position_ids"):
        if not np.array_equal(sizes_of(batch, name), sizes):
            raise ValueError(f"a row has more or fewer {name} than input_ids")
    if len(sizes) and not 1 <= sizes.min() <= sizes.max() <= length:
        raise ValueError(f"rows have {sizes.min():,} to {sizes.max():,} tokens, expected 1 to {length:,}")
    places = np.arange(length, dtype=np.int32)
    filled = places < sizes[:, None]
    found: dict[str, np.ndarray] = {  # in the order of `names`
        "input_ids": np.full((len(sizes), length), pad, np.int32),
        "attention_mask": filled.astype(np.int8),
        "labels": np.full((len(sizes), length), IGNORED, np.int32),
        "position_ids": places - sizes[:, None].astype(np.int32),
    }
    for name in ("input_ids", "labels", "position_ids"):
        found[name][filled] = _values(batch, name)
    if layout.align > 1:
        found["attention_mask"] = _mask_of_pieces(batch, length, layout)
        # If a row ends with a gap, the positions of the gap continue in the padding.
        rows, lasts, positions = np.arange(len(sizes)), sizes - 1, found["position_ids"]
        further = np.where(found["attention_mask"][rows, lasts] == 1, 0, positions[rows, lasts] + 1)
        positions += np.where(filled, 0, further[:, None]).astype(np.int32)
    return found


def sizes_of(batch: pa.RecordBatch, name: str) -> np.ndarray:
    """Return the length of each list of a column, int64[rows]."""
    if batch.column(name).null_count:
        raise ValueError(f"{name} has nulls")
    return batch.column(name).value_lengths().to_numpy().astype(np.int64)


def _values(batch: pa.RecordBatch, name: str) -> np.ndarray:
    values = batch.column(name).flatten()
    if batch.column(name).null_count or values.null_count:
        raise ValueError(f"{name} has nulls")
    return to_numpy(values)


def _mask_of_pieces(batch: pa.RecordBatch, length: int, layout: RowLayout) -> np.ndarray:
    """Return the attention mask of rows with aligned pieces, int8[rows, length].

    The lengths of the pieces are in the column `seq_lens`. Each piece starts at a multiple of `align`.
    """
    rows, tokens = batch.num_rows, _values(batch, "seq_lens").astype(np.int64)
    of_row = np.repeat(np.arange(rows), sizes_of(batch, "seq_lens"))
    places = layout.places(tokens)
    before = np.cumsum(places) - places
    firsts = np.searchsorted(of_row, np.arange(rows))
    inside = before - before[firsts[of_row]] if len(of_row) else before
    if len(tokens) and (tokens.min() < 1 or (inside + tokens).max() > length):
        raise ValueError("seq_lens exceed the end of a row")
    edges = np.zeros(rows * length + 1, np.int8)
    edges[of_row * length + inside] += 1
    edges[of_row * length + inside + tokens] -= 1
    return np.cumsum(edges[:-1], dtype=np.int8).reshape(rows, length)


def bounds_of_pieces(mask: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and the lengths of all pieces in rows, int64[pieces] each.

    Starts are counted over the places of all rows. `mask` and `positions` are [rows, sequence_length]. A piece starts
    at a token whose position does not continue the one before, at the start of its row, or after padding. It ends
    before the next piece, before padding, or at the end of its row.
    """
    mask = mask == 1
    begins, ends = mask & (positions == 0), mask.copy()
    begins[:, 1:] |= mask[:, 1:] & (positions[:, 1:] != positions[:, :-1] + 1)
    begins[:, 0] |= mask[:, 0]
    begins[:, 1:] |= mask[:, 1:] & ~mask[:, :-1]
    ends[:, :-1] &= begins[:, 1:] | ~mask[:, 1:]
    starts = np.flatnonzero(begins)
    return starts, np.flatnonzero(ends) + 1 - starts


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Packed rows, and the pieces in them, in their order.

    Padding follows the last piece of a row. With `align`, it also fills the gap between two pieces. EOS does not mark
    the bounds of pieces, because with many templates it ends every turn.
    """

    ids: np.ndarray  # int32[rows, sequence_length]
    labels: np.ndarray  # int32[rows, sequence_length], not shifted
    positions: np.ndarray  # int32[rows, sequence_length]
    filled: np.ndarray  # bool[rows, sequence_length], the places that have a token
    tokens: np.ndarray  # int64[rows], without padding
    pieces: np.ndarray  # int64[rows]
    starts: np.ndarray  # int64[pieces], counted over all places of these rows
    lengths: np.ndarray  # int64[pieces]
    weights: np.ndarray | None = None  # float32[rows, sequence_length], if the corpus has `loss_weight`
    ends: np.ndarray | None = None  # int32[rows, sequence_length], if the corpus has `share`

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def trained(self) -> int:
        return int(np.count_nonzero(self.labels != IGNORED))

    @property
    def gaps(self) -> np.ndarray:
        """Return the padding after each piece, up to the next piece or the end of the row."""
        ends = self.starts + self.lengths
        following = np.append(self.starts[1:], 0)
        following[np.cumsum(self.pieces) - 1] = np.arange(1, len(self) + 1) * self.ids.shape[1]
        return following - ends

    def next_labels(self) -> np.ndarray:
        """Return the next token's label for every place: int32[rows, sequence_length].

        The last place of a piece has no label, because the next token is in a different piece.
        """
        shifted = np.full_like(self.labels, IGNORED)
        shifted[:, :-1] = self.labels[:, 1:]
        shifted.reshape(-1)[self.starts + self.lengths - 1] = IGNORED
        return shifted


def rows_of(batch: pa.RecordBatch, length: int, shape: RowLayout, pad: int = 0) -> RowBatch:
    """Return the packed rows of a record batch; see `row_columns`."""
    ids, mask, labels, positions = row_columns(batch, length, shape, pad).values()
    starts, lengths = bounds_of_pieces(mask, positions)
    weights, ends = (
        batch.column(name).flatten().to_numpy().reshape(-1, length) if name in batch.schema.names else None
        for name in (LOSS_WEIGHT, END)
    )
    tokens = np.count_nonzero(mask, axis=1).astype(np.int64)
    pieces = np.bincount(starts // length, minlength=len(ids))
    return RowBatch(ids, labels, positions, mask == 1, tokens, pieces, starts, lengths, weights, ends)


def path_before(ends: np.ndarray, start: int) -> np.ndarray:
    """Return the places whose tokens precede those of a piece in its sample: int64[n].

    `ends` is the column `end` of the row, and `start` the first place of the piece, whose position is n.
    """
    return np.flatnonzero(ends[:start] > start)


def sample_of_piece(row: Mapping[str, Any], start: int, length: int) -> dict[str, np.ndarray]:
    """Return the ids, labels, and weights of the sample that a piece of a row ends.

    These are the tokens of its path, which this sample does not train on, and its own. `row` has the columns of a row.
    Without `end`, each piece begins its sample. Only columns of the row are included.
    """
    path, own = path_before(row[END], start) if END in row else np.zeros(0, np.int64), slice(start, start + length)
    of_path = {"labels": IGNORED, LOSS_WEIGHT: 0}
    found = {}
    for name in ("input_ids", *of_path):
        if name in row:
            before = np.full(len(path), of_path[name], row[name].dtype) if name in of_path else row[name][path]
            found[name] = np.concatenate([before, row[name][own]])
    return found


def to_dicts(rows: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a batch as dicts; raise pa.ArrowInvalid if it is damaged."""
    rows.validate(full=True)  # otherwise, Python would raise SystemError or crash
    return list(rows.to_pylist())


def describe_metadata(schema: pa.Schema) -> str:
    """Return the metadata of a schema on one line; long values are truncated."""
    pairs = (schema.metadata or {}).items()
    shown = [f"{key.decode(errors='replace')}={value[:64].decode(errors='replace')}" for key, value in pairs]
    return ", ".join(shown) or "none"


def describe_columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema) or "none"


ROWS = "rows.arrow"


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Statistics of rows: the columns of schemas.ROWS_SCHEMA."""

    squares: np.ndarray  # int64
    longest: np.ndarray  # int32
    segments: np.ndarray  # int32
    trained: np.ndarray  # int32

    @classmethod
    def zeros(cls, rows: int) -> Self:
        return cls(*(np.zeros(rows, str(field.type)) for field in ROWS_SCHEMA))

    @classmethod
    def joined(cls, parts: Iterable[RowStatistics]) -> Self:
        every: list[RowStatistics] = [cls.zeros(0), *parts]
        columns = zip(*(part.columns() for part in every), strict=True)
        return cls(*(np.concatenate(column) for column in columns))

    def __len__(self) -> int:
        return len(self.squares)

    def columns(self) -> list[np.ndarray]:
        return [getattr(self, field.name) for field in fields(self)]

    def take(self, chosen: slice | np.ndarray) -> Self:
        """Return the statistics of chosen rows, in their order."""
        return type(self)(*(column[chosen] for column in self.columns()))

    def batch(self) -> pa.RecordBatch:
        return pa.record_batch([to_arrow(column) for column in self.columns()], ROWS_SCHEMA)

    def sums(self) -> dict[str, int]:
        """Return the sums that a manifest records for a split (facts.RowSums)."""
        found = {field.name: int(getattr(self, field.name).sum(dtype=np.int64)) for field in fields(self)}
        return found | {"longest": int(self.longest.max(initial=0))}


def add_sums(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """Return the sums over the rows of both arguments."""
    longest = max(one["longest"], other["longest"])
    return {name: one[name] + value for name, value in other.items()} | {"longest": longest}


def has_statistics(manifest: Manifest) -> bool:
    return any(file.path == ROWS for file in manifest.files)


def read_statistics(manifest: Manifest, folder: Path) -> Iterator[tuple[str, RowStatistics]]:
    """Check rows.arrow, and yield split and statistics of each shard, in order."""
    file = listed_file(manifest, folder, ROWS)
    check_unchanged(folder, file)
    path = folder / file.path

    def wrong(found: str) -> DataError:
        return DataError("bad_index", f"{path}: has {found}; {repair_hint(folder)}")

    with reading(path, folder), pa.OSFile(str(path)) as source, pa.ipc.open_stream(source) as reader:
        if not reader.schema.equals(ROWS_SCHEMA, check_metadata=True):
            raise wrong("unexpected columns")
        batches = iter(reader)
        for split, shard in ((name, shard) for name, own in manifest.splits.items() for shard in own.shards):
            batch: Any = next(batches, None)
            if batch is None or batch.num_rows != shard.rows:
                found = "no record batch" if batch is None else f"{batch.num_rows:,} records"
                raise wrong(f"{found} for the {shard.rows:,} rows of {shard.path}")
            batch.validate(full=True)
            yield split, RowStatistics(*(to_numpy(batch.column(name)) for name in ROWS_SCHEMA.names))
        if next(batches, None) is not None:
            raise wrong("more record batches than the corpus has shards")


def statistics_of_split(manifest: Manifest, folder: Path, split: str, most: int | None = None) -> RowStatistics | None:
    """Return the statistics of a split's first rows, or None without rows.arrow."""
    if not has_statistics(manifest):
        return None
    parts, rows = list[RowStatistics](), 0
    for name, of_shard in read_statistics(manifest, folder):
        if name == split:
            parts.append(of_shard)
            rows += len(of_shard)
            if most is not None and rows >= most:
                break
    return RowStatistics.joined(parts).take(slice(0, most))
