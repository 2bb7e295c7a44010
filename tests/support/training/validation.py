"""The loss and accuracy of a model on validation rows, by their definitions.

Rows are evaluated one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def evaluated(model: Any, rows: Iterable[Any]) -> tuple[float, float]:
    """Return the mean loss of all trained tokens, and the accuracy.

    The accuracy is the share of the trained tokens that have the highest logit.
    """
    loss, right, trained = 0.0, 0, 0
    with torch.no_grad():
        for row in rows:
            ids, labels = torch.tensor(row["input_ids"])[None].long(), torch.tensor(row["labels"])[1:].long()
            positions = torch.tensor(row["position_ids"])[None] if "position_ids" in row else None
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, :-1]
            places = [place for place, label in enumerate(labels.tolist()) if label != -100]
            loss += sum(-logits[place].log_softmax(-1)[labels[place]].item() for place in places)
            right += sum(int(logits[place].argmax()) == labels[place] for place in places)
            trained += len(places)
    return loss / trained, int(right) / trained


def with_adapter(base: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
