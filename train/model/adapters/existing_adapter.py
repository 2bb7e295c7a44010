"""Start from the adapter of an earlier run or of another tool.

    folder ─read_adapter─▶ LoraConfig, checked against the settings ─add_adapter─▶ model ─load_weights─▶ fp32 weights

The adapter determines rank, alpha, variant, targets, and whole modules. A setting that differs from its default must
agree with the adapter. The settings determine the dropout, because the weights do not depend on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file

from tasks.core.errors import DataError, UsageError
from tasks.core.printable import counted
from train.config import TrainingConfig
from train.model.digests import adapter_files, folder_digest


def read_adapter(folder: Path, config: TrainingConfig, base: Path | str) -> LoraConfig:
    """Read the settings of an adapter, and check them against the settings of the run.

    Raises DataError if the adapter cannot be read or belongs to another base model, UsageError if the settings differ.
    """
    _, path = adapter_files(folder)
    try:
        lora = PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _unreadable(path, error) from None
    if not isinstance(lora, LoraConfig):
        kind = getattr(lora.peft_type, "value", lora.peft_type)
        raise DataError("bad_adapter", f"{path}: is an adapter of type {kind}, and only LORA can be trained here")
    _check_base(path, lora.base_model_name_or_path, base)
    for name, theirs in {
        "lora_r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "lora_variant": "dora" if lora.use_dora else "rslora" if lora.use_rslora else "lora",
        "modules_to_save": _whole(lora, config),
    }.items():
        ours, default = getattr(config, name), TrainingConfig.model_fields[name].default
        if ours not in (default, theirs):
            raise UsageError(
                "other_adapter", f"{name} is {ours}, but {path} has {theirs}; leave {name} out, or start a new adapter"
            )
    lora.inference_mode = False
    lora.lora_dropout = 0.0 if lora.target_parameters else config.lora_dropout
    return lora


def _whole(lora: LoraConfig, config: TrainingConfig) -> list[str] | None:
    """Return the modules that an adapter trains as a whole; None if there are none.

    If the config names the same modules, the names of the config are returned.
    """
    theirs = sorted({name.rpartition(".")[2] for name in lora.modules_to_save or ()})
    ours = config.modules_to_save
    # If embeddings and head have the same weights, one name means both.
    same = bool(theirs and ours) and (lora.ensure_weight_tying or theirs == sorted(set(ours or ())))
    return ours if same else theirs or None


def _check_base(path: Path, recorded: str | None, base: Path | str) -> None:
    """Raise DataError if an adapter is known to be trained on another model."""
    if not recorded:
        return
    there, here = Path(recorded), Path(base)
    if there.is_dir() and here.is_dir():
        same = there.resolve() == here.resolve() or folder_digest(there) == folder_digest(here)
    else:
        # A folder may be a copy of the model that the other name refers to. Shapes are compared later.
        same = there.is_dir() or here.is_dir() or there.is_absolute() or recorded == str(base)
    if not same:
        raise DataError(
            "bad_adapter", f"{path}: was trained on {recorded}, which is not {base}; set base_model to that model"
        )


def load_weights(model: Any, folder: Path, config: TrainingConfig, targets: list[str]) -> None:
    """Load the weights of an adapter into a model with an adapter of the same kind.

    `targets` are the layers that `config.lora_targets` names. Raises DataError if the weights belong to another model,
    UsageError if they belong to other layers.
    """
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
