"""Pack conversations with and without trees; print tokens and rows.

    python bench/packing/trees.py CONFIG.yaml [--plan SAMPLES]

The conversations of CONFIG.yaml are packed with `turns: auto` and `turns: apart`. "Pairs" are the pairs of tokens that
attention computes, halved. `--plan` measures instead how long it takes to cut the trees of so many samples, five for
each conversation.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from itertools import product
from pathlib import Path

import numpy as np
import yaml

from packcorpus.tasks.config import config_from
from packcorpus.tasks.packing.trees import cut_trees
from packcorpus.tasks.recipe import recipe_of
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.work import Publish, run_all


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", type=Path, nargs="?")
    parser.add_argument("--plan", type=int, default=0, help="samples")
    given = parser.parse_args()
    if given.plan:
        print(plan(given.plan))
    else:
        print("| turns | share | samples | tokens | rows | full | trained | pairs |\n|---|---|" + "---:|" * 6)
        for turns, share in product(("auto", "apart"), ("none", "conversation")):
            print(f"| {turns} | {share} | {packed(given.config, turns, share)} |", flush=True)


def packed(config: Path, turns: str, share: str) -> str:
    values = yaml.safe_load(config.read_text())
    values["advanced"] = values.get("advanced", {}) | {"turns": turns}
    with tempfile.TemporaryDirectory() as root:
        recipe = recipe_of(config_from(values | {"share": share}, str(config)), config.parent, Path(root))
        run_all(Publish(recipe))
        manifest = load_manifest(recipe.published)
    ledger, packing = manifest.ledger, manifest.packing_metadata
    samples = ledger.samples.packed if ledger.samples else ledger.conversations.packed
    pairs = sum(split.statistics.squares for split in manifest.splits.values() if split.statistics) / 2
    trained = 100 * ledger.tokens.trained / ledger.tokens.packed
    full = f"{packing.packing_efficiency:.1f} %"
    return f"{samples:,} | {ledger.tokens.packed:,} | {packing.rows:,} | {full} | {trained:.1f} % | {pairs / 1e9:.2f} G"


def plan(samples: int) -> str:
    random = np.random.default_rng(0)
    lengths = random.integers(200, 4000, samples).astype(np.int32)
    alike = (np.minimum(lengths, np.roll(lengths, 1)) * random.random(samples)).astype(np.int32)
    start = time.perf_counter()
    cut_trees(np.arange(0, samples, 5), lengths, np.ones(samples, np.bool_), alike, 8192)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    return f"{samples:,} samples: {time.perf_counter() - start:.1f} s, {memory:.0f} MB"


if __name__ == "__main__":
    main()
