"""Compare token ids and labels with a reference implementation in plain Python.

    python bench/reliability/differential.py [--real 30000] [--unusual 3000] [--template llama2] [--kind hf_unigram]

The comparison covers every built-in template with every kind of tokenizer. Folders are loaded by AutoTokenizer, with
classes that change how they encode. The real conversations are from
../shared/corpora, filled up with conversations of two GSM8K problems each; they are tokenized with `train_on:
assistant`. The unusual conversations are generated from --seed and tokenized with `assistant`, `last`, and `all`. The
reference is tests/reference. Prints a Markdown table; exit code 1 if an id or a label differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # tests are imported by name
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from support.differential.comparison import Tally, compare_pair  # noqa: E402
from support.tokenizer_kinds import CLASSES, KINDS  # noqa: E402

from packcorpus.tasks.templates.built_in import BUILT_IN  # noqa: E402

COLUMNS = ("template", "tokenizer", "conversations", "samples", "tokens", "trained tokens", "rejected", "mismatches")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=int, default=30_000, help="real conversations for each pair")
    parser.add_argument("--unusual", type=int, default=3_000, help="unusual conversations for each pair")
    parser.add_argument("--seed", type=int, default=1, help="of the unusual conversations")
    parser.add_argument("--template", choices=BUILT_IN, nargs="+", default=list(BUILT_IN))
    parser.add_argument("--kind", choices=[*KINDS, *CLASSES], nargs="+", default=[*KINDS, *CLASSES])
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    given = parser.parse_args()
    pairs = [(template, kind) for template in given.template for kind in given.kind]
    print(f"| {' | '.join(COLUMNS)} |\n|---|---|{'---:|' * 6}", flush=True)
    start, total = time.perf_counter(), Tally()
    with ProcessPoolExecutor(given.workers) as pool:
        jobs = [pool.submit(compare_pair, *pair, given.real, given.unusual, given.seed) for pair in pairs]
        for (template, kind), job in zip(pairs, jobs, strict=True):
            tally = job.result()
            total += tally
            print(row(f"`{template}`", kind, tally), flush=True)
            for wrong in tally.wrong[:5]:
                print(f"{template}, {kind}: {wrong}", file=sys.stderr)
    print(row("all", "all", total))
    print(f"{time.perf_counter() - start:,.0f} s", file=sys.stderr)
    sys.exit(bool(total.wrong))


def row(template: str, kind: str, tally: Tally) -> str:
    counts = (tally.conversations, tally.samples, tally.tokens, tally.trained, tally.rejected, len(tally.wrong))
    return f"| {template} | {kind} | {' | '.join(f'{count:,}' for count in counts)} |"


if __name__ == "__main__":
    main()
