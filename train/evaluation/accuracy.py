"""Count the trained tokens to which a model gives the highest probability.

    pass with labels ─┬─ logits ──────────────────────────────────────▶ argmax == label
                      └─ none (fused_loss) ─ hidden states ─head, in chunks─┘

With `fused_loss`, the logits of a batch may not fit into memory. Then only the logits of trained tokens are computed,
one chunk at a time. A head that scales or caps its logits does not change which logit is the highest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

CHUNK = 512  # tokens whose logits are in memory at a time


@contextmanager
def count_predicted(model: Any) -> Iterator[Callable[[Any, torch.Tensor], torch.Tensor]]:
    """Yield a function that counts the predicted tokens of a model's latest pass.

    It takes the outputs of the pass and its labels, and returns the number of labeled tokens that the preceding token
    predicts, int64[].
    """
    latest: list[torch.Tensor] = []

    def keep(_decoder: Any, _given: Any, found: Any) -> None:
        latest[:] = [found[0]]

    def count(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        targets, logits = labels[:, 1:], outputs.get("logits")
        if logits is not None:
            return (logits[:, :-1].argmax(-1) == targets).sum()  # never equal to -100
        head, is_trained = model.get_output_embeddings(), targets != -100
        hidden = latest[0][:, :-1][is_trained].to(head.weight.dtype).split(CHUNK)
        chunks = zip(hidden, targets[is_trained].split(CHUNK), strict=True)
        return torch.stack([(head(x).argmax(-1) == target).sum() for x, target in chunks]).sum()

    hook = model.get_decoder().register_forward_hook(keep)
    try:
        yield count
    finally:
        hook.remove()
        latest.clear()
