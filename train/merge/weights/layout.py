"""Map the tensors of a model's files to the weights of the model.

    names in the files, the model without weights ─groups_of─▶ [Group, …] ─load─▶ weights of the model, by name
                                                                          ◀─store─ tensors of the files

transformers renames most tensors or loads them as they are. It stacks the tensors of experts, and splits or transposes
tensors of some architectures. Such a group is converted, changed, and converted back, so that the merged files have the
same tensor names as the files of the base model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from train.merge.weights.tensor_files import Place


class NotInvertible(Exception):
    """Error if weights cannot be converted back to the tensors of the files."""


@dataclass
class Group:
    """Tensors of the files that together become one or more weights of the model."""

    first: str  # the first weight; the name of the tensor if the model does not load it
    converter: Any = None
    tensors: dict[str, str] = field(default_factory=dict)  # name in the files ─▶ pattern of the converter
    weights: tuple[str, ...] = ()
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
        """Return the tensors of the files.

        Raises NotInvertible if their names differ from the names of the original tensors.
        """
        if self.converter is None:
            return dict(zip(self.tensors, weights.values(), strict=True))
        found = revert_weight_conversion(model, dict(weights))
        if set(found) != set(self.tensors):
            raise NotInvertible(f"{self.first} is not converted back to the tensors that it is made of")
        return {name: found[name] for name in self.tensors}


def groups_of(model: Any, places: dict[str, Place], adapted: Iterable[str]) -> list[Group]:
    """Return the groups of all tensors, as transformers would load them.

    `model` has no weights. Raises NotInvertible if a group with adapted weights cannot be converted back.
    """
    conversions = get_model_conversion_mapping(model)
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    groups: dict[str, Group] = {}
    for name, first, pattern in _renamed(model, places, conversions):
        if pattern is None:
            groups[name] = Group(first, None, {name: ""}, (first,))
        else:
            group = groups.setdefault(f"{first}\0", Group(first, of_pattern[pattern]))
            group.tensors[name] = pattern
    model._weight_conversions = [one for one in conversions if one.was_used()]
    wanted = set(adapted)
    found = [part for group in groups.values() for part in _checked(group, model, places, wanted)]
    if missing := sorted(wanted - {name for group in found for name in group.weights}):
        raise NotInvertible(f"no tensor of the files becomes {missing[0]}")
    return found


def files_of(model: Any, places: dict[str, Place]) -> dict[str, str]:
    """Return {weight: tensor} for all tensors that are loaded without conversion."""
    found = _renamed(model, places, get_model_conversion_mapping(model))
    return {weight: name for name, weight, pattern in found if pattern is None}


def _renamed(model: Any, places: dict[str, Place], conversions: Sequence[Any]) -> Iterator[tuple[str, str, str | None]]:
    """Yield (tensor, the first weight that it becomes, pattern of its converter)."""
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    weights, prefix = model.state_dict(), model.base_model_prefix
    for name in sorted(places, key=dot_natural_key):
        first, pattern = rename_source_key(name, renamings, converters, prefix, weights)
        # Otherwise, a renaming matches a tensor that it does not mean, or the model does not load the tensor.
        yield (name, first, pattern) if first in weights else (name, name, None)


def _checked(group: Group, model: Any, places: dict[str, Place], adapted: set[str]) -> list[Group]:
    """Return a group with its weights, or one group per tensor.

    If none of its weights is adapted, its tensors are copied one by one.
    """
    if group.converter is None:
        return [group]
    empty = {name: torch.empty(places[name].shape, dtype=places[name].dtype, device="meta") for name in group.tensors}
    try:
        found = group.load(empty, model)
        if adapted.isdisjoint(found):
            return [Group(name, None, {name: ""}, (name,)) for name in group.tensors]
        back = group.store(found, model)
    except NotInvertible:
        raise
    except Exception as error:  # each operation of transformers raises its own class
        raise NotInvertible(f"{group.first} cannot be converted ({' '.join(str(error).split())[:160]})") from None
    for name, value in empty.items():
        if (back[name].shape, back[name].dtype) != (value.shape, value.dtype):
            raise NotInvertible(f"{name} is not converted back to its shape and precision")
    group.weights = tuple(found)
    return [group]
