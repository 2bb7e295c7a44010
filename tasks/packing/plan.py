"""Assign every conversation of the token files a split, shard, row, and start.

    columns ─filters─▶ ─overlong policy─▶ pieces ─limits, weights─▶ ─pack each split─▶ rows ─shuffle─▶ shards
                └──────────────┴─────────────────────────┴─▶ rejected, dropped, truncated: counted

Packing decisions depend on lengths only. All files are written to one folder, the receipt last:

    plan.arrow      IPC file; record batch s holds the pieces of shard s, by row and start (PLAN_SCHEMA)
    index.arrow     the place of every accepted conversation
    rejects.jsonl   one line per rejected conversation
    plan.json       ledger, sources, packing figures: the receipt

Memory: a constant plus 20 bytes per conversation, regardless of the number of token files and shards; up to 45 if
conversations are held out, weighted, deduplicated, or repacked for further epochs; 2 more if there are several groups
(bench/planning.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tasks.core.errors import DataError, StorageError
from tasks.core.int32 import as_int32
from tasks.packing import bin_packing
from tasks.packing.filters import filter_conversations
from tasks.packing.groups import group_pieces
from tasks.packing.index_writer import index_writer
from tasks.packing.ledger import (
    Losses,
    count_losses,
    count_samples,
    make_ledger,
    mixture_facts,
    packing_metadata,
    source_facts,
    tally,
    unused_keys,
)
from tasks.packing.mixture import mix
from tasks.packing.pieces import CHUNK, Accepted, Pieces, check_count, cut_overlong
from tasks.packing.placement import Placed, hold_out_at_least_one, place, remember, repack
from tasks.packing.rejects import Rejected, check_rejects, first_of_each, write_rejects
from tasks.packing.row_companions import Companions
from tasks.recipe import Recipe
from tasks.sources.model import Part
from tasks.storage.arrow import to_arrow, xxh3_of
from tasks.storage.files import atomic_file, digest_of, read_receipt, sha256_of, write_receipt
from tasks.storage.samples import samples_of
from tasks.storage.schemas import PLAN_SCHEMA, REJECTED
from tasks.storage.splits import TRAIN_EPOCH_PREFIX
from tasks.storage.token_files import TokenColumns
from tasks.tokenization.token_batch import noticed_in

PLAN_FILES = ("plan.arrow", "index.arrow", "rejects.jsonl")

# Pieces sorted by row at a time, 40 bytes each. Each pass scans the rows of all pieces.
SORTED_AT_ONCE = 1 << 21


def make_plan(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Write the plan, its receipt last, and return the receipt.

    Raises DataError if too many conversations are rejected, if none is left to train on, or if one is too long and
    `overlong` is error. Raises StorageError if the checksum of a token file does not match its receipt.
    """
    config = recipe.config
    keys = [recipe.tokens_key(part) for part in recipe.parts]
    receipts = [read_receipt(recipe.layout.token_receipt(key)) for key in keys]
    files = [recipe.layout.token_file(key) for key in keys]
    for file, receipt in zip(files, receipts, strict=True):
        if digest_of(file, "xxh3") != receipt["xxh3"]:
            raise StorageError("damaged_artefact", f"{file}: damaged (checksum mismatch); delete it and run again")
    bases = _record_bases(recipe.parts, receipts)
    tokens = TokenColumns(files, bases)
    pieces = select_pieces(tokens, recipe)
    accepted = pieces.accepted
    rejects = _rejects(receipts, bases, accepted, tokens, recipe)
    write_rejects(folder / "rejects.jsonl", rejects, recipe)
    read = sum(receipt["conversations"] for receipt in receipts)
    cut_off = int(np.count_nonzero(accepted.outcomes() == REJECTED))
    check_rejects(rejects, cut_off, read, recipe, folder / "rejects.jsonl")
    pieces = mix(pieces, tokens, recipe)
    lost = count_losses(pieces, config)
    _check_left(pieces, lost, read, rejects, recipe, folder / "rejects.jsonl")
    sums = tally(pieces, tokens, recipe)
    placed, checksums = _write_blocks(folder, pieces, tokens, recipe)
    places = sum(block.rows for block in placed) * config.sequence_length if config.packing else 0
    receipt = {
        "ledger": make_ledger(
            receipts, pieces, sums, lost, rejects, places, count_samples(pieces, tokens)
        ).model_dump(),
        "packing_metadata": packing_metadata(
            config, sums, placed, bin_packing.ALGORITHM if config.packing else "one conversation a row"
        ),
        "sources": source_facts(recipe, receipts, pieces, sums),
        "mixture": mixture_facts(recipe, pieces, sums),
        "noticed": noticed_in(receipts)
        | ({"unused_keys": unused} if (unused := unused_keys(recipe, receipts)) else {}),
        "rows_of_shards": np.concatenate([np.diff(block.edges) for block in placed]).tolist(),
        "placements": checksums,
    }
    receipt["files"] = {name: (folder / name).stat().st_size for name in PLAN_FILES}
    # A repair whose sources are gone finds the plan of a corpus by these checksums, and knows that it is complete.
    receipt["sha256"] = {name: sha256_of(folder / name) for name in PLAN_FILES}
    receipt |= {"name": config.name, "corpus": recipe.corpus_key}
    receipt["token_files"] = keys
    write_receipt(folder / "plan.json", receipt)
    return receipt


