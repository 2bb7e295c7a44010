"""Read an adapter, and add it to one weight at a time.

    adapter_config.json ─Adapter─▶ its layers, on a model without weights; its file, checked against them
    weight ─merge─▶ W + scaling · B·A, or the formula of its variant, computed in fp32 and rounded; the difference

PEFT computes the merged weight. For comparison, it also computes the output of the layer with the unmerged adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from math import prod
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

# Names of the tensors of an adapter. All other tensors belong to whole modules.
PARTS = re.compile(r"\.lora_(?:A|B)\.weight$|\.lora_magnitude_vector$")
# Names of tensors of other kinds of adapters: for embeddings, with a bias, or for single tokens.
UNKNOWN = re.compile(r"\.lora_(?!(?:A|B)\.weight$|magnitude_vector$)|\.token_adapter\.|\.base_layer\.(?:weight|bias)$")

# Number of inputs on which a layer is compared.
INPUTS = 16


class Adapter:
    """Adapter of a run on a model without weights.

    Raises DataError if the adapter is damaged or belongs to another model.
    """

    def __init__(self, folder: Path, model: Any):
        self.config = read_config(folder)
        self._file = folder / FILE
        self._tensors = Tensors([self._file], "damaged_adapter", FIX)
        self.place = folder / CONFIG
        self._require_known_parts()
        try:
            with torch.device("meta"):
                wrapped = get_peft_model(deepcopy(model), self.config)
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300].rstrip(".")
            raise DataError(
                "damaged_adapter", f"{folder / CONFIG}: does not fit the base model ({reason}); {FIX}"
            ) from None
        expected = {name: tuple(value.shape) for name, value in get_peft_model_state_dict(wrapped).items()}
        # PEFT saves tied weights under all of their names, but for some architectures it loads only one of them.
        tied = (
            {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()} if self.config.modules_to_save else ()
        )
        for name in tied:
            if (saved := f"{PREFIX}{name}") in self._tensors.places:
                expected[saved] = tuple(model.state_dict()[name].shape)
        self._check(expected)
        # Name of a weight that was trained as a whole → name of its tensor.
        self.whole = {name.removeprefix(PREFIX): name for name in expected if not PARTS.search(name)}
        # Name of an adapted weight → the layer that adapts it, and the prefix of the names of its tensors.
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

    def _require_known_parts(self) -> None:
        """Raise DataError if the adapter has parts other than LoRA and whole modules."""
        for name in sorted(self._tensors.places):
            if UNKNOWN.search(name):
                raise DataError(
                    "cannot_merge",
                    f"{self._file}: {name} belongs to a kind of adapter that cannot be merged; load it with "
                    "AutoPeftModelForCausalLM.from_pretrained",
                )

    @property
    def scaling(self) -> float:
        """Return the factor of B·A."""
        return float(next(iter(self.layers.values()))[0].scaling[NAME])

    def is_zero(self) -> bool:
        """Return whether every B is zero and nothing else is trained.

        This is the state before the first step of training.
        """
        return not self.whole and not any(
            self._tensors.read(name).any() for name in self._tensors.places if "lora_B" in name
        )

    def read_whole(self, name: str) -> torch.Tensor:
        """Return a weight that was trained as a whole.

        Raises DataError if it is not finite.
        """
        value = self._tensors.read(self.whole[name])
        if not value.sum(dtype=torch.float64).isfinite():
            raise DataError("damaged_adapter", f"{self._file}: {self.whole[name]} is not finite; {FIX}")
        return value

    def whole_size(self) -> int:
        """Return the number of weights that were trained as a whole."""
        return sum(prod(self._tensors.places[name].shape) for name in self.whole.values())

    def read_layer(self, name: str) -> dict[str, torch.Tensor]:
        """Return the parts that are added to a weight, by name; {} if they change nothing."""
        layer, prefix = self.layers[name]
        names = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
        parts = {name: self._tensors.read(prefix + name) for name in names if prefix + name in self._tensors.places}
        if not parts["lora_B.weight"].any() and len(parts) == 2:
            return {}
        return parts | {"scaling": torch.tensor(layer.scaling[NAME])}

    @torch.no_grad()
    def merge(self, name: str, weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
        """Return the merged weight, and the difference that merging makes.

        The difference is between the outputs of the merged layer and of the layer with the unmerged adapter. It is
        relative, over random inputs, so that no direction of the weight is missed. Experts have no separate output, so
        their weights are compared. Raises DataError if the merged weight is not finite.
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
        """Give a layer its weight and its adapter in this context.

        Its bias does not change and is zero.
        """
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
    """Read adapter_config.json."""
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
    """Return a tensor in another precision.

    Raises DataError if its values are too large for fp16.
    """
    if value.dtype == dtype:
        return value
    new = value.to(dtype)
    if dtype == torch.float16 and new.isinf().any() and value.isfinite().all():
        raise DataError(
            "merge_differs", f"{name}: has values up to {value.abs().max():.3g}, too large for fp16; use --dtype bf16"
        )
    return new


def described(adapter: Adapter) -> str:
    """Return a short description of an adapter."""
    variant = "DoRA" if adapter.config.use_dora else "rsLoRA" if adapter.config.use_rslora else "LoRA"
    weights = counted(len(adapter.layers), "weight")
    whole = f", and {' and '.join(sorted(adapter.whole))} as a whole" if adapter.whole else ""
    return f"{variant} of rank {adapter.config.r}, scaled by {adapter.scaling:g}, on {weights}{whole}"
