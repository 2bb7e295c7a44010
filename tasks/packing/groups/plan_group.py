"""Plan one group: its rows, its part of the index, and its account.

    deal.json ─▶ the runs of the group ─▶ columns ─▶ pieces ─▶ plan-00007.arrow     placements, a record batch per shard
                                                             ├▶ index-00007.arrow    places of its conversations
                                                             ├▶ rejects-00007.jsonl  those without a trained token
                                                             └▶ group-00007.json     the receipt: account, rows, bounds

A group may be planned on any machine and at any time after the parts are tokenized. Memory: 110 bytes per conversation.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tasks.config import Config
from tasks.packing.groups.columns import GroupColumns
from tasks.packing.groups.deal import runs_of, shards_of
from tasks.packing.groups.dealt import Dealt, read_dealt
from tasks.packing.ledger import count_losses, take_account
from tasks.packing.mixture import mix
from tasks.packing.plan import Blocks, late_rejects, select_pieces, write_blocks
from tasks.packing.rejects import write_rejects
from tasks.storage.files import atomic_file, digest_of, sha256_of, write_receipt
from tasks.storage.paths import Layout
from tasks.storage.splits import splits_of


def files_of_group(folder: Path, group: int) -> dict[str, Path]:
    """Return the paths of the files of a group, by name.

    Without packing, `rows`, the statistics of rows, is not written.
    """
    return {
        "plan": folder / f"plan-{group:05d}.arrow",
        "index": folder / f"index-{group:05d}.arrow",
        "rows": folder / f"rows-{group:05d}.arrow",
        "rejects": folder / f"rejects-{group:05d}.jsonl",
    }


def group_receipt(folder: Path, group: int) -> Path:
    return folder / f"group-{group:05d}.json"


def plan_group(layout: Layout, folder: Path, group: int) -> dict[str, Any]:
    """Plan a group, write its files to `folder`, and return its receipt.

    The receipt is written last. It lists no files if the corpus does not have this group, because it has fewer
    conversations than its bytes allow. Raises DataError if a conversation is too long and `overlong` is error.
    """
    dealt = read_dealt(folder, layout)
    receipt: dict[str, Any] = {"files": {}}
    if group < dealt.groups:
        receipt = _plan(dealt, folder, group)
    write_receipt(group_receipt(folder, group), receipt)
    return receipt


def _plan(dealt: Dealt, folder: Path, group: int) -> dict[str, Any]:
    config, files = dealt.recipe.config, files_of_group(folder, group)
    if not config.packing:
        del files["rows"]
    runs = runs_of(group, dealt.groups, dealt.edges, config.plan_chunk, _train_shards(dealt), config.seed)
    tokens = GroupColumns(dealt.files(), dealt.bases, runs)
    # Each run is a part of the group.
    recipe = replace(dealt.recipe, parts=tuple(dealt.recipe.parts[run.part] for run in tokens.runs))
    pieces = select_pieces(tokens, recipe, is_sample=True)
    late = late_rejects(pieces.accepted, tokens, recipe)
    with atomic_file(files["rejects"]) as out:
        write_rejects(out, late, recipe)
    pieces = mix(pieces, tokens, recipe)
    account = take_account(pieces, tokens, recipe, count_losses(pieces, config))
    shards = {split: shards_of(group, dealt.groups, count) for split, count in dealt.shards.items()}
    blocks = write_blocks(files, pieces, tokens, recipe, shards, group)
    return {
        "account": account.to_json(),
        "late": len(late),
        "rows": blocks.rows,
        "row_sums": blocks.sums,
        "checksums": blocks.checksums,
        "counts": [[found.tolist(), own[found].tolist()] for own in blocks.counts for found in [np.flatnonzero(own)]],
        "files": {path.name: path.stat().st_size for path in files.values()},
        "sha256": {files["plan"].name: sha256_of(files["plan"])},
        "xxh3": {name: digest_of(files[name], "xxh3") for name in files if name != "plan"},
    }


def _train_shards(dealt: Dealt) -> int:
    """Return the number of shards that the training split has per length of rows."""
    return dealt.shards[splits_of("train", dealt.recipe.config.row_lengths)[0]]


def blocks_of(receipt: dict[str, Any], config: Config) -> Blocks:
    """Return the planned blocks of a group from its receipt."""
    blocks = Blocks.empty(config)
    for own, (lengths, found) in zip(blocks.counts, receipt["counts"], strict=True):
        own[lengths] = found
    return replace(blocks, rows=receipt["rows"], checksums=receipt["checksums"], sums=receipt["row_sums"])
