"""Measure the loss of a merged model on the rows that its run was validated on.

    corpus ─pieces_of─▶ conversations of its validation rows, or of its training rows ─mean_loss(model)─▶ one number

The number of tokens depends on the size of the model, not on the speed of the machine, so the same merge measures the
same rows everywhere. Each conversation is passed alone, so nothing has to keep conversations apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from packcorpus.tasks.core.printable import counted
from packcorpus.tasks.storage.layout import kind_of
from packcorpus.tasks.storage.schemas import IGNORED
from packcorpus.train.data.corpus import Corpus
from packcorpus.train.data.dataset import PackedDataset
from packcorpus.train.data.paths import paths_of

# Operations of all passes of a model: 20 seconds at 1 TFLOP/s. A model of 8 billion parameters reads 1,250 tokens.
OPERATIONS = 2e13
FEWEST, MOST = 512, 32768  # tokens
# Tokens of a conversation that are read, so that its logits fit into memory.
LONGEST = 2048
# Rows whose shards are opened.
ROWS = 1000


@dataclass(frozen=True, slots=True)
class Pieces:
    """Token IDs and labels of conversations, each int64[tokens], of rows of one kind."""

    kind: str  # validation or training
    pieces: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def trained(self) -> int:
        """Return the number of tokens whose loss is measured."""
        return sum(int((labels[1:] != IGNORED).sum()) for _, labels in self.pieces)


@dataclass(frozen=True, slots=True)
class Losses:
    """Mean losses on the same tokens: in training, and of merged models.

    `written` is that of the merged model, and `other` that of the model with the other weights of the base; None for a
    run without quantization.
    """

    tokens: int
    kind: str
    training: float
    written: float
    other: float | None
    is_dequantized: bool  # the merged model has the dequantized weights

    def is_other_lower(self) -> bool:
        """Return whether the original weights give a lower loss than this model's."""
        return self.is_dequantized and self.other is not None and round(self.other, 4) < round(self.written, 4)

    def __str__(self) -> str:
        names = ("dequantized", "original")[:: 1 if self.is_dequantized else -1]
        text = f"{self.training:.4f} in training, {self.written:.4f} merged"
        if self.other is not None:
            text += f" into the {names[0]} weights, {self.other:.4f} merged into the {names[1]} weights"
        return f"{text} ({counted(self.tokens, 'trained token')} of the {self.kind} rows)"


def pieces_of(corpus: Corpus, parameters: int) -> Pieces:
    """Return the first conversations of each split, fewer for a larger model."""
    most = min(MOST, max(FEWEST, int(OPERATIONS / (2 * parameters))))
    names = [name for name in corpus.splits if kind_of(name) == "validation" and corpus.rows(name)]
    found = Pieces("validation" if names else "training")
    names = names or [name for name in corpus.splits if kind_of(name) == "train" and corpus.rows(name)]
    for name in names:
        left = most // len(names)
        for ids, labels in _pieces(_rows(corpus, name)):
            if len(ids) > left:
                break
            found.pieces.append((ids, labels))
            left -= len(ids)
    return found


def _rows(corpus: Corpus, split: str) -> Iterator[dict[str, np.ndarray]]:
    """Yield the rows of the first shards of a split."""
    shards = list(corpus.splits[split])
    while len(shards) > 1 and sum(shard.rows for shard in shards[:-1]) >= ROWS:
        shards.pop()
    part: Any = replace(corpus, splits={split: shards})
    if corpus.packed:
        rows: Any = PackedDataset(part, split, "mmap")
    else:
        from packcorpus.train.data.conversations import sft_dataset

        rows = sft_dataset(part, split)[0]
    for number in range(len(rows)):
        yield {name: np.asarray(values) for name, values in rows[number].items()}


def _pieces(rows: Iterator[dict[str, np.ndarray]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each conversation of rows up to its last trained token."""
    for row in rows:
        ids, labels = row["input_ids"].astype(np.int64), row["labels"].astype(np.int64)
        for places, shared in paths_of(row):
            targets = labels[places[:LONGEST]]
            targets[:shared] = IGNORED  # they count in another sample
            trained = np.flatnonzero(targets != IGNORED)
            if trained.any():  # otherwise padding; nothing predicts the first token
                end = int(trained[-1]) + 1
                yield torch.from_numpy(ids[places[:end]]), torch.from_numpy(targets[:end])


@torch.inference_mode()
def mean_loss(model: Any, given: Pieces) -> float:
    """Return the mean loss of the trained tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for ids, labels in given.pieces:
        logits, targets = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0, :-1], labels[1:]
        is_trained = targets != IGNORED
        chosen = logits[is_trained.to(logits.device)].float().cpu()
        total += cross_entropy(chosen, targets[is_trained], reduction="sum").double()
    return float(total / given.trained)
