"""Compare samples of 24 kinds of tokenizers with the ids of AutoTokenizer.

    python bench/reliability/every_tokenizer.py [--count 5000] [--kind byte-level] [--class Qwen2] [--seed 1]

The kinds are those of tests/support/differential/composed_tokenizers.py. The classes are those of the installed
Transformers that load a tokenizer unlike its file, with the settings that change how (auto_tokenizers.py). Each pair of
a kind and a class reads --count conversations of unusual texts, an equal number with each chat template of
like_inference.py. The ids before each trained turn must be those of `apply_chat_template(messages[:k],
add_generation_prompt=True)`, and the ids of the turn those that the template writes after it. Prints a Markdown table;
exit code 1 if a sample differs.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # tests are imported by name
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

from support.differential.auto_tokenizers import CLASSES, write_folder  # noqa: E402
from support.differential.composed_tokenizers import COMPOSED, NAMED, THOUGHTS  # noqa: E402
from support.differential.like_inference import (  # noqa: E402
    TEMPLATES,
    Pair,
    Tally,
    compare,
    conversations,
    opened,
    reason_of,
)

AT_ONCE = 500  # conversations


def compare_pair(kind: str, class_name: str, count: int, seed: int) -> Tally | str:
    """Compare the conversations of a kind and a class, or return why it is refused."""
    name, settings = CLASSES[class_name]
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        for number, source in enumerate(TEMPLATES.values()):
            more = settings | NAMED | {"chat_template": source}
            pair = opened(write_folder(Path(folder) / "tokenizer", kind, "nothing", name, settings=more))
            if not isinstance(pair, Pair):
                return reason_of(pair)
            draw = random.Random(seed * 1000 + number)
            left = (count + number) // len(TEMPLATES)
            while left > 0:
                found = compare(pair, list(conversations(draw, min(left, AT_ONCE), THOUGHTS)))
                tally.outcomes += found.outcomes
                tally.wrong += found.wrong
                left -= AT_ONCE
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000, help="conversations for each kind and class")
    parser.add_argument("--kind", choices=COMPOSED, nargs="+", default=list(COMPOSED))
    parser.add_argument("--class", dest="classes", choices=CLASSES, nargs="+", default=list(CLASSES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    start, total, refused = time.perf_counter(), Tally(), Counter[str]()
    print("| tokenizer | class | equal | rejected | different |\n|---|---|---:|---:|---:|", flush=True)
    pairs = [(kind, class_name) for kind in given.kind for class_name in given.classes]
    with ProcessPoolExecutor(given.workers) as pool:
        jobs = [pool.submit(compare_pair, *pair, given.count, given.seed) for pair in pairs]
        for (kind, class_name), job in zip(pairs, jobs, strict=True):
            found = job.result()
            if isinstance(found, str):
                refused[found] += 1
                print(f"| {kind} | {class_name} | refused: {found} | | |", flush=True)
                continue
            total.outcomes += found.outcomes
            total.wrong += found.wrong
            print(row(kind, class_name, found), flush=True)
            for wrong in found.wrong[:3]:
                print(f"{kind}, {class_name}: {wrong[:2000]}", file=sys.stderr)
    print(row("all", f"{len(pairs) - refused.total()} pairs", total))
    for reason, count in refused.most_common():
        print(f"refused {count} of {len(pairs)} pairs: {reason}")
    for outcome, count in total.outcomes.most_common():
        print(f"{outcome}: {count:,}")
    print(f"{time.perf_counter() - start:,.0f} s; seed {given.seed}", file=sys.stderr)
    sys.exit(bool(total.wrong))


def row(kind: str, class_name: str, tally: Tally) -> str:
    equal = tally.outcomes["equal"]
    rejected = tally.outcomes.total() - equal
    return f"| {kind} | {class_name} | {equal:,} | {rejected:,} | {len(tally.wrong):,} |"


if __name__ == "__main__":
    main()
