"""The losses and the gradients of steps, to compare different rows.

`alone` puts each conversation in its own row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from support.training.tiny_training import LENGTH, Row
from transformers import TrainerCallback

Gradients = dict[str, torch.Tensor]


def alone(rows: Sequence[Row]) -> list[Row]:
    """Return the conversations of the rows, each in its own row."""
    found = []
    for row in rows:
        bounds = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), LENGTH]
        pieces = [{name: column[a:b] for name, column in row.items()} for a, b in pairwise(bounds)]
        found += [piece for piece in pieces if (piece["labels"] >= 0).any()]
    assert len(found) > len(rows)
    return found


def token_losses(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of each token of a batch.

    It is 0 for tokens that are not trained on, and for the first token of a row.
    """
    logits = model(**{name: batch[name] for name in ("input_ids", "position_ids")}).logits[:, :-1]
    found = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    return torch.nn.functional.pad(found, (1, 0))


def gradients_of(model: Any) -> Gradients:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(found: Gradients, expected: Gradients) -> float:
    """Return the relative error over all weights of the adapter."""
    assert found.keys() == expected.keys()
    difference = sum((found[name] - expected[name]).square().sum() for name in expected)
    return float((difference / sum(x.square().sum() for x in expected.values())).sqrt())


class Caught(TrainerCallback):
    """Keeps the gradients of the first optimizer step."""

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.gradients = gradients_of(getattr(model, "module", model))
