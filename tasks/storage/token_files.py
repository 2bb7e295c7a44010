"""Read token files: the conversations of one part as tokens with their labels.

A token file is an Arrow IPC file with one row per sample of an accepted conversation. A sample is nearly always the
whole conversation. The columns:

    record      int64               number of the record within the part (a line number for JSONL), from 0
    digest      uint64              hash of the content of the conversation (content_digest)
    turns       int32               messages, without system messages
    turn        int32               index of the message that the sample trains on; -1 if it is the whole conversation
    trained     int32               trained tokens, including the separator
    separator   bool                whether the last token is an EOS that was added
    tokens      large_list<int32>   id if a token is trained, ~id (bitwise not) if it is not
    weight_ends, weights            only with loss_weight: data or both (schemas.WEIGHTED_TOKENS_SCHEMA)

One number holds a token and its label, so one copy moves both: id = v ^ (v >> 31), trained = v >= 0. The first token of
a conversation is never trained, because there is nothing to predict it from. With `packing: false`, the columns
messages, tools, and text follow, for format 2.0. The samples of a conversation are adjacent rows with the same record
and digest. Below, "conversation" means a sample.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from tasks.core.errors import StorageError
from tasks.core.numbers import as_int32
from tasks.storage.arrow import offsets_of, to_numpy
from tasks.storage.schemas import TOKENS_SCHEMA

# Conversations whose columns are kept in memory, 33 bytes each.
KEPT = 1 << 20


class TokenFiles:
    """Token files, mapped or in memory.

    Each file is opened when it is first needed. The path of a file that is not needed may be None.
    """

    def __init__(self, paths: Sequence[Path | pa.Buffer | None]):
        self._paths = paths
        self._opened: dict[int, _Opened] = {}

    @property
    def tables(self) -> list[pa.Table]:
        return [self.table(part) for part in range(len(self._paths))]

    def table(self, part: int) -> pa.Table:
        """Return all rows of a file, or an empty table if its path is None."""
        return self._open(part).table

    def tokens(self, part: int, conversation: int) -> np.ndarray:
        """Return a view of the tokens of a conversation: int32[length], id or ~id."""
        found = self._open(part)
        chunk = bisect_right(found.edges, conversation) - 1
        offsets, values = found.views[chunk]
        at = conversation - found.edges[chunk]
        return values[offsets[at] : offsets[at + 1]]

    def locate(self, plan: dict[str, np.ndarray]) -> np.ndarray:
        """Return the byte offset of each piece's first token in its file: int64[pieces].

        `plan` has the columns of schemas.PLAN_SCHEMA. Raises the errors of `places_of`.
        """
        found = np.empty(len(plan["part"]), np.int64)
        for part, pieces in self._by_part(plan):
            found[pieces] = places_of(self._path(part), plan["conversation"][pieces])
        return found + 4 * plan["first"]

    def weights(self, plan: dict[str, np.ndarray]) -> WeightRuns:
        """Return the loss weights from the data for each piece of a plan, as runs.

        The runs of a piece cover its whole conversation.
        """
        numbers, ends, weights = [np.empty(0, np.int64)], [np.empty(0, np.int32)], [np.empty(0, np.float32)]
        counts = np.zeros(len(plan["part"]), np.int64)
        for part, of_part in self._by_part(plan):
            for asked, batch, rows in _batches_of(self._path(part), plan["conversation"][of_part]):
                own, pieces = batch.select(["weight_ends", "weights"]).take(pa.array(rows)), of_part[asked]
                counts[pieces] = np.diff(to_numpy(own.column(0).offsets))
                numbers.append(np.repeat(pieces, counts[pieces]))
                ends.append(own.column(0).flatten().to_numpy())
                weights.append(own.column(1).flatten().to_numpy())
        order = np.argsort(np.concatenate(numbers), kind="stable")
        return WeightRuns(offsets_of(counts), np.concatenate(ends)[order], np.concatenate(weights)[order])

    def gather(self, plan: dict[str, np.ndarray], starts: np.ndarray, out: np.ndarray) -> None:
        """Copy the pieces of a plan into `out` (int32), each to its offset in `starts`.

        `plan` has the columns of schemas.PLAN_SCHEMA and `position`, from `locate`. The files are read, not mapped: the
        pieces of a shard are scattered over the corpus, and the 64 KiB around every piece of a mapped file count as
        memory of the process. Raises StorageError if a file ends early.
        """
        room = out.view(np.uint8).data
        for part, pieces in self._by_part(plan):
            path = self._path(part)
            positions = plan["position"][pieces]
            offsets = 4 * starts[pieces].astype(np.int64)
            ends = offsets + 4 * plan["taken"][pieces]
            handle = os.open(path, os.O_RDONLY)
            try:
                for offset, end, position in zip(offsets.tolist(), ends.tolist(), positions.tolist(), strict=True):
                    if _read(handle, room[offset:end], position) < end - offset:
                        raise StorageError("damaged_artefact", f"{path}: is truncated; delete it, then run again")
            finally:
                os.close(handle)

    def _by_part(self, plan: dict[str, np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each part with pieces, and their numbers in order of conversations."""
        order = np.lexsort((plan["conversation"], plan["part"]))
        edges = np.searchsorted(plan["part"][order], np.arange(len(self._paths) + 1))
        for part, (top, bottom) in enumerate(pairwise(edges.tolist())):
            if top < bottom:
                yield part, order[top:bottom]

    def _path(self, part: int) -> Path:
        path = self._paths[part]
        assert isinstance(path, Path), f"part {part} is in the plan, but its token file was not given"
        return path

    def _open(self, part: int) -> _Opened:
        if part not in self._opened:
            path = self._paths[part]
            source = (
                pa.BufferReader(path) if isinstance(path, pa.Buffer) else pa.memory_map(str(path)) if path else None
            )
            table = pa.ipc.open_file(source).read_all() if source else TOKENS_SCHEMA.empty_table()
            self._opened[part] = _Opened(table)
        return self._opened[part]


