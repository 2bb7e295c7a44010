"""Measure the memory and time of planning one group, and of joining all groups.

    python bench/packing/joining.py [--conversations 1000000000] [--group 1000000]

Two groups are planned from token files like the files of planning.py. Then as many receipts are joined as a corpus of
`--conversations` has, each like the receipt of the first group, with an index and statistics of a few rows. Both are
copied batch by batch, so their size costs time, but no memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from planning import PART, recipe_of, write_part

from tasks.core.seeded_order import CHUNKS
from tasks.packing.groups.deal import deal, shards_of
from tasks.packing.groups.dealt import DEAL, deal_parts
from tasks.packing.groups.join import join_groups
from tasks.packing.groups.plan_group import files_of_group, group_receipt, plan_group
from tasks.recipe import Recipe
from tasks.storage.files import digest_of, read_receipt, write_receipt

MOST_PARTS = 2048


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def measured(what: str, work: Callable[..., Any], *given: Any) -> None:
    """Run `work` in a separate process, because peak memory is per process.

    Prints a line of the table.
    """

    def run() -> None:
        before, started = peak(), time.process_time()
        work(*given)
        print(
            f"{what:<52} {time.process_time() - started:>9.1f} {before / 1e6:>9,.0f} {peak() / 1e6:>8,.0f}", flush=True
        )

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()


def large(recipe: Recipe, conversations: int) -> Recipe:
    """Return a recipe with the most parts that a corpus of this size may have."""
    [file], one = recipe.files, recipe.parts[0]
    file = replace(file, bytes=1200 * conversations)
    parts = tuple(replace(one, file=file, sha256=f"{number:064x}") for number in range(MOST_PARTS))
    return replace(recipe, files=(file,), parts=parts)


def simulate(recipe: Recipe, folder: Path, conversations: int, like: dict[str, Any], group: Recipe) -> None:
    """Write receipts of token files and groups that add up to `conversations`."""
    [sums] = like["account"]["sums"]  # pieces, places, trained, separators, four each: first copies in train come first
    groups = conversations // sums[0]
    own = dict.fromkeys(("conversations", "records", "accepted"), sums[0]) | {"tokens": sums[4] - sums[12]}
    some = read_receipt(group.layout.token_receipt(group.tokens_key(group.parts[0])))
    for number, part in enumerate(recipe.parts):
        # The first part has all conversations, so that the ledger balances.
        counts = {name: 0 if number else groups * value for name, value in own.items()}
        write_receipt(recipe.layout.token_receipt(recipe.tokens_key(part)), some | counts)
    keys = recipe.token_keys
    rows = conversations // MOST_PARTS
    values = {
        "groups": groups,
        "shards": recipe.shards,
        "config": recipe.config.model_dump(mode="json"),
        "files": [[file.name, file.container, file.entry] for file in recipe.files],
        "parts": [[0, rows, rows * number, key] for number, key in enumerate(keys)],
    }
    write_receipt(folder / DEAL, values)
    small = folder / "small.arrow"
    with pa.OSFile(str(files_of_group(group.plan_folder, 0)["index"])) as source, pa.ipc.open_stream(source) as reader:
        first = next(iter(reader)).slice(0, 100)
    with pa.OSFile(str(small), "w") as out, pa.ipc.new_stream(out, first.schema) as writer:
        writer.write_batch(first)
    digest, size = digest_of(small, "xxh3"), sum(like["rows"]["train"])
    with pa.OSFile(str(files_of_group(group.plan_folder, 0)["rows"])) as source, pa.ipc.open_file(source) as reader:
        statistics = reader.get_batch(0).slice(0, 1)
    for number in range(groups):
        files = files_of_group(folder, number)
        files["index"].hardlink_to(small)
        files["rejects"].touch()
        counts = {split: len(shards_of(number, groups, count)) for split, count in recipe.shards.items()}
        of_rows = folder / f"small-{sum(counts.values())}.arrow"  # a batch for each shard
        if not of_rows.exists():
            with pa.OSFile(str(of_rows), "w") as out, pa.ipc.new_file(out, statistics.schema) as writer:
                for _ in range(sum(counts.values())):
                    writer.write_batch(statistics)
        files["rows"].hardlink_to(of_rows)
        edges = np.arange(counts["train"] + 1) * size // counts["train"]
        receipt = like | {
            "rows": {"train": np.diff(edges).tolist(), "validation": [0] * counts["validation"]},
            "checksums": {split: ["0" * 32] * count for split, count in counts.items()},
            "files": {files["plan"].name: 0},
            "sha256": {files["plan"].name: "0" * 64},
            "xxh3": like["xxh3"] | {"index": digest, "rows": digest_of(of_rows, "xxh3")},
        }
        write_receipt(group_receipt(folder, number), receipt)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the memory and time of planning in groups.")
    parser.add_argument("--conversations", type=int, default=1_000_000_000)
    parser.add_argument("--group", type=int, default=1_000_000)
    given = parser.parse_args()
    print(f"{'':<52} CPU s     start MB  peak MB", flush=True)
    os.fsync = lambda file: None  # thousands of receipts: nothing here has to survive a power failure
    with tempfile.TemporaryDirectory(prefix="packcorpus-") as name:
        # A recipe of two groups with token files for all of its parts.
        group = recipe_of(Path(name), 2 * given.group, {"plan_group": given.group})
        for number, part in enumerate(group.parts):
            write_part(group, part, number)
        measured(f"dealing {len(group.parts) * PART:,} conversations", deal_parts, group, group.plan_folder)
        for number in range(2):
            measured(f"planning group {number} of 2", plan_group, group.layout, group.plan_folder, number)
        like = read_receipt(group_receipt(group.plan_folder, 0))
        recipe = large(group, given.conversations)
        simulate(recipe, recipe.plan_folder, given.conversations, like, group)
        groups = read_receipt(recipe.plan_folder / DEAL)["groups"]
        chunks, shards = given.conversations // recipe.config.plan_chunk, recipe.shards["train"]
        measured(f"dealing {chunks:,} chunks to groups", deal, chunks, shards, groups, 42, CHUNKS)
        measured(f"joining {groups:,} groups, {shards:,} shards", join_groups, recipe, recipe.plan_folder)


if __name__ == "__main__":
    main()
