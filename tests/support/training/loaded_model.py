"""A tiny model, saved in a folder and loaded as the training code does.

folder ─save_base─▶ folder ─load─▶ PeftModel        batch_of(0, 1) ─▶ packed rows        adapter(model) ─▶ its weights
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.training.tiny_training import packed_rows, tiny_model

from packcorpus.train.config import TrainingConfig
from packcorpus.train.model.attention import Collator
from packcorpus.train.model.qlora import load_model


def save_base(folder: Path, **sizes: Any) -> Path:
    """Write a model that can learn, with tied embeddings.

    Its weights have the usual size.
    """
    learns = {"initializer_range": 0.02, "tie_word_embeddings": True, "use_cache": True}
    tiny_model(adapter=False, **learns, **sizes).save_pretrained(folder)
    return folder


def load(base: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return load_model(base, TrainingConfig(**changes), "cpu", dtype)


def batch_of(*rows: int) -> dict[str, torch.Tensor]:
    return Collator("sdpa")([packed_rows()[i] for i in rows])


def adapter(model: Any) -> dict[str, torch.Tensor]:
    return {name: weights.detach().clone() for name, weights in model.named_parameters() if weights.requires_grad}
