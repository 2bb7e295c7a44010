"""Merge an adapter into weights, one layer at a time, and compare each layer.

    adapter_config.json ─Adapter─▶ its layers, on a model without weights; its file, checked against them
    ties of the model, changes of the adapter ─find_ties─▶ Ties: settings that separate them, weights to add, to omit
    groups of tensors ─write_weights─▶ load one, add the adapter, round, convert back ─▶ files

Weights are computed in fp32 from the weights in the files of the base model, or from their values in NF4, and rounded
once. PEFT computes the merged weight and, for comparison, the output of the layer with the unmerged adapter. If the
files of the base model cannot be written one tensor at a time, transformers loads and saves the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch.nn import Parameter
from transformers import AutoConfig
from transformers.integrations.mxfp4 import Mxfp4Dequantize

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.core.printable import counted
from packcorpus.tasks.storage.files import give_usual_mode
from packcorpus.train.merge.dequantized import Dequantized
from packcorpus.train.merge.tensors import (
    SHARD_BYTES,
    Group,
    NotInvertible,
    Place,
    Tensors,
    alone,
    files_of,
    groups_of,
    rounded,
    write_shards,
)
from packcorpus.train.model.checkpoint import auto_class
from packcorpus.train.model.quantization import how_to_load

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
# A merged layer may differ from a layer with the unmerged adapter by the rounding of its weights and by the order of
# sums in fp32. The relative error of rounding is at most 2^-9 (bf16) or 2^-12 (fp16). An output averages over many
# weights, so it never reaches twice the largest error.
LAYER_LIMITS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}


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


class Adapter:
    """Adapter of a run on a model without weights.

    `whole` maps the name of a weight that was trained as a whole to the name of its tensor. `layers` maps the name of
    an adapted weight to the layer that adapts it, and the prefix of the names of its tensors. Raises DataError if the
    adapter is damaged or belongs to another model.
    """

    def __init__(self, folder: Path, model: Any):
        self.config = read_config(folder)
        self.place = folder / CONFIG
        self._file = folder / FILE
        self._tensors = Tensors([self._file], "damaged_adapter", FIX)
        places = self._tensors.places
        if unknown := next(filter(UNKNOWN.search, sorted(places)), None):
            raise DataError(
                "cannot_merge",
                f"{self._file}: {unknown} belongs to a kind of adapter that cannot be merged; load it with "
                "AutoPeftModelForCausalLM.from_pretrained",
            )
        try:
            with torch.device("meta"):
                wrapped = get_peft_model(deepcopy(model), self.config)
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300].rstrip(".")
            raise DataError("damaged_adapter", f"{self.place}: does not fit the base model ({reason}); {FIX}") from None
        expected = {name: tuple(value.shape) for name, value in get_peft_model_state_dict(wrapped).items()}
        # PEFT saves tied weights under all of their names, but for some architectures it loads only one of them.
        ties = model.all_tied_weights_keys if self.config.modules_to_save else {}
        for name in {*ties, *ties.values()}:
            if (saved := f"{PREFIX}{name}") in places:
                expected[saved] = tuple(model.state_dict()[name].shape)
        for name in sorted({*places, *expected}):
            found = places[name].shape if name in places else None
            if found != expected.get(name):
                what = "is missing" if found is None else f"has {list(found)}"
                wanted = f"expects {list(expected[name])}" if name in expected else "has no such weight"
                raise DataError("damaged_adapter", f"{self._file}: {name} {what}; the base model {wanted}; {FIX}")
        self.whole = {name.removeprefix(PREFIX): name for name in expected if not PARTS.search(name)}
        self.layers: dict[str, tuple[Any, str]] = {}
        for name, layer in wrapped.eval().named_modules():
            if isinstance(layer, LoraLayer):
                inner = name.removeprefix(PREFIX).replace(".base_layer", "")
                weight = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
                self.layers[f"{inner}.{weight}"] = (layer, f"{name}.")

    def __str__(self) -> str:
        variant = "DoRA" if self.config.use_dora else "rsLoRA" if self.config.use_rslora else "LoRA"
        scaling = float(next(iter(self.layers.values()))[0].scaling[NAME])
        whole = f", and {' and '.join(sorted(self.whole))} as a whole" if self.whole else ""
        weights = counted(len(self.layers), "weight")
        return f"{variant} of rank {self.config.r}, scaled by {scaling:g}, on {weights}{whole}"

    def is_zero(self) -> bool:
        """Return whether every B is zero, as before training, and nothing else trained."""
        return not self.whole and not any(
            self._tensors.read(name).any() for name in self._tensors.places if "lora_B" in name
        )

    def read_whole(self, name: str) -> torch.Tensor:
        """Return a weight that was trained as a whole."""
        value = self._tensors.read(self.whole[name])
        if not value.sum(dtype=torch.float64).isfinite():
            raise DataError("damaged_adapter", f"{self._file}: {self.whole[name]} is not finite; {FIX}")
        return value

    def whole_size(self) -> int:
        """Return the number of weights that were trained as a whole."""
        return sum(prod(self._tensors.places[name].shape) for name in self.whole.values())

    def change_of(self, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors that define the change of a weight; {} if it is unchanged."""
        if name in self.whole:
            return {"whole": self.read_whole(name)}
        if name not in self.layers:
            return {}
        layer, prefix = self.layers[name]
        names = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
        parts = {part: self._tensors.read(prefix + part) for part in names if prefix + part in self._tensors.places}
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
        """Give a layer its weight and its adapter in this context."""
        # Its bias does not change and is zero.
        layer, prefix = self.layers[name]
        base, attribute = layer.get_base_layer(), name.rpartition(".")[2]
        values = [(base, attribute, weight)]
        if attribute == "weight" and getattr(base, "bias", None) is not None:
            values.append((base, "bias", torch.zeros(base.bias.shape)))
        for part in ("lora_A", "lora_B"):
            values.append((getattr(layer, part)[NAME], "weight", self._tensors.read(f"{prefix}{part}.weight").float()))
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


