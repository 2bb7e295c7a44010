"""Pack the same records as one file of each kind; print times, memory, and rows.

    python bench/one_file.py FOLDER                 FOLDER has a.jsonl a.json a.parquet a.jsonl.gz …
    python bench/one_file.py FOLDER --on workers:1 workers:2 ray://auto --only parquet

Memory is the largest sum of all processes of the run: proportional set size, so shared pages count once. Equal rows
have the same digest; they are sorted, because the order of rows depends on the bytes of the sources.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa

PAUSE = 0.5  # seconds between two looks at the memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--on", nargs="+", default=["workers:1", "workers:2"])
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--tokenizer", default="")
    given = parser.parse_args()
    files = sorted(path for path in given.folder.glob("a*.*") if any(map(path.name.endswith, given.only)))
    for file in sorted(files, key=lambda path: path.suffix != ".jsonl"):
        for on in given.on:
            print(file.name, on, run(file, on, given.tokenizer), flush=True)


def run(file: Path, on: str, tokenizer: str) -> str:
    root = file.parent / "root"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    config = root / "corpus.yaml"
    config.write_text(
        f"name: one\nsources: [{{path: {file.absolute()}}}]\ntokenizer: {tokenizer}\ntemplate: mistral\n"
        "sequence_length: 2048\n"
    )
    command = [sys.executable, "-m", "luigi", "--module", "pipeline", "PackCorpus", "--local-scheduler"]
    command += ["--config", str(config), "--root", str(root), "--on", on]
    start, before, peak = time.perf_counter(), os.times(), 0
    environment = os.environ | {"PYTHONPATH": "packcorpus"}
    with (root / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        while process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            time.sleep(PAUSE)
    seconds, after = time.perf_counter() - start, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    if process.returncode:
        return (root / "log").read_text()[-2000:]
    [manifest] = root.glob("manifests/*.json")
    facts = json.loads(manifest.read_bytes())
    shards = [root / facts["corpus"] / shard["path"] for split in facts["splits"].values() for shard in split["shards"]]
    record = json.loads((root / facts["corpus"] / "run.json").read_bytes())
    left = [str(path) for path in root.glob("data/unpacked/*")]
    largest = record["peak_memory_bytes"] / 1e6
    steps = sum(record["stages"][name]["cpu_seconds"] for name in ("TokenizePart", "WriteShard"))
    return (
        f"{seconds:.1f} s, {cpu:.1f} s of CPU, of which {steps:.1f} s in steps, {peak / 1e6:.0f} MB in all, "
        f"{largest:.0f} MB the largest process, rows {hash_of(shards)} {left or ''}"
    )


def hash_of(shards: list[Path]) -> str:
    """Return a digest of all rows, computed in another process.

    A child inherits the peak memory of its parent.
    """
    code = "import sys; from one_file import rows_of; print(rows_of(sys.argv[1:]))"
    words = [sys.executable, "-c", code, *map(str, shards)]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent).stdout[:12]


def rows_of(shards: list[str]) -> str:
    rows = list[bytes]()
    for shard in shards:
        with pa.memory_map(shard) as source:
            for batch in pa.ipc.open_stream(source):
                columns = [batch.column(name) for name in ("input_ids", "labels", "position_ids")]
                values = [column.flatten().to_numpy().reshape(batch.num_rows, -1) for column in columns]
                rows += [hashlib.sha256(row.tobytes()).digest() for row in np.hstack(values)]
    return hashlib.sha256(b"".join(sorted(rows))).hexdigest()


def memory_of(pid: int) -> int:
    """Return the memory of a process and its descendants in bytes."""
    total = 0
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total = 1024 * int(line.split()[1])
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                total += memory_of(int(child))
    return total


if __name__ == "__main__":
    main()
