"""Read and write safetensors, and map their tensors to weights of a model.

    folder of a model ─Tensors─▶ names, shapes, precisions ─read─▶ one tensor
    names in the files, the model without weights ─groups_of─▶ [Group, …] ─load─▶ weights of the model, by name
                                                                          ◀─store─ tensors of the files
    tensors, in the order of writing ─write_shards─▶ files of at most 5 GB, and their index

transformers renames most tensors or loads them as they are. It stacks the tensors of experts, and splits or transposes
tensors of some architectures. Such a group is converted, changed, and converted back, so that the merged files have the
same tensor names as the files of the base model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError, safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.storage.files import atomic_file, read_json, to_json, write_bytes

SHARD_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"
ONLY = "model.safetensors"

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path = Path()

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Tensors:
    """Tensors of some safetensors files, by name, read when needed."""

    def __init__(self, files: Sequence[Path], reason: str, fix: str):
        self._reason, self._fix = reason, fix
        self.places: dict[str, Place] = {}
        for file in files:
            try:
                # safe_open checks sizes and offsets in the header, and that the file ends with the last tensor.
                with safe_open(file, framework="pt") as opened:
                    found = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
                    facts = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in found.items()}
            except (OSError, SafetensorError) as error:
                raise self._damaged(file, " ".join(str(error).split())) from None
            for name, (dtype, shape) in facts.items():
                if dtype not in DTYPES:
                    raise self._damaged(file, f"{name} is stored as {dtype}, which cannot be merged")
                self.places[name] = Place(name, DTYPES[dtype], shape, file)
        self._unpack()

    def _unpack(self) -> None:
        """Replace blocks and scales of MXFP4 by the weights in bf16 that they hold."""
        self.packed: dict[str, tuple[Place, Place]] = {}
        for blocks in [name for name in self.places if name.endswith("_blocks")]:
            name = blocks.removesuffix("_blocks")
            if (scales := f"{name}_scales") in self.places:
                self.packed[name] = self.places.pop(blocks), self.places.pop(scales)
                (*stack, rows, groups, size), file = self.packed[name][0].shape, self.packed[name][0].file
                self.places[name] = Place(name, torch.bfloat16, (*stack, groups * size * 2, rows), file)

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        if name in self.packed:
            blocks, scales = (self._read(place) for place in self.packed[name])
            return convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        return self._read(self.places[name])

    def _read(self, place: Place) -> torch.Tensor:
        try:
            with safe_open(place.file, framework="pt") as opened:
                return opened.get_tensor(place.name)
        except (OSError, SafetensorError) as error:
            raise self._damaged(place.file, " ".join(str(error).split())) from None

    @property
    def bytes(self) -> int:
        return sum(place.bytes for place in self.places.values())

    @property
    def precision(self) -> torch.dtype:
        """Return the precision of most bytes."""
        count = Counter[torch.dtype]()
        for place in self.places.values():
            count[place.dtype] += place.bytes
        return count.most_common(1)[0][0]

    def _damaged(self, file: Path, why: str) -> DataError:
        return DataError(self._reason, f"{file}: cannot be read ({why[:200].rstrip('.')}); {self._fix}")


def tensors_of_model(folder: Path) -> Tensors:
    """Open the weights of a model, in the files that transformers would load."""
    fix = "copy the model again"
    if (folder / ONLY).is_file():
        return Tensors([folder / ONLY], "bad_model", fix)
    if not (folder / INDEX).is_file():
        raise DataError("bad_model", f"{folder}: contains neither {ONLY} nor {INDEX}; {fix}")
    index = read_json(folder / INDEX)
    named = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise DataError("bad_model", f"{folder / INDEX}: has no weight_map; {fix}")
    found = Tensors([folder / file for file in sorted(set(named.values()))], "bad_model", fix)
    stored = {*found.places, *(place.name for pair in found.packed.values() for place in pair)}
    if missing := sorted(set(named) - stored):
        raise DataError("bad_model", f"{folder / named[missing[0]]}: lacks {missing[0]}; {fix}")
    return found


def write_shards(folder: Path, places: Sequence[Place], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write `tensors` to files of at most 5 GB, and then their index.

    The safetensors library can write a file only from all of its tensors at once. The tensors come in the order of
    `places`. A tensor of more than 5 GB has its own file. The offset of a tensor must be a multiple of the size of its
    precision, so precisions must not widen in this order.
    """
    shards: list[list[Place]] = []
    for place in places:
        if not shards or sum(other.bytes for other in shards[-1]) + place.bytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(place)
    count = len(shards)
    names = [ONLY] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    for name, shard in zip(names, shards, strict=True):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for place, end in zip(shard, accumulate(place.bytes for place in shard), strict=True):
            offsets = [end - place.bytes, end]
            header[place.name] = {"dtype": NAMES[place.dtype], "shape": place.shape, "data_offsets": offsets}
        text = orjson.dumps(header)
        text += b" " * (-len(text) % 8)  # so that the first tensor is aligned
        with atomic_file(folder / name) as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for place in shard:
                key, tensor = next(tensors)
                if (key, tensor.dtype, tuple(tensor.shape)) != (place.name, place.dtype, place.shape):
                    raise RuntimeError(f"{key}: expected {place.name} {place.dtype} {place.shape}")
                out.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
                del tensor
    if count > 1:
        weight_map = {place.name: name for name, shard in zip(names, shards, strict=True) for place in shard}
        total = {"total_size": sum(place.bytes for place in places)}
        write_bytes(folder / INDEX, to_json({"metadata": total, "weight_map": dict(sorted(weight_map.items()))}))