# -- tied weights ------------------------------------------------------------------------------------------------------


@dataclass
class Ties:
    """Storage of the tied weights of a model in the merged model.

    If the adapter changes tied weights in the same way, they stay tied. Otherwise, each weight is stored separately, if
    the architecture has a setting for that. Zamba uses a block in several layers and has no such setting. Zamba 2 has
    num_mem_blocks. All names are names of weights of the model.
    """

    settings: dict[str, Any] = field(default_factory=dict)  # settings in config.json that separate weights
    copies: dict[str, str] = field(default_factory=dict)  # new weight ─▶ the tensor of the files that it starts from
    dropped: set[str] = field(default_factory=set)  # weights that the separated model does not use
    same: set[str] = field(default_factory=set)  # weights that are stored under the name of a tied weight

    def apply(self, config: Any) -> None:
        """Set the settings in a config of transformers."""
        for name, value in self.settings.items():
            for part in (config, config.get_text_config()):
                setattr(part, name, value)

    def __str__(self) -> str:
        """Describe the separated weights; "" if there are none."""
        settings = ", ".join(f"{name}: {value}" for name, value in self.settings.items())
        return f"{counted(len(self.copies), 'shared weight')} stored separately ({settings})" if settings else ""


def find_ties(model: Any, tensors: Tensors, adapter: Adapter) -> Ties:
    """Return how to store the tied weights of `model`, which has no weights."""

    def are_equal(values: Sequence[dict[str, torch.Tensor]]) -> bool:
        first, *others = values
        return all(
            other.keys() == first.keys() and all(torch.equal(value, other[part]) for part, value in first.items())
            for other in others
        )

    files = files_of(model, tensors.places)
    groups: dict[str, list[str]] = {}
    for name, source in model.all_tied_weights_keys.items():
        groups.setdefault(source, [source]).append(name)
    same: set[str] = set()
    parted: list[list[str]] = []
    for names in groups.values():
        stored = [name for name in names if name in files]
        # transformers does not tie weights that differ in the files.
        if stored and (len(stored) == 1 or are_equal([{"": tensors.read(files[name])} for name in stored])):
            if are_equal([adapter.change_of(name) for name in names]):
                same |= {*names} - {*stored}
            else:
                parted.append(names)
    if not parted:
        return Ties(same=same)
    ties = Ties(_settings(model, adapter, parted))
    config = deepcopy(model.config)
    ties.apply(config)
    with torch.device("meta"):
        separate = type(model)(config)
    weights, tied = separate.state_dict(), separate.all_tied_weights_keys
    # Zamba 2 has a slot for each layer in each block, but uses only the slot of the layer. The other slots are omitted.
    ties.dropped = model.state_dict().keys() - weights.keys()
    ties.same = same & tied.keys()
    for names in groups.values():
        source = next((files[name] for name in names if name in files), "")
        ties.copies |= {name: source for name in names if name in weights and name not in tied and name not in files}
    return ties


