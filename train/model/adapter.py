"""Add a LoRA adapter to the text decoder of a frozen model.

    decoder ─target_layers─▶ names of its linear layers ──┐
            └target_experts─▶ names of weights of experts ┴─add_adapter─▶ PeftModel
    folder of an adapter ─read_adapter─▶ LoraConfig, checked against the settings ─load_weights─▶ fp32 weights

Nothing outside the decoder is adapted: neither the head nor, in a multimodal model, the towers for images and sound.
For new tokens, embeddings and head can be trained as a whole (`modules_to_save`).

A run may start from the adapter of an earlier run or of another tool, which determines rank, alpha, variant, targets,
and whole modules. A setting that differs from its default must agree with it. The settings determine the dropout,
because the weights do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model, set_peft_model_state_dict
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from tasks.core.errors import DataError, UsageError
from tasks.core.printable import counted, suggest
from train.config import TrainingConfig, adapter_files, folder_digest

# Names of the attention projections in the model families of transformers. Some combine q, k, and v in one layer.
ATTENTION = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "query_key_value", "c_attn", "W_pack", "Wqkv", "qkv",
)  # fmt: skip


def add_adapter(model: Any, config: TrainingConfig, base: Path | str = "") -> Any:
    """Add `config.adapter` or a new LoRA adapter, and freeze everything else."""
    layers = target_layers(model, config.lora_targets)
    if not config.adapter:
        experts = target_experts(model) if config.lora_targets == "all" else []
        whole = whole_modules(model, config.modules_to_save or [])
        lora = LoraConfig(
            r=config.lora_r,
            lora_alpha=config.lora_alpha,
            # An adapter for the weights of experts is added to these weights, so there are no activations to drop.
            lora_dropout=0.0 if experts else config.lora_dropout,
            use_rslora=config.lora_variant == "rslora",
            use_dora=config.lora_variant == "dora",
            target_modules=_not_experts(model, layers, config.lora_targets),
            target_parameters=experts or None,
            modules_to_save=whole or None,
            ensure_weight_tying=bool(whole) and is_tied(model),
            task_type="CAUSAL_LM",
        )
        return _with_adapter(model, lora, config)
    folder = Path(config.adapter)
    lora = read_adapter(folder, config, base)
    if lora.modules_to_save and lora.ensure_weight_tying:
        lora.modules_to_save = whole_modules(model, [name.rpartition(".")[2] for name in lora.modules_to_save])
    model = _with_adapter(model, lora, config)
    load_weights(model, folder, config, layers)
    return model


def _not_experts(model: Any, layers: list[str], wanted: str | list[str]) -> list[str]:
    """Return the layers that PEFT can adapt.

    In DeepSeek V2 and V3, Qwen3-Next, and other models, PEFT takes every layer named gate_proj, up_proj, or down_proj
    for an expert of an old checkpoint, both when it creates and when it loads an adapter. It would leave out dense
    layers and shared experts, and adapt the stacked experts instead, with twice the rank. Raises DataError if the
    config names such a layer.
    """
    taken = []
    for name in sorted({layer.rpartition(".")[2] for layer in layers}):
        probe = LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(probe, model, None)
        except ValueError:  # PEFT converts gate_proj only together with up_proj
            taken.append(name)
        else:
            taken += [name] * (name not in (probe.target_modules or ()))
    if wanted != "all" and taken:
        raise DataError(
            "no_such_layers",
            f"lora_targets: {', '.join(taken)}: PEFT takes layers of this name for experts in a "
            f"{model.config.model_type} model, and would adapt those; leave {'it' if len(taken) == 1 else 'them'} out",
        )
    return [layer for layer in layers if layer.rpartition(".")[2] not in taken]


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
    """Return the names of modules to train as a whole; tied ones have one name."""
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
    """Return the full names of the linear layers: all, attention, or by name."""
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
    """Return the names of parameters that hold all experts of a layer."""
    experts = [module for name, module in model.get_decoder().named_modules() if name.rpartition(".")[2] == "experts"]
    parameters = (pair for module in experts for pair in module.named_parameters(recurse=False))
    return sorted({f"experts.{name}" for name, values in parameters if values.ndim == 3})


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
    """Seed the random numbers of the CPU and, if `device` is a GPU, of all GPUs."""
    # torch.manual_seed also formats the stack, once for each kind of device that is not in use.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


def read_adapter(folder: Path, config: TrainingConfig, base: Path | str) -> LoraConfig:
    """Read the settings of an adapter, and check them against those of the run."""
    _, path = adapter_files(folder)
    try:
        lora = PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _unreadable(path, error) from None
    if not isinstance(lora, LoraConfig):
        kind = getattr(lora.peft_type, "value", lora.peft_type)
        raise DataError("bad_adapter", f"{path}: is an adapter of type {kind}, and only LORA can be trained here")
    if recorded := lora.base_model_name_or_path:
        there, here = Path(recorded), Path(base)
        if there.is_dir() and here.is_dir():
            same = there.resolve() == here.resolve() or folder_digest(there) == folder_digest(here)
        else:  # a folder may be a copy of the model that the other name refers to; shapes are compared later
            same = there.is_dir() or here.is_dir() or there.is_absolute() or recorded == str(base)
        if not same:
            text = f"{path}: was trained on {recorded}, which is not {base}; set base_model to that model"
            raise DataError("bad_adapter", text)
    whole: list[str] | None = sorted({name.rpartition(".")[2] for name in lora.modules_to_save or ()})
    wanted = config.modules_to_save
    # If embeddings and head have the same weights, one name means both.
    if whole and wanted and (lora.ensure_weight_tying or whole == sorted(set(wanted))):
        whole = wanted
    for name, theirs in {
        "lora_r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "lora_variant": "dora" if lora.use_dora else "rslora" if lora.use_rslora else "lora",
        "modules_to_save": whole or None,
    }.items():
        ours, default = getattr(config, name), TrainingConfig.model_fields[name].default
        if ours not in (default, theirs):
            text = f"{name} is {ours}, but {path} has {theirs}; leave {name} out, or start a new adapter"
            raise UsageError("other_adapter", text)
    lora.inference_mode = False
    lora.lora_dropout = 0.0 if lora.target_parameters else config.lora_dropout
    return lora


def load_weights(model: Any, folder: Path, config: TrainingConfig, targets: list[str]) -> None:
    """Load the weights of an adapter into a model with an adapter of the same kind."""
    # `targets` are the layers that `config.lora_targets` names.
    path, _ = adapter_files(folder)
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from None
    adapted = {name.partition(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    adapted = {name.removeprefix("base_model.model.") for name in adapted}
    if config.lora_targets != "all" and adapted != set(targets):
        theirs = sorted({name.rpartition(".")[2] for name in adapted})
        raise UsageError(
            "other_adapter",
            f"lora_targets is {config.lora_targets}, but the layers of {path} are {', '.join(theirs)}; "
            "leave lora_targets out, or start a new adapter",
        )
    try:
        result = set_peft_model_state_dict(model, weights)
    except (RuntimeError, ValueError, KeyError) as error:
        raise _unreadable(path, error) from None
    trained = {name for name, values in model.named_parameters() if values.requires_grad}
    strange, absent = sorted(result.unexpected_keys), sorted(trained & set(result.missing_keys))
    if strange or absent:
        what = f"has weights that the model lacks, such as {strange[0]}" if strange else f"lacks {absent[0]}"
        raise DataError(
            "bad_adapter",
            f"{path}: {what} ({counted(len(strange) + len(absent), 'such weight')}); it was trained on another model",
        )


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = " ".join(str(error).split())[:300].rstrip(".")
    return DataError("bad_adapter", f"{path}: does not fit the model or cannot be read ({reason})")
