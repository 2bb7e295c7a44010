"""How well a run foretells its own end: at every second, the seconds that it said were left beside those that were.

    python bench/eta.py CONFIG [--times 10] [--workers 2]

With --times the conversations are enlarged first (bench/enlarge.py). "done" is the share of the whole time that had
passed; "off" is what was foretold for the whole run beside what it took. The last lines are the largest error after
the first tenth, and where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from enlarge import enlarge

ROOT = Path(__file__).resolve().parent.parent


def foretold(config: Path, root: Path, workers: int) -> tuple[list[tuple[float, float]], float]:
    """(seconds since the start, seconds left as the run had it) at each of its lines, and the seconds that it took."""
    words = [str(Path(sys.executable).parent / "luigi"), "--module", "pipeline", "PackCorpus", "--json"]
    words += ["--config", str(config), "--root", str(root), "--workers", str(workers)]
    environment = os.environ | {"LUIGI_CONFIG_PATH": str(ROOT / "luigi.cfg")}
    start, found = time.perf_counter(), []
    run = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)
    assert run.stderr is not None
    for line in run.stderr:
        told = json.loads(line)
        if "error" in told:
            sys.exit(line)
        if told.get("progress", {}).get("seconds_left") is not None:
            found.append((time.perf_counter() - start, told["progress"]["seconds_left"]))
    run.wait()
    return found, time.perf_counter() - start


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
        found, took = foretold(config, Path(name), options.workers)
    print(f"{'at':>8} {'done':>6} {'left, as told':>14} {'left, really':>13} {'off':>7}")
    worst = (0.0, 0.0)
    for at, left in found:
        off = (at + left) / took - 1
        print(f"{at:6.1f} s {at / took:6.0%} {left:12.1f} s {took - at:11.1f} s {off:+7.1%}")
        if at >= 0.1 * took:
            worst = max(worst, (abs(off), at / took))
    print(f"took {took:.1f} s; after the first tenth at most {worst[0]:.1%} off, at {worst[1]:.0%} of the run")


if __name__ == "__main__":
    main()
