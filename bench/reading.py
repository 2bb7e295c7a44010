"""Measure the memory and time of the commands that read a finished corpus.

    python bench/reading.py [KEY=VALUE …] [--conversations 1000000 4000000] [--only report verify …] [--folder FOLDER]

The commands are report, verify, inspect, diff, and repair; `repair` restores the index and a shard. The corpora have
rows of 128, made from token files like the ones in bench/packing/planning.py. Each command runs on each corpus in a
separate process. KEY=VALUE overrides settings of the config, such as epochs=2. Prints the CPU seconds and the peak
resident memory of each command, and the bytes that each further conversation takes. 4 million conversations take 4 GB
in FOLDER, which is kept for the next call. Without FOLDER, the folder is temporary.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent / "packing"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from planning import recipe_of, write_part

from packcorpus.tasks.recipe import resolve
from packcorpus.tasks.storage.corpus_folder import corpus_folder
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.tokenization.train_tokenizer import train_tokenizer
from packcorpus.tasks.work import Publish, run_all

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 1000  # all ids in the token files are smaller

# Reads VmHWM, because ru_maxrss of a process includes the peak of the process that started it.
PROGRAM = """
import atexit, pathlib, re, time
from packcorpus.tasks.cli.app import main

@atexit.register
def write():
    [peak] = re.findall(r"VmHWM: *(\\d+)", pathlib.Path("/proc/self/status").read_text().replace("\\t", " "))
    pathlib.Path("used").write_text(f"{time.process_time()} {peak}")

main()
"""

COMMANDS = {
    "report": "report {manifest} --output {folder}/report.html",
    "verify": "verify {manifest}",
    "inspect": "inspect {manifest}",
    "row": "inspect {manifest} --row 1000",
    "conversation": "inspect {manifest} --conversation 1000",
    "at": "inspect {manifest} --at x.jsonl:1000",
    "search": "inspect {manifest} --search Paris",
    "rejects": "inspect {manifest} --rejects",
    "diff": "diff {manifest} {other}",
    "repair index": "repair {manifest}",
    "repair shard": "repair {manifest}",
}


def make_corpus(root: Path, conversations: int, settings: dict[str, Any]) -> Path:
    """Make a corpus unless it exists, and return its manifest.

    The source of the corpus is never written.
    """
    model = root / "bench.model"
    if not model.is_file():
        train_tokenizer(resolve(ROOT / "data/sample/corpus.yaml", root).parts, "chatml", VOCABULARY, 1 << 20, model)
    recipe = recipe_of(root, conversations, {"tokenizer": model.name, "name": f"bench-{conversations}"} | settings)
    if not recipe.published.is_file():
        for number, part in enumerate(recipe.parts):
            if not recipe.layout.token_receipt(recipe.tokens_key(part)).is_file():
                write_part(recipe, part, number)
        run_all(Publish(recipe))
    return recipe.published


def damage(manifest: Path, command: str) -> None:
    """Flip a bit of the file that the command restores."""
    facts = load_manifest(manifest)
    name = "index.arrow" if command.endswith("index") else facts.splits["train"].shards[0].path
    with (corpus_folder(facts, manifest) / name).open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        [byte] = file.read(1)
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def measure(root: Path, command: str, manifest: Path, other: Path) -> tuple[float, int]:
    """Run a command and return its CPU seconds and its peak memory in bytes."""
    if command.startswith("repair"):
        damage(manifest, command)
    words = COMMANDS[command].format(manifest=manifest, other=other, folder=root).split()
    with (root / "log").open("wb") as log:
        process = subprocess.run([sys.executable, "-c", PROGRAM, *words], stdout=log, stderr=log, cwd=root, check=False)
    if process.returncode:
        print(f"{command}: exit code {process.returncode}: {(root / 'log').read_text()}")
    seconds, peak = (root / "used").read_text().split()
    return float(seconds), int(peak) << 10


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the commands that read a finished corpus.")
    parser.add_argument("--conversations", type=int, nargs=2, default=[1_000_000, 4_000_000])
    parser.add_argument("--only", nargs="+", default=[*COMMANDS], choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    settings = {name: yaml.safe_load(value) for name, value in (pair.split("=", 1) for pair in given.settings)}
    with tempfile.TemporaryDirectory(prefix="packcorpus-") as temporary:
        root = (given.folder or Path(temporary)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        corpora = [make_corpus(root, count, settings) for count in given.conversations]
        small, large = given.conversations
        print(f"{'':<14}{small:>15,} conversations{large:>15,} conversations   bytes each", flush=True)
        for command in given.only:
            # `diff` compares both corpora: most of the larger corpus was added or removed.
            (one, less), (other, more) = (measure(root, command, *pair) for pair in (corpora, corpora[::-1]))
            each = (more - less) / (large - small)
            print(
                f"{command:<14}{one:>12.1f} CPU s {less / 1e6:>7,.0f} MB {other:>12.1f} CPU s {more / 1e6:>7,.0f} MB "
                f"{each:>12.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
