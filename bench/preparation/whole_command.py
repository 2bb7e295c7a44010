"""Compare the whole command with TRL's preparation and with the minimum work.

    make bench CONFIG=my.yaml
    python bench/preparation/whole_command.py my.yaml [--runs 3] [--times 10] [--write FILE]

Each round runs, in this order: the whole command from a cold start (nothing cached) with one worker and with two; the
command for a second length (token files reused); TRL's SFTTrainer with packing_strategy="bfd" and two processes; the
floor (floor.py). With --times, the conversations are enlarged first: every prompt is combined with other completions.
The config must name a tokenizer. The input of TRL is written before the runs and is not timed. The table has medians;
MB refer to the conversations as JSON lines of messages. With --write, the table replaces the section with the same
title in FILE. With `template: tokenizer`, bench/preparation/own_template.py defines the runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from enlarge import enlarge
from read_conversations import valid_conversations

from packcorpus.tasks.config import load_config
from packcorpus.tasks.conversations.model import full_text
from packcorpus.tasks.recipe import resolve
from packcorpus.tasks.templates.families.hermes import call_text

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
COLUMNS = (
    "seconds", "cpu_seconds", "MB_per_second", "conversations_per_second", "tokens_per_second", "peak_memory_bytes",
    "rows", "efficiency",
)  # fmt: skip


def write_messages(config: Path, path: Path) -> None:
    """Write all conversations as messages with role and content, for TRL."""
    with path.open("wb") as file:
        for conversation in valid_conversations(resolve(config, path.parent).parts):
            messages = [
                {"role": m.role, "content": "\n".join(filter(None, [full_text(m), *call_text(m)]))}
                for m in conversation.messages
            ]
            file.write(orjson.dumps({"messages": messages}) + b"\n")


def timed(words: list[str], folder: Path) -> tuple[str, float, float]:
    """Run a command; return its output, seconds, and CPU seconds with all children."""
    before = os.times()
    start = time.perf_counter()
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    after = os.times()
    if done.returncode:
        sys.exit(done.stderr)
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return done.stdout, seconds, cpu


def packcorpus(config: Path, root: Path, length: int, workers: int) -> tuple[dict[str, float], Path]:
    """Run the whole command; return its figures and the path of the manifest."""
    os.environ["LUIGI_CONFIG_PATH"] = str(ROOT / "luigi.cfg")
    words = [str(BIN / "luigi"), "--module", "pipeline", "PackCorpus", "--config", str(config), "--root", str(root)]
    out, seconds, cpu = timed([*words, "--sequence-length", str(length), "--workers", str(workers)], root)
    path = Path(out.splitlines()[-1])
    manifest = orjson.loads(path.read_bytes())
    run = orjson.loads((root / manifest["corpus"] / "run.json").read_bytes())
    ledger, packing = manifest["ledger"], manifest["packing_metadata"]
    figures = {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "conversations_per_second": ledger["conversations"]["read"] / seconds,
        "tokens_per_second": ledger["tokens"]["encoded"] / seconds,
        "peak_memory_bytes": run["peak_memory_bytes"],
        "rows": packing["rows"],
        "efficiency": packing["packing_efficiency"],
    }
    return figures, path


def trl(messages: Path, tokenizer: Path, length: int, folder: Path) -> dict[str, float]:
    """Run bench/preparation/trl_preparation.py and return its figures."""
    script = str(Path(__file__).with_name("trl_preparation.py"))
    words = [sys.executable, script, str(messages), str(tokenizer), str(length), str(folder)]
    out, _, _ = timed(words, folder)
    found = json.loads(out.splitlines()[-1])
    return {
        "seconds": found["seconds"],
        "cpu_seconds": found["cpu_seconds"],
        "conversations_per_second": found["conversations"] / found["seconds"],
        "tokens_per_second": found["tokens"] / found["seconds"],
        "peak_memory_bytes": found["peak_memory_bytes"],
        "rows": found["rows"],
        "efficiency": found["efficiency"],
    }


def measure(config: Path, options: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Run all rounds; return the figures of each row of the table."""
    messages = folder / "messages.jsonl"
    write_messages(config, messages)
    tokenizer = resolve(config, folder).tokenizer_files.main
    length, other = options.lengths
    found: dict[str, list[dict[str, float]]] = {}
    for run in range(options.runs):
        for workers in (1, 2):
            root = folder / f"root-{run}-{workers}"
            root.mkdir()
            figures, manifest = packcorpus(config, root, length, workers)
            found.setdefault(f"packcorpus, rows of {length}, workers {workers}", []).append(figures)
        again, _ = packcorpus(config, root, other, 2)
        found.setdefault(f"packcorpus, rows of {other}, workers 2, token files reused", []).append(again)
        if not options.without_trl:
            (folder / "trl").mkdir()
            found.setdefault(f"TRL bfd, rows of {length}, 2 processes", []).append(
                trl(messages, tokenizer, length, folder / "trl")
            )
            shutil.rmtree(folder / "trl")
        found.setdefault("floor, one process", []).append(floor(config, root, manifest))
        for root in folder.glob("root-*"):
            shutil.rmtree(root)
    size = messages.stat().st_size
    for runs in found.values():
        for figures in runs:
            figures["MB_per_second"] = size / 1e6 / figures["seconds"]
    return found


