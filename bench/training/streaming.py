"""Measure rows per second and CPU time per row of streaming and PackedDataset.

    python bench/training/streaming.py manifests/x.json [--rows-per-step 64] [--most 50000] [--cache FOLDER]

Prints a Markdown table. Each reader yields the same number of rows in batches of 8 through a DataLoader. PackedDataset
reads them in random order; streamed rows have the order in which the Trainer gets them. Both readers verify every
checksum, PackedDataset when it opens and streaming while it reads, and the times include this. The page cache is warm
after the first run, which is not counted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import default_data_collator

from train.data.corpus import Corpus, open_corpus
from train.data.dataset import PackedDataset
from train.data.dealt_rows import DealtRows, empty_row
from train.data.stream import StreamedRows

BATCH = 8


def packed(corpus: Corpus, load: Any, most: int) -> Iterator[Any]:
    rows = PackedDataset(corpus, load=load)
    order = random.Random(0).sample(range(len(rows)), most)
    yield from DataLoader(rows, BATCH, sampler=order, collate_fn=default_data_collator)


def streamed(corpus: Corpus, rows_per_step: int, most: int, cache: Path | None) -> Iterator[Any]:
    rows = StreamedRows(corpus, rows_per_step, cache=cache)
    dealt = DealtRows(rows, BATCH, empty_row(corpus))
    batches = BatchSampler(SequentialSampler(dealt), BATCH, drop_last=False)
    yield from islice(DataLoader(dealt, batch_sampler=batches, collate_fn=default_data_collator), most // BATCH)
    dealt.close()


def measure(work: Callable[[], Iterator[Any]]) -> tuple[float, float, float]:
    """Return the seconds until the first batch, the total seconds, and CPU seconds."""
    start, cpu = time.perf_counter(), time.process_time()
    batches = work()
    next(batches)
    first = time.perf_counter() - start
    for _ in batches:
        pass
    return first, time.perf_counter() - start, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--rows-per-step", type=int, default=64)
    parser.add_argument("--most", type=int, default=10**9, help="rows to read of one epoch")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus = open_corpus(options.manifest)
    most = min(options.most, corpus.rows("train")) // BATCH * BATCH
    readers: dict[str, Callable[[], Iterator[Any]]] = {
        "PackedDataset, memory": lambda: packed(corpus, "memory", most),
        "PackedDataset, mmap": lambda: packed(corpus, "mmap", most),
        "streamed": lambda: streamed(corpus, options.rows_per_step, most, None),
    }
    if options.cache:
        readers["streamed, with a cache"] = lambda: streamed(corpus, options.rows_per_step, most, options.cache)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in readers}
    for run in range(options.runs + 1):
        for name, reader in readers.items():
            figures = measure(reader)
            if run:
                found[name].append(figures)
    shards = corpus.splits["train"]
    print(f"{most:,} rows of {corpus.sequence_length}, {len(shards)} shards of {shards[0].bytes / 1e6:.0f} MB")
    print("| rows | first batch, s | rows/s | CPU, µs a row |")
    print("|---|---:|---:|---:|")
    for name, runs in found.items():
        first, seconds, cpu = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"| {name} | {first:.2f} | {most / seconds:,.0f} | {1e6 * cpu / most:.1f} |")


if __name__ == "__main__":
    main()
