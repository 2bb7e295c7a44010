"""Check every invariant of the rows of a corpus."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.storage.facts import RowSums, Shard
from packcorpus.tasks.storage.layout import kind_of
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.schemas import END, IGNORED
from packcorpus.tasks.storage.shards import (
    ROWS,
    RowStatistics,
    add_sums,
    has_statistics,
    open_shard,
    read_statistics,
    row_columns,
    sizes_of,
)
from packcorpus.tasks.verification.check_index import PIECE, Index


@dataclass(slots=True)
class Weights:
    """Sums over the column `loss_weight` of one kind of split."""

    trained: int = 0
    sums: list[float] = field(default_factory=list)  # weights, per shard
    conversations: list[float] = field(default_factory=list)  # sums of the shares of pieces, per batch


@dataclass(slots=True)
class Tokens:
    """Sums over the rows of all shards."""

    packed: int = 0
    trained: int = 0
    rows: int = 0
    pieces: int = 0
    places: int = 0
    of_splits: dict[str, int] = field(default_factory=dict)  # tokens without padding
    weights: dict[str, Weights] = field(default_factory=dict)  # by kind of split, if rows have any
    alignment: int = 0  # padding between pieces and the next multiple of `align`


def _shards(manifest: Manifest, index: Index) -> Iterator[tuple[str, Shard, dict[str, np.ndarray]]]:
    """Yield each shard, its split, and its pieces in the index, by row and start."""
    shards = ((name, shard) for name, split in manifest.splits.items() for shard in split.shards)
    for (split, shard), pieces in zip(shards, index.by_shard, strict=True):
        ordered = pieces[np.lexsort((pieces["start"], pieces["row"]))]
        yield split, shard, {name: ordered[name] for name in PIECE.names or ()}


def pieces_between(pieces: dict[str, np.ndarray], top: int, bottom: int) -> dict[str, np.ndarray]:
    """Return the pieces of the rows [top, bottom), which are numbered from 0.

    `pieces` are sorted by row.
    """
    inside = slice(*np.searchsorted(pieces["row"], [top, bottom]).tolist())
    chosen = {name: values[inside] for name, values in pieces.items()}
    return {**chosen, "row": chosen["row"] - top}


def check_packed_rows(manifest: Manifest, folder: Path, index: Index) -> Tokens:
    """Check the rows of all shards, and their recorded statistics.

    A corpus of an earlier version has no rows.arrow, so its rows are counted but not compared.
    """
    total, has_weights = Tokens(), manifest.loss_weight is not None
    if has_weights:
        total.weights = {kind_of(split): Weights() for split in manifest.splits}
    sums = {split: RowStatistics.zeros(0).sums() for split in manifest.splits}
    recorded = read_statistics(manifest, folder) if has_statistics(manifest) else None
    for split, shard, pieces in _shards(manifest, index):
        path, length, kind = folder / shard.path, manifest.length_of_split(split), kind_of(split)
        rows, counted, weights = 0, list[RowStatistics](), list[float]()
        with open_shard(manifest, folder, shard, streamed=True) as batches:
            for batch in batches:
                top, rows = rows, rows + batch.num_rows
                chosen = pieces_between(pieces, top, rows)
                where = f"{path}: row {top}"
                counted.append(_check_batch(batch, chosen, manifest, length, where, total))
                if has_weights:
                    weights.append(_check_weights(batch, chosen, manifest, length, kind, where, total))
        statistics = RowStatistics.joined(counted)
        sums[split] = add_sums(sums[split], statistics.sums())
        if recorded is not None:
            columns = zip(RowStatistics.__slots__, statistics.columns(), next(recorded)[1].columns(), strict=True)
            for name, found, noted in columns:
                if (differs := np.flatnonzero(found != noted)).size:
                    row = int(differs[0])
                    what = f"{name} of row {row} of {shard.path} is recorded as {noted[row]:,}, counted {found[row]:,}"
                    raise DataError("wrong_figure", f"{folder / ROWS}: {what}")
        total.rows += rows
        total.of_splits[split] = total.of_splits.get(split, 0) + int(pieces["length"].sum(dtype=np.int64))
        if has_weights:
            total.weights[kind].sums.append(math.fsum(weights))
    if recorded is not None:
        next(recorded, None)  # raises if there are more
    for name, facts in manifest.splits.items():
        expected, wrong = RowSums(**sums[name]) if recorded is not None else None, ""
        # The ledger check reports splits that the corpus should not have.
        if facts.statistics != expected and (facts.shards or facts.statistics):
            wrong = f"statistics of {name} are recorded as {facts.statistics}, counted {expected}"
        elif facts.groups is not None and sum(facts.groups) != facts.rows:
            wrong = f"the groups of {name} have {sum(facts.groups):,} rows, but the split has {facts.rows:,}"
        if wrong:
            raise DataError("wrong_figure", f"{folder / 'manifest.json'}: {wrong}")
    return total


def _check_batch(
    batch: pa.RecordBatch, pieces: dict[str, np.ndarray], manifest: Manifest, length: int, where: str, total: Tokens
) -> RowStatistics:
    """Check a batch of rows, add sums to `total`, and return their statistics."""
    count, align, tokenizer = batch.num_rows, manifest.row_layout.align, manifest.tokenizer
    columns = row_columns(batch, length, manifest.row_layout, tokenizer.pad_token_id)
    ids, mask, labels, positions = columns.values()

    def require(held: Any, what: str) -> None:
        """Raise DataError unless `held`, a bool per row, is True everywhere."""
        bad = ~np.asarray(held)
        if bad.any():
            row = int(np.argwhere(bad)[0][0])
            raise DataError("bad_row", f"{where} + {row}: {what}")

    filled = mask.sum(axis=1, dtype=np.int64)
    require(((mask == 0) | (mask == 1)).all(axis=1), "attention_mask has values other than 0 and 1")
    if align == 1:
        in_front = np.arange(length) < filled[:, None]
        require((mask == in_front).all(axis=1), "attention_mask has padding among the tokens")
    require(filled > 0, "the row is empty")
    require(((ids >= 0) & (ids < tokenizer.vocab_size)).all(axis=1), "a token id is outside the vocabulary")
    require(((ids == tokenizer.pad_token_id) | (mask == 1)).all(axis=1), "padding is not the pad token")
    require(((labels == IGNORED) | (labels == ids)).all(axis=1), "a label is neither -100 nor the token itself")
    require(((labels == IGNORED) | (mask == 1)).all(axis=1), "padding is trained on")
    require((labels != IGNORED).any(axis=1), "no token of the row is trained on")
    # Expected positions follow from the pieces of the index, not from the code that wrote the rows.
    starts, lengths = pieces["start"].astype(np.int64), pieces["length"].astype(np.int64)
    first_of_row = np.searchsorted(pieces["row"], np.arange(count))
    covered = np.bincount(pieces["row"], weights=lengths, minlength=count)
    require(covered == filled, "the index covers a different number of tokens")
    places = -(-lengths // align) * align
    expected = np.cumsum(places) - places
    expected -= np.repeat(expected[first_of_row], np.diff(np.append(first_of_row, len(starts))))
    if (starts != expected).any():
        row = int(pieces["row"][np.flatnonzero(starts != expected)[0]])
        what = "leave a gap or overlap" if align == 1 else f"do not follow one another at multiples of {align}"
        raise DataError("bad_row", f"{where} + {row}: the index's pieces {what}")
    if (over := np.flatnonzero(starts + lengths > length)).size:
        row = int(pieces["row"][over[0]])
        raise DataError("bad_row", f"{where} + {row}: a piece in the index extends beyond the end of the row")
    first_tokens = pieces["row"].astype(np.int64) * length + starts
    ends = first_tokens + lengths - 1
    # Positions restart at every piece, and after it, at the next piece or at padding.
    after = ends[starts + lengths < length] + 1
    marks = np.zeros(count * length, np.int64)
    marks[first_tokens], marks[after] = first_tokens, after
    wanted = (np.arange(count * length) - np.maximum.accumulate(marks)).reshape(count, length)
    if manifest.row_layout.is_shared:
        _check_trees(batch, pieces, wanted, where)
    if align > 1:
        edges = np.zeros(count * length + 1, np.int8)
        edges[first_tokens] += 1
        edges[ends + 1] -= 1
        in_piece = np.cumsum(edges[:-1], dtype=np.int8).reshape(count, length)
        require((mask == in_piece).all(axis=1), "attention_mask is not 1 on exactly the pieces of the index")
    require((positions == wanted).all(axis=1), "position_ids do not restart at 0 at every conversation")
    flat_labels, flat_ids = labels.reshape(-1), ids.reshape(-1)
    if (flat_labels[first_tokens] != IGNORED).any():
        raise DataError("bad_row", f"{where}: the first token of a conversation is trained on")
    if (flat_ids[ends][pieces["separator"]] != tokenizer.eos_token_id).any():
        raise DataError("bad_row", f"{where}: a conversation does not end with the EOS separator")
    if (flat_labels[ends][pieces["closed"]] != IGNORED).any():
        raise DataError("bad_row", f"{where}: the separator after a truncated conversation is trained on")
    if manifest.config.get("overlong") == "turns":
        # Truncated conversations end with a trained turn and EOS, which may be the last token of the turn or follow it.
        if (flat_labels[ends - pieces["closed"]][pieces["truncated"]] == IGNORED).any():
            raise DataError("bad_row", f"{where}: a truncated conversation does not end with a turn that is trained on")
        if (flat_ids[ends][pieces["truncated"]] != tokenizer.eos_token_id).any():
            raise DataError("bad_row", f"{where}: a truncated conversation does not end with EOS")
    is_trained = flat_labels != IGNORED
    trained = np.add.reduceat(is_trained, first_tokens, dtype=np.int64) if len(first_tokens) else np.zeros(0)
    if (trained != pieces["trained"]).any():
        raise DataError("bad_row", f"{where}: the index and the labels disagree about trained tokens")
    total.places += ids.size
    if manifest.row_layout.padding == "none":  # the columns are lists
        sizes, counts = sizes_of(batch, "input_ids"), sizes_of(batch, "seq_lens")
        require(sizes == np.bincount(pieces["row"], places, count), "the row does not end with its last piece")
        of_index = np.bincount(pieces["row"], minlength=count)
        require(counts == of_index, "seq_lens and the index have different numbers of pieces")
        found = batch.column("seq_lens").flatten().to_numpy()
        differs = np.bincount(pieces["row"][found != lengths], minlength=count)
        require(differs == 0, "seq_lens differ from the index")
        longest = np.maximum.reduceat(found, np.cumsum(counts) - counts)
        require(batch.column("max_seqlen").to_numpy() == longest, "max_seqlen is not the longest of seq_lens")
        total.places += int(sizes.sum()) - ids.size
    total.pieces += len(first_tokens)
    total.packed += int(filled.sum())
    total.alignment += int((places - lengths).sum())
    total.trained += int(is_trained.sum())
    statistics = RowStatistics.zeros(count)
    shared = pieces["shared"].astype(np.int64)
    np.add.at(statistics.squares, pieces["row"], (shared + lengths) ** 2 - shared**2)
    np.maximum.at(statistics.longest, pieces["row"], pieces["length"])
    np.add.at(statistics.segments, pieces["row"], np.int32(1))
    statistics.trained[:] = is_trained.reshape(ids.shape).sum(axis=1)
    return statistics


def _check_trees(batch: pa.RecordBatch, pieces: dict[str, np.ndarray], positions: np.ndarray, where: str) -> None:
    """Check the trees of rows, and add what each piece shares to `positions`.

    The pieces of a tree are visited backwards. `closes` is where the next piece begins that does not see the token of
    a depth: only if it shares more tokens does it see it.
    """
    count, length = positions.shape
    ids, found = (batch.column(name).flatten().to_numpy().reshape(count, length) for name in ("input_ids", END))
    places = np.arange(1, length + 1, dtype=np.int32)
    columns = [pieces[name].tolist() for name in ("row", "start", "length", "first", "shared")]
    wanted = np.tile(places, (count, 1))

    def check(row: int, tree: list[tuple[int, int, int]]) -> None:
        if not tree:
            return
        stop = tree[-1][0] + tree[-1][1]
        deepest = max(shared + size for _, size, shared in tree)
        closes, path = np.full(deepest, stop, np.int32), np.full(deepest, -1, np.int32)
        for start, size, shared in reversed(tree):
            wanted[row, start : start + size] = closes[shared : shared + size]
            closes[shared:] = start
        last = 0
        for start, size, shared in tree:
            own = ids[row, start : start + size]
            if shared and (shared >= last or path[shared] != own[0]):
                what = "a piece does not begin with the last token that it shares with its tree"
                raise DataError("bad_row", f"{where} + {row}: {what}")
            path[shared : shared + size], last = own, shared + size
            positions[row, start : start + size] += shared

    of_row, tree = -1, list[tuple[int, int, int]]()
    for row, start, size, first, shared in zip(*columns, strict=True):
        if shared and (shared != first or row != of_row):
            raise DataError("bad_row", f"{where} + {row}: the index has a piece without the tokens that it shares")
        if not shared:
            check(of_row, tree)
            of_row, tree = row, []
        tree.append((start, size, shared))
    check(of_row, tree)
    if (differs := (found != wanted).any(axis=1)).any():
        raise DataError("bad_row", f"{where} + {int(differs.argmax())}: `end` is not where the tree of a token ends")


def _check_weights(
    batch: pa.RecordBatch,
    pieces: dict[str, np.ndarray],
    manifest: Manifest,
    length: int,
    kind: str,
    where: str,
    total: Tokens,
) -> float:
    """Check the column `loss_weight` of some rows and return its exact sum."""
    sums, facts = total.weights[kind], (manifest.loss_weight or {})[kind]
    weights = batch.column("loss_weight").flatten().to_numpy()
    trained = batch.column("labels").flatten().to_numpy() != IGNORED

    def require(bad: np.ndarray, rows: np.ndarray | None, what: str) -> None:
        """Raise DataError at the first `bad` value; `rows` has the row of each."""
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise DataError("bad_row", f"{where} + {at // length if rows is None else int(rows[at])}: {what}")

    require(~np.isfinite(weights), None, "a loss_weight is not a number")
    require(trained & ~(weights > 0), None, "a token that is trained on has no loss_weight")
    require(~trained & (weights != 0), None, "a token that is not trained on has a loss_weight")
    if manifest.config["loss_weight"] == "conversation":
        # Each of the n trained tokens of a conversation weighs w = t / (c n), if the split has t trained tokens and c
        # conversations. So n follows from the weight of a piece, and a piece with k trained tokens is a share of k / n
        # of its conversation. The shares add up to the number of conversations.
        places, tokens = np.flatnonzero(trained), pieces["trained"].astype(np.int64)
        has_trained = tokens > 0
        tokens, rows = tokens[has_trained], pieces["row"][has_trained]
        if tokens.sum() != len(places):
            raise DataError("bad_row", f"{where}: the index and the labels disagree about trained tokens")
        of_tokens = weights[places]
        of_pieces = of_tokens[np.cumsum(tokens) - tokens]
        whole = np.rint(facts.trained / (facts.conversations * of_pieces.astype(np.float64)))
        expected = (facts.trained / (facts.conversations * np.maximum(whole, 1))).astype(np.float32)
        is_whole = manifest.config.get("overlong") != "split" and manifest.ledger.samples is None
        differs = (expected != of_pieces) | ((whole != tokens) if is_whole else (whole < tokens))
        require(differs, rows, "a loss_weight does not match the number of trained tokens of its conversation")
        differs = of_tokens != np.repeat(of_pieces, tokens)
        require(differs, places // length, "a conversation has several values of loss_weight")
        sums.conversations.append(math.fsum((tokens / whole).tolist()))
    sums.trained += int(np.count_nonzero(trained))
    values, counts = np.unique(weights, return_counts=True)
    return math.fsum(float(value) * count for value, count in zip(values, counts.tolist(), strict=True))


def check_unpacked_rows(manifest: Manifest, folder: Path, index: Index) -> Tokens:
    """Check the rows of format 2.0, each of which is one conversation."""
    total = Tokens()
    for _, shard, pieces in _shards(manifest, index):
        with open_shard(manifest, folder, shard, streamed=True) as batches:
            rows = sum(batch.num_rows for batch in batches)
        if not np.array_equal(pieces["row"], np.arange(rows)):
            raise DataError("bad_index", f"{folder / shard.path}: the index does not have one conversation per row")
        total.pieces += rows
        total.rows += rows
        total.packed += int(pieces["length"].sum())
        total.trained += int(pieces["trained"].sum())
    return total
