"""Add a LoRA adapter to the text decoder of a frozen model.

    decoder ─target_layers─▶ names of its linear layers ──┐
            └target_experts─▶ names of weights of experts ┴─add_adapter─▶ PeftModel

Nothing outside the decoder is adapted: neither the head nor, in a multimodal model, the towers for images and sound.
For new tokens, embeddings and head can be trained as a whole (`modules_to_save`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from transformers.pytorch_utils import Conv1D

from tasks.core.errors import DataError
from tasks.core.printable import suggest
from train.config import TrainingConfig
from train.model.adapters.existing_adapter import load_weights, read_adapter

# Names of the attention projections in the model families of transformers. Some combine q, k, and v in one layer.
ATTENTION = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "query_key_value", "c_attn", "W_pack", "Wqkv", "qkv",
)  # fmt: skip


def add_adapter(model: Any, config: TrainingConfig, base: Path | str = "") -> Any:
    """Add a LoRA adapter and freeze everything else.

    The adapter is the one in `config.adapter`, which must have been trained on `base`, or a new one, initialized from
    `config.seed`. Raises DataError if the model lacks a layer that the config names or cannot have the adapter,
    UsageError if the settings contradict an existing adapter.
    """
    layers = target_layers(model, config.lora_targets)
    if not config.adapter:
        return _with_adapter(model, _new_adapter(model, config, layers), config)
    folder = Path(config.adapter)
    lora = read_adapter(folder, config, base)
    if lora.modules_to_save and lora.ensure_weight_tying:
        lora.modules_to_save = whole_modules(model, [name.rpartition(".")[2] for name in lora.modules_to_save])
    model = _with_adapter(model, lora, config)
    load_weights(model, folder, config, layers)
    return model


def _new_adapter(model: Any, config: TrainingConfig, layers: list[str]) -> LoraConfig:
    experts = target_experts(model) if config.lora_targets == "all" else []
    layers = _not_experts(model, layers, config.lora_targets)
    whole = whole_modules(model, config.modules_to_save or [])
    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        # An adapter for the weights of experts is added to these weights, so there are no activations to drop.
        lora_dropout=0.0 if experts else config.lora_dropout,
        use_rslora=config.lora_variant == "rslora",
        use_dora=config.lora_variant == "dora",
        target_modules=layers,
        target_parameters=experts or None,
        modules_to_save=whole or None,
        ensure_weight_tying=bool(whole) and is_tied(model),
        task_type="CAUSAL_LM",
    )


def _not_experts(model: Any, layers: list[str], wanted: str | list[str]) -> list[str]:
    """Return the layers that PEFT can adapt.

    In DeepSeek V2 and V3, Qwen3-Next, and other models, PEFT takes every layer named gate_proj, up_proj, or down_proj
    for an expert of an old checkpoint, both when it creates and when it loads an adapter. It would leave out dense
    layers and shared experts, and adapt the stacked experts instead, with twice the rank. Raises DataError if the
    config names such a layer.
    """
    taken = [name for name in sorted({layer.rpartition(".")[2] for layer in layers}) if _is_taken(model, name)]
    if wanted != "all" and taken:
        raise DataError(
            "no_such_layers",
            f"lora_targets: {', '.join(taken)}: PEFT takes layers of this name for experts in a "
            f"{model.config.model_type} model, and would adapt those; leave {'it' if len(taken) == 1 else 'them'} out",
        )
    return [layer for layer in layers if layer.rpartition(".")[2] not in taken]


def _is_taken(model: Any, name: str) -> bool:
    probe = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(probe, model, None)
    except ValueError:  # PEFT converts gate_proj only together with up_proj
        return True
    return name not in (probe.target_modules or ())


def left_out(model: Any) -> list[str]:
    """Return the names of the decoder's linear layers that have no adapter."""
    inside = (".base_layer", ".lora_", ".original_module", ".modules_to_save")
    found = _linear_layers(model.get_base_model())
    return [name for name in found if not any(part in name for part in inside)]


