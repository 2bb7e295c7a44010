"""Measure how long ranks wait for the slowest rank, with and without `balance`.

    python bench/packing/balance.py INDEX                             a forecast, at several lengths
    python bench/packing/balance.py INDEX --steps                     8 ranks, step by step: slowest over mean
    python bench/packing/balance.py --rows 1000000                    seconds to put this many rows in order

INDEX is index.arrow of a corpus packed without limits of length (`overlong: error`, with a long row). At each length,
conversations are packed again as they are (`short`), and joined to longer conversations (`joined`). Neighbors in the
sources are joined so that lengths are log-normal with a median of an eighth of a row (sigma 1.3), cut at a row. Joining
is repeated at other places until there are 10,000 rows, because fewer rows may not fill a step of 512 ranks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from packcorpus.tasks.core.numbers import shuffle
from packcorpus.tasks.packing import bin_packing
from packcorpus.tasks.packing.balance import LINEAR, RANKS, balanced_order, forecast
from packcorpus.tasks.packing.column_generation import rows_of

LENGTHS = (1024, 4096, 16_384, 32_768, 131_072)
ROWS = 10_000  # rows of joined conversations


def lengths_of(index: Path) -> np.ndarray:
    with pa.memory_map(str(index)) as file:
        table = pa.ipc.open_stream(file).read_all()
        return table.filter(table["row"].is_valid())["length"].to_numpy().copy()


def joined(lengths: np.ndarray, row: int, seed: int) -> np.ndarray:
    """Join neighboring conversations so that their lengths are log-normal."""
    total = int(lengths.sum())
    wanted = row / 8 * np.exp(np.random.default_rng(seed).normal(0, 1.3, 20 * total // row + 20))
    ends = np.searchsorted(np.cumsum(lengths), np.cumsum(wanted))
    ends = np.unique(ends[ends < len(lengths)])
    found = np.add.reduceat(lengths, np.concatenate([[0], ends]))
    return np.minimum(found[found > 1], row).astype(np.int32)


def squares_of(lengths: np.ndarray, row: int) -> np.ndarray:
    """Pack lengths, and return Σn² of each row, in random order."""
    rows, _ = bin_packing.solve(bin_packing.histogram(lengths, row), row)
    squares = [sum(times * length**2 for length, times in lengths_in_row) for lengths_in_row, _ in rows]
    return np.repeat(squares, [copies for _, copies in rows])[shuffle(rows_of(rows), 42, 0)]


def corpora(lengths: np.ndarray) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield the name, the length of a row, and Σn² of each row, for each corpus."""
    for row in LENGTHS:
        yield "short", row, squares_of(lengths[lengths <= row], row)
        times = -(-ROWS * row // int(lengths.sum()))
        yield "joined", row, squares_of(np.concatenate([joined(lengths, row, n) for n in range(times)]), row)


def print_forecast(lengths: np.ndarray) -> None:
    print("| conversations | row | rows | worst / best | " + " | ".join(f"{ranks} ranks" for ranks in RANKS) + " |")
    print("|---|---:|---:|---:|" + "---:|" * len(RANKS))
    for name, row, squares in corpora(lengths):
        linear = LINEAR * row
        worst = (squares.max() + linear) / (squares.min() + linear)
        found = {one.ranks: one for one in forecast(squares, np.zeros(len(squares), np.int32), row)}
        shares = [f"{found[n].random:.2f} % → {found[n].balanced:.2f} %" if n in found else "–" for n in RANKS]
        print(f"| {name} | {row:,} | {len(squares):,} | {worst:.2f} | {' | '.join(shares)} |", flush=True)


def print_steps(lengths: np.ndarray) -> None:
    print("| conversations | row | slowest / mean, random | with balance | 4 ranks | 2 ranks |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, row, squares in corpora(lengths):
        order = balanced_order(squares, np.zeros(len(squares), np.int32), 8, 1, row, 42)
        flops, shown = LINEAR * row + squares, []
        for rows, ranks in ((flops, 8), (flops[order], 8), (flops[order], 4), (flops[order], 2)):
            steps = rows[: len(rows) // 8 * 8].reshape(-1, 8 // ranks, ranks).sum(axis=1)
            shown.append(f"{(steps.max(axis=1) / steps.mean(axis=1)).mean():.4f}")
        print(f"| {name} | {row:,} | {' | '.join(shown)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how long ranks wait for the slowest of a step.")
    parser.add_argument("index", nargs="?", type=Path)
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--rows", type=int)
    given = parser.parse_args()
    if given.rows:
        random = np.random.default_rng(0)
        squares = random.integers(1 << 17, 1 << 24, given.rows)
        trained = random.integers(1, 4096, given.rows).astype(np.int32)
        start = time.process_time()
        balanced_order(squares, trained, 8, 1, 4096, 42)
        print(f"{given.rows:,} rows: {time.process_time() - start:.2f} CPU s")
    if given.index:
        (print_steps if given.steps else print_forecast)(lengths_of(given.index))


if __name__ == "__main__":
    main()
