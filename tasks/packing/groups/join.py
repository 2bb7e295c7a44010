"""Join the plans of groups to the plan of the corpus.

    group-00000.json, group-00001.json, … ─added up─▶ ledger, bounds, rows of shards ─▶ plan.json, the receipt
    index-00000.arrow, …                  ─one after another─▶ index.arrow
    rows-00000.arrow, …                   ─shard by shard────▶ rows.arrow
    rejects of the parts, then of groups  ─one after another─▶ rejects.jsonl

Memory holds the receipts of all parts and of one group, however many conversations there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tasks.core.errors import DataError
from tasks.packing.groups.deal import place_of_shard
from tasks.packing.groups.dealt import Dealt, read_dealt, token_receipts
from tasks.packing.groups.plan_group import blocks_of, files_of_group, group_receipt
from tasks.packing.ledger import Account
from tasks.packing.placement import bound_of, number_of
from tasks.packing.plan import Blocks, check_left, dropped, early_rejects, plan_facts, seal_plan
from tasks.packing.rejects import check_rejects, write_rejects
from tasks.packing.several_lengths import lower_bound_places
from tasks.recipe import Recipe
from tasks.storage.arrow import strings
from tasks.storage.files import CHUNK, atomic_file, digest_of, read_receipt
from tasks.storage.row_statistics import ROWS, add_sums
from tasks.storage.schemas import DROP_REASONS, INDEX_SCHEMA, ROWS_SCHEMA, index_schema
from tasks.storage.splits import first_packing, length_in, splits_of


def join_groups(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Write the plan of a corpus from the plans of its groups, and return its receipt.

    The receipt is written last. Raises DataError if too many conversations are rejected, if none is left to train on,
    or if none is held out although `validation` is set.
    """
    config, dealt = recipe.config, read_dealt(folder, recipe.layout)
    account, blocks = Account.empty(recipe), Blocks.empty(config)
    files, sha256, late = dict[str, int](), dict[str, str](), 0
    of_groups = dict[str, list[int]]()  # rows of each group, by split
    for group in range(dealt.groups):
        receipt = read_receipt(group_receipt(folder, group))
        account.add(receipt["account"], config)
        own = blocks_of(receipt, config)
        for split in recipe.shards:
            blocks.rows.setdefault(split, []).extend(own.rows[split])
            blocks.checksums.setdefault(split, []).extend(own.checksums[split])
            of_groups.setdefault(split, []).append(sum(own.rows[split]))
        for split, sums in own.sums.items():
            blocks.sums[split] = add_sums(blocks.sums[split], sums) if split in blocks.sums else sums
        blocks.counts += own.counts
        late += receipt["late"]
        plan = files_of_group(folder, group)["plan"].name
        files[plan], sha256[plan] = receipt["files"][plan], receipt["sha256"][plan]
    rejects = folder / "rejects.jsonl"
    receipts, rejected = _join_rejects(recipe, dealt, folder, rejects, sha256)
    if late:
        rejected["no_trained_tokens"] += late
    read = sum(receipt["conversations"] for receipt in receipts)
    check_rejects(rejected, late, read, recipe, rejects)
    check_left(account, read, rejected, recipe, rejects)
    if config.validation and account.packed == account.in_train:
        raise DataError(
            "nothing_held_out",
            f"{config.name}: validation: {config.validation:g} is too small to hold out any of {account.packed:,} "
            f"conversations; raise it, remove it, or set plan_group to {account.packed:,} or more",
        )
    index = folder / "index.arrow"
    _join_indexes(folder, dealt.groups, index, account.samples is not None, sha256)
    joined = [index, rejects]
    if config.packing:
        joined.append(_join_rows(folder, dealt, sha256))
    # The bounds are computed over all pieces, because the bounds of groups may add up to more than one plan needs.
    for split, rows in blocks.rows.items():
        length = config.row_lengths.index(length_in(split, config.sequence_length))
        first = splits_of(first_packing(split), config.row_lengths)[length]
        blocks.bounds.append(bound_of(sum(rows), blocks.counts[number_of(first, config)], config, split))
    if len(config.row_lengths) > 1:
        train, held_out = np.split(blocks.counts, 2)
        for counts, times in ((train, config.epochs), (held_out, 1)):
            blocks.places += [lower_bound_places(counts.sum(axis=0), config.row_lengths)] * times
    facts = plan_facts(recipe, receipts, account, rejected, blocks)
    facts["groups"] = dealt.groups
    facts["shards"] = recipe.shards
    if config.balance and dealt.groups > 1:
        facts["rows_of_groups"] = of_groups
    facts["files"] = files | {path.name: path.stat().st_size for path in joined}
    facts["sha256"] = sha256
    return seal_plan(facts, recipe, folder)


