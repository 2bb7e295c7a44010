"""Measure the time and peak memory of exports.

    python bench/exports/speed.py MANIFEST

Exports the corpus in every format, one after another, into a temporary folder, and prints a row of a table for each
format. CPU seconds and memory are measured for the whole command.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from packcorpus.tasks.exports.export import EXPORTS
from packcorpus.tasks.storage.manifest import load_manifest

COMMAND = str(Path(sys.executable).with_name("packcorpus"))


def measure(manifest: Path, name: str, output: Path) -> str:
    """Export once and return a row of the table."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [COMMAND, "export", str(manifest), "--to", name, "--output", str(output)], stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode:
        return f"| `{name}` | exit code {process.returncode} | | | |"
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    cpu = used.ru_utime + used.ru_stime
    return f"| `{name}` | {seconds:.1f} | {cpu:.1f} | {used.ru_maxrss >> 10:,} MB | {size / 1e6:,.0f} MB |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the time and peak memory of exports.")
    parser.add_argument("manifest", type=Path)
    path = parser.parse_args().manifest
    manifest = load_manifest(path)
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    rows, size = sum(shard.rows for shard in shards), sum(shard.bytes for shard in shards)
    print(f"{rows:,} rows of {manifest.sequence_length:,} in {len(shards)} shards, {size / 1e6:,.0f} MB")
    print("| format | s | CPU s | peak memory | size |\n|---|---:|---:|---:|---:|")
    for format in EXPORTS:
        with tempfile.TemporaryDirectory(prefix="packcorpus-") as folder:
            print(measure(path, format.name, Path(folder) / "export"), flush=True)


if __name__ == "__main__":
    main()
