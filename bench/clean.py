"""Measure `duplicates: near` and `decontaminate` on planted cases, and their cost.

    python bench/clean.py --tokenizer FILE --words FILE [--conversations 100000] [--workers 1 2]

Writes conversations of words that are drawn as often as they are in FILE, any text. One of five system messages begins
each. Planted are, one each in a hundred conversations:

    a copy of an earlier one, with 1, 2, 5, 10, or 20 % of its words replaced, and at least one of question and answer
    one that is like an earlier one, but no duplicate: the same question with another answer, or another number in both
    an item of an evaluation set of 1,000, whole or 13 words of it, in other case and punctuation

Packs them three times with each number of workers: as they are, with `duplicates: near`, and with `decontaminate`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from packcorpus.tasks.tokenization.decontamination import words_of

ROOT = Path(__file__).resolve().parent.parent
EDITS = (1, 2, 5, 10, 20)  # percent of the words
OTHERS = ("another answer", "another number")
ITEMS = 1000
RUNS: dict[str, dict[str, Any]] = {
    "exact": {"duplicates": "exact"},
    "near": {"duplicates": "near"},
    "decontaminate": {"duplicates": "exact", "decontaminate": ["items.txt"]},
}


class Planted:
    """What was planted, by line."""

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[str | int, int]] = {}  # kind and original
        self.items: dict[int, int] = {}  # line of the item


def write(folder: Path, words: list[str], count: int) -> Planted:
    """Write data.jsonl and items.txt."""
    source, planted = random.Random(0), Planted()
    systems = [" ".join(source.choices(words, k=40)) for _ in range(5)]
    begin = source.choices(words, k=15)  # of all items
    items = [[*begin, *source.choices(words, k=source.randint(6, 60))] for _ in range(ITEMS)]
    (folder / "items.txt").write_text("".join(f"{' '.join(item)}\n" for item in items), encoding="utf-8")
    recent: list[tuple[int, list[str], list[str]]] = []
    with (folder / "data.jsonl").open("w", encoding="utf-8") as out:
        for line in range(1, count + 1):
            question, answer = (source.choices(words, k=source.randint(*sizes)) for sizes in ((10, 30), (20, 80)))
            number = str(source.randrange(10**6))
            for text in (question, answer):
                text.insert(source.randrange(len(text)), number)
            if line % 100 < 2 and line > 1000:
                original, *texts = recent.pop(source.randrange(len(recent)))
                kind = (OTHERS if line % 100 else EDITS)[line // 100 % (2 if line % 100 else len(EDITS))]
                if kind == OTHERS[0]:
                    question = texts[0]
                elif kind == OTHERS[1]:
                    was = next(word for word in texts[0] if word.isdecimal() and word in texts[1])
                    question, answer = ([number if word == was else word for word in text] for text in texts)
                else:
                    question, answer = (edited(text, int(kind), words, source) for text in texts)
                planted.pairs[line] = kind, original
            elif line % 100 == 50:
                item = source.randrange(ITEMS)
                planted.items[line] = item + 1
                question = disguised(items[item], source)
            elif line % 7 == 0:
                recent = [*recent[-500:], (line, question, answer)]
            turns = ("system", source.choice(systems)), ("user", " ".join(question)), ("assistant", " ".join(answer))
            messages = [{"role": role, "content": content} for role, content in turns]
            out.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    return planted


def edited(text: list[str], percent: int, words: list[str], source: random.Random) -> list[str]:
    changed = list(text)
    for place in source.sample(range(len(text)), max(1, round(len(text) * percent / 100))):
        changed[place] = source.choice(words)
    return changed


def disguised(item: list[str], source: random.Random) -> list[str]:
    """Return an item, or 13 words of it without most of its beginning."""
    if len(item) > 40 and source.random() < 0.5:
        first = source.randint(16, len(item) - 13)
        item = item[first : first + 13]
    return [source.choice((str.upper, str.title, str))(word) + source.choice(("", ",", "!", " --")) for word in item]


def pack(folder: Path, tokenizer: Path, run: str, workers: int) -> tuple[str, list[dict[str, Any]]]:
    """Return the figures of a run, and what it dropped."""
    config: dict[str, Any] = {"name": run, "sources": ["data.jsonl"], "tokenizer": str(tokenizer.resolve())}
    config |= RUNS[run] | {"sequence_length": 2048, "advanced": {"unknown_markers": "text"}}
    (folder / "corpus.yaml").write_text(yaml.safe_dump(config))
    root = folder / "root"
    words = ["--module", "pipeline", "PackCorpus", "--config", str(folder / "corpus.yaml"), "--root", str(root)]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [Path(sys.executable).parent / "luigi", *words, "--workers", str(workers)]
    with (folder / "log").open("wb") as log:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        if subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=environment, check=False).returncode:
            sys.exit((folder / "log").read_text())
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    [path] = (root / "manifests").glob("*.json")
    manifest = json.loads(path.read_bytes())
    listed = root / manifest["corpus"] / "dropped.jsonl"
    dropped = [*map(json.loads, listed.read_bytes().splitlines())] if listed.exists() else []
    peak = json.loads((listed.parent / "run.json").read_bytes()).get("peak_memory_bytes", 0)
    shutil.rmtree(root)
    tokens = manifest["ledger"]["tokens"]["encoded"]
    return f"| {run} | {workers} | {seconds:.1f} | {cpu:.1f} | {peak / 1e6:,.0f} | {tokens:,} |", dropped


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure `duplicates: near` and `decontaminate`.")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--words", type=Path, required=True, help="text from which words are drawn")
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="packcorpus-clean-") as name:
        # `decontaminate` does not count an equals sign as a word, and "3.50" as two.
        words = [word for word in given.words.read_text("utf-8").split() if len(words_of(word)) == 1]
        planted = write(Path(name), words, given.conversations)
        print("| run | workers | seconds | CPU s | peak MB | tokens |\n|---|---|---|---|---|---|")
        lists: dict[str, list[list[dict[str, Any]]]] = {}
        for workers in given.workers:
            for run in RUNS:
                figures, dropped = pack(Path(name), given.tokenizer, run, workers)
                lists.setdefault(run, []).append(dropped)
                print(figures, flush=True)
    for run, same in lists.items():
        if any(other != same[0] for other in same):
            sys.exit(f"{run}: another number of workers drops other conversations")
    dropped = {line["line"]: line["kept"]["line"] for line in lists["near"][0]}
    counts = Counter((kind, dropped.get(line) == original) for line, (kind, original) in planted.pairs.items())
    print("\n| planted | pairs | dropped |\n|---|---|---|")
    for kind in (*EDITS, *OTHERS):
        pairs = counts[kind, True] + counts[kind, False]
        label = f"{kind} % of the words" if isinstance(kind, int) else kind
        print(f"| {label} | {pairs:,} | {100 * counts[kind, True] / max(1, pairs):.1f} % |")
    right = sum(count for (kind, is_found), count in counts.items() if is_found and kind not in OTHERS)
    print(f"\nnear: {len(dropped):,} dropped, {right:,} of them planted as near-duplicates of the one that stays")
    found = {line["line"]: line["item"]["line"] for line in lists["decontaminate"][0]}
    right = sum(found.get(line) == item for line, item in planted.items.items())
    print(f"decontaminate: {right:,} of {len(planted.items):,} planted items found, {len(found) - right} others")


if __name__ == "__main__":
    main()
