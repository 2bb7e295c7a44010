"""Cost model of `packcorpus check` and of the time remaining.

The constants are measured seconds of one idle core. The cost of encoding depends on tokenizer and template, so it is
measured on the sample, or during the run. To refit the constants, run on an idle machine:

    python bench/eta.py CONFIG               for START, TASK, STEP (not with one worker, which forks no process)
    python bench/eta.py CONFIG --times 10    for the constants per byte, token, and conversation

The last lines of its output compare the predicted and the measured CPU seconds of each stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from packcorpus.tasks.core.process import cores, free_disk, memory_limit
from packcorpus.tasks.readers.containers import container_named
from packcorpus.tasks.sources.parts import HASH_THREADS
from packcorpus.tasks.storage.facts import Ledger
from packcorpus.tasks.stores.urls import url_of

if TYPE_CHECKING:  # a run reads only the constants
    from packcorpus.tasks.dry_run.sample import Selection

START = 1.2  # interpreter, libraries and the graph
HASHED_BYTE = 1.0e-9  # of a source, per thread: hashed once as a file and once as a part
TASK = 0.03  # a fork, page faults, Luigi, syncs
STEP = 0.007  # per part and shard, in a worker that stays: two files, two lists of all parts
WRITTEN_BYTE = 2.7e-9  # of a shard
UNPACKED_BYTE = {"gz": 3.5e-9, "zst": 1.2e-9, "": 1.5e-9}  # by compression, for each time that it is unpacked
COMMIT = 0.1

# Bytes per token in a shard: int32 + int8 + int32 + int32.
ROW_BYTES = 13

LIST_BYTES = 12.0  # per token of rows without padding, for three columns; the lengths take little
TOKEN_BYTES = 4  # mean bytes of text per token

# Bytes on disk per piece: in index.arrow, of which the plan has a copy, and in plan.arrow.
INDEX_BYTES, PLAN_BYTES = 50.5, 25

# Memory of the largest process: BASE_MEMORY for the interpreter and libraries, and the larger of two terms. A worker
# takes TEXT_MEMORY each time its text doubles, from TEXT_START bytes on, for the words that gigatoken has seen: in
# total 130 MB at 1 MB of text, 157 at 13, and 175 at 64. The process of the run encodes PROOF bytes to choose the
# encoder, and the plan takes PLAN_MEMORY bytes per conversation (bench/packing/planning.py: 19 to 28).
BASE_MEMORY, TEXT_MEMORY, TEXT_START, PROOF, PLAN_MEMORY = 105e6, 7.5e6, 100_000, 8 << 20, 28
TABLE_MEMORY = 50e6  # for the pages and rows of a table whose row groups are large

# Near-duplicates (bench/clean.py): seconds per token, and memory, of which each conversation takes a part.
NEAR_TOKEN, NEAR_BASE, NEAR_MEMORY = 0.12e-6, 100e6, 160
# Trees across conversations (bench/packing/trees.py --plan): seconds per token, and memory per sample.
TREE_TOKEN, TREE_MEMORY = 0.05e-6, 800


def plan_seconds(pieces: float, tokens: float, epochs: int = 1) -> float:
    """Return the seconds of the plan, without its TASK.

    A conversation of 200 tokens takes 0.9 µs. Filling rows takes the same time for any number of pieces. Token files
    are hashed, 4 bytes per token.
    """
    return 0.06 * epochs + 0.7e-6 * pieces + 1.2e-9 * tokens


def estimate_costs(chosen: Selection, ledger: Ledger, places: int, workers: int) -> dict[str, Any]:
    """Return the costs of a Prediction whose rows have `places` places."""
    recipe, config, tokens, usable = chosen.recipe, chosen.recipe.config, ledger.tokens, cores()
    conversations, pieces = ledger.conversations.read, ledger.pieces.packed
    weights = [each.sample.expected / max(len(each.sample.records), 1) for each in chosen.sampled]
    if not config.packing:  # all text is written twice: as messages, and rendered
        text = np.concatenate([np.empty(0, np.int64), *(each.text for each in chosen.sampled)])[chosen.repeated.rows]
        is_packed, copies = chosen.pieces.accepted.reason == 0, chosen.pieces.copies
        shards = 2 * chosen.scale * float(text @ (is_packed * (1 if copies is None else copies)))
    elif config.padding == "none":
        shards = (tokens.packed + tokens.padding) * LIST_BYTES
    else:
        shards = places * float(ROW_BYTES + 4 * (config.loss_weight != "none") + 4 * config.rows.is_shared)
    listed = pieces + sum(ledger.conversations.dropped.values())
    further = 4 * config.splits_at_turns + 4 * config.rows.is_shared
    of_index, of_plan = INDEX_BYTES + further, PLAN_BYTES + further
    disk = {
        "shards": shards,
        "index": listed * of_index,
        "token_files": sum(each.file.size * weight for each, weight in zip(chosen.sampled, weights, strict=True)),
        "plan": listed * of_index + pieces * of_plan,
        "tokenizer": sum(file.stat().st_size for file in recipe.tokenizer_files.files),
    }
    at_once = max(1, min(workers, usable))
    text_bytes = tokens.encoded * TOKEN_BYTES
    planned = max(conversations, pieces / config.epochs)
    of_worker, of_run = (
        TEXT_MEMORY * np.log2(1 + size / TEXT_START) for size in (text_bytes / at_once, min(text_bytes, PROOF))
    )
    finds_near = config.duplicates == "near"
    plan_memory = PLAN_MEMORY * planned + finds_near * (NEAR_BASE + NEAR_MEMORY * conversations)
    plan_memory += (config.share == "all") * TREE_MEMORY * pieces / config.epochs
    memory = BASE_MEMORY + max(of_worker, of_run + plan_memory)
    unpacked = [container_named(file.container).copied_bytes(file, config.part_size) for file in recipe.files]
    disk |= {"unpacked": sum(unpacked)} if any(unpacked) else {}
    memory += TABLE_MEMORY * any(
        size and not file.compression for file, size in zip(recipe.files, unpacked, strict=True)
    )
    unpacking = [size * UNPACKED_BYTE[file.compression] for file, size in zip(recipe.files, unpacked, strict=True)]
    encoding = sum(each.seconds * weight for each, weight in zip(chosen.sampled, weights, strict=True))
    size = sum(file.bytes for file in recipe.files)
    parts = max(len(recipe.files), (size + sum(unpacked)) // config.part_size)
    plan = TASK + plan_seconds(max(conversations, pieces), tokens.encoded, config.epochs)
    plan += (finds_near * NEAR_TOKEN + (config.share == "all") * TREE_TOKEN) * tokens.encoded
    steps = STEP * (parts + sum(recipe.shards.values()))
    # To be cut, a text is unpacked while it is hashed.
    cutting = sum(each for file, each in zip(recipe.files, unpacking, strict=True) if file.compression)
    hashing = (size * HASHED_BYTE + cutting) / min(HASH_THREADS, usable, len(recipe.files))
    seconds = START + hashing + plan + (sum(unpacking) + encoding + steps + shards * WRITTEN_BYTE) / at_once + COMMIT
    return {
        "bytes_on_disk": {name: round(size) for name, size in disk.items()},
        "disk_free_bytes": None if url_of(recipe.layout.root) else free_disk(recipe.layout.root / "data"),
        "peak_memory_bytes": round(float(memory)),
        "memory_limit_bytes": memory_limit(),
        "seconds": round(seconds, 1),
        "workers": workers,
        "cores": usable,
    }