def _record_bases(parts: tuple[Part, ...], receipts: list[dict[str, Any]]) -> list[int]:
    """Return the number of the first record of each part within its file."""
    bases = [0] * len(parts)
    for index in range(1, len(parts)):
        if parts[index].file is parts[index - 1].file:
            bases[index] = bases[index - 1] + receipts[index - 1]["records"]
    return bases


def select_pieces(tokens: TokenColumns, recipe: Recipe, is_sample: bool = False) -> Pieces:
    """Hold out, filter, and cut conversations: everything before the mixture.

    The dry run calls this for its sample, for which no content is moved to give each split at least one. Raises
    DataError if a conversation is too long and `overlong` is error.
    """
    config = recipe.config
    check_count(tokens.edges[-1], f"{config.name}: a plan can number")
    accepted = read_columns(tokens, config.validation)
    filter_conversations(accepted, tokens, config)
    pieces = cut_overlong(accepted, tokens, recipe)
    if not is_sample:
        stays = accepted.reason == 0
        hold_out_at_least_one(accepted.held_out, stays, lambda: tokens.column("digest"), config.validation)
    return pieces


def read_columns(tokens: TokenColumns, validation: float) -> Accepted:
    """Read the columns of all conversations and hold out a share of them."""
    length = tokens.column("length")
    held_out = np.zeros(len(length), np.bool_)
    if validation:
        # A share of the hash range is a share of the conversations, and does not depend on the rest of the corpus.
        for top in range(0, len(length), CHUNK):
            chunk = slice(top, min(top + CHUNK, len(length)))
            held_out[chunk] = tokens.column("digest", chunk.start, chunk.stop) < np.uint64(int(validation * 2**64))
    return Accepted(
        edges=np.array(tokens.edges, np.int64),
        length=length,
        separator=tokens.column("separator"),
        held_out=held_out,
        reason=np.zeros(len(length), np.uint8),
        samples=samples_of(tokens),
    )


def _rejects(
    receipts: list[dict[str, Any]], bases: list[int], accepted: Accepted, tokens: TokenColumns, recipe: Recipe
) -> list[Rejected]:
    """List all rejects in source order.

    These are the rejects of every part and the conversations that cutting left without a trained token.
    """
    config = recipe.config
    message = (
        f"no trained token is left within {config.sequence_length:,} tokens (overlong: {config.overlong}); "
        "increase sequence_length to keep it"
    )
    found = [
        Rejected(part, bases[part] + record, code, text)
        for part, receipt in enumerate(receipts)
        for record, code, text in receipt["rejects"]
    ]
    late = np.flatnonzero(accepted.samples.only_first(accepted.reason == REJECTED))
    parts = accepted.part(late)
    for part in np.unique(parts).tolist():
        first, last = int(accepted.edges[part]), int(accepted.edges[part + 1])
        records = tokens.column("record", first, last)[late[parts == part] - first]
        found += [Rejected(part, record, "no_trained_tokens", message) for record in records.tolist()]
    return sorted(found, key=lambda reject: (reject.part, reject.record))


