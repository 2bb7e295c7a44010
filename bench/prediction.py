"""Compare predictions of `packcorpus check` with actual runs.

Measures all sources of a config together, and each source alone.

    python bench/prediction.py CONFIG [--lengths 512 1024 2048 4096] [--budget BYTES] [--workers 2]

Prints Markdown. `--budget` limits how many bytes of the sources the prediction may read; a budget smaller than the
sources tests the estimates. Each source is packed by the real command in a separate folder. Token files of a config are
reused for further lengths, so time and disk usage are reported only for the first length. Memory and time are from
run.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson
import yaml

from packcorpus.tasks.config import Config, load_config
from packcorpus.tasks.dry_run.dry_run import BUDGET, predict

ROOT = Path(__file__).resolve().parent.parent
LUIGI = Path(sys.executable).parent / "luigi"
COLUMNS = ("conversations", "rows", "tokens", "trained", "efficiency")


def run(config: Path, root: Path, length: int, workers: int) -> tuple[dict[str, float], dict[str, float]]:
    """Run the real command; return its figures and its costs."""
    words = [str(LUIGI), "--module", "pipeline", "PackCorpus", "--config", str(config), "--root", str(root)]
    words += ["--sequence-length", str(length), "--workers", str(workers)]
    env = os.environ | {"LUIGI_CONFIG_PATH": str(ROOT / "luigi.cfg")}
    done = subprocess.run(words, cwd=root, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    manifest = orjson.loads(Path(done.stdout.splitlines()[-1]).read_bytes())
    corpus = root / manifest["corpus"]
    ledger, packing = manifest["ledger"], manifest["packing_metadata"]
    figures = {
        "conversations": ledger["conversations"]["read"],
        "rows": packing["rows"],
        "tokens": ledger["tokens"]["packed"],
        "trained": ledger["tokens"]["trained"],
        "efficiency": packing["packing_efficiency"],
    }
    record = orjson.loads((corpus / "run.json").read_bytes())
    disk = sum(path.stat().st_size for path in (root / "data").rglob("*") if path.is_file())
    return figures, {"seconds": record["seconds"], "memory": record["peak_memory_bytes"], "disk": disk}


def predicted(config: Config, folder: Path, root: Path, workers: int, budget: int) -> tuple[Any, Any]:
    """Predict the figures and the costs of a run."""
    found = predict(config, folder, root, workers, budget)
    figures = {
        "conversations": found.ledger.conversations.read,
        "rows": sum(found.rows.values()),
        "tokens": found.ledger.tokens.packed,
        "trained": found.ledger.tokens.trained,
        "efficiency": found.packing_efficiency,
    }
    return figures, {
        "seconds": found.seconds,
        "memory": found.peak_memory_bytes,
        "disk": sum(found.bytes_on_disk.values()),
    }


def alone(config: Path, folder: Path) -> list[tuple[str, Path]]:
    """Write configs for all sources together and for each of their files alone.

    Returns pairs of name and config path. Paths in these configs are absolute.
    """
    settings = yaml.safe_load(config.read_text())
    from packcorpus.tasks.sources.source_files import find_files

    loaded = load_config(config)
    files = find_files(loaded.sources, config.parent)
    for key in ("tokenizer", "template"):
        if (config.parent / str(settings.get(key, ""))).is_file():
            settings[key] = str((config.parent / settings[key]).resolve())
    together = [source | {"path": str(config.parent / source["path"])} for source in loaded.model_dump()["sources"]]
    found = []
    for name, file in [("together", None), *((file.path.name, file) for file in files)]:
        sources = together
        if file:
            sources = [{"path": str(file.path), "format": file.format, "columns": dict(file.columns)}]
        path = folder / f"{len(found)}.yaml"
        path.write_text(yaml.safe_dump(settings | {"sources": sources}))
        found.append((name, path))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--budget", type=int, default=BUDGET)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    titles = [f"{name}, {kind}" for name in COLUMNS for kind in ("predicted", "run")]
    print(f"| source | length | {' | '.join(titles)} | points off | check, s |")
    print("|---|---:|" + "---:|" * (len(titles) + 2))
    costs = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, path) in enumerate(alone(options.config.resolve(), Path(scratch))):
            root = Path(scratch) / f"root-{number}"
            root.mkdir()
            for length in options.lengths:
                start = time.perf_counter()
                prediction = predicted(
                    load_config(path, str(length)), path.parent, root, options.workers, options.budget
                )
                seconds = time.perf_counter() - start
                actual = run(path, root, length, options.workers)
                cells = [
                    f"{side[0][name]:,.2f}" if name == "efficiency" else f"{side[0][name]:,.0f}"
                    for name in COLUMNS
                    for side in (prediction, actual)
                ]
                off = round(prediction[0]["efficiency"] - actual[0]["efficiency"], 2) + 0.0  # avoids -0.00
                print(
                    f"| {name} | {length} | {' | '.join(cells)} | {off:+.2f} | {seconds:.1f} |",
                    flush=True,
                )
                if length == options.lengths[0]:
                    costs.append((name, prediction[1], actual[1]))
    print(f"\nAt {options.lengths[0]}, {options.workers} workers:\n")
    print("| source | MB on disk, predicted | run | MB of memory, predicted | run | seconds, predicted | run |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, expected, measured in costs:
        pairs = [(expected["disk"] / 1e6, measured["disk"] / 1e6), (expected["memory"] / 1e6, measured["memory"] / 1e6)]
        pairs.append((expected["seconds"], measured["seconds"]))
        print(f"| {name} | " + " | ".join(f"{value:,.1f}" for pair in pairs for value in pair) + " |")


if __name__ == "__main__":
    main()
