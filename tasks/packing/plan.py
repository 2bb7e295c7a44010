"""Assign every conversation of the token files a split, shard, row, and start.

    columns ─filters─▶ ─overlong policy─▶ pieces ─limits, weights─▶ ─pack each split─▶ rows ─shuffle─▶ shards
                └──────────────┴─────────────────────────┴─▶ rejected, dropped, truncated: counted

Packing decisions depend only on lengths. All files are written to one folder, the receipt last:

    plan.arrow      IPC file; record batch s holds the pieces of shard s, by row and start (PLAN_SCHEMA)
    index.arrow     the place of every accepted conversation
    rows.arrow      statistics of each row (storage/row_statistics.py); not without packing
    rejects.jsonl   one line per rejected conversation
    plan.json       ledger, sources, packing figures: the receipt

Memory: a constant plus 20 bytes per conversation, regardless of the number of token files and shards; up to 45 if
conversations are held out, weighted, deduplicated, or repacked for further epochs (bench/packing/planning.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tasks.config import Config
from tasks.core.errors import DataError, StorageError
from tasks.core.int32 import as_int32
from tasks.packing import bin_packing
from tasks.packing.balance.count_rows import statistics_of
from tasks.packing.balance.put_in_order import put_in_order
from tasks.packing.company.arrange import arrange, compared_in
from tasks.packing.company.other_epochs import Companions
from tasks.packing.filters import filter_conversations
from tasks.packing.index_writer import index_writer
from tasks.packing.ledger import (
    Account,
    make_ledger,
    mixture_facts,
    packing_metadata,
    source_facts,
    take_account,
    unused_keys,
    weighting_facts,
)
from tasks.packing.mixture import mix
from tasks.packing.pieces import (
    CHUNK,
    Accepted,
    Pieces,
    check_conversations,
    cut_overlong,
    trained_of_conversations,
)
from tasks.packing.placement import Placed, hold_out_at_least_one, pack_split, place
from tasks.packing.rejects import Rejected, check_first, check_rejects, first_of_each, write_rejects
from tasks.recipe import Recipe
from tasks.sources.model import Part
from tasks.storage.arrow import to_arrow, xxh3_of
from tasks.storage.files import atomic_file, digest_of, read_receipt, sha256_of, write_receipt
from tasks.storage.row_statistics import ROWS
from tasks.storage.schemas import REJECTED, ROWS_SCHEMA, plan_schema
from tasks.storage.splits import TRAIN_EPOCH_PREFIX, first_packing, length_in, splits_of
from tasks.storage.tokens.samples import samples_of
from tasks.storage.tokens.token_files import TokenColumns
from tasks.tokenization.token_batch import noticed_in

# The errors of reading a damaged token file. pyarrow raises a plain OSError for a damaged footer, and a damaged name of
# a column is a KeyError. If no checksum differs, such an error has another cause.
UNREADABLE = (pa.ArrowException, OSError, ValueError, LookupError)


def plan_files(config: Config) -> tuple[str, ...]:
    """Return the names of the files of a plan, without its receipt."""
    return ("plan.arrow", "index.arrow", *[ROWS] * config.packing, "rejects.jsonl")


# Pieces to sort by row at a time, 40 bytes each. Each pass scans the rows of all pieces.
SORTED_AT_ONCE = 1 << 21


def make_plan(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Write the plan, and return its receipt, which is written last.

    Raises DataError if the first conversations show that the template does not fit, if too many are rejected, if none
    is left to train on, or if one is too long and `overlong` is error. Raises StorageError if the checksum of a token
    file does not match its receipt.
    """
    receipts = [read_receipt(recipe.layout.token_receipt(key)) for key in recipe.token_keys]
    read = sum(receipt["conversations"] for receipt in receipts)
    check_conversations(sum(receipt["accepted"] for receipt in receipts), recipe.config)
    files = [recipe.layout.token_file(key) for key in recipe.token_keys]
    for file, receipt in zip(files, receipts, strict=True):
        if digest_of(file, "xxh3") != receipt["xxh3"]:
            raise StorageError("damaged_artefact", f"{file}: damaged (checksum mismatch); delete it and run again")
    bases = record_bases(recipe.parts, receipts)
    tokens = TokenColumns(files, bases)
    pieces = select_pieces(tokens, recipe)
    late = late_rejects(pieces.accepted, tokens, recipe)
    early = [
        Rejected(part, bases[part] + record, code, text)  # by tokenization
        for part, receipt in enumerate(receipts)
        for record, code, text in receipt["rejects"]
    ]
    check_first(early, first_accepted(tokens), recipe)
    rejects = sorted([*early, *late], key=lambda reject: (reject.part, reject.record))
    with atomic_file(folder / "rejects.jsonl") as out:
        write_rejects(out, rejects, recipe)
    rejected = Counter(reject.reason for reject in rejects)
    check_rejects(rejected, len(late), read, recipe, folder / "rejects.jsonl")
    pieces = mix(pieces, tokens, recipe)
    account = take_account(pieces, tokens, recipe)
    check_left(account, read, rejected, recipe, folder / "rejects.jsonl")
    names, blocks = plan_files(recipe.config), write_blocks(folder, pieces, tokens, recipe)
    facts = plan_facts(recipe, receipts, account, rejected, blocks)
    facts["files"] = {name: (folder / name).stat().st_size for name in names}
    # If the sources are gone, a repair uses these checksums to find the plan of a corpus and to check it.
    facts["sha256"] = {name: sha256_of(folder / name) for name in names}
    facts |= {"name": recipe.config.name, "corpus": recipe.corpus_key, "token_files": recipe.token_keys}
    write_receipt(folder / "plan.json", facts)
    return facts