def rounded(value: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return a tensor in another precision."""
    if value.dtype == dtype:
        return value
    new = value.to(dtype)
    if dtype == torch.float16 and new.isinf().any() and value.isfinite().all():
        raise DataError(
            "merge_differs", f"{name}: has values up to {value.abs().max():.3g}, too large for fp16; use --dtype bf16"
        )
    return new


# -- tensors of the files and weights of the model ---------------------------------------------------------------------


class NotInvertible(Exception):
    """Error if weights cannot be converted back to the tensors of the files."""


@dataclass
class Group:
    """Tensors of the files that together become one or more weights of the model."""

    first: str  # the first weight; the name of the tensor if the model does not load it
    tensors: dict[str, str]  # name in the files ─▶ pattern of the converter
    weights: tuple[str, ...] = ()
    converter: Any = None
    reads: str = ""  # the tensor that a new one starts from; if empty, each tensor is read by its own name

    def load(self, values: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        """Return the weights of the model, by name."""
        if self.converter is None:
            [value] = values.values()
            return {self.first: value}
        converter = deepcopy(self.converter)
        for name, pattern in self.tensors.items():
            converter.add_tensor(self.first, name, pattern, values[name])
        found = converter.convert(self.first, model=model, config=model.config)
        return {name: weight[0] if isinstance(weight, list) else weight for name, weight in found.items()}

    def store(self, weights: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        """Return the tensors of the files."""
        if self.converter is None:
            return dict(zip(self.tensors, weights.values(), strict=True))
        found = revert_weight_conversion(model, dict(weights))
        if set(found) != set(self.tensors):
            raise NotInvertible(f"{self.first} is not converted back to the tensors that it is made of")
        return {name: found[name] for name in self.tensors}


def alone(name: str, weight: str, reads: str = "") -> Group:
    """Return the group of a tensor that is loaded without conversion."""
    return Group(weight, {name: ""}, (weight,), reads=reads)


def groups_of(model: Any, places: dict[str, Place], adapted: Iterable[str]) -> list[Group]:
    """Return the groups of all tensors, as transformers would load them."""
    # `model` has no weights. The tensors of a group without adapted weights are copied one by one.
    conversions = get_model_conversion_mapping(model)
    of_pattern = {p: one for one in conversions if isinstance(one, WeightConverter) for p in one.source_patterns}
    converted: dict[str, Group] = {}
    groups = []
    for name, first, pattern in _renamed(model, places, conversions):
        if pattern is None:
            groups.append(alone(name, first))
            continue
        if first not in converted:
            groups.append(Group(first, {}, converter=of_pattern[pattern]))
            converted[first] = groups[-1]
        converted[first].tensors[name] = pattern
    model._weight_conversions = [one for one in conversions if one.was_used()]
    wanted, found = set(adapted), []
    for group in groups:
        if group.converter is not None:
            group.weights = _checked_weights(group, model, places, wanted)
        found += [group] if group.weights else [alone(name, name) for name in group.tensors]
    if missing := sorted(wanted - {name for group in found for name in group.weights}):
        raise NotInvertible(f"no tensor of the files becomes {missing[0]}")
    return found


def files_of(model: Any, places: dict[str, Place]) -> dict[str, str]:
    """Return {weight: tensor} for all tensors that are loaded without conversion."""
    renamed = _renamed(model, places, get_model_conversion_mapping(model))
    return {weight: name for name, weight, pattern in renamed if pattern is None}


def _renamed(model: Any, places: dict[str, Place], conversions: Sequence[Any]) -> Iterator[tuple[str, str, str | None]]:
    """Yield (tensor, the first weight that it becomes, pattern of its converter)."""
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    weights, prefix = model.state_dict(), model.base_model_prefix
    for name in sorted(places, key=dot_natural_key):
        first, pattern = rename_source_key(name, renamings, converters, prefix, weights)
        # Otherwise, a renaming matches a tensor that it does not mean, or the model does not load the tensor.
        yield (name, first, pattern) if first in weights else (name, name, None)


def _checked_weights(group: Group, model: Any, places: dict[str, Place], adapted: set[str]) -> tuple[str, ...]:
    """Return the weights of a group; () if none of them is adapted."""
    empty = {name: torch.empty(places[name].shape, dtype=places[name].dtype, device="meta") for name in group.tensors}
    try:
        found = group.load(empty, model)
        if adapted.isdisjoint(found):
            return ()
        back = group.store(found, model)
    except NotInvertible:
        raise
    except Exception as error:  # each operation of transformers raises its own class
        raise NotInvertible(f"{group.first} cannot be converted ({' '.join(str(error).split())[:160]})") from None
    for name, value in empty.items():
        if (back[name].shape, back[name].dtype) != (value.shape, value.dtype):
            raise NotInvertible(f"{name} is not converted back to its shape and precision")
    return tuple(found)
