"""Measure rows, fill, lower bound, and times for each shape of rows.

    python bench/packing/row_shapes.py CONFIG [--lengths 1024 4096] [--align 1 8 16 64 128]

Tokenizes the sources of CONFIG once. Then plans, writes, and verifies a corpus of each shape in a temporary folder, in
this process. Times are CPU seconds of the plan and of the shards.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from packcorpus.tasks.config import load_config
from packcorpus.tasks.recipe import recipe_of
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.verification.verify import verify
from packcorpus.tasks.work import Plan, Publish, run_all


def measure(config_file: Path, root: Path, settings: dict[str, Any]) -> str:
    """Make a corpus with rows of one shape, and return its line of the table."""
    config = load_config(config_file)
    config = type(config).model_validate(config.model_dump() | settings)
    recipe = recipe_of(config, config_file.parent, root)
    for stage in Plan(recipe).requires():
        run_all(stage)
    clock = [time.process_time()]
    run_all(Plan(recipe))
    clock.append(time.process_time())
    run_all(Publish(recipe, lambda: {"seconds": 1.0}))
    clock.append(time.process_time())
    manifest = load_manifest(recipe.published)
    verify(recipe.published)
    tokens, packing = manifest.ledger.tokens, manifest.packing_metadata
    size = sum(shard.bytes for split in manifest.splits.values() for shard in split.shards)
    plan, write = clock[1] - clock[0], clock[2] - clock[1]
    shape = ", ".join(f"{name}: {value}" for name, value in settings.items() if name != "sequence_length")
    return (
        f"| {manifest.sequence_length:,} | {shape} | {packing.rows:,} | {packing.lower_bound_rows:,} "
        f"({packing.lower_bound}) | {packing.packing_efficiency:.2f} % | {tokens.alignment or 0:,} | "
        f"{tokens.padding - (tokens.alignment or 0):,} | {size / 1e6:.1f} | {plan:.2f} | {write:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure rows, fill, bound, and times for each shape of rows.")
    parser.add_argument("config", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--align", type=int, nargs="+", default=[1, 8, 16, 64, 128])
    arguments = parser.parse_args()
    print("| row | shape | rows | lower bound | full | alignment | other padding | MB of shards | plan s | write s |")
    print("|---:|---|---:|---|---:|---:|---:|---:|---:|---:|")
    shapes: list[dict[str, Any]] = [{"align": align} for align in arguments.align]
    shapes += [{"padding": "none"}, {"padding": "none", "align": 16}]
    with tempfile.TemporaryDirectory(prefix="packcorpus-") as name:
        for length in arguments.lengths:
            for shape in shapes:
                print(measure(arguments.config, Path(name), {"sequence_length": length} | shape), flush=True)


if __name__ == "__main__":
    main()
