"""Read an adapter, and add it to one weight at a time.

    adapter_config.json ─Adapter─▶ its layers, on a model without weights; its file, checked against them
    weight ─merge─▶ W + scaling · B·A, or as its variant has it, computed in fp32 and rounded; what that changes

PEFT computes both the merged weight and, to compare it with, the output of the layer with the adapter beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch.nn import Parameter

from tasks.core.errors import DataError
from tasks.core.printable import counted
from train.merge.weights.tensor_files import Tensors

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
NAME = "default"
PREFIX = "base_model.model."
FIX = "restore it from a backup, or train again"

# Inputs that a layer is compared with.
INPUTS = 16


class Adapter:
    """The adapter of a run on a model without weights. Raises DataError if it is damaged or of another model."""

    def __init__(self, folder: Path, model: Any):
        self.config = read_config(folder)
        self._file = folder / FILE
        self._tensors = Tensors([self._file], "damaged_adapter", FIX)
        if whole := self.config.modules_to_save:
            raise DataError(
                "cannot_merge",
                f"{folder / CONFIG}: the adapter contains whole modules ({', '.join(whole)}), which cannot be merged "
                "yet; load it with AutoPeftModelForCausalLM.from_pretrained",
            )
        try:
            with torch.device("meta"):
                wrapped = get_peft_model(deepcopy(model), self.config)
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300].rstrip(".")
            raise DataError(
                "damaged_adapter", f"{folder / CONFIG}: does not fit the base model ({reason}); {FIX}"
            ) from None
        self._check({name: tuple(value.shape) for name, value in get_peft_model_state_dict(wrapped).items()})
        # By name of the weight: the layer that adapts it, and the start of the names of its tensors.
        self.layers: dict[str, tuple[Any, str]] = {}
        for name, layer in wrapped.eval().named_modules():
            if isinstance(layer, LoraLayer):
                inner = name.removeprefix(PREFIX).replace(".base_layer", "")
                weight = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
                self.layers[f"{inner}.{weight}"] = (layer, f"{name}.")

    def _check(self, expected: dict[str, tuple[int, ...]]) -> None:
        found = {name: place.shape for name, place in self._tensors.places.items()}
        for name in sorted({*found, *expected}):
            if found.get(name) != expected.get(name):
                what = f"has {list(found[name])}" if name in found else "is missing"
                wanted = f"expects {list(expected[name])}" if name in expected else "has no such weight"
                raise DataError("damaged_adapter", f"{self._file}: {name} {what}; the base model {wanted}; {FIX}")

    @property
    def scaling(self) -> float:
        """Return the factor of B·A."""
        return float(next(iter(self.layers.values()))[0].scaling[NAME])

    def is_zero(self) -> bool:
        """Return whether every B is zero, as before the first step of training."""
        return not any(self._tensors.read(name).any() for name in self._tensors.places if "lora_B" in name)

    @torch.no_grad()
    def merge(self, name: str, weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
        """Return the merged weight, and by how much it changes what the layer computes with the adapter beside it.

        The difference is relative, over random inputs, so that no direction of the weight is missed. Experts have no
        output of their own; their weights are compared. Raises DataError if the merged weight is not finite.
        """
        with self._filled(name, weight.to(torch.float32, copy=True)) as layer:
            base, attribute = layer.get_base_layer(), name.rpartition(".")[2]
            is_layer = not isinstance(layer, ParamWrapper)
            if is_layer:
                inputs = torch.randn(INPUTS, layer.in_features, generator=torch.Generator().manual_seed(0))
                expected = layer(inputs)
            else:
                with layer._activate_lora([NAME]):
                    expected = getattr(base, attribute).clone()
            layer.merge()
            layer.merged_adapters.clear()
            merged = rounded(getattr(base, attribute).data, dtype, name)
            again = merged.float()
            if not again.sum().isfinite():
                raise DataError("damaged_adapter", f"{self._file}: {name} is not finite with the adapter; {FIX}")
            setattr(base, attribute, Parameter(again, requires_grad=False))
            found = base(inputs) if is_layer else getattr(base, attribute)
            difference = (found - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float32).tiny)
        return merged, float(difference)

    @contextmanager
    def _filled(self, name: str, weight: torch.Tensor) -> Iterator[Any]:
        """Give a layer its weight and its adapter in this context; its bias, which does not change, is zero."""
        layer, prefix = self.layers[name]
        base = layer.get_base_layer()
        attribute = name.rpartition(".")[2]
        values = [(base, attribute, weight)]
        if attribute == "weight" and getattr(base, "bias", None) is not None:
            values.append((base, "bias", torch.zeros(base.bias.shape)))
        for part, tensor in (("lora_A", "lora_A.weight"), ("lora_B", "lora_B.weight")):
            values.append((getattr(layer, part)[NAME], "weight", self._tensors.read(prefix + tensor).float()))
        if (magnitude := f"{prefix}lora_magnitude_vector") in self._tensors.places:
            values.append((layer.lora_magnitude_vector[NAME], "weight", self._tensors.read(magnitude).float()))
        empty = [getattr(module, attribute) for module, attribute, _ in values]
        for module, attribute, value in values:
            setattr(module, attribute, Parameter(value, requires_grad=False))
        try:
            yield layer
        finally:
            for (module, attribute, _), old in zip(values, empty, strict=True):
                setattr(module, attribute, old)


def read_config(folder: Path) -> LoraConfig:
    """Read adapter_config.json. Raises DataError."""
    if not (folder / CONFIG).is_file():  # PEFT would look for it on the Hub
        raise DataError("damaged_adapter", f"{folder / CONFIG}: is missing; {FIX}")
    try:
        config = LoraConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise DataError("damaged_adapter", f"{folder / CONFIG}: cannot be read ({reason}); {FIX}") from None
    config.inference_mode = True
    return config


def rounded(value: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return a tensor in another precision. Raises DataError if it is too large for it."""
    if value.dtype == dtype:
        return value
    new = value.to(dtype)
    if dtype == torch.float16 and new.isinf().any() and value.isfinite().all():
        raise DataError(
            "merge_differs", f"{name}: has values up to {value.abs().max():.3g}, too large for fp16; use --dtype bf16"
        )
    return new


def described(adapter: Adapter) -> str:
    """Return the adapter in words."""
    variant = "DoRA" if adapter.config.use_dora else "rsLoRA" if adapter.config.use_rslora else "LoRA"
    weights = counted(len(adapter.layers), "weight")
    return f"{variant} of rank {adapter.config.r}, scaled by {adapter.scaling:g}, on {weights}"
