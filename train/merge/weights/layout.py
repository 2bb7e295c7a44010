"""Find out which weights of a model the tensors of its files become.

    names in the files, the model without weights ─groups_of─▶ [Group, …] ─load─▶ weights of the model, by name
                                                                          ◀─store─ tensors of the files

transformers renames most tensors at most. Those of experts it stacks, and other architectures split or transpose some:
such a group is converted, changed, and converted back, so that the merged files have the names of the base's.
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
    """Weights of the model cannot be converted back to the tensors of its files."""


@dataclass
class Group:
    """Tensors of the files that become one or more weights of the model together."""

    first: str  # the first weight; of a tensor that the model does not load, its own name
    converter: Any = None
    tensors: dict[str, str] = field(default_factory=dict)  # name in the files ─▶ pattern of the converter
    weights: tuple[str, ...] = ()
    reads: str = ""  # the tensor that a new one starts from; else each starts from the one of its name

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
        """Return the tensors of the files. Raises NotInvertible if they would be others."""
        if self.converter is None:
            return dict(zip(self.tensors, weights.values(), strict=True))
        found = revert_weight_conversion(model, dict(weights))
        if set(found) != set(self.tensors):
            raise NotInvertible(f"{self.first} is not converted back to the tensors that it is made of")
        return {name: found[name] for name in self.tensors}


def groups_of(model: Any, places: dict[str, Place], adapted: Iterable[str]) -> list[Group]:
    """Return the groups of all tensors, as transformers would load them into `model`, which has no weights.

    Raises NotInvertible if a group with adapted weights is not one to one.
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
    """Return, by name of the weight, the tensors of the files that are weights of the model as they are."""
    found = _renamed(model, places, get_model_conversion_mapping(model))
    return {weight: name for name, weight, pattern in found if pattern is None}


def _renamed(model: Any, places: dict[str, Place], conversions: Sequence[Any]) -> Iterator[tuple[str, str, str | None]]:
    """Yield each tensor with the first weight that it becomes, and the pattern of its converter, if it has one."""
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    weights, prefix = model.state_dict(), model.base_model_prefix
    for name in sorted(places, key=dot_natural_key):
        first, pattern = rename_source_key(name, renamings, converters, prefix, weights)
        # Otherwise a renaming that does not mean this tensor, or one that the model does not load.
        yield (name, first, pattern) if first in weights else (name, name, None)


def _checked(group: Group, model: Any, places: dict[str, Place], adapted: set[str]) -> list[Group]:
    """Return a group with its weights; if none of them is adapted, its tensors one by one, which are copied."""
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
    except Exception as error:  # each operation of transformers has its own
        raise NotInvertible(f"{group.first} cannot be converted ({' '.join(str(error).split())[:160]})") from None
    for name, value in empty.items():
        if (back[name].shape, back[name].dtype) != (value.shape, value.dtype):
            raise NotInvertible(f"{name} is not converted back to its shape and precision")
    group.weights = tuple(found)
    return [group]