def _lengths(tokens: pa.LargeListArray) -> np.ndarray:
    return as_int32(np.diff(to_numpy(tokens.offsets)), "tokens of a conversation")


class WeightRuns(NamedTuple):
    """Runs of tokens with the same weight: see schemas.WEIGHTED_TOKENS_SCHEMA."""

    offsets: np.ndarray  # int64[pieces + 1], the first run of each piece, then the number of runs
    ends: np.ndarray  # int32, offset in the conversation at which a run ends
    weights: np.ndarray  # float32

    def between(self, pieces: slice) -> WeightRuns:
        """Return the runs of the pieces in a slice."""
        offsets = self.offsets[pieces.start : pieces.stop + 1]
        inside = slice(offsets[0], offsets[-1])
        return WeightRuns(offsets - offsets[0], self.ends[inside], self.weights[inside])


class _Opened:
    """All record batches of a token file.

    Offsets and values are computed on first use, because a file is mostly opened for other columns.
    """

    def __init__(self, table: pa.Table):
        self.table = table

    @cached_property
    def edges(self) -> list[int]:
        """Return the number of rows before each record batch, then the total."""
        return [0, *accumulate(map(len, self._chunks))]

    @cached_property
    def views(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the offsets and values of the tokens of each record batch."""
        return [(to_numpy(chunk.offsets), to_numpy(chunk.values)) for chunk in self._chunks]

    @property
    def _chunks(self) -> list[pa.LargeListArray]:
        return list(self.table.column("tokens").chunks)


def _batches_of(path: Path, rows: np.ndarray) -> Iterator[tuple[slice, pa.RecordBatch, np.ndarray]]:
    """Yield the record batches of a token file that contain rows.

    Each item is the slice of `rows`, which are sorted, that the record batch contains, the record batch, and these rows
    counted from its start. Raises IndexError if there are fewer rows.
    """
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        edges = offsets_of([batch.num_rows for batch in batches])
        for number, asked in batches_with(path, rows, edges):
            yield asked, batches[number], rows[asked] - edges[number]


class TokenColumns:
    """Columns of the token files of all parts.

    Conversations are numbered over all parts. One file is mapped at a time, because touched pages of a map count as
    memory. The columns of up to KEPT conversations are read once; those of more are read again each time.
    """

    TYPES: ClassVar[dict[str, type]] = {
        "record": np.int64, "digest": np.uint64, "turns": np.int32, "turn": np.int32, "trained": np.int32,
        "separator": np.bool_, "length": np.int32,
    }  # fmt: skip

    def __init__(self, paths: Sequence[Path | pa.Buffer], bases: Sequence[int]):
        """Open token files.

        `bases` has the number of the first record of each part within its source.
        """
        self._paths, self._bases = paths, bases
        self._part, self._file = -1, TokenFiles([])
        counts = [self._open(part).table(0).num_rows for part in range(len(paths))]
        self.edges: list[int] = [0, *accumulate(counts)]  # conversations before each part, then the total

    def column(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Return a column of the conversations [first, last); TYPES has its type.

        `record` counts from 0 within the source.
        """
        if self.edges[-1] <= KEPT:
            return self._kept[name][first:last].copy()
        return self._read([name], first, self.edges[-1] if last is None else last)[name]

    @cached_property
    def _kept(self) -> dict[str, np.ndarray]:
        """Return all columns; planning needs them several times."""
        return self._read(list(self.TYPES), 0, self.edges[-1])

    def _read(self, names: Sequence[str], first: int, last: int) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {name: np.empty(last - first, self.TYPES[name]) for name in names}
        for part in range(len(self._paths)):
            before = self.edges[part]
            top, bottom = max(first, before), min(last, self.edges[part + 1])
            for name in names if top < bottom else ():
                # Convert only the requested slice, because large parts are read in slices.
                own = self._open(part).table(0).column("tokens" if name == "length" else name)
                chunks = own.slice(top - before, bottom - top).chunks
                values = np.concatenate([to_numpy(c) if name != "length" else _lengths(c) for c in chunks])
                found[name][top - first : bottom - first] = values + self._bases[part] if name == "record" else values
        return found

    def tokens(self, conversation: int) -> np.ndarray:
        """Return the tokens of a conversation: int32[length], id or ~id."""
        part = bisect_right(self.edges, conversation) - 1
        return self._open(part).tokens(0, conversation - self.edges[part])

    def contents(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield the tokens of all conversations, a few thousand at a time.

        Each item is the number of the first conversation, the offsets of the conversations (int64[conversations + 1],
        from 0), and the tokens (int32, id or ~id).
        """
        for first, tokens in self.chunks("tokens"):
            offsets = to_numpy(tokens.offsets)
            yield first, offsets - offsets[0], to_numpy(tokens.values)[offsets[0] : offsets[-1]]

    def chunks(self, name: str) -> Iterator[tuple[int, pa.Array]]:
        """Yield a column of all conversations, a few thousand at a time.

        Each item is the number of the first conversation and the values.
        """
        for part in range(len(self._paths)):
            first = self.edges[part]
            for chunk in self._open(part).table(0).column(name).chunks:
                yield first, chunk
                first += len(chunk)

    def rows_of(self, conversations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the part of each conversation and its row in that token file, int64."""
        edges = np.array(self.edges)
        part = np.searchsorted(edges, conversations, side="right") - 1
        return part, conversations - edges[part]

    def _open(self, part: int) -> TokenFiles:
        if part != self._part:
            self._part, self._file = part, TokenFiles([self._paths[part]])
        return self._file


def _read(handle: int, room: memoryview, position: int) -> int:
    """Read bytes of a file from `position` into `room`, and return their number."""
    if hasattr(os, "preadv"):
        return os.preadv(handle, (room,), position)
    data = os.pread(handle, len(room), position)
    room[: len(data)] = data
    return len(data)


_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class Samples:
    """The grouping of samples by conversation.

    `firsts` (int32[conversations]) is the first sample of each conversation, or None if every conversation is one
    sample.
    """

    firsts: np.ndarray | None = None

    @property
    def several(self) -> bool:
        """Return whether a conversation may have several samples."""
        return self.firsts is not None

    def only_first(self, flags: np.ndarray) -> np.ndarray:
        """Return the flags of first samples, and False at all others: bool[samples]."""
        return flags if self.firsts is None else self._at_firsts(flags[self.firsts], len(flags))

    def most(self, values: np.ndarray) -> np.ndarray:
        """Return, at each first sample, the maximum over its conversation's samples.

        All other samples get 0 or False.
        """
        if self.firsts is None or not len(values):
            return values
        return self._at_firsts(np.maximum.reduceat(values, self.firsts), len(values))

    def total(self, values: np.ndarray) -> np.ndarray:
        """Return, at each first sample, the sum over its conversation's samples.

        The result is integers[samples]; all other samples get 0.
        """
        if self.firsts is None or not len(values):
            return values
        return self._at_firsts(np.add.reduceat(values, self.firsts, dtype=np.int64), len(values))

    def of_each(self, values: np.ndarray) -> np.ndarray:
        """Return, for every sample, the value of its conversation's first sample."""
        if self.firsts is None:
            return values
        return np.repeat(values[self.firsts], np.diff(self.firsts, append=len(values)))

    def first_of(self, chosen: np.ndarray) -> np.ndarray:
        """Return the first sample of the conversation of each chosen sample."""
        if self.firsts is None:
            return chosen
        return self.firsts[np.searchsorted(self.firsts, chosen, side="right") - 1]

    def _at_firsts(self, values: np.ndarray, count: int) -> np.ndarray:
        found = np.zeros(count, values.dtype)
        found[self.firsts] = values
        return found


def samples_of(tokens: TokenColumns) -> Samples:
    """Read which samples of the token files belong to the same conversation."""
    count = tokens.edges[-1]
    tops = range(0, count, _CHUNK)
    if not any((tokens.column("turn", top, min(top + _CHUNK, count)) >= 0).any() for top in tops):
        return Samples()
    record = tokens.column("record")
    is_first = np.append(True, record[1:] != record[:-1])
    is_first[[edge for edge in tokens.edges if edge < count]] = True
    return Samples(as_int32(np.flatnonzero(is_first), "samples"))


# Token files to remember, each with about 1 KB. All shards read the files in the same order, so replacing the oldest
# one would forget each file just before it is needed.
REMEMBERED = 1 << 14


def places_of(path: Path, rows: np.ndarray) -> np.ndarray:
    """Return the byte offset of the first token of each row: int64[rows].

    `rows` are sorted. Raises IndexError if the file does not have these rows, OSError if it cannot be read, and
    StorageError if it changes meanwhile.
    """
    found = np.empty(len(rows), np.int64)
    handle = os.open(path, os.O_RDONLY)
    try:
        file = _file(path, _state(os.fstat(handle)))
        for number, asked in batches_with(path, rows, file.edges):
            first, last = file.edges[number : number + 2].tolist()
            offsets = np.frombuffer(os.pread(handle, 8 * (last - first), file.offsets[number]), np.int64)
            found[asked] = file.tokens[number] + 4 * offsets[rows[asked] - first]
    finally:
        os.close(handle)
    return found


def batches_with(path: Path, rows: np.ndarray, edges: np.ndarray) -> list[tuple[int, slice]]:
    """Return the record batches that contain rows, each with a slice of `rows`.

    `rows` are sorted. `edges` has the rows before each record batch, then the total. Raises IndexError if the file does
    not have all of `rows`.
    """
    if len(rows) and rows[-1] >= edges[-1]:
        raise IndexError(f"{path}: has {edges[-1]:,} conversations, but the plan refers to number {rows[-1]:,}")
    inside = np.searchsorted(rows, edges)
    return [
        (number, slice(*inside[number : number + 2].tolist())) for number in np.flatnonzero(np.diff(inside)).tolist()
    ]


class _File(NamedTuple):
    """What is known about a token file in one state.

    `edges` has the rows before each record batch, then the total. For each record batch, `offsets` and `tokens` are the
    positions in the file of the first of its offsets (int64) and of its tokens (int32).
    """

    state: tuple[int, ...]
    edges: np.ndarray
    offsets: Sequence[int]
    tokens: Sequence[int]


def _state(stat: os.stat_result) -> tuple[int, ...]:
    """Return facts that differ after a file was replaced or changed."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


_remembered: dict[Path, _File] = {}


def _file(path: Path, state: tuple[int, ...]) -> _File:
    """Return what is known about a file, unless it has changed since."""
    known = _remembered.get(path)
    if known is not None and known.state == state:
        return known
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        if _state(os.stat(path)) != state:
            raise StorageError("cannot_read", f"{path}: was replaced while it was read; run again")
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        source.seek(0)
        base = source.read_buffer(1).address
        buffers = [batch.column("tokens").buffers() for batch in batches]
        offsets = [of_offsets.address - base for _, of_offsets, _, _ in buffers]
        tokens = [of_tokens.address - base for _, _, _, of_tokens in buffers]
        found = _File(state, offsets_of([batch.num_rows for batch in batches]), offsets, tokens)
    if path in _remembered or len(_remembered) < REMEMBERED:
        _remembered[path] = found
    return found
