"""Measure how well a run predicts its remaining time, every second.

    python bench/eta.py CONFIG [--times 10] [--workers 2]

With --times, the sources are enlarged first (bench/enlarge.py). "done" is the elapsed share of the total time; "off" is
the error of the predicted total time. Below the table, the script prints the largest error after the first tenth of the
run with its position, and compares the CPU seconds predicted by tasks/dry_run/cost_model.py with the actual CPU
seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
from enlarge import enlarge

from packcorpus.tasks.dry_run import cost_model

ROOT = Path(__file__).resolve().parent.parent


def progress_of_run(config: Path, root: Path, workers: int) -> tuple[list[tuple[float, float]], float, float]:
    """Run the command and record its predictions.

    Returns (seconds since the start, predicted seconds left) for each line of progress, the total wall seconds, and the
    total CPU seconds of all processes.
    """
    words = [str(Path(sys.executable).parent / "luigi"), "--module", "pipeline", "PackCorpus", "--json"]
    words += ["--config", str(config), "--root", str(root), "--workers", str(workers)]
    environment = os.environ | {"LUIGI_CONFIG_PATH": str(ROOT / "luigi.cfg")}
    before, start, found = os.times(), time.perf_counter(), []
    run = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)
    assert run.stderr is not None
    for line in run.stderr:
        event = json.loads(line)
        if "error" in event:
            sys.exit(line)
        if event.get("progress", {}).get("seconds_left") is not None:
            found.append((time.perf_counter() - start, event["progress"]["seconds_left"]))
    run.wait()
    after = os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return found, time.perf_counter() - start, cpu


def cpu_by_stage(root: Path, cpu: float) -> Iterator[tuple[str, float, float]]:
    """Yield each stage with its predicted and actual CPU seconds."""
    [folder] = (root / "data" / "corpora").iterdir()
    manifest, run = (orjson.loads((folder / name).read_bytes()) for name in ("manifest.json", "run.json"))
    stages = {name: stage["cpu_seconds"] for name, stage in run["stages"].items()}
    ledger, sources = manifest["ledger"], sum(source["bytes"] for source in manifest["sources"])
    shards = [shard["bytes"] for split in manifest["splits"].values() for shard in split["shards"]]
    pieces = max(ledger["pieces"]["packed"], ledger["conversations"]["read"])
    plan = cost_model.plan_seconds(pieces, ledger["tokens"]["encoded"], manifest["config"]["epochs"])
    tasks = len(list((root / "data" / "tokens").rglob("*.arrow"))) + 1 + len(shards)
    yield f"tokens, {sources / 1e6:,.1f} MB (measured during each run)", math.nan, stages["TokenizePart"]
    yield f"plan, {pieces:,} pieces", plan, stages["PlanPacking"]
    yield f"shards, {sum(shards) / 1e6:,.1f} MB", sum(shards) * cost_model.WRITTEN_BYTE, stages["WriteShard"]
    rest = (
        cost_model.START
        + cost_model.TASK
        + (tasks - 1) * cost_model.STEP
        + sources * cost_model.HASHED_BYTE
        + cost_model.COMMIT
    )
    yield f"start, {tasks} parts, plan, and shards, checksums, commit", rest, cpu - sum(stages.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    config = options.config.resolve()
    with tempfile.TemporaryDirectory() as name:
        if options.times > 1:
            enlarge(config, Path(name) / "enlarged", options.times)
            config = Path(name) / "enlarged" / "config.yaml"
        found, total, cpu = progress_of_run(config, Path(name), options.workers)
        stages = list(cpu_by_stage(Path(name), cpu))
    print(f"{'elapsed':>8} {'done':>6} {'predicted left':>14} {'actual left':>13} {'off':>7}")
    worst = (0.0, 0.0)
    for elapsed, left in found:
        off = (elapsed + left) / total - 1
        print(f"{elapsed:6.1f} s {elapsed / total:6.0%} {left:12.1f} s {total - elapsed:11.1f} s {off:+7.1%}")
        if elapsed >= 0.1 * total:
            worst = max(worst, (abs(off), elapsed / total))
    print(f"total {total:.1f} s; after the first tenth at most {worst[0]:.1%} off, at {worst[1]:.0%} of the run")
    print(f"\n{'CPU seconds':<60} {'predicted':>9} {'actual':>8}")
    for stage, predicted, actual in stages:
        print(f"{stage:<60} {predicted:9.2f} {actual:8.2f}")


if __name__ == "__main__":
    main()