def dropped(plan_folder: Path, damaged: Path, receipt: Path) -> StorageError:
    """Remove the receipts of a damaged plan, and return the error to raise.

    Removes `receipt` and the receipts of all shards, so that the next run rebuilds them.
    """
    for each in (receipt, *plan_folder.glob("shard-*.json")):
        each.unlink(missing_ok=True)
    return StorageError("damaged_artefact", f"{damaged}: damaged or missing; run again to rebuild it")


def plan_facts(
    recipe: Recipe, receipts: Sequence[dict[str, Any]], account: Account, rejected: dict[str, int], blocks: Blocks
) -> dict[str, Any]:
    """Return the facts of a plan that the manifest and the shards need.

    `receipts` are the receipts of the token files. Raises DataError if the ledger does not balance.
    """
    config = recipe.config
    rows = sum(blocks.rows_of_splits.values())
    room = sum(own * length_in(split, config.sequence_length) for split, own in blocks.rows_of_splits.items())
    places = room * config.packing
    if config.padding == "none":  # rows may be shorter than they could be
        places = account.tally.total("places") + (account.alignment or 0)
    noticed: dict[str, Any] = noticed_in(receipts)
    if unused := unused_keys(recipe, receipts):
        noticed = noticed | {"unused_keys": unused}
    facts: dict[str, Any] = {}
    if len(config.row_lengths) > 1:
        facts["bounds_of_splits"] = [bound for bound, _ in blocks.bounds]
    facts |= {
        "ledger": make_ledger(receipts, account, rejected, places).model_dump(),
        "packing_metadata": packing_metadata(config, account.tally, rows, room, blocks.bounds, blocks.places),
        "sources": source_facts(recipe, receipts, account),
        "mixture": mixture_facts(recipe, account),
        "noticed": noticed,
        "rows_of_shards": blocks.rows_of_shards,
        "placements": blocks.checksums,
        "row_sums": blocks.sums,
    }
    if config.loss_weight != "none":
        splits = [first_packing(split) for split in blocks.rows_of_splits for _ in range(recipe.shards[split])]
        facts |= {"loss_weight": weighting_facts(config, account), "weighted_as": splits}
    return facts