def _with_adapter(model: Any, lora: LoraConfig, config: TrainingConfig) -> Any:
    tied = is_tied(model)
    try:
        with keep_random(model.device):
            set_random(model.device, config.seed)
            found = get_peft_model(model, lora)
    except (ValueError, NotImplementedError, TypeError, AttributeError, KeyError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        what = f"adapter: {config.adapter}" if config.adapter else f"lora_targets: {config.lora_targets}"
        fix = "use another adapter" if config.adapter else "name other layers, such as lora_targets: [q_proj, v_proj]"
        raise DataError(
            "no_such_layers",
            f"{what}: a {model.config.model_type} model does not support this adapter ({reason}); {fix}",
        ) from None
    if tied != is_tied(found):
        raise DataError(
            "no_such_layers",
            f"modules_to_save: the embeddings and the head of a {model.config.model_type} model have the same weights, "
            "which PEFT cannot train together; leave modules_to_save out",
        )
    # PEFT would write a card full of placeholders with every checkpoint.
    found.create_or_update_model_card = lambda _output_dir: None
    # PEFT copies whole modules in the precision of the model, but trained weights must be fp32.
    for name, weights in found.named_parameters():
        if ".modules_to_save." in name:
            weights.data = weights.data.float()
    return found


def is_tied(model: Any) -> bool:
    """Return whether the embeddings and the head share their weights."""
    head = model.get_output_embeddings()
    return getattr(head, "weight", None) is model.get_input_embeddings().weight


def whole_modules(model: Any, wanted: Sequence[str]) -> list[str]:
    """Return the names of modules to train as a whole: embeddings, head, or both.

    If the two share their weights, one name means both. Raises DataError for any other name.
    """
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    known = [names[module] for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module]
    for name in wanted:
        if name not in known:
            hint = suggest(name, known) or f"; they are {' and '.join(known)}"
            raise DataError(
                "no_such_layers",
                f"modules_to_save: {name}: only the embeddings and the head of a {model.config.model_type} model can "
                f"be trained as a whole{hint}",
            )
    # PEFT recognizes shared weights by the name of the head.
    return known[-1:] if wanted and is_tied(model) else list(dict.fromkeys(wanted))


def target_layers(model: Any, wanted: str | Sequence[str]) -> list[str]:
    """Return the full names of the linear layers to adapt.

    `wanted` is "all", "attention", or a list of names. Raises DataError if no layer has a wanted name.
    """
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
    """Return the names of weights that hold all experts of a layer.

    These weights are parameters, not linear layers.
    """
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
    """Return the full names of the linear layers of the decoder, except the head."""
    decoder = model.get_decoder()
    [prefix] = [name for name, module in model.named_modules() if module is decoder]
    modules, head = dict(decoder.named_modules()), model.get_output_embeddings()
    found = []
    for name, module in modules.items():
        parent = modules[name.rpartition(".")[0]]
        # Mamba reads the weights of these layers and would ignore their adapter. Zamba 2 uses only a few of the layers
        # in `_adapter_list`.
        in_kernel = name.endswith(("out_proj", "dt_proj")) and hasattr(parent, "conv1d") and hasattr(parent, "D")
        in_kernel |= "_adapter_list." in name
        is_router = "Router" in type(module).__name__  # returns more than a tensor
        if isinstance(module, torch.nn.Linear | Conv1D) and not (module is head or in_kernel or is_router):
            found.append(f"{prefix}.{name}".lstrip("."))
    return found


def keep_random(device: torch.device) -> Any:
    """Return a context that restores the random state of CPU and `device`."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def set_random(device: torch.device, seed: int) -> None:
    """Seed the random numbers of the CPU and, if `device` is a GPU, of all GPUs.

    torch.manual_seed also formats the stack, once for each kind of device that is not in use.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)
