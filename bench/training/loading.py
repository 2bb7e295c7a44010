"""Measure rows per second of PackedDataset and of `datasets` with torch format.

    python bench/training/loading.py manifests/x.json [--runs 5]

Prints a Markdown table of medians; the last column is the ratio to `datasets`. Every run reads the same shards in the
same shuffled order with each reader in turn: batches of 8 through a DataLoader with transformers' default collator, and
single rows. `datasets` maps the files and returns the same three columns; its cache is warm after the first run, which
is not counted. Opening is timed separately, because PackedDataset checks every checksum when it opens.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from torch.utils.data import DataLoader
from transformers import default_data_collator

from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.data.dataset import PackedDataset

COLUMNS = ["input_ids", "labels", "position_ids"]
BATCH = 8


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def by_batches(rows: Any, order: list[int]) -> None:
    for _ in DataLoader(rows, BATCH, sampler=order, collate_fn=default_data_collator):
        pass


def one_by_one(rows: Any, order: list[int]) -> None:
    for number in order:
        rows[number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus = open_corpus(options.manifest)
    shards = [str(corpus.folder / shard.path) for shard in corpus.splits["train"]]

    def mapped_by_datasets() -> Any:
        return concatenate_datasets([Dataset.from_file(shard) for shard in shards]).with_format("torch", COLUMNS)

    openers: dict[str, Callable[[], Any]] = {
        "datasets": mapped_by_datasets,
        "PackedDataset, memory": lambda: PackedDataset(corpus, load="memory"),
        "PackedDataset, mmap": lambda: PackedDataset(corpus, load="mmap"),
    }
    order = list(range(corpus.rows("train")))
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in openers}
    for run in range(options.runs + 1):
        random.Random(run).shuffle(order)
        for name, open_rows in openers.items():
            opening = seconds(open_rows)
            rows = open_rows()
            figures = opening, *(len(order) / seconds(lambda: work(rows, order)) for work in (by_batches, one_by_one))  # noqa: B023
            if run:
                found[name].append(figures)
    medians = {name: [statistics.median(column) for column in zip(*runs, strict=True)] for name, runs in found.items()}
    print(f"{len(order):,} rows of {corpus.sequence_length}, medians of {options.runs} runs")
    print(f"| rows | open, s | rows/s, batches of {BATCH} | rows/s, one by one | over datasets |")
    print("|---|---:|---:|---:|---:|")
    for name, (opening, batches, singles) in medians.items():
        _, theirs, their_singles = medians["datasets"]
        over = f"{batches / theirs:.1f}, {singles / their_singles:.1f}"
        print(f"| {name} | {opening:.2f} | {batches:,.0f} | {singles:,.0f} | {over} |")


if __name__ == "__main__":
    main()