def _join_rejects(
    recipe: Recipe, dealt: Dealt, folder: Path, path: Path, sha256: dict[str, str]
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Write rejects.jsonl; return the receipts of the parts and the count per reason.

    The receipts are returned without their rejects.
    """
    receipts, rejected = list[dict[str, Any]](), Counter[str]()
    with atomic_file(path) as out:
        for part, receipt in enumerate(token_receipts(recipe)):
            early = [reject._replace(part=part) for reject in early_rejects([receipt], [dealt.bases[part]])]
            write_rejects(out, early, recipe)
            rejected.update(reject.reason for reject in early)
            receipts.append({name: value for name, value in receipt.items() if name not in ("rejects", "batches")})
        for group in range(dealt.groups):
            with _checked(folder, group, "rejects").open("rb") as own:
                while chunk := own.read(CHUNK):
                    out.write(chunk)
    sha256[path.name] = out.digest()
    return receipts, rejected


def _join_indexes(folder: Path, groups: int, path: Path, with_turns: bool, sha256: dict[str, str]) -> None:
    schema = index_schema(with_turns)
    with atomic_file(path) as out, pa.ipc.new_stream(pa.PythonFile(out, "w"), schema) as writer:
        for group in range(groups):
            for batch in _index_of(_checked(folder, group, "index")):
                writer.write_batch(batch if with_turns else _without_turns(batch))
    sha256[path.name] = out.digest()


def _join_rows(folder: Path, dealt: Dealt, sha256: dict[str, str]) -> Path:
    paths = [_checked(folder, group, "rows") for group in range(dealt.groups)]
    with atomic_file(folder / ROWS) as out, pa.ipc.new_stream(pa.PythonFile(out, "w"), ROWS_SCHEMA) as writer:
        for shard in range(sum(dealt.shards.values())):
            group, number = place_of_shard(shard, dealt.groups, dealt.shards)
            with pa.OSFile(str(paths[group])) as source, pa.ipc.open_file(source) as reader:
                writer.write_batch(reader.get_batch(number))
    sha256[ROWS] = out.digest()
    return folder / ROWS


def _index_of(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.OSFile(str(path)) as source, pa.ipc.open_stream(source) as reader:
        yield from reader


def _without_turns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert a batch to the schema of an index without several samples."""
    *columns, dropped = (batch.column(name) for name in INDEX_SCHEMA.names)
    reasons = pa.DictionaryArray.from_arrays(dropped.indices, strings(DROP_REASONS))
    return pa.record_batch([*columns, reasons], INDEX_SCHEMA)


def _checked(folder: Path, group: int, name: str) -> Path:
    """Return a file of a group.

    Raises StorageError if the file is missing or damaged, and removes the receipts of all groups (`dropped`).
    """
    path, receipt = files_of_group(folder, group)[name], group_receipt(folder, group)
    if not path.is_file() or digest_of(path, "xxh3") != read_receipt(receipt)["xxh3"][name]:
        raise dropped(folder, path, receipt)
    return path
