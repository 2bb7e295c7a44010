"""How well a run foretells its own end: at every second, the seconds that it said were left beside those that were.

    python bench/eta.py CONFIG [--times 10] [--workers 2]

With --times the conversations are enlarged first (bench/enlarge.py). "done" is the share of the whole time that had
passed; "off" is what was foretold for the whole run beside what it took. Then the largest error after the first tenth,
and where it was; and the CPU seconds of what tasks/dry_run/cost_model.py foretells, beside what they were.
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

from tasks.dry_run import cost_model

ROOT = Path(__file__).resolve().parent.parent


def foretold(config: Path, root: Path, workers: int) -> tuple[list[tuple[float, float]], float, float]:
    """(seconds since the start, seconds left as the run had it) at each of its lines, and what it took: seconds, and
    CPU seconds of all its processes."""
    words = [str(Path(sys.executable).parent / "luigi"), "--module", "pipeline", "PackCorpus", "--json"]
    words += ["--config", str(config), "--root", str(root), "--workers", str(workers)]
    environment = os.environ | {"LUIGI_CONFIG_PATH": str(ROOT / "luigi.cfg")}
    before, start, found = os.times(), time.perf_counter(), []
    run = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)
    assert run.stderr is not None
    for line in run.stderr:
        told = json.loads(line)
        if "error" in told:
            sys.exit(line)
        if told.get("progress", {}).get("seconds_left") is not None:
            found.append((time.perf_counter() - start, told["progress"]["seconds_left"]))
    run.wait()
    after = os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return found, time.perf_counter() - start, cpu


def spent(root: Path, cpu: float) -> Iterator[tuple[str, float, float]]:
    """What took CPU seconds: as foretold, and really."""
    [folder] = (root / "data" / "corpora").iterdir()
    manifest, run = (orjson.loads((folder / name).read_bytes()) for name in ("manifest.json", "run.json"))
    stages = {name: stage["cpu_seconds"] for name, stage in run["stages"].items()}
    ledger, sources = manifest["ledger"], sum(source["bytes"] for source in manifest["sources"])
    shards = [shard["bytes"] for split in manifest["splits"].values() for shard in split["shards"]]
    pieces = max(ledger["pieces"]["packed"], ledger["conversations"]["read"])
    plan = cost_model.plan_seconds(pieces, ledger["tokens"]["encoded"], manifest["config"]["epochs"])
    tasks = len(list((root / "data" / "tokens").rglob("*.arrow"))) + 1 + len(shards)
    yield f"tokens, {sources / 1e6:,.1f} MB (as each run measures)", math.nan, stages["TokenizePart"]
    yield f"plan, {pieces:,} pieces", plan, stages["PlanPacking"]
    yield f"shards, {sum(shards) / 1e6:,.1f} MB", sum(shards) * cost_model.WRITTEN_BYTE, stages["WriteShard"]
    rest = cost_model.START + tasks * cost_model.TASK + sources * cost_model.HASHED_BYTE + cost_model.COMMIT
    yield f"start, {tasks} tasks, digests, commit", rest, cpu - sum(stages.values())


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
        found, took, cpu = foretold(config, Path(name), options.workers)
        parts = list(spent(Path(name), cpu))
    print(f"{'at':>8} {'done':>6} {'left, as told':>14} {'left, really':>13} {'off':>7}")
    worst = (0.0, 0.0)
    for at, left in found:
        off = (at + left) / took - 1
        print(f"{at:6.1f} s {at / took:6.0%} {left:12.1f} s {took - at:11.1f} s {off:+7.1%}")
        if at >= 0.1 * took:
            worst = max(worst, (abs(off), at / took))
    print(f"took {took:.1f} s; after the first tenth at most {worst[0]:.1%} off, at {worst[1]:.0%} of the run")
    print(f"\n{'CPU seconds':<60} {'as told':>8} {'really':>8}")
    for what, told, really in parts:
        print(f"{what:<60} {told:8.2f} {really:8.2f}")


if __name__ == "__main__":
    main()
