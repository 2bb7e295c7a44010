"""Assign every conversation of the token files a split, shard, row, and start.

    columns ─filters─▶ ─overlong policy─▶ pieces ─limits, weights─▶ ─pack each split─▶ rows ─shuffle─▶ shards
                └──────────────┴─────────────────────────┴─▶ rejected, dropped, truncated: counted

Packing decisions depend only on lengths. All files are written to one folder, the receipt last:

    plan.arrow      IPC file; record batch s holds the pieces of shard s, by row and start (PLAN_SCHEMA)
    index.arrow     the place of every accepted conversation
    rows.arrow      statistics of each row (storage/shards.py); not without packing
    rejects.jsonl   one line per rejected conversation
    dropped.jsonl   one line per conversation that is cleaned away; only with duplicates: near or decontaminate
    plan.json       ledger, sources, packing figures: the receipt

Memory: a constant plus 20 bytes per conversation, regardless of the number of token files and shards; up to 45 if
conversations are held out, weighted, deduplicated, or repacked for further epochs (bench/packing/planning.py). To find
near prompts of held-out conversations takes 100 bytes for each different prompt, and trees across conversations 800 for
each sample.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.errors import DataError, StorageError
from packcorpus.tasks.core.numbers import as_int32
from packcorpus.tasks.packing.balance import put_in_order, statistics_of
from packcorpus.tasks.packing.dropped import DROPPED, contaminated_rows, evaluation_facts, overlaps_of, write_dropped
from packcorpus.tasks.packing.held_out import check_group_key, check_sides, hold_out, hold_out_at_least_one
from packcorpus.tasks.packing.leaks import count_leaks
from packcorpus.tasks.packing.ledger import (
    Account,
    Written,
    plan_facts,
    source_numbers,
    take_account,
)
from packcorpus.tasks.packing.mixture import mix
from packcorpus.tasks.packing.neighbors import EarlierRows, arrange, bring_together, compared_in
from packcorpus.tasks.packing.pieces import (
    Pieces,
    accepted_of,
    check_conversations,
    cut_overlong,
    filter_conversations,
    indexes_where,
)
from packcorpus.tasks.packing.placement import Placed, number_rows_by_source, pack_split, place
from packcorpus.tasks.packing.rejects import Rejected, check_first, check_rejects, first_of_each, write_rejects
from packcorpus.tasks.packing.trees import Units, with_trees
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.files import atomic_file, digest_of, read_receipt, sha256_of, write_receipt
from packcorpus.tasks.storage.layout import TRAIN_EPOCH_PREFIX, first_packing
from packcorpus.tasks.storage.schemas import (
    ALL_DROP_REASONS,
    DROP_REASONS,
    REJECTED,
    ROWS_SCHEMA,
    SAMPLE_DROP_REASONS,
    index_schema,
    plan_schema,
    strings,
    to_arrow,
    xxh3_of,
)
from packcorpus.tasks.storage.shards import ROWS
from packcorpus.tasks.storage.token_files import TokenColumns
from packcorpus.tasks.tokenization.checks import check_markers

# The errors of reading a damaged token file. pyarrow raises a plain OSError for a damaged footer, and a damaged name of
# a column is a KeyError. If no checksum differs, such an error has another cause.
UNREADABLE = (pa.ArrowException, OSError, ValueError, LookupError)

# Pieces to sort by row at a time, 40 bytes each. Each pass scans the rows of all pieces.
SORTED_AT_ONCE = 1 << 21
# Conversations or pieces per record batch of the index; a batch is assembled in one step.
INDEX_BATCH = 1 << 16


def plan_files(config: Config) -> tuple[str, ...]:
    """Return the names of the files of a plan, without its receipt."""
    return ("plan.arrow", "index.arrow", *[ROWS] * config.packing, "rejects.jsonl", *[DROPPED] * config.lists_dropped)


def make_plan(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Write the plan, and return its receipt, which is written last.

    Raises DataError if the first conversations show that the template does not fit, if too many are rejected, if none
    is left to train on, or if one is too long and `overlong` is error. Raises StorageError if the checksum of a token
    file does not match its receipt.
    """
    receipts = [read_receipt(recipe.layout.token_receipt(key)) for key in recipe.token_keys]
    check_markers(recipe, receipts)
    read = sum(receipt["conversations"] for receipt in receipts)
    check_group_key(recipe.config, *(sum(each.get(n, 0) for each in receipts) for n in ("accepted", "without_key")))
    check_conversations(sum(receipt["accepted"] for receipt in receipts), recipe.config)
    files = [recipe.layout.token_file(key) for key in recipe.token_keys]
    for file, receipt in zip(files, receipts, strict=True):
        if digest_of(file, "xxh3") != receipt["xxh3"]:
            raise StorageError("damaged_artefact", f"{file}: damaged (checksum mismatch); delete it and run again")
    bases = [0] * len(files)  # the number of the first record of each part within its source
    for part, (before, now) in enumerate(pairwise(recipe.parts), 1):
        if now.file is before.file:
            bases[part] = bases[part - 1] + receipts[part - 1]["records"]
    tokens = TokenColumns(files, bases)
    overlaps = overlaps_of(receipts)
    pieces = select_pieces(tokens, recipe, contaminated=contaminated_rows(overlaps, tokens, bases))
    early = [
        Rejected(part, bases[part] + record, code, text)  # by tokenization
        for part, receipt in enumerate(receipts)
        for record, code, text in receipt["rejects"]
    ]
    filled = ((part, first) for part, (first, last) in enumerate(pairwise(tokens.edges)) if first < last)
    check_first(early, next(((n, int(tokens.column("record", at, at + 1)[0])) for n, at in filled), None), recipe)
    late = [*_late_rejects(pieces, tokens, recipe.config)]
    rejects_file = folder / "rejects.jsonl"
    with atomic_file(rejects_file) as out:
        write_rejects(out, sorted([*early, *late], key=lambda reject: (reject.part, reject.record)), recipe)
    rejected = Counter(reject.reason for reject in (*early, *late))
    check_rejects(rejected, len(late), read, recipe, rejects_file)
    if recipe.config.lists_dropped:
        with atomic_file(folder / DROPPED) as out:
            write_dropped(out, overlaps, bases, pieces.accepted, tokens, recipe)
    pieces = with_trees(mix(pieces, tokens, recipe), tokens, recipe.config)
    account = take_account(pieces, tokens, recipe)
    if not account.in_train:
        raise _nothing_left(account, read, rejected, recipe, rejects_file)
    held_out = count_leaks(pieces, tokens)
    facts = plan_facts(recipe, receipts, account, rejected, write_rows(folder, pieces, tokens, recipe))
    facts |= {"held_out": held_out} if held_out else {}
    names = plan_files(recipe.config)
    facts["files"] = {name: (folder / name).stat().st_size for name in names}
    # If the sources are gone, a repair uses these checksums to find the plan of a corpus and to check it.
    facts["sha256"] = {name: sha256_of(folder / name) for name in names}
    if overlaps is not None:
        facts["evaluation"] = evaluation_facts(recipe, receipts, overlaps)
    facts |= {"name": recipe.config.name, "corpus": recipe.corpus_key, "token_files": recipe.token_keys}
    write_receipt(folder / "plan.json", facts)
    return facts