def record_bases(parts: Sequence[Part], receipts: Sequence[dict[str, Any]]) -> list[int]:
    """Return the number of the first record of each part within its file."""
    bases = [0] * len(parts)
    for index in range(1, len(parts)):
        if parts[index].file is parts[index - 1].file:
            bases[index] = bases[index - 1] + receipts[index - 1]["records"]
    return bases


def select_pieces(tokens: TokenColumns, recipe: Recipe, is_sample: bool = False) -> Pieces:
    """Hold out, filter, and cut conversations: everything before the mixture.

    `is_sample` is true for the sample of a dry run. Then no content is moved to fill an empty split.
    Raises DataError if a conversation is too long and `overlong` is error.
    """
    config = recipe.config
    check_conversations(tokens.edges[-1], config)
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


def first_accepted(tokens: TokenColumns) -> tuple[int, int] | None:
    """Return the part and the record of the first accepted conversation."""
    for part, (first, last) in enumerate(pairwise(tokens.edges)):
        if first < last:
            return part, int(tokens.column("record", first, first + 1)[0])
    return None


def late_rejects(accepted: Accepted, tokens: TokenColumns, recipe: Recipe) -> list[Rejected]:
    """List the conversations without a trained token after cutting, in source order."""
    config, found = recipe.config, list[Rejected]()
    message = (
        f"no trained token is left within {config.sequence_length:,} tokens (overlong: {config.overlong}); "
        "increase sequence_length to keep it"
    )
    late = np.flatnonzero(accepted.samples.only_first(accepted.reason == REJECTED))
    parts = accepted.part(late)
    for part in np.unique(parts).tolist():
        first, last = int(accepted.edges[part]), int(accepted.edges[part + 1])
        records = tokens.column("record", first, last)[late[parts == part] - first]
        found += [Rejected(part, record, "no_trained_tokens", message) for record in records.tolist()]
    return found


def check_left(account: Account, read: int, rejected: dict[str, int], recipe: Recipe, rejects_file: Path) -> None:
    """Raise DataError if no conversation is left to train on.

    The error lists the reasons that removed conversations, and the first reject of each reason.
    """
    config = recipe.config
    if account.in_train:
        return
    counts = [f"{read:,} read", f"{sum(rejected.values()):,} rejected"]
    for reason, count in account.lost.dropped.items():
        setting = getattr(config, reason, None)
        label = f"longer than {config.sequence_length:,} tokens" if reason == "too_long" else reason
        counts.append(
            f"{count:,} dropped as {label}" if setting is None else f"{count:,} dropped by {reason}: {setting}"
        )
    counts += [f"{account.packed:,} held out"] * (account.packed > 0)
    lines = [f"{config.name}: no conversation is left to pack: {', '.join(counts)}"]
    lines += first_of_each(rejects_file, rejected) if rejected else []
    raise DataError("nothing_to_pack", lines)


@dataclass(slots=True)
class Blocks:
    """Result of a plan: all packings of the training split, and the held-out split."""

    rows_of_shards: list[int] = field(default_factory=list)
    rows_of_splits: dict[str, int] = field(default_factory=dict)
    checksums: list[str] = field(default_factory=list)  # of the placements of each shard
    bounds: list[tuple[int, str]] = field(default_factory=list)  # of the rows of each split, with their names
    sums: dict[str, dict[str, int]] = field(default_factory=dict)  # of row statistics, by split; empty without packing
    places: list[tuple[int, str]] = field(default_factory=list)  # bounds of places, if rows have several lengths


