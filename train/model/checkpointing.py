"""Choose which layers recompute their activations in the backward pass.

    False        none: the fastest, and the most memory
    N            every N-th layer
    True         all: a third more compute
    "offload"    all, and what they need for it is kept in main memory

All give the same gradients. What `auto` tries is measured together with the micro-batch (train.loop.micro_batch).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from packcorpus.train.model.attention import without_adapter

Checkpointing = bool | int | Literal["offload"]

# What `auto` tries, the fastest first.
BY_SPEED: tuple[Checkpointing, ...] = (False, 2, True)


def usable(model: Any, wanted: Checkpointing) -> tuple[Checkpointing, str]:
    """Return what a model can do instead of `wanted`, and why; "" if it is the same."""
    name = model.config.model_type
    if wanted is not False and not model.supports_gradient_checkpointing:
        return False, f"{name} models do not support it"
    several = not isinstance(wanted, bool | str) and wanted > 1
    if several and not any(isinstance(module, GradientCheckpointingLayer) for module in model.modules()):
        return True, f"{name} models support it only for all layers"
    if wanted == "offload" and not torch.accelerator.is_available():
        return True, "without a GPU, activations are in main memory anyway"
    return wanted, ""


def use_checkpointing(model: Any, how: Checkpointing) -> None:
    """Make a model checkpoint its activations; `how` is `usable`."""
    if not model.supports_gradient_checkpointing:
        return
    causal = without_adapter(model)
    causal.activation_checkpointing_disable()
    if how is not False:
        every = 1 if isinstance(how, bool | str) else how
        causal.activation_checkpointing_enable({"use_reentrant": False}, every, how == "offload")
        # Only reentrant checkpointing needs inputs that require gradients.
        causal.disable_input_require_grads()


def described(how: Checkpointing) -> str:
    if isinstance(how, bool | str):
        return {False: "off", True: "on", "offload": "on, offloaded to main memory"}[how]
    return f"every {how} layers" if how > 1 else "on"