def _check_left(
    pieces: Pieces, lost: Losses, read: int, rejects: list[Rejected], recipe: Recipe, rejects_file: Path
) -> None:
    """Raise DataError if no conversation is left to train on.

    The error lists what removed the conversations, and the first reject of each reason.
    """
    config, accepted = recipe.config, pieces.accepted
    if ((accepted.reason == 0) & ~accepted.held_out).any():
        return
    held_out = int(np.count_nonzero(accepted.left()))
    counts = [f"{read:,} read", f"{len(rejects):,} rejected"]
    for reason, count in lost.dropped.items():
        setting = getattr(config, reason, None)
        label = f"longer than {config.sequence_length:,} tokens" if reason == "too_long" else reason
        counts.append(
            f"{count:,} dropped as {label}" if setting is None else f"{count:,} dropped by {reason}: {setting}"
        )
    counts += [f"{held_out:,} held out"] * (held_out > 0)
    reasons = Counter(reject.reason for reject in rejects)
    lines = [f"{config.name}: no conversation is left to pack: {', '.join(counts)}"]
    lines += first_of_each(rejects_file, reasons) if reasons else []
    raise DataError("nothing_to_pack", "\n".join(lines))


def _write_blocks(folder: Path, pieces: Pieces, tokens: TokenColumns, recipe: Recipe) -> tuple[list[Placed], list[str]]:
    """Place the pieces once per epoch and write plan.arrow and index.arrow.

    Returns the rows and lower bounds of each packing, whose columns over the pieces are empty, and the checksum of each
    shard's placements.
    """
    config, done = recipe.config, []
    checksums: list[str] = []
    with (
        atomic_file(folder / "plan.arrow") as out,
        pa.ipc.new_file(pa.PythonFile(out, "w"), PLAN_SCHEMA) as plan,
        index_writer(folder / "index.arrow", tokens, recipe, pieces.accepted.samples.several) as index,
    ):
        held_out = pieces.held_out()
        groups = group_pieces(pieces, held_out, config, recipe.shards, recipe.most_groups)
        companions = [Companions() for _ in range(groups["train"].count)]
        for epoch in range(1, config.epochs + 1):
            split = "train" if epoch == 1 else f"{TRAIN_EPOCH_PREFIX}{epoch}"
            if epoch == 1:
                placed = place(pieces.lengths(), held_out, groups, config, recipe.shards)
            else:
                placed = repack(
                    pieces.lengths(), pieces.of, groups["train"], companions, config, epoch, split, recipe.shards[split]
                )
            checksums += _write_plan(plan, pieces, placed)
            index.write(pieces, placed, with_dropped=epoch == 1)
            if config.epochs > 1:
                if epoch == 1:
                    in_train = ~held_out
                    pieces = replace(pieces, of=pieces.of[in_train])
                    placed = replace(placed, row=placed.row[in_train])
                remember(companions, placed, pieces.of, groups["train"], recipe.shards[split])
            # The columns over the pieces are not needed any more.
            done.append(replace(placed, row=placed.row[:0], start=placed.start[:0]))
            del placed
    return done, checksums


def _write_plan(plan: pa.ipc.RecordBatchFileWriter, pieces: Pieces, placed: Placed) -> Iterator[str]:
    """Write one record batch per shard and yield its checksum, sorting about SORTED_AT_ONCE pieces at a time."""
    accepted = pieces.accepted
    shards = len(placed.edges) - 1
    step = max(1, int(shards * SORTED_AT_ONCE // max(1, len(pieces))))
    for first in range(0, shards, step):
        edges = placed.edges[first : first + step + 1]
        chosen = _rows_between(placed.row, int(edges[0]), int(edges[-1]))
        # Row and start as one number, in 31 + 20 bits.
        order = np.argsort(placed.row[chosen].astype(np.int64) << 20 | placed.start[chosen])
        chosen = chosen[order]
        row = placed.row[chosen]
        for low, high in pairwise(edges):
            inside = slice(*np.searchsorted(row, [low, high]).tolist())
            of = pieces.columns(chosen[inside])
            part = accepted.part(of.conversation)
            columns = [
                as_int32(row[inside] - low, "rows of a shard"),
                placed.start[chosen[inside]],
                as_int32(part, "parts"),
                as_int32(of.conversation - accepted.edges[part], "conversations of a part"),
                of.first,
                of.taken,
                of.closed,
            ]
            batch = pa.record_batch([to_arrow(values) for values in columns], PLAN_SCHEMA)
            plan.write_batch(batch)
            yield xxh3_of(batch)


def _rows_between(row: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return the numbers of the pieces whose row is in [low, high), int32."""
    found = [np.empty(0, np.int32)]
    for top in range(0, len(row), bin_packing.CHUNK):
        part = row[top : top + bin_packing.CHUNK]
        found.append(as_int32(np.flatnonzero((part >= low) & (part < high)) + top, "pieces"))
    return np.concatenate(found)
