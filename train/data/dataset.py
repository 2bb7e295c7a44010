"""Verified packed rows as a torch Dataset, in memory or memory-mapped.

    shard ─read_verified─▶ its bytes ─record batches─▶ checked and counted ─▶ int32[rows, L] of each column
    row numbers of a batch ─▶ input_ids int32[L], labels int64[L], position_ids int32[L],
                              perhaps end int32[L] and loss_weight float32[L]

If rows are kept in memory, exactly the bytes that were hashed are parsed. They are freed once their rows are copied.
attention_mask is checked and then dropped, because a model that receives it does not isolate conversations.

Rows without padding (`padding: none`) differ in length. Each of their columns is int32[n], one row after another.
"""

from __future__ import annotations

import operator
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.core.process import cores
from packcorpus.tasks.storage.corpus_folder import reading
from packcorpus.tasks.storage.layout import RowLayout
from packcorpus.tasks.storage.schemas import END, IGNORED, LOSS_WEIGHT, offsets_of, to_numpy
from packcorpus.tasks.storage.shards import bounds_of_pieces, check_row_count, read_verified, row_columns, sizes_of
from packcorpus.train.data.corpus import Corpus, Shard, open_corpus
from packcorpus.train.machine.devices import free_memory, is_wsl, processes_here

Columns = dict[str, Any]  # int32[rows, L], or Ragged, by name; loss_weight is float32[rows, L]
Counts = tuple[int, ...]  # max_id, tokens of the longest segment, tokens, trained tokens, conversations


@dataclass(frozen=True, slots=True)
class Ragged:
    """Column of rows of different lengths.

    `values` holds the rows one after another, int32[tokens] (loss_weight: float32). `offsets` are their starts,
    int64[rows + 1].
    """

    values: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def copy(self) -> Ragged:
        return Ragged(self.values.copy(), self.offsets)


# Most bytes of shards in memory at a time, in addition to the rows copied from them. They suffice for 26 shards of the
# size that PackCorpus makes from 8 MB of chats, or for one larger shard.
RAW_BYTES = 1 << 30


