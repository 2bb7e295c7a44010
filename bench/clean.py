"""Measure `duplicates: near` on planted duplicates, and what it costs.

    python bench/clean.py --tokenizer FILE --words FILE [--conversations 100000] [--workers 1 2]

Writes conversations of words that are drawn as often as they are in FILE, any text; one of five system messages begins
each. One in a hundred is a copy of an earlier one, with 1, 2, 5, 10, or 20 % of its words replaced, and at least one.
Another one in two hundred is like an earlier one, but no duplicate: the same question with another answer, or the same
text with another number in question and answer. Packs them with `duplicates: exact` and `near`.
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

ROOT = Path(__file__).resolve().parent.parent
EDITS = (1, 2, 5, 10, 20)  # percent of the words
OTHERS = ("another answer", "another number")


def write(path: Path, words: list[str], count: int) -> dict[int, tuple[str | int, int]]:
    """Write conversations, and return the kind and the original of each planted line."""
    source, planted = random.Random(0), dict[int, tuple[str | int, int]]()
    systems = [" ".join(source.choices(words, k=80)) for _ in range(5)]
    kinds = [*EDITS, *OTHERS]
    recent: list[tuple[int, list[str], list[str]]] = []
    with path.open("w", encoding="utf-8") as out:
        for line in range(1, count + 1):
            question, answer = (source.choices(words, k=source.randint(*sizes)) for sizes in ((10, 60), (20, 200)))
            number = str(source.randrange(10**6))
            question.insert(source.randrange(len(question)), number)
            answer.insert(source.randrange(len(answer)), number)
            if recent and line % 100 < 2 and line > 1000:
                kind = kinds[line // 100 % len(kinds)] if line % 100 else EDITS[line // 100 % len(EDITS)]
                original, *texts = recent.pop(source.randrange(len(recent)))
                if kind == OTHERS[0]:
                    question = texts[0]
                elif kind == OTHERS[1]:
                    was = next(word for word in texts[0] if word.isdecimal() and word in texts[1])
                    question, answer = ([number if word == was else word for word in text] for text in texts)
                else:
                    question, answer = (edited(text, int(kind), words, source) for text in texts)
                planted[line] = kind, original
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


def pack(folder: Path, tokenizer: Path, duplicates: str, workers: int) -> tuple[float, float, float, dict[str, Any]]:
    """Return seconds, CPU seconds, peak memory in MB, and the manifest of a run."""
    config: dict[str, Any] = {"name": duplicates, "sources": ["data.jsonl"], "tokenizer": str(tokenizer.resolve())}
    (folder / "corpus.yaml").write_text(
        yaml.safe_dump(config | {"duplicates": duplicates, "sequence_length": 2048, "unknown_markers": "text"})
    )
    root = folder / f"{duplicates}-{workers}"
    shutil.rmtree(root, ignore_errors=True)
    words = ["--module", "pipeline", "PackCorpus", "--config", str(folder / "corpus.yaml"), "--root", str(root)]
    root.mkdir()
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [Path(sys.executable).parent / "luigi", *words, "--workers", str(workers)],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    [manifest] = (root / "manifests").glob("*.json")
    return seconds, cpu, after.ru_maxrss / 1e3, json.loads(manifest.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure `duplicates: near` on planted duplicates.")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--words", type=Path, required=True, help="text from which words are drawn")
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "packcorpus-clean")
    given = parser.parse_args()
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    planted = write(given.folder / "data.jsonl", given.words.read_text("utf-8").split(), given.conversations)
    lists = set[bytes]()
    for duplicates in ("exact", "near"):
        for workers in given.workers:
            seconds, cpu, peak, manifest = pack(given.folder, given.tokenizer, duplicates, workers)
            listed = given.folder / f"{duplicates}-{workers}" / manifest["corpus"] / "dropped.jsonl"
            lists |= {listed.read_bytes()} if duplicates == "near" else set()
            tokens = manifest["ledger"]["tokens"]["encoded"]
            print(
                f"{duplicates}, {workers} workers: {seconds:.1f} s, {cpu:.1f} CPU s, {peak:,.0f} MB, {tokens:,} tokens",
                flush=True,
            )
    [content] = lists  # the same choice for any number of workers
    dropped = {line["line"]: line["kept"]["line"] for line in map(json.loads, content.splitlines())}
    print(f"{len(dropped):,} dropped, {len(dropped.keys() - planted.keys())} of them not planted")
    counts = Counter((kind, dropped.get(line) == original) for line, (kind, original) in planted.items())
    print("| planted | pairs | dropped |\n|---|---|---|")
    for kind in (*EDITS, *OTHERS):
        pairs = counts[kind, True] + counts[kind, False]
        label = f"{kind} % of the words" if isinstance(kind, int) else kind
        print(f"| {label} | {pairs:,} | {100 * counts[kind, True] / max(1, pairs):.1f} % |")
    right = sum(kind not in OTHERS and dropped.get(line) == original for line, (kind, original) in planted.items())
    print(f"precision: {100 * right / max(1, len(dropped)):.2f} %")
    shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