def discard_receipts(plan_folder: Path, damaged: Path, receipt: Path) -> StorageError:
    """Remove the receipts of a damaged plan, and return the error to raise.

    Removes `receipt` and the receipts of all shards, so that the next run rebuilds them.
    """
    for path in (receipt, *plan_folder.glob("shard-*.json")):
        path.unlink(missing_ok=True)
    return StorageError("damaged_artefact", f"{damaged}: damaged or missing; run again to rebuild it")


def select_pieces(
    tokens: TokenColumns, recipe: Recipe, is_sample: bool = False, contaminated: np.ndarray | None = None
) -> Pieces:
    """Hold out, filter, and cut conversations: everything before the mixture.

    `is_sample` is true for the sample of a dry run. Then no content is moved to fill an empty split. `contaminated` is
    as in Accepted.
    Raises DataError if a conversation is too long and `overlong` is error, or if it is in sources of both splits.
    """
    config = recipe.config
    check_conversations(tokens.edges[-1], config)
    accepted = accepted_of(tokens, hold_out(tokens, recipe))
    accepted.contaminated = contaminated
    filter_conversations(accepted, tokens, recipe)
    pieces, stays = cut_overlong(accepted, tokens, recipe), accepted.reason == 0
    check_sides(accepted.held_out, stays, tokens, recipe)
    if not is_sample:
        groups = partial(tokens.column, config.grouped_by)
        hold_out_at_least_one(accepted.held_out, stays, groups, config.validation, accepted.fixed)
    return pieces


