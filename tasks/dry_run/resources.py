"""Estimate the disk space, memory, and time of a run."""

from __future__ import annotations

import os

import numpy as np

from tasks.dry_run.cost_model import COMMIT, HASHED_BYTE, ROW_BYTES, START, STEP, TASK, WRITTEN_BYTE, plan_seconds
from tasks.dry_run.model import Costs, Packed, SampleTokens
from tasks.recipe import Recipe
from tasks.sources.parts import HASH_THREADS

# Bytes on disk per piece: in index.arrow, of which the plan has a copy, and in plan.arrow.
INDEX_BYTES, PLAN_BYTES = 50.5, 25

# Memory of the largest process: BASE_MEMORY for the interpreter and libraries, and the larger of two terms. A worker
# takes TEXT_MEMORY each time its text doubles, from TEXT_START bytes on, for the words that gigatoken has seen: in
# total 130 MB at 1 MB of text, 157 at 13, and 175 at 64. The plan takes PLAN_MEMORY bytes per conversation
# (bench/packing/planning.py: 19 to 28).
BASE_MEMORY, TEXT_MEMORY, TEXT_START, PLAN_MEMORY = 105e6, 7.5e6, 100_000, 28

LIST_BYTES = 12.0  # per token of rows without padding, for three columns; the lengths take little

TOKEN_BYTES = 4  # mean bytes of text per token


def estimate_costs(
    recipe: Recipe, sampled: list[SampleTokens], packed: Packed, copies: np.ndarray, dropped: float, workers: int
) -> Costs:
    """Estimate the disk space, the memory, and the time of a run.

    `copies` is how often each conversation is packed. `dropped` is the number of conversations that are not packed.
    """
    config, cores = recipe.config, os.cpu_count() or 1
    conversations = sum(each.sample.expected for each in sampled)
    weights = [each.sample.expected / max(len(each.sample.records), 1) for each in sampled]
    token_files = sum(each.file.size * weight for each, weight in zip(sampled, weights, strict=True))
    if config.packing:
        places = sum(rows * config.rows.length_of(split) for split, rows in packed.rows.items())
        shards = places * float(ROW_BYTES + 4 * (config.loss_weight != "none"))
        if config.padding == "none":
            shards = (packed.tokens["packed"] + packed.tokens["padding"]) * LIST_BYTES
    else:  # all text is written twice: as messages, and rendered
        text = np.concatenate([each.text * weight for each, weight in zip(sampled, weights, strict=True)])
        shards = 2 * float(text @ copies)
    listed = packed.pieces + dropped
    disk = {
        "shards": shards,
        "index": listed * INDEX_BYTES,
        "token_files": token_files,
        "plan": listed * INDEX_BYTES + packed.pieces * PLAN_BYTES,
        "tokenizer": float(sum(file.stat().st_size for file in recipe.tokenizer_files.files)),
    }
    at_once = max(1, min(workers, cores))
    text_bytes = packed.tokens["encoded"] * TOKEN_BYTES / at_once
    planned = max(conversations, packed.pieces / config.epochs)
    memory = BASE_MEMORY + max(TEXT_MEMORY * np.log2(1 + text_bytes / TEXT_START), PLAN_MEMORY * planned)
    encoding = sum(each.seconds * weight for each, weight in zip(sampled, weights, strict=True))
    size = sum(file.bytes for file in recipe.files)
    parts = max(len(recipe.files), size // config.part_size)
    plan = TASK + plan_seconds(max(conversations, packed.pieces), packed.tokens["encoded"], config.epochs)
    steps = STEP * (parts + sum(recipe.shards.values()))
    hashing = size * HASHED_BYTE / min(HASH_THREADS, cores, len(recipe.files))
    seconds = START + hashing + plan + (encoding + steps + shards * WRITTEN_BYTE) / at_once + COMMIT
    return Costs(disk, float(memory), seconds)
