"""Random samples that begin alike, and the rows that store what they share once.

random_trees(seed) ─▶ samples in trees ─lay_out─▶ a row: input_ids, labels, position_ids, end, loss_weight
                                       ─alone───▶ each sample in its own row
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from random import Random

import numpy as np
import torch
from support.packed_rows import write_rows
from support.training.tiny_training import LENGTH, VOCABULARY, Row


@dataclass(frozen=True)
class Sample:
    ids: list[int]
    first: int  # the first token that is trained on; all after it are, too
    weight: float


Tree = list[Sample]


def random_trees(seed: int, length: int = LENGTH) -> list[Tree]:
    """Return the samples of conversations that fit into a row together.

    A sample is a prompt with the answer to it. The next prompt repeats the answer without its reasoning, and some
    prompts have two answers.
    """
    source, trees = Random(seed), list[Tree]()

    def tokens(least: int, most: int) -> list[int]:
        return [source.randrange(3, VOCABULARY) for _ in range(source.randint(least, most))]

    while True:
        history, tree = tokens(6, 20), Tree()
        for _ in range(source.randint(1, 4)):
            history = history + tokens(2, 8)
            for _ in range(source.randint(1, 2)):
                reasoning, answer = tokens(0, 8), tokens(3, 8)
                ids, weight = history + reasoning + answer, source.choice([0.25, 1.0, 3.0])
                tree.append(Sample(ids, len(history), weight))
            history = history + answer
        if len(lay_out([*trees, tree], 4 * length)["input_ids"].nonzero()) > length:
            return trees
        trees.append(tree)


def lay_out(trees: Sequence[Tree], length: int = LENGTH) -> Row:
    """Return a row of trees; `loss_weight` is that of the sample."""
    row: dict[str, list[float]] = {name: [] for name in ("input_ids", "labels", "position_ids", "end", "loss_weight")}
    for tree in trees:
        begin, before = len(row["end"]), list[int]()
        for sample in tree:
            alike = len([*takewhile(lambda pair: pair[0] == pair[1], zip(before, sample.ids, strict=False))])
            first = max(0, min(alike, sample.first) - 1)
            start = len(row["end"])
            for place in range(begin, start):  # what does not begin this sample ends here
                if row["end"][place] < 0 and row["position_ids"][place] >= first:
                    row["end"][place] = start
            for position in range(first, len(sample.ids)):
                is_trained = position >= sample.first
                row["input_ids"].append(sample.ids[position])
                row["labels"].append(sample.ids[position] if is_trained else -100)
                row["position_ids"].append(position)
                row["end"].append(-1)
                row["loss_weight"].append(sample.weight * is_trained)
            before = sample.ids
        stop = len(row["end"])
        row["end"] = [stop if end < 0 else end for end in row["end"]]
    size = len(row["end"])
    for place in range(size, length):
        for name, value in (("input_ids", 0), ("labels", -100), ("position_ids", place - size), ("end", place + 1)):
            row[name].append(value)
        row["loss_weight"].append(0.0)
    kinds = dict.fromkeys(row, torch.int32) | {"labels": torch.int64, "loss_weight": torch.float32}
    return {name: torch.tensor(values, dtype=kinds[name]) for name, values in row.items()}


def alone(trees: Sequence[Tree]) -> list[Row]:
    """Return each sample in its own row, as if nothing were shared."""
    rows = [lay_out([[sample]], len(sample.ids)) for tree in trees for sample in tree]
    for row in rows:
        del row["end"]
    return rows


def columns_of(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Return the columns of rows, with their mask."""
    columns = {name: np.stack([row[name].numpy() for row in rows]) for name in rows[0]}
    columns["attention_mask"] = (columns["input_ids"] > 0).astype(np.int8)  # padding alone has the token 0
    return columns


def write_trees(path: Path, columns: Mapping[str, np.ndarray]) -> Path:
    """Write rows as a shard of format 3.2, and return its folder."""
    length = len(columns["input_ids"][0])
    facts = {"format_version": "3.2", "sequence_length": str(length), "share": "conversation"}
    write_rows(path, columns, facts)
    return path.parent


def tree_rows(count: int, length: int = LENGTH) -> list[Row]:
    """Return several rows of trees."""
    return [lay_out(random_trees(seed, length), length) for seed in range(count)]