def _late_rejects(pieces: Pieces, tokens: TokenColumns, config: Config) -> Iterator[Rejected]:
    """Yield the conversations without a trained token after cutting, in source order."""
    message = (
        f"no trained token is left within {config.sequence_length:,} tokens (overlong: {config.overlong}); "
        "increase sequence_length to keep it"
    )
    accepted = pieces.accepted
    late = np.flatnonzero(accepted.samples.only_first(accepted.reason == REJECTED))
    parts = accepted.part(late)
    for part in np.unique(parts).tolist():
        first, last = tokens.edges[part : part + 2]
        for record in tokens.column("record", first, last)[late[parts == part] - first].tolist():
            yield Rejected(part, record, "no_trained_tokens", message)


def _nothing_left(
    account: Account, read: int, rejected: dict[str, int], recipe: Recipe, rejects_file: Path
) -> DataError:
    config = recipe.config
    counts = [f"{read:,} read", f"{sum(rejected.values()):,} rejected"]
    for reason, count in account.lost.dropped.items():
        setting = getattr(config, reason, None)
        label = f"longer than {config.sequence_length:,} tokens" if reason == "too_long" else reason
        counts.append(f"{count:,} dropped " + (f"as {label}" if setting is None else f"by {reason}: {setting}"))
    counts += [f"{account.packed:,} held out"] * (account.packed > 0)
    lines = [f"{config.name}: no conversation is left to pack: {', '.join(counts)}"]
    return DataError("nothing_to_pack", [*lines, *(first_of_each(rejects_file, rejected) if rejected else [])])


# -- rows ------------------------------------------------------------------------------------------------------------


