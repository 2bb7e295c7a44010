"""TRL's SFTTrainer for tokenized conversations, with measurements.

This module is imported only for format 2.0, because TRL takes seconds to load.
"""

from __future__ import annotations

from typing import Any

import torch
from trl import SFTConfig, SFTTrainer

from train.data.conversations import SFT_SETTINGS
from train.loop.trainer import Measured, one_gpu


class ConversationTrainer(Measured, SFTTrainer):
    """SFTTrainer for rows of format 2.0."""


def conversation_trainer(
    model: Any, given: dict[str, Any], collator: Any, train: Any, validation: Any, padding: Any
) -> ConversationTrainer:
    adapter = {name: weights.detach().clone() for name, weights in model.named_parameters() if weights.requires_grad}
    trainer = ConversationTrainer(
        model=model,
        args=one_gpu(SFTConfig(**given, **SFT_SETTINGS)),
        data_collator=collator,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=padding,
    )
    # TRL converts the adapter of a quantized model to bf16, which is too coarse for small steps.
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name in adapter:
                weights.data = adapter[name]
    return trainer