def floor(config: Path, root: Path, manifest: Path) -> dict[str, float]:
    """Run bench/preparation/floor.py and return its CPU seconds."""
    script = str(Path(__file__).with_name("floor.py"))
    out, _, _ = timed([sys.executable, script, str(config), str(root), str(manifest)], root)
    parts = json.loads(out.splitlines()[-1])
    print(f"floor: {parts}", file=sys.stderr)
    cpu = parts["parse"] + parts["encode"] + parts["write"]
    return {"seconds": cpu, "cpu_seconds": cpu}


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Format the medians as a Markdown table."""
    lines = ["| run | " + " | ".join(column.replace("_", " ") for column in COLUMNS) + " |"]
    lines.append("|---|" + "---:|" * len(COLUMNS))
    for label, runs in found.items():
        medians = [statistics.median(run.get(column, math.nan) for run in runs) for column in COLUMNS]
        lines.append(f"| {label} | " + " | ".join(_shown(value) for value in medians) + " |")
    return "\n".join(lines)


def _shown(value: float) -> str:
    return "–" if value != value else f"{value:,.2f}" if value < 1000 and value != int(value) else f"{value:,.0f}"


def machine() -> str:
    """Return a description of the date, processor, and versions."""
    model = next((line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), "")
    names = ("luigi", "pyarrow", "numpy", "sentencepiece", "gigatoken", "orjson", "trl", "transformers", "datasets")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    system = f"{os.cpu_count()} cores ({model}), {platform.system()}, Python {platform.python_version()}"
    return f"{datetime.date.today().isoformat()}, {system}, {versions}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def write_section(file: Path, title: str, body: str) -> None:
    """Replace the section `title` of a Markdown file with `body`, or append it."""
    heading = f"### {title}\n"
    before, found, after = file.read_text().partition(heading)
    rest = re.search(r"^#", after, re.MULTILINE)
    after = after[rest.start() :] if rest else ""
    gap = "" if found else "\n"
    file.write_text(f"{before}{gap}{heading}\n{body}\n{chr(10) if after else ''}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument(
        "--lengths",
        type=int,
        nargs=2,
        default=[1024, 512],
        help="of the cold runs, and of the run that reuses token files",
    )
    parser.add_argument("--without-trl", action="store_true")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    config = options.config.resolve()
    settings = load_config(config)
    if settings.tokenizer is None:
        sys.exit(f"{options.config}: tokenizer is missing; both sides must use the same one: make bench CONFIG=my.yaml")
    with tempfile.TemporaryDirectory() as name:
        if options.times > 1:
            enlarge(config, Path(name) / "enlarged", options.times)
            config = Path(name) / "enlarged" / "config.yaml"
        title, runs = settings.name, f"{options.runs} alternating runs"
        if settings.template == "tokenizer":
            from own_template import compare  # uses functions of this module

            title = f"Template of {Path(settings.tokenizer).name}"
            body = f"{machine()}; {runs} of whole processes; {compare(config, options, Path(name))}"
        else:
            body = f"{machine()}; medians of {runs}.\n\n{table(measure(config, options, Path(name)))}"
    print(body)
    if options.write:
        write_section(options.write, f"{title}{f', times {options.times}' * (options.times > 1)}", body)


if __name__ == "__main__":
    main()