def write_rows(folder: Path, pieces: Pieces, tokens: TokenColumns, recipe: Recipe) -> Written:
    """Place the pieces once per epoch, and write the plan, index, and row statistics.

    Without packing, there are no row statistics.
    """
    config, written = recipe.config, Written()
    with ExitStack() as stack:

        def opened(name: str, schema: pa.Schema, new: Callable[..., Any] = pa.ipc.new_stream) -> Any:
            file = pa.PythonFile(stack.enter_context(atomic_file(folder / name)), "w")
            return stack.enter_context(new(file, schema))

        schema = plan_schema(config.weighs_conversations, config.splits_at_turns, config.rows.is_shared)
        plan = opened("plan.arrow", schema, pa.ipc.new_file)
        of_index = _index_schema(pieces, config)
        index = opened("index.arrow", of_index)
        rows_out = opened(ROWS, ROWS_SCHEMA) if config.packing else None
        earlier, compared = EarlierRows(), compared_in(config, tokens)
        trained = pieces.trained_of_conversations(tokens) if config.weighs_conversations else None
        for epoch in range(1, config.epochs + 1):
            units = Units.of(pieces)
            lengths, held_out, of = units.lengths, units.held_out, units.first(pieces.of)
            if epoch == 1:
                placed = place(lengths, held_out, config, recipe.shards)
            else:
                placed = pack_split(lengths, config, f"{TRAIN_EPOCH_PREFIX}{epoch}", epoch, recipe.shards)
            by_source = config.order == "source"
            if compared is not None or by_source or epoch > 1:
                kind = config.rows.multiples(lengths)
                of_splits = kind * 2 + held_out if epoch == 1 else kind  # pieces of different splits do not swap
                if by_source:
                    bring_together(placed.row, placed.start, of_splits)
                    number_rows_by_source(placed)
                if compared is not None:
                    contents = compared[units.first(pieces.conversations(slice(None)))]
                    arrange(placed.row, placed.start, of_splits, contents, config)
                if epoch > 1:
                    earlier.separate(placed.row, placed.start, of, kind, placed.rows)
            of_pieces = units.spread(placed)
            if rows_out is not None:
                statistics = statistics_of(of_pieces.row, placed.rows, pieces, tokens)
                if config.balance:
                    statistics = put_in_order(of_pieces, statistics, config, epoch)
                written.sums |= {split: statistics.take(rows).sums() for split, rows in placed.slices().items()}
                for first, last in pairwise(placed.edges.tolist()):
                    rows_out.write_batch(statistics.take(slice(first, last)).batch())
            written.bounds += placed.lower_bounds
            written.places += placed.places
            written.checksums += _write_plan(plan, schema, pieces, tokens, of_pieces, trained)
            written.rows_of_shards += np.diff(placed.edges).tolist()
            written.rows_of_splits |= placed.rows_of_splits
            _write_index(index, tokens, recipe, pieces, of_pieces, with_dropped=epoch == 1)
            if config.epochs > 1:
                if epoch == 1:
                    pieces = pieces.in_training()
                    placed, of = replace(placed, row=placed.row[~held_out]), of[~held_out]
                rows = sum(n for split, n in placed.rows_of_splits.items() if first_packing(split) == "train")
                earlier.remember(placed.row, of, rows)
            del placed, of_pieces, units  # frees their columns
    return written


