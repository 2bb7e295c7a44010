"""The whole command beside TRL's own preparation of the same conversations. Prints a table in Markdown.

    make bench CONFIG=my.yaml            (or: python bench/preparation.py my.yaml [--runs 3] [--lengths 512 1024])

In every run, in turn: the command from a cold start (nothing cached), the command again for every further length
(token files re-used), and SFTTrainer's preparation with packing_strategy="bfd" and two processes. The table holds
medians. The config must name a SentencePiece model. What TRL reads is written to JSONL beforehand, and not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import orjson

from tasks.config import load_config
from tasks.conversations import read_record
from tasks.errors import Reject
from tasks.recipe import resolve
from tasks.sources import read_part
from tasks.templates import call_text, full_text

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parent.parent
COLUMNS = (
    "conversations", "seconds", "cpu_seconds", "conversations_per_second", "tokens_per_second", "peak_memory_bytes",
    "rows", "lower_bound", "efficiency",
)  # fmt: skip


def write_messages(config: Path, path: Path) -> None:
    """All conversations as messages of role and content, for TRL."""
    with path.open("wb") as file:
        for part in resolve(config, path.parent).parts:
            for _, value in read_part(part):
                try:
                    if isinstance(value, Reject):
                        raise value
                    conversation = read_record(value, part.file.format, dict(part.file.columns))
                except Reject:
                    continue
                messages = [
                    {"role": m.role, "content": "\n".join(filter(None, [full_text(m), *call_text(m)]))}
                    for m in conversation.messages
                ]
                file.write(orjson.dumps({"messages": messages}) + b"\n")


def timed(words: list[str], folder: Path) -> tuple[str, float, float]:
    """Standard output, seconds, and CPU seconds with all children."""
    before = os.times()
    start = time.perf_counter()
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    after = os.times()
    if done.returncode:
        sys.exit(done.stderr)
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return done.stdout, seconds, cpu


def packcorpus(config: Path, root: Path, length: int, workers: int) -> dict[str, float]:
    os.environ["LUIGI_CONFIG_PATH"] = str(ROOT / "luigi.cfg")
    words = [str(BIN / "luigi"), "--module", "pipeline", "PackCorpus", "--config", str(config), "--root", str(root)]
    out, seconds, cpu = timed([*words, "--sequence-length", str(length), "--workers", str(workers)], root)
    manifest = orjson.loads(Path(out.splitlines()[-1]).read_bytes())
    run = orjson.loads((root / manifest["corpus"] / "run.json").read_bytes())
    ledger, packing = manifest["ledger"], manifest["packing_metadata"]
    return {
        "conversations": ledger["conversations"]["packed"],
        "seconds": seconds,
        "cpu_seconds": cpu,
        "conversations_per_second": ledger["conversations"]["read"] / seconds,
        "tokens_per_second": ledger["tokens"]["encoded"] / seconds,
        "peak_memory_bytes": run["peak_memory_bytes"],
        "rows": packing["rows"],
        "lower_bound": packing["lower_bound_rows"],
        "efficiency": packing["packing_efficiency"],
    }


def trl(messages: Path, tokenizer: Path, length: int, folder: Path) -> dict[str, float]:
    script = str(ROOT / "bench" / "trl_preparation.py")
    words = [sys.executable, script, str(messages), str(tokenizer), str(length), str(folder)]
    out, _, _ = timed(words, folder)
    found = json.loads(out.splitlines()[-1])
    return {
        "conversations": found["conversations"],
        "seconds": found["seconds"],
        "cpu_seconds": found["cpu_seconds"],
        "conversations_per_second": found["conversations"] / found["seconds"],
        "tokens_per_second": found["tokens"] / found["seconds"],
        "peak_memory_bytes": found["peak_memory_bytes"],
        "rows": found["rows"],
        "lower_bound": float("nan"),
        "efficiency": found["efficiency"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 512, 2048, 4096])
    parser.add_argument("--without-trl", action="store_true")
    options = parser.parse_args()
    config = options.config.resolve()
    if load_config(config).tokenizer is None:
        sys.exit(f"{options.config}: names no tokenizer; both sides must use the same one: make bench CONFIG=my.yaml")
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        messages = folder / "messages.jsonl"
        write_messages(config, messages)
        tokenizer = resolve(config, folder).tokenizer_files.main
        for run in range(options.runs):
            root = folder / f"root-{run}"
            root.mkdir()
            for place, length in enumerate(options.lengths):
                label = f"packcorpus, {length}, {'token files re-used' if place else 'cold'}"
                found.setdefault(label, []).append(packcorpus(config, root, length, options.workers))
            if not options.without_trl:
                (folder / f"trl-{run}").mkdir()
                label = f"TRL bfd, {options.lengths[0]}"
                found.setdefault(label, []).append(trl(messages, tokenizer, options.lengths[0], folder / f"trl-{run}"))
    print("| run | " + " | ".join(column.replace("_", " ") for column in COLUMNS) + " |")
    print("|---|" + "---:|" * len(COLUMNS))
    for label, runs in found.items():
        medians = [statistics.median(run[column] for run in runs) for column in COLUMNS]
        print(f"| {label} | " + " | ".join(_shown(value) for value in medians) + " |")


def _shown(value: float) -> str:
    return "–" if value != value else f"{value:,.2f}" if value < 1000 and value != int(value) else f"{value:,.0f}"


if __name__ == "__main__":
    main()
