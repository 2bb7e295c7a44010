"""Token files → plan: every conversation → (split, shard, row, start), from lengths alone.

    lengths ─split by content─▶ train, validation ─over-long policy─▶ pieces ─pack─▶ rows ─shuffle─▶ shards
                                                          └─▶ rejected, dropped, truncated: counted

Written to one folder, the receipt last:

    plan.arrow      IPC file; record batch s holds the pieces of shard s, by row and start (shards.PLAN_SCHEMA)
    index.arrow     where every accepted conversation stands
    rejects.jsonl   a line for each rejected conversation
    plan.json       ledger, sources, packing figures: the receipt
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tasks import packing
from tasks.batch import NOTICED
from tasks.columns import to_arrow, to_numpy
from tasks.errors import DataError, StorageError
from tasks.files import atomic_file, read_json, sha256_of, to_json, write_bytes
from tasks.index import write_index
from tasks.ledger import make_ledger, packing_metadata, source_facts
from tasks.pieces import Accepted, Pieces, cut_overlong
from tasks.placement import Placed, place
from tasks.recipe import Recipe
from tasks.rejects import Rejected, check_rejects, write_rejects
from tasks.shards import PLAN_SCHEMA
from tasks.sources import Part
from tasks.token_files import TokenFiles

PLAN_FILES = ("plan.arrow", "index.arrow", "rejects.jsonl")


def make_plan(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Write the plan, its receipt last, and return the receipt.

    Raises DataError where too many conversations are rejected, none is left, or the policy for over-long ones says so,
    StorageError where a token file is not what was written.
    """
    config = recipe.config
    keys = [recipe.tokens_key(part) for part in recipe.parts]
    receipts = [read_json(recipe.layout.token_receipt(key)) for key in keys]
    files = [recipe.layout.token_file(key) for key in keys]
    for file, receipt in zip(files, receipts, strict=True):
        if sha256_of(file) != receipt["sha256"]:
            raise StorageError(
                "damaged_artefact", f"{file}: is damaged (its SHA-256 is not the recorded one); delete it and run again"
            )
    tokens = TokenFiles(files)
    bases = _record_bases(recipe.parts, receipts)
    accepted = _read_columns(tokens, bases, config.validation)
    pieces, lost, late = cut_overlong(accepted, tokens, recipe)
    rejects = _rejects(receipts, bases, accepted, late, recipe)
    write_rejects(folder / "rejects.jsonl", rejects, recipe)
    read = sum(receipt["conversations"] for receipt in receipts)
    check_rejects(rejects, read, recipe, folder / "rejects.jsonl")
    if not len(pieces.conversation):
        raise DataError(
            "nothing_to_pack",
            f"{config.name}: no conversation is left to pack: {read:,} read, {len(rejects):,} rejected, "
            f"{lost.dropped:,} dropped as longer than {config.sequence_length:,} tokens",
        )
    placed = place(pieces, accepted, config, recipe.shards)
    places = placed.rows * config.sequence_length if config.packing else 0
    receipt = {
        "ledger": make_ledger(receipts, accepted, pieces, lost, rejects, places),
        "packing_metadata": packing_metadata(
            recipe, pieces, placed, packing.ALGORITHM if config.packing else "one conversation a row"
        ),
        "sources": source_facts(recipe, receipts, accepted, pieces, late),
        "noticed": {name: sum(receipt[name] for receipt in receipts) for name in NOTICED},
        "rows_of_shards": placed.rows_of_shards.tolist(),
    }
    _write_plan(folder / "plan.arrow", pieces, placed, accepted)
    write_index(folder / "index.arrow", pieces, placed, accepted, late, recipe)
    receipt["files"] = {name: (folder / name).stat().st_size for name in PLAN_FILES}
    # By these a plan is found for a corpus whose sources are gone, and known to be whole.
    receipt["sha256"] = {name: sha256_of(folder / name) for name in PLAN_FILES}
    receipt |= {"name": config.name, "corpus": recipe.corpus_key}
    receipt["token_files"] = keys
    write_bytes(folder / "plan.json", to_json(receipt))
    return receipt


def _record_bases(parts: tuple[Part, ...], receipts: list[dict[str, Any]]) -> np.ndarray:
    """Number of the first record of each part within its file; int64[parts]."""
    bases = np.zeros(len(parts), np.int64)
    for index in range(1, len(parts)):
        if parts[index].file is parts[index - 1].file:
            bases[index] = bases[index - 1] + receipts[index - 1]["records"]
    return bases


def _read_columns(tokens: TokenFiles, bases: np.ndarray, validation: float) -> Accepted:
    counts = [table.num_rows for table in tokens.tables]
    part = np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    def column(name: str, kind: type) -> np.ndarray:
        chunks = (chunk for table in tokens.tables for chunk in table.column(name).chunks)
        return np.concatenate([np.empty(0, kind), *map(to_numpy, chunks)])

    return Accepted(
        part=part,
        place=np.concatenate([np.arange(count, dtype=np.int32) for count in counts]),
        record=column("record", np.int64) + bases[part],
        length=tokens.lengths(),
        trained=column("trained", np.int32),
        separator=column("separator", np.bool_),
        # A share of the hashes is a share of the conversations, the same one whatever else is in the corpus.
        held_out=column("digest", np.uint64) < np.uint64(int(validation * 2**64)),
    )


def _rejects(
    receipts: list[dict[str, Any]], bases: np.ndarray, accepted: Accepted, late: np.ndarray, recipe: Recipe
) -> list[Rejected]:
    """Those of every part and those that the over-long policy left without a trained token, in source order."""
    config = recipe.config
    message = (
        f"no trained token is left within {config.sequence_length:,} tokens (overlong: {config.overlong}); "
        "a larger sequence_length keeps it"
    )
    early = [
        Rejected(part, int(bases[part]) + record, code, text)
        for part, receipt in enumerate(receipts)
        for record, code, text in receipt["rejects"]
    ]
    cut = [Rejected(int(accepted.part[c]), int(accepted.record[c]), "no_trained_tokens", message) for c in late]
    return sorted(early + cut, key=lambda reject: (reject.part, reject.record))


def _write_plan(path: Path, pieces: Pieces, placed: Placed, accepted: Accepted) -> None:
    # One number for shard, row and start, in 9 + 31 + 20 bits: sorted in a third of the time of three.
    key = placed.shard.astype(np.int64)
    for bits, column in ((31, placed.row), (20, placed.start)):
        key <<= bits
        key |= column
    order = np.argsort(key)
    del key
    ends = np.cumsum(np.bincount(placed.shard, minlength=len(placed.rows_of_shards))).tolist()
    with atomic_file(path) as out, pa.ipc.new_file(pa.PythonFile(out, "w"), PLAN_SCHEMA) as writer:
        for top, bottom in pairwise([0, *ends]):
            chosen = order[top:bottom]
            of_shard = pieces[chosen]
            columns = [
                placed.row[chosen],
                placed.start[chosen],
                accepted.part[of_shard.conversation],
                accepted.place[of_shard.conversation],
                of_shard.first,
                of_shard.taken,
                of_shard.closed,
            ]
            writer.write_batch(pa.record_batch([to_arrow(values) for values in columns], PLAN_SCHEMA))
