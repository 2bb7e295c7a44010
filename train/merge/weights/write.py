"""Write the merged weights, and compare each adapted layer.

    groups of tensors ─stream─▶ load one, add the adapter, round, convert back ─▶ shards    (a layer in memory)
    base model ─whole─▶ load it, add the adapter to each weight, round ─save_pretrained─▶ shards

Both ways compute in fp32 from the weights in the files of the base model, and round once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.core.errors import DataError
from tasks.storage.files import give_usual_mode
from train.merge.weights.adapter import Adapter, rounded
from train.merge.weights.layout import Group, NotInvertible, groups_of
from train.merge.weights.tensor_files import SHARD_BYTES, Place, Tensors, write_shards
from train.merge.weights.ties import Ties

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# A merged layer may differ from a layer with the unmerged adapter by the rounding of its weights and by the order of
# sums in fp32. The relative error of rounding is at most 2^-9 (bf16) or 2^-12 (fp16). An output averages over many
# weights, so it never reaches twice the largest error.
LAYER_LIMITS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}


@dataclass
class Written:
    """Result of writing the weights, with the largest difference of a layer."""

    whole: str  # why the model was loaded as a whole; empty if it was not
    largest: float = 0.0
    layer: str = ""

    def compare(self, name: str, difference: float, dtype: torch.dtype) -> None:
        """Record the difference of a layer.

        Raises DataError if the difference is above the limit.
        """
        if not difference <= LAYER_LIMITS[dtype]:
            raise DataError(
                "merge_differs",
                f"{name}: the output with the merged weight differs by {difference:.1e} from the output with the "
                f"unmerged adapter (relative; {LAYER_LIMITS[dtype]:.1e} is allowed); report this with your "
                "training.json",
            )
        if difference >= self.largest:
            self.largest, self.layer = difference, name


def main_precision(tensors: Tensors) -> torch.dtype:
    """Return the precision of most bytes of a model."""
    count = Counter[torch.dtype]()
    for place in tensors.places.values():
        count[place.dtype] += place.bytes
    return count.most_common(1)[0][0]


def precision_of(model: Any, tensors: Tensors, wanted: torch.dtype) -> Callable[[str, str], torch.dtype]:
    """Return a function that returns the new precision of a tensor.

    It takes the name of the tensor in the files and the name of its weight. Tensors in the main precision get the
    wanted precision. Other tensors keep their precision, such as the fp32 bias of a router in a bf16 model. A weight
    that transformers always loads in fp32 also keeps its precision.
    """
    main = main_precision(tensors)
    kept = model._get_dtype_plan(wanted)

    def precision(name: str, weight: str) -> torch.dtype:
        own = tensors.places[name].dtype
        in_fp32 = any(re.search(pattern.replace("*", ".*"), weight) for pattern in kept)
        return wanted if own == main and own.is_floating_point and not (in_fp32 and own == torch.float32) else own

    return precision


def write_weights(
    folder: Path, base: Path, model: Any, tensors: Tensors, adapter: Adapter, ties: Ties, dtype: torch.dtype
) -> Written:
    """Write the weights of base plus adapter to `folder`.

    Raises DataError or StorageError.
    """
    try:
        adapted = {*adapter.layers, *adapter.whole} - ties.same - ties.copies.keys() - ties.dropped
        groups = [
            group for group in groups_of(model, tensors.places, adapted) if ties.dropped.isdisjoint(group.weights)
        ]
        groups += [Group(name, None, {name: ""}, (name,), source) for name, source in ties.copies.items()]
        written = Written("")
        precision = precision_of(model, tensors, dtype)
        new = {}
        for group in groups:
            for name in group.tensors:
                read = group.reads or name
                new[name] = replace(tensors.places[read], name=name, dtype=precision(read, group.weights[0]))
        # Wide precisions come first (see `write_shards`). All tensors of a group have the same precision.
        groups.sort(key=lambda group: -new[next(iter(group.tensors))].dtype.itemsize)
        places = [new[name] for group in groups for name in group.tensors]
        write_shards(folder, places, _stream(groups, new, model, tensors, adapter, written))
        return written
    except NotInvertible as error:
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        return _write_whole(folder, base, tensors, adapter, ties, dtype, str(error))


def _stream(
    groups: Sequence[Group],
    places: dict[str, Place],
    model: Any,
    tensors: Tensors,
    adapter: Adapter,
    written: Written,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the merged files, one group after another."""
    for group in groups:
        values = {name: tensors.read(group.reads or name) for name in group.tensors}
        adapted = [name for name in group.weights if name in adapter.layers or name in adapter.whole]
        if not adapted:
            [(name, value)] = values.items()
            yield name, rounded(value, places[name].dtype, name)
            continue
        weights = group.load(values, model)
        if group.converter is not None:
            back = group.store(weights, model)
            if not all(torch.equal(back[name], value) for name, value in values.items()):
                raise NotInvertible(f"{group.first} is not converted back to the values that it is made of")
            del back
        del values
        dtype = places[next(iter(group.tensors))].dtype
        for name in adapted:
            weights[name] = _merged(adapter, name, weights[name], dtype, written)
        for name, value in group.store(weights, model).items():
            yield name, rounded(value, dtype, name)


def _merged(adapter: Adapter, name: str, weight: torch.Tensor, dtype: torch.dtype, written: Written) -> torch.Tensor:
    """Return a weight with its adapter, or the weight that was trained as a whole."""
    if name in adapter.whole:
        return rounded(adapter.read_whole(name), dtype, name)
    merged, difference = adapter.merge(name, weight, dtype)
    written.compare(name, difference, dtype)
    return merged


@torch.no_grad()
def _write_whole(
    folder: Path, base: Path, tensors: Tensors, adapter: Adapter, ties: Ties, dtype: torch.dtype, why: str
) -> Written:
    """Load the whole model, merge the adapter, and save the model.

    This is the fallback if the files of the base model cannot be written one tensor at a time.
    """
    written = Written(why)
    config = AutoConfig.from_pretrained(base, trust_remote_code=False)
    ties.apply(config)
    model = AutoModelForCausalLM.from_pretrained(
        base, config=config, dtype="auto", use_safetensors=True, trust_remote_code=False
    )
    main = model.dtype
    for name, source in ties.copies.items():
        model.get_parameter(name).data = tensors.read(source)
    for name in {**adapter.layers, **adapter.whole}:
        if name not in ties.same and name not in ties.dropped:
            weight = model.get_parameter(name)
            weight.data = _merged(adapter, name, weight.data, dtype, written)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.dtype == main:  # transformers keeps other weights in fp32
            value.data = rounded(value.data, dtype, name)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=SHARD_BYTES)
    for file in folder.glob("*.safetensors"):
        give_usual_mode(file)
    (folder / "config.json").unlink()  # write_companions writes it
    (folder / "generation_config.json").unlink(missing_ok=True)
    return written