class PackedDataset(torch.utils.data.Dataset):
    """Packed rows (format 3.0, 3.1, or 3.2) of one split of a corpus.

    If rows have several lengths, a split holds the rows of one length, such as train-512. A DataLoader fetches the rows
    of a batch at once:

        rows = packcorpus.PackedDataset("mine")
        batches = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True, collate_fn=packcorpus.Collator("sdpa"))

    A row is {"input_ids": int32[L], "labels": int64[L], "position_ids": int32[L]}. The tensors are copies and may be
    modified. A row never has an attention_mask. It lacks position_ids if the corpus has none and `allow_unisolated` is
    set. If the config of the corpus sets `loss_weight`, a row also has "loss_weight": float32[L], and `weigh_loss`
    makes a model apply it. If it sets `share`, a row also has "end": int32[L]: token q sees token k if and only if
    k <= q < end[k]; `require_isolation` makes a model follow it. Rows without padding differ in length; `Collator`
    joins the rows of a batch.

    rows, tokens, trained_tokens   counts; tokens exclude padding
    lengths                        int64[rows], the length of each row
    conversations                  number of conversations, or pieces of them; None if rows have no position_ids
    max_id                         the largest token ID
    load                           "memory" or "mmap". "auto" chooses memory if the rows of all processes of this
                                   machine (LOCAL_WORLD_SIZE) fit in half of the free memory
    nbytes                         bytes of the columns that are kept
    notes                          messages for the user, one sentence each, in addition to the notes of the corpus

    Raises DataError or InputMissing, which name the file, if a shard does not match the manifest or its format. If a
    mapped file is truncated, SIGBUS ends the process, so do not change files that are in use.
    """

    def __init__(
        self,
        given: Corpus | str | os.PathLike[str],
        split: str = "train",
        load: Literal["auto", "memory", "mmap"] = "auto",
        allow_unisolated: bool = False,
    ):
        corpus = given if isinstance(given, Corpus) else open_corpus(given, allow_unisolated)
        if not corpus.packed:
            raise DataError(
                "not_trainable",
                f"{corpus.folder}: contains conversations (format {corpus.format_version}), not packed rows; pack them "
                "with packing: true, or train on them with: packcorpus train",
            )
        self.corpus, self.split = corpus, split
        self.rows = corpus.rows(split)
        if len(corpus.lengths) > 1 and split not in corpus.splits:
            raise DataError(
                "no_rows",
                f"{corpus.folder}: {split!r}: rows have several lengths; open one of the splits "
                f"{', '.join(corpus.splits)}",
            )
        self.length = corpus.length_of(split)
        if not self.rows:
            counts = ", ".join(f"{name} has {corpus.rows(name):,}" for name in corpus.splits)
            raise DataError("no_rows", f"{corpus.folder}: the split {split!r} has no rows ({counts})")
        self._kinds: dict[str, Any] = {
            "input_ids": np.int32,
            "labels": np.int32,
        }  # of the columns that a model receives, in memory
        self._kinds |= {"position_ids": np.int32} if corpus.isolated else {}
        self._kinds |= {END: np.int32} if corpus.layout.is_shared else {}
        self._kinds |= {LOSS_WEIGHT: np.float32} if corpus.weighted else {}
        self.nbytes = self.rows * self.length * 4 * len(self._kinds)
        shards = corpus.splits[split]
        largest = max(shard.bytes for shard in shards)
        processes = processes_here()
        fits = processes * (self.nbytes + largest) <= free_memory() // 2
        self.load = load if load != "auto" else "memory" if fits else "mmap"
        self.notes: tuple[str, ...] = ()
        if is_wsl() and self.load == "mmap":
            self.notes = ("on WSL mapped rows are slow; give WSL more memory in .wslconfig, then set load: memory",)
        mapped, threads = self.load == "mmap", max(1, cores() // processes)
        if not mapped:
            threads = max(1, min(threads, RAW_BYTES // largest))

        def load_shard(shard: Shard) -> list[tuple[Columns, Counts]]:
            batches = _read_shard(corpus.folder, shard, self._kinds, self.length, mapped, corpus.layout)
            if mapped:
                return list(batches)
            return [({name: values.copy() for name, values in columns.items()}, counts) for columns, counts in batches]

        with ThreadPoolExecutor(threads) as pool:  # hashing and copying release the GIL
            loaded = [batch for batches in pool.map(load_shard, shards) for batch in batches]
        self._blocks = [block for block, _ in loaded]
        self._first_rows = [0, *accumulate(len(block["input_ids"]) for block in self._blocks)][:-1]
        self.lengths = np.full(self.rows, self.length)
        if corpus.layout.padding == "none":
            self.lengths = np.concatenate([np.diff(block["input_ids"].offsets) for block in self._blocks])
            self.nbytes = 4 * len(self._kinds) * int(self.lengths.sum())
        facts = np.array([counts for _, counts in loaded])
        self.max_id = int(facts[:, 0].max())
        self.longest_segment = int(facts[:, 1].max())
        self.tokens, self.trained_tokens, conversations = facts[:, 2:].sum(axis=0).tolist()
        self.conversations: int | None = conversations if corpus.isolated else None

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: SupportsIndex) -> dict[str, torch.Tensor]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[SupportsIndex]) -> list[dict[str, torch.Tensor]]:
        """Return copies of several rows; negative numbers count from the end."""
        copies, kinds = [], self._kinds | {"labels": np.int64}
        for number in map(operator.index, rows):
            row = number + self.rows if number < 0 else number
            if not 0 <= row < self.rows:
                raise IndexError(f"row {number} of {self.rows}")
            number = bisect_right(self._first_rows, row) - 1
            block, row = self._blocks[number], row - self._first_rows[number]
            copies.append({name: torch.from_numpy(block[name][row].astype(kind)) for name, kind in kinds.items()})
        return copies


def _read_shard(
    folder: Path, shard: Shard, kinds: dict[str, Any], length: int, mapped: bool, shape: RowLayout
) -> Iterator[tuple[Columns, Counts]]:
    """Verify a shard and yield (columns, counts) of each record batch."""
    data = read_verified(folder, shard, mapped=mapped)
    path, rows = folder / shard.path, 0
    for batch in _record_batches(path, data):
        columns: Columns
        with reading(path):
            if shape.padding == "none":
                batch.validate()
                columns = dict(row_columns(batch, length, shape))  # padded
            else:
                types = {name: pa.from_numpy_dtype(kind) for name, kind in kinds.items()} | {
                    "attention_mask": pa.int8()
                }
                columns = {name: _matrix(batch.column(name), name, type_, length) for name, type_ in types.items()}
        mask = columns.pop("attention_mask")
        first, rows = rows, rows + len(mask)
        if rows > shard.rows:
            continue
        counts = _check_and_count(columns, mask, path, first, shape.align)
        if shape.padding == "none":
            starts, lengths = bounds_of_pieces(mask, columns["position_ids"])
            sizes, pieces = np.bincount(starts // length, minlength=len(mask)), batch.column("seq_lens")
            same = np.array_equal(sizes_of(batch, "seq_lens"), sizes)
            if not (same and np.array_equal(to_numpy(pieces.flatten()), lengths)):
                raise DataError("bad_row", f"{path}: seq_lens do not match the runs of position_ids")
            with reading(path):
                columns = {
                    name: Ragged(to_numpy(batch.column(name).flatten()), offsets_of(sizes_of(batch, name)))
                    for name in kinds
                }
        yield columns, counts
    check_row_count(path, rows, shard.rows, folder)


def _record_batches(path: Path, data: pa.Buffer) -> Iterator[pa.RecordBatch]:
    with reading(path):
        yield from (batch for batch in pa.ipc.open_stream(data) if batch.num_rows)


def _matrix(column: pa.Array, name: str, kind: pa.DataType, length: int) -> np.ndarray:
    values = column.flatten()
    if column.null_count or values.null_count:
        raise ValueError(f"{name} has nulls")
    shortest, longest = pc.min_max(pc.list_value_length(column)).values()
    if shortest.as_py() != length or longest.as_py() != length:
        raise ValueError(f"{name} has rows of {shortest} to {longest} values, not {length}")
    return values.cast(kind).to_numpy().reshape(-1, length)


def _check_and_count(columns: Columns, mask: np.ndarray, path: Path, first_row: int, align: int = 1) -> Counts:
    """Check rows, and return their Counts."""
    # Shards without a manifest have never been verified. These faults would make training go wrong without an error.
    ids, labels, positions = columns["input_ids"], columns["labels"], columns.get("position_ids")

    def require(valid: np.ndarray, fault: str) -> None:
        """Raise DataError unless `valid`, one bool per token, is True everywhere."""
        if not valid.all():
            raise DataError("bad_row", f"{path}: row {first_row + int(np.argwhere(~valid)[0][0])}: {fault}")

    trained = labels != IGNORED
    require(ids >= 0, "a token id is negative")
    require((mask == 1) | (mask == 0), "attention_mask has values other than 0 and 1")
    after_padding = mask[:, 1:] > mask[:, :-1]
    if align == 1:
        require(~after_padding, "attention_mask has padding before a token")
    elif positions is not None:
        require(~after_padding | (positions[:, 1:] == 0), "position_ids do not restart at 0 after padding")
        at = np.arange(ids.shape[1]) % align == 0
        require(at | (positions != 0) | (mask == 0), f"a conversation does not start at a multiple of {align}")
    require(trained <= mask, "padding is trained on")
    require((labels == ids) | ~trained, "a label is neither -100 nor the token itself")
    require(trained.any(axis=1, keepdims=True), "no token of the row is trained on")
    if (weights := columns.get(LOSS_WEIGHT)) is not None:
        require(np.isfinite(weights), "a loss_weight is not a number")
        require((weights > 0) == trained, "loss_weight must be above 0 for exactly the tokens that are trained on")
    conversations, longest = 0, ids.shape[1]
    if positions is not None:
        require(positions[:, :1] == 0, "position_ids do not start at 0")
        starts = positions == 0
        if END in columns:
            starts = _check_trees(positions, columns[END], mask, require)
        else:
            continues = positions[:, 1:] == positions[:, :-1] + 1
            fault = "position_ids neither increase by 1 nor restart at 0"
            require(continues | starts[:, 1:] | (mask[:, 1:] == 0), fault)
        require(~(trained & starts), "the first token of a conversation is trained on")
        conversations, longest = int(np.count_nonzero(starts & (mask == 1))), int(positions.max()) + 1
    return int(ids.max()), longest, int(np.count_nonzero(mask)), int(np.count_nonzero(trained)), conversations


def _check_trees(
    positions: np.ndarray, end: np.ndarray, mask: np.ndarray, require: Callable[[np.ndarray, str], None]
) -> np.ndarray:
    """Check rows with trees, and return where pieces begin, bool[rows, L].

    A piece begins where a position does not continue the one before: at 0, it begins a tree, and otherwise it follows
    the token of the path before it with the position below its own. A token is seen up to the next one whose position
    is not above its own.
    """
    rows, length = positions.shape
    require((positions >= 0) | (mask == 0), "a position is negative")
    # Padding and the end of a row end every tree.
    depth = np.full((rows, length + 1), -1, np.int64)
    depth[:, :-1] = np.where(mask == 1, positions, -1)
    starts = np.ones((rows, length), bool)
    starts[:, 1:] = depth[:, 1:-1] != depth[:, :-2] + 1
    starts &= mask == 1
    before = np.concatenate([np.full((rows, 1), -1), depth[:, :-2]], axis=1)
    require(~starts | (positions == 0) | (depth[:, :-1] <= before), "position_ids grow by more than 1")
    place = np.arange(length)
    require((end > place) & (end <= length), "an `end` is not after its token, or is after the row")
    require((end == place + 1) | (mask == 1), "the `end` of padding is not the next place")
    flat, ends = depth.reshape(-1), np.full((rows, length + 1), length, np.int64)
    first = (length + 1) * np.arange(rows)[:, None]
    ends[:, :-1] = end
    ends = (ends + first).reshape(-1)
    real = np.flatnonzero(flat >= 0)
    wanted = real + 1
    above = np.flatnonzero(flat[wanted] > flat[real])
    while len(above):  # past what follows the next token, from end to end
        wanted[above] = ends[wanted[above]]
        above = above[flat[wanted[above]] > flat[real[above]]]
    fits = np.ones(rows * (length + 1), bool)
    fits[real] = ends[real] == wanted
    require(fits.reshape(rows, -1)[:, :-1], "an `end` is not the next place of the same or a lower position")
    return starts
