"""Read token files: the conversations of one part as tokens with their labels.

A token file is an Arrow IPC file with one row per sample of an accepted conversation. A sample is nearly always the
whole conversation. The columns:

    record      int64               number of the record within the part (a line number for JSONL), from 0
    digest      uint64              hash of the content of the conversation (content_digest)
    prompt      uint64              hash of everything before its first trained answer (prompt_digest)
    turns       int32               messages, without system messages
    turn        int32               index of the message that the sample trains on; -1 if it is the whole conversation
    trained     int32               trained tokens, including the separator
    separator   bool                whether the last token is an EOS that was added
    shared      int32               tokens that a tree does not store again after the sample before (shared_tokens)
    tokens      large_list<int32>   id if a token is trained, ~id (bitwise not) if it is not
    weight_ends, weights            only with loss_weight: data or both (schemas.WEIGHTED_TOKENS_SCHEMA)
    group       uint64              only with validation_by: KEY; hash of its value, or `digest` if there is none

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
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from packcorpus.tasks.core.errors import StorageError
from packcorpus.tasks.core.numbers import as_int32
from packcorpus.tasks.storage.schemas import TOKENS_SCHEMA, offsets_of, to_arrow, to_numpy

# Conversations whose columns are kept in memory, 45 bytes each.
KEPT = 1 << 20
# Conversations whose samples are searched at a time.
CHUNK = 1 << 18


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


class TokenFiles:
    """Token files, mapped or in memory.

    Each file is opened when it is first needed. The path of a file that is not needed may be None. A `plan` has the
    columns of schemas.PLAN_SCHEMA.
    """

    def __init__(self, paths: Sequence[Path | pa.Buffer | None]):
        self._paths = paths
        self._tables: dict[int, pa.Table] = {}

    def table(self, part: int) -> pa.Table:
        """Return all rows of a file, or an empty table if its path is None."""
        if part not in self._tables:
            path = self._paths[part]
            source = pa.BufferReader(path) if isinstance(path, pa.Buffer) else path and pa.memory_map(str(path))
            self._tables[part] = pa.ipc.open_file(source).read_all() if source else TOKENS_SCHEMA.empty_table()
        return self._tables[part]

    def tokens(self, part: int, conversation: int) -> np.ndarray:
        """Return a view of the tokens of a conversation: int32[length], id or ~id."""
        return to_numpy(self.table(part).column("tokens")[conversation].values)

    def locate(self, plan: dict[str, np.ndarray]) -> np.ndarray:
        """Return the byte offset of each piece's first token in its file: int64[pieces].

        Raises the errors of `places_of`.
        """
        places = np.empty(len(plan["part"]), np.int64)
        for path, pieces in self._by_part(plan):
            places[pieces] = places_of(path, plan["conversation"][pieces])
        return places + 4 * plan["first"]

    def weights(self, plan: dict[str, np.ndarray]) -> WeightRuns:
        """Return the loss weights from the data for each piece of a plan, as runs.

        The runs of a piece cover its whole conversation.
        """
        numbers, ends, weights = [np.empty(0, np.int64)], [np.empty(0, np.int32)], [np.empty(0, np.float32)]
        counts = np.zeros(len(plan["part"]), np.int64)
        for path, pieces in self._by_part(plan):
            with pa.memory_map(str(path)) as source:
                table = pa.ipc.open_file(source).read_all().select(["weight_ends", "weights"])
                of_pieces = table.take(to_arrow(plan["conversation"][pieces])).combine_chunks()
                of_ends, of_weights = (column.chunk(0) for column in of_pieces.columns)
                counts[pieces] = np.diff(to_numpy(of_ends.offsets))
                numbers.append(np.repeat(pieces, counts[pieces]))
                ends.append(to_numpy(of_ends.flatten()))
                weights.append(of_weights.flatten().to_numpy())
        order = np.argsort(np.concatenate(numbers), kind="stable")
        return WeightRuns(offsets_of(counts), np.concatenate(ends)[order], np.concatenate(weights)[order])

    def gather(self, plan: dict[str, np.ndarray], starts: np.ndarray, out: np.ndarray) -> None:
        """Copy the pieces of a plan into `out` (int32), each to its offset in `starts`.

        `plan` also has `position`, from `locate`. The files are read, not mapped: the pieces of a shard are scattered
        over the corpus, and the 64 KiB around every piece of a mapped file count as memory of the process. Raises
        StorageError if a file ends early.
        """
        room = out.view(np.uint8).data
        for path, pieces in self._by_part(plan):
            positions = plan["position"][pieces]
            offsets = 4 * starts[pieces].astype(np.int64)
            ends = offsets + 4 * plan["taken"][pieces]
            with path.open("rb", buffering=0) as file:
                for offset, end, position in zip(offsets.tolist(), ends.tolist(), positions.tolist(), strict=True):
                    file.seek(position)
                    if file.readinto(room[offset:end]) < end - offset:
                        raise StorageError("damaged_artefact", f"{path}: is truncated; delete it, then run again")

    def _by_part(self, plan: dict[str, np.ndarray]) -> Iterator[tuple[Path, np.ndarray]]:
        """Yield the path of each part with pieces, and the pieces in conversation order."""
        order = np.lexsort((plan["conversation"], plan["part"]))
        edges = np.searchsorted(plan["part"][order], np.arange(len(self._paths) + 1))
        for part, (top, bottom) in enumerate(pairwise(edges.tolist())):
            if top < bottom:
                path = self._paths[part]
                assert isinstance(path, Path), f"part {part} is in the plan, but its token file was not given"
                yield path, order[top:bottom]


# -- places ----------------------------------------------------------------------------------------------------------

# A shard has pieces from nearly every token file, and a process writes many shards. Opening a token file with Arrow
# takes 0.3 ms, so what is found is remembered. The next shard only reads the offsets of its rows, in 0.02 ms.


def places_of(path: Path, rows: np.ndarray) -> np.ndarray:
    """Return the byte offset of the first token of each row: int64[rows].

    `rows` are sorted. Raises IndexError if the file does not have these rows, OSError if it cannot be read, and
    StorageError if it changes meanwhile.
    """
    places = np.empty(len(rows), np.int64)
    with path.open("rb") as file:
        handle = file.fileno()
        edges, offsets, tokens = _batches(path, _state(os.fstat(handle)))
        if len(rows) and rows[-1] >= edges[-1]:
            raise IndexError(f"{path}: has {edges[-1]:,} conversations, but the plan refers to number {rows[-1]:,}")
        inside = np.searchsorted(rows, edges)
        for number in np.flatnonzero(np.diff(inside)).tolist():
            asked, (first, last) = slice(*inside[number : number + 2].tolist()), edges[number : number + 2].tolist()
            in_batch = np.frombuffer(os.pread(handle, 8 * (last - first), offsets[number]), np.int64)
            places[asked] = tokens[number] + 4 * in_batch[rows[asked] - first]
    return places


def _state(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@lru_cache(maxsize=1 << 17)  # about 1 KB each
def _batches(path: Path, state: tuple[int, ...]) -> tuple[np.ndarray, Sequence[int], Sequence[int]]:
    """Return the record batches of a token file in one state.

    The result has the rows before each record batch, then the total; and for each record batch, the positions in the
    file of the first of its offsets (int64) and of its tokens (int32).
    """
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        if _state(os.stat(path)) != state:
            raise StorageError("cannot_read", f"{path}: was replaced while it was read; run again")
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        source.seek(0)
        base = source.read_buffer(1).address
        buffers = [batch.column("tokens").buffers() for batch in batches]
        offsets = [of_offsets.address - base for _, of_offsets, _, _ in buffers]
        return offsets_of([len(batch) for batch in batches]), offsets, [tokens.address - base for *_, tokens in buffers]


# -- columns ---------------------------------------------------------------------------------------------------------


class TokenColumns:
    """Columns of the token files of all parts.

    Conversations are numbered over all parts. One file is mapped at a time, because touched pages of a map count as
    memory. The columns of up to KEPT conversations are read once; those of more are read again each time.
    """

    TYPES: ClassVar[dict[str, type]] = {
        "record": np.int64, "digest": np.uint64, "prompt": np.uint64, "turns": np.int32, "turn": np.int32,
        "trained": np.int32, "separator": np.bool_, "shared": np.int32, "length": np.int32,
    }  # fmt: skip

    def __init__(self, paths: Sequence[Path | pa.Buffer], bases: Sequence[int]):
        """Open token files; `bases` has the first record of each part in its source."""
        self._paths, self._bases = paths, bases
        self._part, self._file = -1, TokenFiles([])
        counts = [self._open(part).table(0).num_rows for part in range(len(paths))]
        self.edges: list[int] = [0, *accumulate(counts)]  # conversations before each part, then the total

    def column(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Return a column of the conversations [first, last); TYPES has its type.

        `record` counts from 0 within the source. `group`, which few files have, is uint64.
        """
        if self.edges[-1] <= KEPT and name in self.TYPES:
            return self._kept[name][first:last].copy()
        return self._read([name], first, self.edges[-1] if last is None else last)[name]

    @cached_property
    def _kept(self) -> dict[str, np.ndarray]:
        return self._read(list(self.TYPES), 0, self.edges[-1])

    def _read(self, names: Sequence[str], first: int, last: int) -> dict[str, np.ndarray]:
        columns: dict[str, np.ndarray] = {
            name: np.empty(last - first, self.TYPES.get(name, np.uint64)) for name in names
        }
        for part, (before, after) in enumerate(pairwise(self.edges)):
            top, bottom = max(first, before), min(last, after)
            for name in names if top < bottom else ():
                # Convert only the requested slice, because large parts are read in slices.
                stored = self._open(part).table(0).column("tokens" if name == "length" else name)
                chunks = stored.slice(top - before, bottom - top).chunks
                if name == "length":
                    lengths = np.concatenate([np.diff(to_numpy(chunk.offsets)) for chunk in chunks])
                    values = as_int32(lengths, "tokens of a conversation")
                else:
                    values = np.concatenate([to_numpy(chunk) for chunk in chunks])
                columns[name][top - first : bottom - first] = values + self._bases[part] if name == "record" else values
        return columns

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

    def contents_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the offsets and the tokens of some conversations, as `contents` does.

        `rows` are ascending.
        """
        lengths, values = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        for part, (before, after) in enumerate(pairwise(np.searchsorted(rows, self.edges).tolist())):
            if before < after:
                column = self._open(part).table(0).column("tokens")
                for chunk in column.take(to_arrow(rows[before:after] - self.edges[part])).chunks:
                    lengths.append(np.diff(to_numpy(chunk.offsets)))
                    values.append(to_numpy(chunk.flatten()))
        return offsets_of(np.concatenate(lengths)), np.concatenate(values)

    def block(self, conversations: np.ndarray, first: int, size: int) -> np.ndarray:
        """Return the ids of some tokens, plus 1: int32[conversations, size].

        These are `size` tokens from number `first` on; 0 is what a conversation does not have.
        """
        block = np.zeros((len(conversations), size), np.int32)
        order = np.argsort(conversations, kind="stable")
        edges = np.searchsorted(conversations, self.edges, sorter=order).tolist()
        for part, (top, bottom) in enumerate(pairwise(edges)):
            chunks = self._open(part).table(0).column("tokens").chunks if top < bottom else ()
            row = self.edges[part]
            for chunk in chunks:
                after = row + len(chunk)
                bottom = top + int(np.searchsorted(conversations[order[top : edges[part + 1]]], after))
                chosen = order[top:bottom]
                offsets, values = to_numpy(chunk.offsets), to_numpy(chunk.values)
                starts, ends = (offsets[conversations[chosen] - row + further] for further in (0, 1))
                places = (starts + first)[:, None] + np.arange(size)
                found = values.take(places, mode="clip")
                block[chosen] = ((found ^ (found >> 31)) + 1) * (places < ends[:, None])
                top, row = bottom, after
        return block

    def chunks(self, name: str) -> Iterator[tuple[int, pa.Array]]:
        """Yield first conversations and values of a column, a few thousand at a time."""
        for part, first in enumerate(self.edges[:-1]):
            for chunk in self._open(part).table(0).column(name).chunks:
                yield first, chunk
                first += len(chunk)

    def distinct(self) -> tuple[TokenColumns, np.ndarray | None]:
        """Return the columns without repetitions, and the row there of each one here.

        The rows are None if they are the same.
        """
        return self, None

    def rows_of(self, conversations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the part of each conversation and its row in that token file, int64."""
        edges = np.array(self.edges)
        part = np.searchsorted(edges, conversations, side="right") - 1
        return part, conversations - edges[part]

    def _open(self, part: int) -> TokenFiles:
        if part != self._part:
            self._part, self._file = part, TokenFiles([self._paths[part]])
        return self._file