def _settings(model: Any, adapter: Adapter, parted: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the settings of the config that separate these weights."""
    config = model.config.get_text_config()
    if hasattr(config, "num_mem_blocks") and all(".shared_transformer." in name for group in parted for name in group):
        return {"num_mem_blocks": len(config.hybrid_layer_ids)}
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    embeddings = model.get_input_embeddings().weight
    # This setting separates all tied weights of a model, so all of them must be embeddings.
    if tied == {name for name, value in model.named_parameters(remove_duplicate=False) if value is embeddings}:
        return {"tie_word_embeddings": False}
    apart = sorted({name.split(".")[-2] for name in adapter.layers.keys() - tied})
    fix = f", or train with lora_targets: [{', '.join(apart)}], which are not shared" if apart else ""
    raise DataError(
        "cannot_merge",
        f"{adapter.place}: the adapter changes {counted(len(parted), 'weight')} of a {config.model_type} model "
        f"differently in each layer that shares it (such as {' and '.join(parted[0][:2])}); {config.model_type} cannot "
        "store a weight for each layer, so base plus adapter cannot be one model; load them with "
        f"AutoPeftModelForCausalLM.from_pretrained{fix}",
    )


# -- the merge ---------------------------------------------------------------------------------------------------------


@dataclass
class Merging:
    """Base plus adapter in a precision, and the largest difference of a layer."""

    adapter: Adapter
    ties: Ties
    dtype: torch.dtype
    nf4: Dequantized | None = None  # if set, the base has the values of these weights in NF4
    whole: str = ""  # why the model was loaded as a whole; empty if it was not
    largest: float = 0.0

    def changed(self) -> set[str]:
        """Return the names of the weights that differ from those of the base model."""
        names = {*self.adapter.layers, *self.adapter.whole, *(self.nf4.layers if self.nf4 else ())}
        return names - self.ties.same - self.ties.dropped

    def merge(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return a changed weight: with its adapter, trained as a whole, or from NF4."""
        adapter, dtype = self.adapter, self.dtype
        if name in adapter.whole:
            return rounded(adapter.read_whole(name), dtype, name)
        if self.nf4 and name in self.nf4.layers:
            weight = self.nf4.value(name, weight)
        if name not in adapter.layers:
            return rounded(weight, dtype, name)
        merged, difference = adapter.merge(name, weight, dtype)
        if not difference <= LAYER_LIMITS[dtype]:
            raise DataError(
                "merge_differs",
                f"{name}: the output with the merged weight differs by {difference:.1e} from the output with the "
                f"unmerged adapter (relative; {LAYER_LIMITS[dtype]:.1e} is allowed); report this with your "
                "training.json",
            )
        self.largest = max(self.largest, difference)
        return merged


def _precision_of(model: Any, tensors: Tensors, wanted: torch.dtype) -> Callable[[str, str], torch.dtype]:
    """Return a function of a tensor and its weight that returns the new precision."""
    # Tensors in another precision than most keep it, and so do weights that transformers always loads in fp32.
    main = tensors.precision
    kept = [re.compile(pattern.replace("*", ".*")) for pattern in model._get_dtype_plan(wanted)]

    def precision(name: str, weight: str) -> torch.dtype:
        own = tensors.places[name].dtype
        in_fp32 = own == torch.float32 and any(pattern.search(weight) for pattern in kept)
        return wanted if own == main and own.is_floating_point and not in_fp32 else own

    return precision


def write_weights(folder: Path, base: Path, model: Any, tensors: Tensors, merging: Merging) -> None:
    """Write the weights of base plus adapter to `folder`."""
    ties = merging.ties
    try:
        changed = merging.changed() - ties.copies.keys()
        groups = [
            group for group in groups_of(model, tensors.places, changed) if ties.dropped.isdisjoint(group.weights)
        ]
        groups += [alone(name, name, source) for name, source in ties.copies.items()]
        precision, places = _precision_of(model, tensors, merging.dtype), {}
        for group in groups:
            for name in group.tensors:
                read = group.reads or name
                weight = group.weights[0]
                places[name] = replace(tensors.places[read], name=name, dtype=precision(read, weight))
        # Wide precisions come first (see `write_shards`). All tensors of a group have the same precision.
        groups.sort(key=lambda group: -places[next(iter(group.tensors))].dtype.itemsize)
        ordered = [places[name] for group in groups for name in group.tensors]
        write_shards(folder, ordered, _stream(groups, places, model, tensors, merging))
    except NotInvertible as error:
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        merging.whole = str(error)
        _write_whole(folder, base, tensors, merging)


def _stream(
    groups: Sequence[Group], places: dict[str, Place], model: Any, tensors: Tensors, merging: Merging
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the merged files, one group after another."""
    changed = merging.changed()
    for group in groups:
        values = {name: tensors.read(group.reads or name) for name in group.tensors}
        dtype = places[next(iter(values))].dtype
        names = [name for name in group.weights if name in changed]
        if not names:
            [(name, value)] = values.items()
            yield name, rounded(value, dtype, name)
            continue
        weights = group.load(values, model)
        if group.converter is not None:
            back = group.store(weights, model)
            if not all(torch.equal(back[name], value) for name, value in values.items()):
                raise NotInvertible(f"{group.first} is not converted back to the values that it is made of")
            del back
        del values
        for name in names:
            weights[name] = merging.merge(name, weights[name])
        for name, value in group.store(weights, model).items():
            yield name, rounded(value, dtype, name)


@torch.no_grad()
def load_merged(base: Path, tensors: Tensors, merging: Merging) -> Any:
    """Load the whole base model, and merge the adapter into it."""
    config = AutoConfig.from_pretrained(base, trust_remote_code=False)
    merging.ties.apply(config)
    model = auto_class(base, config).from_pretrained(
        base,
        **how_to_load(base, None) | {"config": config},
        dtype="auto",
        use_safetensors=True,
        trust_remote_code=False,
    )
    main = model.dtype
    for name, source in merging.ties.copies.items():
        model.get_parameter(name).data = tensors.read(source)
    for name in sorted(merging.changed()):
        weight = model.get_parameter(name)
        weight.data = merging.merge(name, weight.data)
    for name, value in model.state_dict(keep_vars=True).items():
        if value.dtype == main:  # transformers keeps other weights in fp32
            value.data = rounded(value.data, merging.dtype, name)
    model.config.dtype = merging.dtype
    return model


def _write_whole(folder: Path, base: Path, tensors: Tensors, merging: Merging) -> None:
    """Load the whole model, merge the adapter, and save the model."""
    model = load_merged(base, tensors, merging)
    # Otherwise transformers gives unpacked experts the names of MXFP4.
    model._weight_conversions = [
        one
        for one in model._weight_conversions
        if not any(isinstance(step, Mxfp4Dequantize) for step in getattr(one, "operations", ()))
    ]
    model.save_pretrained(folder, max_shard_size=SHARD_BYTES)
    for file in folder.glob("*.safetensors"):
        give_usual_mode(file)
    (folder / "config.json").unlink()  # write_other_files writes it
    (folder / "generation_config.json").unlink(missing_ok=True)
