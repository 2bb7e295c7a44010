"""Add a LoRA adapter to the text decoder of a frozen model.

    decoder ─target_layers─▶ names of its linear layers ──┐
            └target_experts─▶ names of weights of experts ┴─add_adapter─▶ PeftModel

Nothing outside the decoder is adapted: neither the head nor, in a model that also sees or hears, its other towers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers.pytorch_utils import Conv1D

from tasks.core.errors import DataError
from tasks.core.suggest import suggest
from train.config import TrainingConfig

# Names of the projections in attention, in the families of transformers; some have q, k, and v in one.
ATTENTION = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "query_key_value", "c_attn", "W_pack", "Wqkv", "qkv",
)  # fmt: skip


def add_adapter(model: Any, config: TrainingConfig) -> Any:
    """Add a LoRA adapter, initialized from `config.seed`, and freeze everything else.

    Raises DataError if the model lacks a layer that the config names, or cannot have the adapter.
    """
    layers = target_layers(model, config.lora_targets)
    experts = target_experts(model) if config.lora_targets == "all" else []
    lora = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        # The adapter of an expert's weights is added to them, so that there is nothing to drop.
        lora_dropout=0.0 if experts else config.lora_dropout,
        use_rslora=config.lora_variant == "rslora",
        use_dora=config.lora_variant == "dora",
        target_modules=layers,
        target_parameters=experts or None,
        task_type="CAUSAL_LM",
    )
    try:
        with keep_random(model.device):
            torch.manual_seed(config.seed)
            return get_peft_model(model, lora)
    except (ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise DataError(
            "no_such_layers",
            f"lora_targets: {config.lora_targets}: a {model.config.model_type} model cannot have this adapter "
            f"({reason}); name other layers, such as lora_targets: [q_proj, v_proj]",
        ) from None


def target_layers(model: Any, wanted: str | Sequence[str]) -> list[str]:
    """Return the full names of the linear layers to adapt: all, those of attention, or those with these names."""
    found = _linear_layers(model)
    if wanted == "all":
        return found
    names = ATTENTION if wanted == "attention" else wanted
    chosen = [layer for layer in found if layer.rpartition(".")[2] in names]
    known = sorted({layer.rpartition(".")[2] for layer in found})
    if wanted != "attention":
        for name in names:
            if name not in known:
                hint = suggest(name, known) or f"; it has {', '.join(known)}"
                raise DataError(
                    "no_such_layers",
                    f"lora_targets: {name}: a {model.config.model_type} model has no linear layer of that name{hint}",
                )
    if not chosen:
        raise DataError(
            "no_such_layers",
            f"lora_targets: attention: a {model.config.model_type} model has no layers named {', '.join(ATTENTION)}; "
            f"set lora_targets: all, or some of [{', '.join(known)}]",
        )
    return chosen


def target_experts(model: Any) -> list[str]:
    """Return names of the weights that hold all experts of a layer; such a weight is not a layer."""
    return sorted(
        {
            f"experts.{weight}"
            for name, module in model.get_decoder().named_modules()
            if name.rpartition(".")[2] == "experts"
            for weight, values in module.named_parameters(recurse=False)
            if values.ndim == 3
        }
    )


def _linear_layers(model: Any) -> list[str]:
    """Return the full names of the linear layers of the decoder, except its head."""
    decoder = model.get_decoder()
    [prefix] = [name for name, module in model.named_modules() if module is decoder]
    modules, head = dict(decoder.named_modules()), model.get_output_embeddings()
    found = []
    for name, module in modules.items():
        parent = modules[name.rpartition(".")[0]]
        # Mamba reads the weights of these layers and would ignore their adapter. Zamba 2 uses few of the others.
        in_kernel = name.endswith(("out_proj", "dt_proj")) and hasattr(parent, "conv1d") and hasattr(parent, "D")
        in_kernel |= "_adapter_list." in name
        is_router = "Router" in type(module).__name__  # returns more than a tensor
        if isinstance(module, torch.nn.Linear | Conv1D) and not (module is head or in_kernel or is_router):
            found.append(f"{prefix}.{name}".lstrip("."))
    return found


def keep_random(device: torch.device) -> Any:
    """Return a context that restores the random state of CPU and `device`."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])
