"""Measure the rows, lower bound, time, and memory of packing.

    python bench/packing/bin_packing.py [lengths.npy] [--conversations 10000000]
    python bench/packing/bin_packing.py hard
    python bench/packing/bin_packing.py several [lengths.npy] [--conversations 10000000]
    python bench/packing/bin_packing.py settings [lengths.npy] [--conversations 10000000]

lengths.npy contains the number of tokens of each conversation; without it, a skewed sample is generated. For each usual
sequence length, the lengths are packed as they are, and resampled to the given number of conversations (100 million
need 1.3 GB). `hard` packs lengths spread evenly over a range of a row, with and without column generation. `several`
packs in rows of several lengths, and in rows of each single length that holds all conversations. It uses lengths as
they are, times 32, resampled, and evenly spread lengths that need column generation. `settings` measures all work of a
plan on lengths, from the histogram to the row and start of each conversation, with settings that change this work.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.numbers import shuffle
from packcorpus.tasks.packing import bin_packing, several_lengths
from packcorpus.tasks.packing.balance import put_in_order
from packcorpus.tasks.packing.column_generation import lower_bound, rows_of
from packcorpus.tasks.packing.placement import place
from packcorpus.tasks.storage.shards import RowStatistics


def measure(lengths: np.ndarray, capacity: int) -> str:
    """Pack the lengths and return one line of the table."""
    clock = [time.perf_counter()]
    counts = bin_packing.histogram(lengths, capacity)
    packed, (bound, name) = bin_packing.solve(counts, capacity)
    clock.append(time.perf_counter())
    bin_packing.assign(lengths, bin_packing.Runs.of(packed), shuffle(len(lengths), 42, 0))
    clock.append(time.perf_counter())
    rows, plain = rows_of(packed), rows_of(bin_packing.best_fit_decreasing(counts, capacity))
    plan, assign = np.diff(clock)
    above, plain_above = (100 * (count - bound) / max(1, bound) for count in (rows, plain))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return (
        f"{capacity:>8} {len(lengths):>13,} {rows:>11,} {bound:>11,} {name:<20} {above:>7.4f} "
        f"{plain_above:>8.4f} {plan:>7.2f} {assign:>7.2f} {peak:>8,}"
    )


HARD = [
    (512, 100_000, 0.25, 0.5),
    (1024, 1_000_000, 0.25, 0.5),
    (2048, 1_000_000, 0.25, 0.5),
    (4096, 1_000_000, 0.25, 0.5),
    (8192, 1_000_000, 0.25, 0.5),
    (32768, 1_000_000, 0.25, 0.5),
    (512, 100_000, 0.15, 0.4),
    (1024, 200_000, 0.2, 0.6),
    (2048, 100_000, 0.2, 0.5),
    (512, 300, 0.2, 0.5),
]


def measure_hard(capacity: int, count: int, low: float, high: float) -> str:
    """Pack evenly spread lengths and return one line of the table."""
    lengths = np.random.default_rng(0).integers(int(capacity * low) + 1, int(capacity * high) + 1, count)
    counts = bin_packing.histogram(lengths, capacity)
    clock = [time.process_time()]
    searched = rows_of(bin_packing.search(counts, capacity))
    clock.append(time.process_time())
    packed, (bound, _) = bin_packing.solve(counts, capacity)
    clock.append(time.process_time())
    simple = lower_bound(counts, capacity)[0]
    rows = rows_of(packed)
    above = 100 * (rows / bound - 1)
    search, both = np.diff(clock)
    return (
        f"| {capacity:,} | {low:g} to {high:g} | {count:,} | {simple:,} | {searched:,} | {bound:,} | {rows:,} "
        f"| {above:.4f} % | {search:.2f} | {both:.1f} |"
    )


SEVERAL = [(512, 1024), (1024, 4096), (16384, 32768, 131072)]


def measure_several(name: str, source: np.ndarray, lengths: tuple[int, ...]) -> Iterator[str]:
    """Yield lines of the table: all lengths together, and each that holds everything."""
    values = source[source <= lengths[-1]]
    counts = bin_packing.histogram(values, lengths[-1])
    tokens = int(values.sum(dtype=np.int64))
    singles = [(length,) for length in lengths if length >= int(values.max())]
    for own in (lengths, *singles):
        start = time.process_time()
        packed = several_lengths.solve(counts[: own[-1] + 1], own)
        (rows, proof) = packed.bounds[0]
        bound, proof = packed.places or (rows * own[0], proof)
        seconds = time.process_time() - start
        counts_of_rows = [*map(rows_of, packed.rows)]
        places = sum(rows * length for rows, length in zip(counts_of_rows, own, strict=True))
        shown = " + ".join(f"{rows:,} × {length:,}" for rows, length in zip(counts_of_rows, own, strict=True))
        yield (
            f"| {name} | {len(values):,} | {shown} | {places:,} | {100 * tokens / places:.3f} % | {bound:,} | {proof} "
            f"| {100 * (places / bound - 1):.4f} % | {seconds:.2f} |"
        )


def print_several(source: np.ndarray, conversations: int) -> None:
    random = np.random.default_rng(0)
    print("| lengths | conversations | rows | places | full | bound | proof | above | CPU s |")
    print("|---|---:|---|---:|---:|---:|---|---:|---:|")
    many = source[random.integers(0, len(source), conversations)]
    even = random.integers(257, 513, conversations, dtype=np.int32)
    for lengths in SEVERAL:
        scale = 32 if lengths[0] > 4096 else 1
        cases = [("as they are", source), *[("times 32", source * 32)] * (scale > 1), ("resampled", many * scale)]
        for name, values in cases:
            for line in measure_several(name, values, lengths):
                print(line, flush=True)
    for line in measure_several("257 to 512", even, (512, 1024)):
        print(line, flush=True)


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("`sequence_length: 1024`", {}),
    ("`align: 16`", {"align": 16}),
    ("`validation: 0.01`", {"validation": 0.01}),
    ("`balance: {ranks: 8}`", {"balance": {"ranks": 8}}),
    ("`sequence_length: [512, 1024]`", {"sequence_length": [512, 1024]}),
    ("`sequence_length: [1024, 4096, 16384]`", {"sequence_length": [1024, 4096, 16384]}),
]


def measure_settings(name: str, given: dict[str, Any], what: str, lengths: np.ndarray) -> str:
    """Place conversations, and return a line of the table."""
    config = Config.model_validate({"sources": [{"path": "x"}], "sequence_length": 1024} | given)
    lengths = lengths[lengths <= config.sequence_length]
    held_out = np.zeros(len(lengths), np.bool_)
    if config.validation:
        held_out[:: round(1 / config.validation)] = True
    shards = dict.fromkeys(config.rows.split_names(1), 64)
    start = time.process_time()
    placed = place(lengths, held_out, config, shards)
    seconds = time.process_time() - start
    if config.balance:
        statistics = RowStatistics.zeros(placed.rows)
        statistics.squares[:] = np.bincount(placed.row, lengths.astype(np.float64) ** 2)
        start = time.process_time()
        put_in_order(placed, statistics, config, 1)
        seconds += time.process_time() - start
    bounds = ", ".join(sorted({proof for _, proof in placed.lower_bounds if proof}))
    return f"| {what} | {name} | {len(lengths):,} | {placed.rows:,} | {bounds} | {seconds:.1f} |"


def print_settings(source: np.ndarray, conversations: int) -> None:
    random = np.random.default_rng(0)
    print("| lengths | settings | conversations | rows | bounds | CPU s |")
    print("|---|---|---:|---:|---|---:|")
    many = source[random.integers(0, len(source), conversations)]
    for name, given in SETTINGS:
        print(measure_settings(name, given, "resampled", many), flush=True)
    for length in (1024, 4096, 32768):  # column generation; with classes if there are more than 512 different lengths
        even = random.integers(length // 4 + 1, length // 2 + 1, conversations, dtype=np.int32)
        print(
            measure_settings(f"`sequence_length: {length}`", {"sequence_length": length}, "0.25 to 0.5", even),
            flush=True,
        )
    several = {"sequence_length": [512, 1024]}
    even = random.integers(257, 513, conversations, dtype=np.int32)
    print(measure_settings("`sequence_length: [512, 1024]`", several, "257 to 512", even), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the rows, lower bound, time, and memory of packing.")
    parser.add_argument(
        "lengths", nargs="*", help="a .npy file of lengths in tokens, after `several` or `settings` if given; or: hard"
    )
    parser.add_argument("--conversations", type=int, default=10_000_000, help="size of the resampled corpus")
    arguments = parser.parse_args()
    modes = {"several": print_several, "settings": print_settings}
    mode = modes.get((arguments.lengths or [""])[0])
    given = (arguments.lengths[bool(mode) :] or [None])[0]
    if given == "hard":
        print("| row | lengths, in rows | count | simple bound | search | bound | rows | above | search s | all s |")
        print("|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|")
        for case in HARD:
            print(measure_hard(*case), flush=True)
        return
    random = np.random.default_rng(0)
    drawn = 20 + np.exp(random.normal(5.3, 0.9, 25_000))
    source = (np.load(given) if given else drawn).astype(np.int32)
    if mode:
        mode(source, arguments.conversations)
        return
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
