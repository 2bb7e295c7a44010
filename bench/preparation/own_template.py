"""Compare packing with a model's own chat template to three other preparations.

whole_command.py runs this comparison if the config has `template: tokenizer`. Every run reads the same file:

    messages.jsonl ─┬─ packcorpus, template: chatml ▶ rows              two workers, nothing cached
                    ├─ packcorpus, template: tokenizer ▶ rows
                    ├─ datasets.map(apply_chat_template) ▶ tokens       two processes, neither packing nor labels
                    └─ TRL's SFTTrainer, packing_strategy="bfd" ▶ rows  two processes

The runs of a round follow each other, and ratios are computed within a round. Seconds and CPU seconds are measured for
whole processes. For the last two runs, "without imports" is the time from loading the file to the result.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import orjson
from whole_command import packcorpus, timed, write_messages

from packcorpus.tasks.config import load_config
from packcorpus.tasks.recipe import resolve

BUILT_IN, OWN = "packcorpus, `template: chatml`, built in", "packcorpus, `template: tokenizer`, the model's own"
COLUMNS = ("seconds", "without imports", "CPU seconds", "rows", "efficiency")
DECIMALS = {"rows": 0}

Figures = dict[str, float]


def compare(config: Path, options: argparse.Namespace, folder: Path) -> str:
    """Run all rounds and return the Markdown table."""
    messages, length = folder / "messages.jsonl", options.lengths[0]
    write_messages(config, messages)
    tokenizer = resolve(config, folder).tokenizer_files.main
    tokenizer = tokenizer if tokenizer.is_dir() else tokenizer.parent
    settings = load_config(config).model_dump(mode="json", exclude_unset=True)
    found: dict[str, list[Figures]] = {}
    for number in range(options.runs):
        for label, template in ((BUILT_IN, "chatml"), (OWN, "tokenizer")):
            root = folder / f"root-{number}-{template}"
            root.mkdir()
            changed = {"sources": [str(messages)], "tokenizer": str(tokenizer), "template": template}
            (root / "corpus.yaml").write_bytes(orjson.dumps(settings | changed))  # JSON is YAML
            figures, _ = packcorpus(root / "corpus.yaml", root, length, 2)
            figures["CPU seconds"] = figures["cpu_seconds"]
            found.setdefault(label, []).append(figures)
            shutil.rmtree(root)
        words = [Path(__file__).with_name("datasets_map.py"), messages, tokenizer]
        found.setdefault("`datasets.map(apply_chat_template)`, without packing", []).append(other(words, folder))
        if not options.without_trl:
            words = [Path(__file__).with_name("trl_preparation.py"), messages, tokenizer, length]
            found.setdefault('TRL, `packing_strategy="bfd"`', []).append(other(words, folder, "own"))
        print(f"round {number + 1} of {options.runs}", file=sys.stderr)
    count = found[OWN][0]["conversations_per_second"] * found[OWN][0]["seconds"]
    size = messages.stat().st_size / 1e6
    about = f"{count:,.0f} conversations in one file of {size:.1f} MB; rows of {length:,}; ratios within a round"
    return f"{about}; median (minimum–maximum).\n\n{table(found)}"


def other(words: Sequence[object], folder: Path, *more: str) -> Figures:
    """Run one of the scripts in a temporary folder, and return its figures."""
    place = folder / "other"
    place.mkdir()
    out, seconds, cpu = timed([sys.executable, *map(str, (*words, place)), *more], place)
    shutil.rmtree(place)
    found = json.loads(out.splitlines()[-1])
    figures = {"seconds": seconds, "CPU seconds": cpu, "without imports": found["seconds"]}
    return figures | {name: found[name] for name in ("rows", "efficiency") if name in found}


def table(found: dict[str, list[Figures]]) -> str:
    """Format medians and ranges as a Markdown table.

    The last columns are the time of each run as a multiple of both packcorpus runs.
    """
    columns = (*COLUMNS, "× built in", "× own template")
    lines = [f"| run, two workers | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for label, runs in found.items():
        cells = [spread([run[name] for run in runs if name in run], DECIMALS.get(name, 2)) for name in COLUMNS]
        for base in (BUILT_IN, OWN):
            pairs = zip(runs, found[base], strict=True)
            cells.append("" if label == base else spread([run["seconds"] / one["seconds"] for run, one in pairs], 2))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: Sequence[float], decimals: int) -> str:
    if not values:
        return "–"
    low, middle, high = min(values), statistics.median(values), max(values)
    shown = f"{middle:,.{decimals}f}"
    return shown if low == high else f"{shown} ({low:,.{decimals}f}–{high:,.{decimals}f})"
