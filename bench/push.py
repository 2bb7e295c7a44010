"""Measure a push to a server on this machine that simulates the Hugging Face Hub.

    python bench/push.py MANIFEST…

Pushes each corpus to a new dataset, pushes it again, and reads it with `load_dataset`. Prints a row of a table for each
corpus, with the CPU seconds of each whole command.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.servers.remote import hub_stand_in  # noqa: E402

from packcorpus.tasks.storage.manifest import load_manifest  # noqa: E402

COMMAND = str(Path(sys.executable).with_name("packcorpus"))
REPO, TOKEN = "someone/rows", "token"
LOAD = """
import sys, datasets
found = [datasets.load_dataset(sys.argv[1], name) for name in datasets.get_dataset_config_names(sys.argv[1])]
print(sum(len(split) for splits in found for split in splits.values()))
"""


def cpu_seconds(words: list[str], environment: dict[str, str]) -> tuple[float, str]:
    """Run a command, and return its CPU seconds and its output."""
    process = subprocess.Popen(words, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    printed = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{words}: exit code {process.returncode}")
    return used.ru_utime + used.ru_stime, printed


def measure(path: Path) -> str:
    """Push a corpus twice, read it, and return the row of the table."""
    manifest = load_manifest(path)
    size, rows = sum(file.bytes for file in manifest.listed()), manifest.packing_metadata.rows
    with hub_stand_in() as hub, tempfile.TemporaryDirectory(prefix="packcorpus-") as home:
        hub.token = TOKEN
        place = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HOME": home}
        push = [COMMAND, "push", str(path), REPO]
        first, _ = cpu_seconds(push, place)
        commits = len(hub.history)
        again, _ = cpu_seconds(push, place)
        assert len(hub.history) == commits, "the second push sent something"
        loading, read = cpu_seconds([sys.executable, "-c", LOAD, REPO], place)
        assert int(read) == rows, f"{read} rows were read, not {rows}"
    lengths = " and ".join(f"{length:,}" for length in manifest.row_lengths)
    files = len(manifest.listed()) + 1
    seconds = " | ".join(f"{value:.1f}" for value in (first, again, loading))
    return f"| {lengths} | {rows:,} | {files} | {size / 1e6:,.0f} | {commits} | {seconds} |"


def main() -> None:
    print("| length | rows | files | MB | commits | push, CPU s | again | `load_dataset` |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for path in sys.argv[1:]:
        print(measure(Path(path)), flush=True)


if __name__ == "__main__":
    main()