def write_blocks(folder: Path, pieces: Pieces, tokens: TokenColumns, recipe: Recipe) -> Blocks:
    """Place the pieces once per epoch, and write the plan, index, and row statistics.

    Without packing, there are no row statistics.
    """
    config, blocks = recipe.config, Blocks()
    with (
        atomic_file(folder / "plan.arrow") as out,
        pa.ipc.new_file(pa.PythonFile(out, "w"), plan_schema(config.weighs_conversations)) as plan,
        index_writer(folder / "index.arrow", tokens, recipe, pieces.accepted.samples.several) as index,
        ExitStack() as stack,
    ):
        rows_out = None
        if config.packing:
            file = pa.PythonFile(stack.enter_context(atomic_file(folder / ROWS)), "w")
            rows_out = stack.enter_context(pa.ipc.new_stream(file, ROWS_SCHEMA))
        held_out, companions = pieces.held_out(), Companions()
        compared = compared_in(config, tokens)
        trained = trained_of_conversations(pieces, tokens) if config.weighs_conversations else None
        for epoch in range(1, config.epochs + 1):
            split = "train" if epoch == 1 else f"{TRAIN_EPOCH_PREFIX}{epoch}"
            if epoch == 1:
                placed = place(pieces.lengths(), held_out, config, recipe.shards)
            else:
                placed = pack_split(pieces.lengths(), config, split, epoch, recipe.shards)
            if compared is not None:  # the rows of two pieces that swap may have different lengths
                kind = bin_packing.in_multiples(pieces.lengths(), config.align)
                kind = kind * 2 + held_out if epoch == 1 else kind
                arrange(placed.row, placed.start, kind, compared[pieces.conversations(slice(None))], config)
            if epoch > 1:
                places = bin_packing.in_multiples(pieces.lengths(), config.align)
                companions.separate(placed.row, placed.start, pieces.of, places, placed.rows)
            if rows_out is not None:
                statistics = statistics_of(placed.row, placed.rows, pieces, tokens)
                if config.balance:
                    statistics = put_in_order(placed, statistics, config, epoch)
                blocks.sums |= {own: statistics.take(rows).sums() for own, rows in placed.slices().items()}
                for first, last in pairwise(placed.edges.tolist()):
                    rows_out.write_batch(statistics.take(slice(first, last)).batch())
            blocks.bounds += placed.lower_bounds
            blocks.places += placed.places
            blocks.checksums += _write_plan(plan, pieces, tokens, placed, trained)
            blocks.rows_of_shards += np.diff(placed.edges).tolist()
            blocks.rows_of_splits |= placed.rows_of_splits
            index.write(pieces, placed, with_dropped=epoch == 1)
            if config.epochs > 1:
                if epoch == 1:
                    in_train = ~held_out
                    pieces = replace(pieces, of=pieces.of[in_train])
                    placed = replace(placed, row=placed.row[in_train])
                rows = sum(placed.rows_of_splits[own] for own in splits_of(split, config.row_lengths))
                companions.remember(placed.row, pieces.of, rows)
            del placed  # frees its columns
    return blocks


def _write_plan(
    plan: pa.ipc.RecordBatchFileWriter,
    pieces: Pieces,
    tokens: TokenColumns,
    placed: Placed,
    trained: np.ndarray | None = None,
) -> Iterator[str]:
    """Write one record batch per shard, and yield its checksum.

    About SORTED_AT_ONCE pieces are sorted at a time. `trained` has the trained tokens of each conversation, by its
    number in Accepted.
    """
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
            inside = slice(*np.searchsorted(row, np.array([low, high], row.dtype)).tolist())  # else it copies `row`
            of = pieces.columns(chosen[inside])
            part, conversation = tokens.rows_of(of.conversation)
            columns = [
                as_int32(row[inside] - low, "rows of a shard"),
                placed.start[chosen[inside]],
                as_int32(part, "parts"),
                as_int32(conversation, "conversations of a part"),
                of.first,
                of.taken,
                of.closed,
            ]
            columns += [] if trained is None else [trained[of.conversation]]
            batch = pa.record_batch([to_arrow(values) for values in columns], plan_schema(trained is not None))
            plan.write_batch(batch)
            yield xxh3_of(batch)


def _rows_between(row: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return the numbers of the pieces whose row is in [low, high), int32."""
    found = [np.empty(0, np.int32)]
    for top in range(0, len(row), bin_packing.CHUNK):
        part = row[top : top + bin_packing.CHUNK]
        found.append(as_int32(np.flatnonzero((part >= low) & (part < high)) + top, "pieces"))
    return np.concatenate(found)