def _write_plan(
    plan: pa.ipc.RecordBatchFileWriter,
    schema: pa.Schema,
    pieces: Pieces,
    tokens: TokenColumns,
    placed: Placed,
    trained: np.ndarray | None,
) -> Iterator[str]:
    """Write one record batch per shard, and yield its checksum.

    About SORTED_AT_ONCE pieces are sorted at a time. `trained` has the trained tokens of each conversation, by its
    number in Accepted.
    """
    shards = len(placed.edges) - 1
    step = max(1, int(shards * SORTED_AT_ONCE // max(1, len(pieces))))
    for first in range(0, shards, step):
        edges = placed.edges[first : first + step + 1]
        chosen = _pieces_between(placed.row, *edges[[0, -1]].tolist())
        # Row and start as one number, in 31 + 20 bits.
        chosen = chosen[np.argsort(placed.row[chosen].astype(np.int64) << 20 | placed.start[chosen])]
        row = placed.row[chosen]
        for low, high in pairwise(edges):
            of_shard = slice(*np.searchsorted(row, np.array([low, high], row.dtype)).tolist())  # else it copies `row`
            of = pieces.columns(chosen[of_shard])
            part, conversation = tokens.rows_of(of.conversation)
            columns = [
                as_int32(row[of_shard] - low, "rows of a shard"),
                placed.start[chosen[of_shard]],
                as_int32(part, "parts"),
                as_int32(conversation, "conversations of a part"),
                of.first,
                of.taken,
                of.closed,
            ]
            columns += [] if trained is None else [trained[of.conversation]]
            columns += [of.repeated] * ("repeated" in schema.names)
            columns += [of.shared] * ("shared" in schema.names)
            batch = pa.record_batch([to_arrow(values) for values in columns], schema)
            plan.write_batch(batch)
            yield xxh3_of(batch)


def _pieces_between(row: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return the numbers of the pieces whose row is in [low, high), int32."""
    return indexes_where(lambda part: (row[part] >= low) & (row[part] < high), len(row))


def _index_schema(pieces: Pieces, config: Config) -> pa.Schema:
    several = pieces.accepted.samples.several
    return index_schema(several, config.splits_at_turns, config.is_grouped, config.rows.is_shared)


def _write_index(
    out: pa.RecordBatchWriter, tokens: TokenColumns, recipe: Recipe, pieces: Pieces, placed: Placed, with_dropped: bool
) -> None:
    """Write the places of all conversations of one packing.

    The index has one row per piece, in source order. A dropped conversation has a reason, and its split, shard, row,
    and start are null. Further copies follow, then the further packings of the training split, each in source order.
    """
    accepted, config, several = pieces.accepted, recipe.config, pieces.accepted.samples.several
    sources, split_names = source_numbers(recipe), config.rows.split_names(config.epochs)
    firsts = np.cumsum([0, *(recipe.shards[split] for split in placed.rows_of_splits)])
    reasons: tuple[str, ...] = SAMPLE_DROP_REASONS if several else DROP_REASONS
    if config.lists_dropped:
        reasons = ALL_DROP_REASONS
    numbers = np.array([split_names.index(split) for split in placed.rows_of_splits], np.int8)

    def write(chosen: slice, left_out: np.ndarray) -> None:
        of = pieces.columns(chosen)
        conversation = np.concatenate([of.conversation, left_out])
        if not len(conversation):
            return
        order = np.argsort(conversation, kind="stable")
        conversation, is_dropped = conversation[order], (order >= len(of.conversation))
        first, last = int(conversation.min()), int(conversation.max()) + 1

        def column(values: np.ndarray, of_dropped: np.ndarray | None = None) -> pa.Array:
            """Build a column; dropped conversations are null unless values for them are given."""
            rest = np.zeros(len(left_out), values.dtype) if of_dropped is None else of_dropped.astype(values.dtype)
            return to_arrow(np.concatenate([values, rest])[order], is_dropped if of_dropped is None else None)

        def names(indexes: pa.Array, known: tuple[str, ...]) -> pa.Array:
            return pa.DictionaryArray.from_arrays(indexes, strings(known))

        def stored(name: str) -> np.ndarray:
            return tokens.column(name, first, last)[conversation - first]

        shard, none = placed.shard(chosen), np.zeros(len(left_out), np.int32)
        within = np.searchsorted(firsts[1:], shard, side="right")
        is_cut = of.first + of.taken < accepted.length[of.conversation]
        reason = to_arrow((accepted.reason[conversation] - np.uint8(1)).astype(np.int8), ~is_dropped)
        columns = [
            to_arrow(sources[accepted.part(conversation)]),
            to_arrow(stored("record") + 1),
            names(column(numbers[within]), split_names),
            column(as_int32(shard - firsts[within], "shards")),
            column(as_int32(placed.row[chosen] - placed.edges[shard], "rows of a shard")),
            column(placed.start[chosen]),
            column(of.length, accepted.length[left_out]),
            column(of.first),
            column(pieces.trained(chosen, tokens), none),
            column(of.separator, none),
            column(is_cut & (config.overlong in ("truncate", "turns")), none),
            column(of.closed, none),
            to_arrow(stored("turns")),
            to_arrow(stored("digest")),
            names(reason, reasons),
        ]
        columns += [to_arrow(stored("turn"))] if several else []
        columns += [column(of.repeated, none)] if config.splits_at_turns else []
        columns += [to_arrow(stored(config.grouped_by))] if config.is_grouped else []
        columns += [column(of.shared, none)] if config.rows.is_shared else []
        out.write_batch(pa.record_batch(columns, _index_schema(pieces, config)))

    top, count = 0, len(accepted.length)
    # The boundaries of batches do not depend on the parts.
    for first in range(0, count if with_dropped else 0, INDEX_BATCH):
        last = min(first + INDEX_BATCH, count)
        bottom = bisect_left(
            range(pieces.once), last, top, key=lambda piece: pieces.conversations(slice(piece, piece + 1))[0]
        )
        reason = accepted.reason[first:last]
        left_out = np.flatnonzero((reason > 0) & (reason != REJECTED)) + first
        write(slice(top, bottom), as_int32(left_out, "conversations"))
        top = bottom
    for first in range(top, len(pieces), INDEX_BATCH):
        write(slice(first, min(first + INDEX_BATCH, len(pieces))), np.empty(0, np.int32))
