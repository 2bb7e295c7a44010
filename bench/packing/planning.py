"""Measure the memory and time of PlanPacking.

PlanPacking reads token files and writes plan.arrow, index.arrow, and the receipt.

    python bench/packing/planning.py [KEY=VALUE …] [--conversations 1000000 10000000]

Generates token files of 200,000 conversations each, with 28 tokens on average, for rows of 128 (4.8 conversations per
row, like chats in rows of 1024). KEY=VALUE overrides settings of the config, such as validation=0.01. 10 million
conversations take 1.7 GB. With --rows, only the rows and places are computed, from the lengths in memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from packcorpus.tasks.config import Config
from packcorpus.tasks.packing.placement import place
from packcorpus.tasks.packing.plan import make_plan
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.sources.model import Part, SourceFile
from packcorpus.tasks.storage.files import digest_of, write_receipt
from packcorpus.tasks.storage.layout import Layout
from packcorpus.tasks.storage.schemas import TOKENS_SCHEMA
from packcorpus.tasks.tokenization.tokenize_part import NOTICED

PART = 200_000
BATCH = 8192
LENGTH = 128
EOS = 2


def lengths_of(random: np.random.Generator, count: int) -> np.ndarray:
    """Return the lengths of conversations, int64[count]."""
    return (4 + np.exp(random.normal(2.9, 0.7, count))).astype(np.int64).clip(max=LENGTH)


def write_part(recipe: Recipe, part: Part, number: int) -> None:
    """Write a token file of PART conversations, and its receipt.

    Every second token is trained.
    """
    key = recipe.tokens_key(part)
    path = recipe.layout.token_file(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(number)
    total = 0
    with pa.OSFile(str(path), "w") as file, pa.ipc.new_file(file, TOKENS_SCHEMA) as writer:
        for top in range(0, PART, BATCH):
            count = min(BATCH, PART - top)
            lengths = lengths_of(random, count)
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            values = np.arange(offsets[-1], dtype=np.int32) % 1000
            values[::2] = ~values[::2]
            values[offsets[:-1]] = ~5
            values[offsets[1:] - 1] = EOS
            trained = np.add.reduceat(values >= 0, offsets[:-1])
            total += len(values) - count
            columns = {
                "record": np.arange(top, top + count),
                "digest": random.integers(0, 1 << 63, count, dtype=np.uint64) * np.uint64(2),
                "prompt": random.integers(0, 1 << 63, count, dtype=np.uint64) * np.uint64(2),
                "turns": np.full(count, 2, np.int32),
                "turn": np.full(count, -1, np.int32),
                "trained": trained.astype(np.int32),
                "separator": np.ones(count, bool),
                "tokens": pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values)),
            }
            arrays = [pa.array(columns[name]) if name != "tokens" else columns[name] for name in TOKENS_SCHEMA.names]
            writer.write_batch(pa.record_batch(arrays, schema=TOKENS_SCHEMA))
    counts = {"conversations": PART, "records": PART, "accepted": PART, "tokens": total, "rejects": []}
    receipt = counts | dict.fromkeys(NOTICED, 0) | {"bytes": path.stat().st_size, "xxh3": digest_of(path, "xxh3")}
    write_receipt(recipe.layout.token_receipt(key), receipt)


def recipe_of(root: Path, conversations: int, settings: dict[str, Any]) -> Recipe:
    (root / "any.model").write_bytes(b"never opened here")
    values = {"sources": [{"path": "x"}], "tokenizer": "any.model", "sequence_length": LENGTH} | settings
    size = 1200 * conversations
    file = SourceFile(root / "x", "x.jsonl", "jsonl", "", "messages", (), size, f"{0:064x}", 0)
    parts = tuple(Part(file, at, at + 1, f"{at:064x}") for at in range(conversations // PART))
    return Recipe(Config.model_validate(values), root, Layout(root), (file,), parts)


def measure(root: Path, conversations: int, settings: dict[str, Any], only_rows: bool) -> None:
    """Print one line of the table.

    Call it in a separate process, because peak memory is per process.
    """
    recipe = recipe_of(root, conversations, settings)
    if only_rows:
        random, lengths = np.random.default_rng(0), np.empty(conversations, np.int32)
        for top in range(0, conversations, PART):
            lengths[top : top + PART] = lengths_of(random, len(lengths[top : top + PART]))
        held_out = np.zeros(conversations, np.bool_)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    started, used = time.perf_counter(), time.process_time()
    if only_rows:
        rows = place(lengths, held_out, recipe.config, recipe.shards).rows
    else:
        rows = make_plan(recipe, recipe.plan_folder)["packing_metadata"]["rows"]
    seconds, cpu = time.perf_counter() - started, time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(
        f"{conversations:>13,} {rows:>11,} {seconds:>8.1f} {cpu:>7.1f} {before / 1e6:>9,.0f} {peak / 1e6:>8,.0f} "
        f"{(peak - before) / conversations:>23.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the memory and time of PlanPacking.")
    parser.add_argument("--conversations", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--rows", action="store_true", help="compute only rows and places, without token files")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    settings = {name: yaml.safe_load(value) for name, value in (pair.split("=", 1) for pair in arguments.settings)}
    print("conversations        rows  seconds   CPU s  start MB  peak MB  bytes/conversation")
    with tempfile.TemporaryDirectory(prefix="packcorpus-") as name:
        recipe = recipe_of(Path(name), max(arguments.conversations), settings)
        for number, part in enumerate(() if arguments.rows else recipe.parts):
            write_part(recipe, part, number)
        for conversations in arguments.conversations:
            process = multiprocessing.get_context("spawn").Process(
                target=measure, args=(Path(name), conversations, settings, arguments.rows)
            )
            process.start()
            process.join()


if __name__ == "__main__":
    main()
