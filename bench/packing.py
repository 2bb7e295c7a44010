"""Measure the rows, lower bound, time, and memory of packing.

    python bench/packing.py [lengths.npy] [--conversations 10000000]

lengths.npy contains the number of tokens of each conversation; without it, a skewed sample is generated. For each usual
sequence length, the lengths are packed as they are, and resampled to the given number of conversations (100 million
need 1.3 GB).
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tasks.packing import bin_packing


def measure(lengths: np.ndarray, capacity: int) -> str:
    """Pack the lengths and return one line of the table."""
    clock = [time.perf_counter()]
    counts = bin_packing.histogram(lengths, capacity)
    patterns = bin_packing.pack(counts, capacity)
    clock.append(time.perf_counter())
    bin_packing.assign(lengths, patterns)
    clock.append(time.perf_counter())
    bound, name = bin_packing.lower_bound(counts, capacity)
    plain = sum(copies for _, copies in bin_packing.best_fit_decreasing(counts, capacity))
    plan, assign = np.diff(clock)
    above, plain_above = (100 * (rows - bound) / max(1, bound) for rows in (patterns.rows, plain))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return (
        f"{capacity:>8} {len(lengths):>13,} {patterns.rows:>11,} {bound:>11,} {name:<20} {above:>7.4f} "
        f"{plain_above:>8.4f} {plan:>7.2f} {assign:>7.2f} {peak:>8,}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the rows, lower bound, time, and memory of packing.")
    parser.add_argument("lengths", nargs="?", help="a .npy file of lengths in tokens")
    parser.add_argument("--conversations", type=int, default=10_000_000, help="size of the resampled corpus")
    arguments = parser.parse_args()
    random = np.random.default_rng(0)
    drawn = 20 + np.exp(random.normal(5.3, 0.9, 25_000))
    source = (np.load(arguments.lengths) if arguments.lengths else drawn).astype(np.int32)
    print(
        f"{'capacity':>8} {'conversations':>13} {'rows':>11} {'bound':>11} {'name of the bound':<20} {'% above':>7} "
        f"{'BFD %':>8} {'plan s':>7} {'place s':>7} {'peak MB':>8}"
    )
    for capacity in (512, 1024, 2048, 4096):
        fitting = source[source <= capacity]
        print(measure(fitting, capacity), flush=True)
        if arguments.conversations:
            chosen = random.integers(0, len(fitting), arguments.conversations, dtype=np.int32)
            print(measure(fitting[chosen], capacity), flush=True)


if __name__ == "__main__":
    main()
