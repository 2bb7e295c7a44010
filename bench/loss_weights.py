"""Measure the cost of loss weights.

    python bench/loss_weights.py CONFIG [--rounds 3]

    CONFIG with loss_weight: none, data, conversation, both ─run_all─▶ a corpus each, in a temporary folder

Prints a Markdown table of medians: CPU seconds of each stage, and bytes of token files, plan, and shards. Uses one
process, without Luigi. For `data` and `both`, the records of CONFIG need no weights: without weights, each sample has
one run of weight 1, which takes as much time and space as any other weight.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

from packcorpus.tasks.config import load_config
from packcorpus.tasks.recipe import recipe_of
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.work import Plan, Publish, TokenizePart, WriteShard

MODES = ("none", "data", "conversation", "both")


def measure(config: Path, mode: str, root: Path) -> dict[str, float]:
    """Pack a corpus; return CPU seconds by stage, and bytes by kind of file."""
    settings = load_config(config).model_copy(update={"loss_weight": mode})
    recipe = recipe_of(settings, config.parent, root)
    stages = {
        "tokenize": TokenizePart.all_of(recipe),
        "plan": [Plan(recipe)],
        "shards": WriteShard.all_of(recipe),
        "publish": [Publish(recipe)],
    }
    assert recipe.encoder, "loaded before the clock starts"
    found: dict[str, float] = {}
    for name, own in stages.items():
        start = time.process_time()
        for stage in own:
            stage.run()
        found[name] = time.process_time() - start
    manifest = load_manifest(recipe.published)
    token_files = {recipe.layout.token_file(key) for key in recipe.token_keys}
    found["token MB"] = sum(file.stat().st_size for file in token_files) / 1e6
    found["plan MB"] = (recipe.plan_folder / "plan.arrow").stat().st_size / 1e6
    found["shard MB"] = sum(shard.bytes for split in manifest.splits.values() for shard in split.shards) / 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for _ in range(given.rounds):
        for mode in MODES:
            with tempfile.TemporaryDirectory() as root:
                runs[mode].append(measure(given.config, mode, Path(root)))
    names = [*runs["none"][0]]
    print(f"| `loss_weight` | {' | '.join(names)} |\n|---|{'---:|' * len(names)}")
    for mode, own in runs.items():
        print(f"| `{mode}` | {' | '.join(f'{median(run[name] for run in own):.2f}' for name in names)} |")


if __name__ == "__main__":
    main()
