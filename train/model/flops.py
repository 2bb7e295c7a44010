"""Compute the FLOP per token and the peak FLOP/s of a GPU, for the MFU.

    model, position_ids ─flops_per_token─▶ FLOP        name of the GPU ─peak_flops─▶ FLOP/s

    4 N        for each weight of a matrix product: 2 forward, 2 for the gradient of its input. Frozen weights have no
               gradient, hence 4 and not 6. An embedding that is only looked up does not count.
    6 N_lora   for each weight of the adapter, and of a head that is trained as a whole
    attention  12 · d · k per layer, with d = heads × head size and k = the tokens that one token attends to, including
               itself: 2 · d · k for the scores and 2 · d · k for their sum in the forward pass, and twice as much in
               the backward pass. On average over a conversation of n tokens, k = (n + 1) / 2. Attention is causal and
               ends at the conversation, so a kernel that also computes masked scores does no more useful work.

Only the experts that a token is routed to count. Convolutions and scans do not count, only the linear layers around
them, so the MFU of a model with such layers is a lower bound.

Recomputation by activation checkpointing is not useful work and does not count either.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch

# Dense bf16 or fp16 with fp32 accumulation, FLOP/s, from NVIDIA's data sheets. The first match counts.
PEAK = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 6000 Ada": 364e12,
    "RTX A6000": 155e12,
    "RTX 5090": 209e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    # GPUs without bf16. All others are as fast in bf16 as in fp16.
    "V100-SXM2": 125e12,
    "V100-PCIE": 112e12,
    "T4": 65e12,
}

# Kinds of layers in `layer_types` that have no attention.
WITHOUT_ATTENTION = ("linear_attention", "conv", "mamba", "recurrent", "moe", "mlp")
# Names of settings: the number of experts of a token, and of all experts of a layer.
ROUTING = (
    ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"),
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
)


def share_in_4_bits(model: Any) -> float:
    """Return the share of the frozen weights that bitsandbytes stores in 4 bits."""
    frozen = [weights for weights in model.parameters() if not weights.requires_grad]
    quantized = sum(_count(weights) for weights in frozen if hasattr(weights, "quant_state"))
    return quantized / max(1, sum(map(_count, frozen)))


def parameters(model: Any) -> tuple[int, int]:
    """Return the numbers of all and of trainable parameters, with the adapter."""
    # A byte of NF4 holds two parameters.
    # Tied weights are yielded once.
    counts = [(_count(weights), weights.requires_grad) for weights in model.parameters()]
    return sum(count for count, _ in counts), sum(count for count, trainable in counts if trainable)


def _count(weights: Any) -> int:
    state = getattr(weights, "quant_state", None)
    return int((weights if state is None else torch.empty(state.shape, device="meta")).numel())


def flops_per_token(model: Any, position_ids: torch.Tensor) -> float:
    """Return the useful FLOP per token, for the positions of typical rows."""
    config = model.config.get_text_config()
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    looked_up = None if head is None or embeddings.weight is head.weight else embeddings.weight
    chosen, experts = (
        next((getattr(config, name) for name in names if getattr(config, name, None)), None) for names in ROUTING
    )
    # The share of a layer's experts that a token is routed to, if it is known.
    routed = min(1.0, chosen / experts) if chosen and experts else 1.0
    weighted = 0.0
    for name, weights in model.named_parameters():
        parts = name.split(".")
        if weights is not looked_up and "original_module" not in parts:  # the copy in modules_to_save is used instead
            share = routed if "experts" in parts else 1.0
            weighted += (6 if weights.requires_grad else 4) * _count(weights) * share
    heads = getattr(config, "num_attention_heads", 0)  # Mamba has none
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads) if heads else 0
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    layers = [kind for kind in layers if kind not in WITHOUT_ATTENTION]
    seen = position_ids.double() + 1
    full, near = (x.mean().item() for x in (seen, seen.clamp(max=window or math.inf)))
    attention = sum(12 * width * (near if "sliding" in kind else full) for kind in layers)
    return weighted + attention


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a GPU; None in fp32, or if it is unknown."""
    if dtype == torch.float32:
        return None
    if re.search(r"\bMIG\b|\bLaptop\b|\bMax-Q\b", name):  # a part of the chip, or a slower one
        return None
    return next((peak for known, peak in PEAK.items() if re.search(rf"\b{known}\b", name)), None)
