"""Count the trained tokens to which a model gives the highest probability.

    pass with labels ─┬─ logits ──────────────────────────────────────▶ argmax == label
                      └─ none (fused_loss) ─ hidden states ─head, in chunks─┘

With `fused_loss`, the logits of a batch may not fit into memory. Then only the logits of trained tokens are computed,
one chunk at a time. A head that scales or caps its logits does not change which logit is the highest.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

CHUNK = 512  # tokens whose logits are in memory at a time


class PredictedTokens:
    """Context in which `count` counts the predicted tokens of a model's latest pass."""

    def __init__(self, model: Any):
        self._model = model
        self._hidden: torch.Tensor | None = None

    def __enter__(self) -> PredictedTokens:
        self._hook = self._model.get_decoder().register_forward_hook(self._keep)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        self._hook.remove()
        self._hidden = None

    def _keep(self, decoder: Any, given: Any, found: Any) -> None:
        self._hidden = found[0]

    def count(self, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        """Return the number of labeled tokens that the preceding token predicts, int64[]."""
        targets, logits = labels[:, 1:], outputs.get("logits")
        if logits is not None:
            return (logits[:, :-1].argmax(-1) == targets).sum()  # never equal to -100
        assert self._hidden is not None, "the pass ran in this context"
        head, is_trained = self._model.get_output_embeddings(), targets != -100
        hidden = self._hidden[:, :-1][is_trained].to(head.weight.dtype).split(CHUNK)
        chunks = zip(hidden, targets[is_trained].split(CHUNK), strict=True)
        return torch.stack([(head(x).argmax(-1) == target).sum() for x, target in chunks]).sum()
