"""Separate conversations in models that build attention masks without positions.

position_ids ─▶ masks of full and of sliding attention, as transformers builds them for other models ─▶ decoder
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

# Models whose decoders accept finished masks, and otherwise build masks from everything but the positions.
WITHOUT_POSITIONS = ("afmoe", "gpt_oss", "granitemoehybrid")


def separate_by_positions(model: Any) -> None:
    """Derive the masks of a model from the positions of each batch.

    Models that are not in WITHOUT_POSITIONS stay unchanged.
    """
    if model.config.get_text_config().model_type in WITHOUT_POSITIONS:
        model.get_decoder().register_forward_pre_hook(_add_masks, with_kwargs=True)


def _add_masks(decoder: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positions = named.get("position_ids")
    if positions is None or named.get("attention_mask") is not None or named.get("past_key_values") is not None:
        return args, named
    # Only the shape, the device, and the precision of the embeddings are used.
    like = torch.empty(
        (*positions.shape, 1), dtype=decoder.get_input_embeddings().weight.dtype, device=positions.device
    )
    given = {"config": decoder.config, "inputs_embeds": like, "attention_mask": None, "past_key_values": None}
    masks = {"full_attention": create_causal_mask(**given, position_ids=positions), "linear_attention": None}
    if getattr(decoder.config, "sliding_window", None):
        masks["sliding_attention"] = create_sliding_window_causal_mask(**given, position_ids=positions)
    return args, named | {"attention_mask": masks}