@dataclass(frozen=True, slots=True)
class Samples:
    """The grouping of the samples of a conversation, which are adjacent rows.

        record   7   7   7   8   9 …
        turn     1   3   5  -1   1        three samples of one conversation, a whole conversation as one sample, …
        first    ✓           ✓   ✓

    Arrays have one entry per sample, and a conversation is represented by its first sample. `firsts`
    (int32[conversations]) is the first sample of each conversation. If every conversation is one sample, it is None,
    and nothing is computed.
    """

    firsts: np.ndarray | None = None

    @classmethod
    def of(cls, tokens: TokenColumns) -> Samples:
        """Read which samples of the token files belong to the same conversation."""
        count = tokens.edges[-1]
        tops = range(0, count, CHUNK)
        if not any((tokens.column("turn", top, min(top + CHUNK, count)) >= 0).any() for top in tops):
            return cls()
        record = tokens.column("record")
        is_first = np.append(True, record[1:] != record[:-1])
        is_first[[edge for edge in tokens.edges if edge < count]] = True
        return cls(as_int32(np.flatnonzero(is_first), "samples"))

    @property
    def several(self) -> bool:
        return self.firsts is not None

    def only_first(self, flags: np.ndarray) -> np.ndarray:
        """Return the flags of first samples, and False at all others: bool[samples]."""
        return flags if self.firsts is None else self._at_firsts(flags[self.firsts], len(flags))

    def most(self, values: np.ndarray) -> np.ndarray:
        """Return the maximum over a conversation's samples at its first, 0 elsewhere."""
        if self.firsts is None or not len(values):
            return values
        return self._at_firsts(np.maximum.reduceat(values, self.firsts), len(values))

    def total(self, values: np.ndarray) -> np.ndarray:
        """Return the sum over a conversation's samples at its first, 0 elsewhere."""
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
        spread = np.zeros(count, values.dtype)
        spread[self.firsts] = values
        return spread
