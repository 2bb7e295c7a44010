"""Count the bytes that machines read from and write to a bucket.

    python bench/store_bytes.py CONFIG [--times 10] [--machines 3] [--file-mb 8]

    packcorpus part --stage prepare; tokenize --share 1/3, 2/3, 3/3; plan; write --share 1/3, 2/3, 3/3; publish

The bucket has the sources and the root. The machines are simulated on this machine, each with its own scratch folder.
The bucket is served by moto. Sources are enlarged first (bench/enlarge.py), and with --file-mb cut into files of that
size. CPU seconds do not include the server.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from enlarge import enlarge
from moto_bucket import BUCKET, MotoBucket, moto_bucket

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
MB = 1e6
STAGES = ("prepare", "tokenize", "plan", "write", "publish")

KINDS = {
    "sources": ("sources/",),
    "token files": ("root/data/tokens/",),
    "shards": ("root/data/corpora/",),
    "plans, digests, receipts, lists": ("",),
}


def start(machine: int, folder: Path, bucket: MotoBucket, *words: str) -> subprocess.Popen[bytes]:
    environment = bucket.environment | {"PYTHONPATH": str(ROOT), "PACKCORPUS_SCRATCH": str(folder / f"m{machine}")}
    command = [str(BIN / "packcorpus"), *words, "--root", f"s3://{BUCKET}/root"]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)


def finish(running: subprocess.Popen[bytes]) -> None:
    if running.wait():
        sys.exit(f"{running.args} has ended with {running.returncode}")


def cpu() -> float:
    """Return the CPU seconds of all machines that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def by_kind(sizes: Counter[str] | dict[str, int]) -> dict[str, float]:
    """Return megabytes by kind of object; receipts count separately from their files."""
    found = dict.fromkeys(KINDS, 0.0)
    for key, size in sizes.items():
        kind = next(kind for kind, starts in KINDS.items() if key.startswith(starts))
        found[[*KINDS][-1] if key.endswith(".json") else kind] += size / MB
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--machines", type=int, default=3)
    parser.add_argument("--file-mb", type=int)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, moto_bucket() as bucket:
        folder = Path(name)
        enlarge(options.config.resolve(), folder, options.times)
        bucket.take_sources(folder / "config.yaml", options.file_mb)
        bucket.written.clear()
        read: dict[str, dict[str, float]] = {}
        seconds: dict[str, float] = {}
        for stage in STAGES:
            bucket.read.clear()
            running, before = [], cpu()
            count = options.machines if stage in ("tokenize", "write") else 1
            for machine in range(1, count + 1):
                share = ["--share", f"{machine}/{count}"] if count > 1 else []
                running.append(start(machine, folder, bucket, "part", "config.yaml", "--stage", stage, *share))
            for each in running:
                finish(each)
            read[stage], seconds[stage] = by_kind(bucket.read), cpu() - before
        stored, written = by_kind(bucket.size()), by_kind(bucket.written)
    print(f"| MB | size | written | read to {' | to '.join(STAGES)} | read in all |")
    print(f"|---|{'---:|' * (len(STAGES) + 3)}")
    for kind in KINDS:
        own = [read[stage][kind] for stage in read]
        cells = [stored[kind], written[kind], *own, sum(own)]
        print(f"| {kind} | {' | '.join(f'{each:.1f}' for each in cells)} |")
    total = sum(sum(of_stage.values()) for of_stage in read.values())
    print(f"\n{total:.1f} MB read: {total / stored['shards']:.2f} times the shards, ", end="")
    print(f"{total / stored['token files']:.2f} times the token files; CPU seconds: ", end="")
    print(", ".join(f"{stage} {each:.1f}" for stage, each in seconds.items()))


if __name__ == "__main__":
    main()
