"""Compare ways of cutting a corpus into groups that are planned one by one.

    python bench/packing/groups.py data/corpora/NAME-KEY/index.arrow [--times 10] [--length 1024]
    python bench/packing/groups.py hard

Reads the source and the length of every packed conversation from an index. Each source is repeated `--times` times, in
the order of the sources. `hard` generates two sources instead: one whose conversations all take between a quarter and
half of a row, and one of short conversations.

For several sizes of groups, prints how many more rows the groups need than one plan of everything. Also prints the
largest deviation of a source's share of the tokens in a group from its share in the corpus, in percentage points, over
several seeds:

    source order    runs of conversations in the order of the sources
    shuffled        chunks in random order, cut into groups
    dealt           tasks/packing/groups/
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tasks.core.seeded_order import shuffle
from tasks.packing import bin_packing
from tasks.packing.groups.deal import deal, shards_of

PER_SHARD = 34_000  # conversations of about 1 KB in a shard
SEED = 42


def read_index(path: Path, times: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the source and length of each conversation, with each source repeated."""
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_stream(file).read_all().select(["source", "length", "row"])
    table = table.filter(table["row"].is_valid())
    source, length = table["source"].to_numpy(), table["length"].to_numpy()
    own = [np.tile(length[source == number], times) for number in np.unique(source)]
    return np.repeat(np.arange(len(own)), [len(lengths) for lengths in own]), np.concatenate(own)


def hard_case(count: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the source and length of `count` conversations from each of two sources."""
    random = np.random.default_rng(SEED)
    medium = random.integers(capacity // 4 + 1, capacity // 2, count)
    short = random.integers(capacity // 50, capacity // 8, count)
    return np.repeat([0, 1], count), np.concatenate([medium, short]).astype(np.int32)


def rows(lengths: np.ndarray, capacity: int) -> int:
    return bin_packing.pack(bin_packing.histogram(lengths, capacity), capacity).rows


def measure(of: np.ndarray, source: np.ndarray, length: np.ndarray, capacity: int) -> tuple[int, float]:
    """Return the rows of all groups, and the largest deviation of a source's share.

    A share is of the tokens in a group. The deviation is in percentage points.
    """
    whole = np.bincount(source, length) / length.sum()
    total, worst = 0, 0.0
    for group in range(int(of.max()) + 1):
        own = of == group
        total += rows(length[own], capacity)
        tokens = np.bincount(source[own], length[own], len(whole))
        worst = max(worst, float(abs(tokens / tokens.sum() - whole).max()))
    return total, 100 * worst


def cuts(
    count: int, size: int, chunk: int, groups: int, shards: int, seeds: int
) -> Iterator[tuple[str, Iterator[np.ndarray]]]:
    """Yield each way of cutting: its name, and each conversation's group per seed."""
    if not chunk:
        yield "source order", iter([np.arange(count) // size])
        return
    chunks = -(-count // chunk)
    edges = np.array([chunks * shards_of(group, groups, shards).stop // shards for group in range(groups)])
    orders = (shuffle(chunks, SEED + number, 0) for number in range(seeds))
    yield "shuffled", (np.repeat(np.searchsorted(edges, order, side="right"), chunk)[:count] for order in orders)
    dealt = (deal(chunks, shards, groups, SEED + number, 0) for number in range(seeds))
    yield "dealt", (np.repeat(of, chunk)[:count] for of in dealt)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare ways of cutting a corpus into groups.")
    parser.add_argument("index", help="index.arrow of a corpus, or `hard`")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--groups", type=int, nargs="+", default=[100_000, 500_000, 1_000_000])
    parser.add_argument("--chunks", type=int, nargs="+", default=[4000, 1000, 250])
    parser.add_argument("--seeds", type=int, default=20)
    given = parser.parse_args()
    if given.index == "hard":
        source, length = hard_case(1_300_000, given.length)
    else:
        source, length = read_index(Path(given.index), given.times)
    count = len(length)
    single, shards = rows(length, given.length), -(-count // PER_SHARD)
    bound = bin_packing.lower_bound(bin_packing.histogram(length, given.length), given.length)[0]
    print(f"{count:,} conversations, {shards} shards; one plan: {single:,} rows, lower bound {bound:,}")
    print("group        chunk  cut            more rows: worst  share off: median  worst")
    for size in given.groups:
        groups = min(-(-count // size), shards)
        for chunk in [0, *given.chunks]:
            for name, of in cuts(count, size, chunk, groups, shards, given.seeds):
                found = [measure(each, source, length, given.length) for each in of]
                more = 100 * (max(total for total, _ in found) / single - 1)
                off = [worst for _, worst in found]
                print(
                    f"{size:>9,} {chunk:>8,}  {name:<12} {more:>17.4f}% {np.median(off):>17.2f} {max(off):>6.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
