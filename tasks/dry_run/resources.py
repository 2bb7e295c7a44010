"""Estimate the disk space, memory, and time of a run."""

from __future__ import annotations

import os

import numpy as np

from tasks.dry_run.cost_model import COMMIT, HASHED_BYTE, ROW_BYTES, START, TASK, WRITTEN_BYTE, plan_seconds
from tasks.dry_run.model import Prediction, Tokens
from tasks.sources.parts import HASH_THREADS

# Bytes on disk, beside the tokens: of a piece in index.arrow (twice: the plan has a copy) and in plan.arrow.
INDEX_BYTES, PLAN_BYTES = 50.5, 25


# The largest process of a run: interpreter and libraries, and the more of these: 7.5 MB whenever the text of a part has
# doubled from 100 kB on, for the words that gigatoken has seen (130 MB in all at 1 MB, 157 at 13, 175 at 64), or the
# conversations of the plan (bench/planning.py: 19 to 28 bytes each).
BASE_MEMORY, TEXT_MEMORY, TEXT_BEGIN, PLAN_MEMORY = 105e6, 7.5e6, 100_000, 28


TOKEN_BYTES = 4  # of text, about


def add_costs(found: Prediction, tokens: list[Tokens], copies: np.ndarray) -> None:
    """Bytes on disk, memory of the largest process, and time. `copies` is of each conversation."""
    config = found.recipe.config
    conversations = sum(source.conversations for source in found.sources)
    weights = [source.conversations / max(len(source.sample.records), 1) for source in found.sources]
    token_files = sum(each.file.size * weight for each, weight in zip(tokens, weights, strict=True))
    if config.packing:
        shards = sum(found.rows.values()) * config.sequence_length * float(ROW_BYTES)
    else:  # all that is said stands there twice, as messages and as rendered
        text = np.concatenate([each.text * weight for each, weight in zip(tokens, weights, strict=True)])
        shards = 2 * float(text @ copies)
    listed = found.pieces + sum(found.dropped.values())
    found.disk = {
        "shards": shards,
        "index": listed * INDEX_BYTES,
        "token_files": token_files,
        "plan": listed * INDEX_BYTES + found.pieces * PLAN_BYTES,
        "tokenizer": float(found.tokenizer_bytes),
    }
    text_bytes = min(found.tokens["encoded"] * TOKEN_BYTES, config.part_size)
    planned = max(conversations, found.pieces / config.epochs)
    found.memory = BASE_MEMORY + max(TEXT_MEMORY * np.log2(1 + text_bytes / TEXT_BEGIN), PLAN_MEMORY * planned)
    encoding = sum(each.seconds * weight for each, weight in zip(tokens, weights, strict=True))
    parts = max(found.files, found.bytes // config.part_size)
    plan = TASK + plan_seconds(max(conversations, found.pieces), found.tokens["encoded"], config.epochs)
    tasks = TASK * (parts + sum(found.recipe.shards.values()))
    at_once = max(1, min(found.workers, os.cpu_count() or 1))
    hashing = found.bytes * HASHED_BYTE / min(HASH_THREADS, os.cpu_count() or 1, found.files)
    found.seconds = START + hashing + plan + (encoding + tasks + shards * WRITTEN_BYTE) / at_once + COMMIT
