"""Find the tied weights of a model, and whether they stay tied with the adapter.

    ties of the model, changes of the adapter ─find_ties─▶ Ties: settings that separate them, weights to add, to omit

If the adapter changes tied weights in the same way, they stay tied. Otherwise, each weight is stored separately, if the
architecture has a setting for that. Zamba uses a block in several layers and has no such setting. Zamba 2 has
num_mem_blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tasks.core.errors import DataError
from tasks.core.printable import counted
from train.merge.weights.adapter import Adapter
from train.merge.weights.layout import files_of
from train.merge.weights.tensor_files import Tensors


@dataclass
class Ties:
    """Storage of the tied weights of a model in the merged model.

    All names are names of weights of the model.
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

    def added(self, tensors: Tensors) -> int:
        """Return the bytes of the new weights, in the precision of the base model."""
        return sum(tensors.places[source].bytes for source in self.copies.values())

    def described(self) -> str:
        """Return a description of the separated weights; "" if there are none."""
        if not self.settings:
            return ""
        settings = ", ".join(f"{name}: {value}" for name, value in self.settings.items())
        return f"{counted(len(self.copies), 'shared weight')} stored separately ({settings})"


def find_ties(model: Any, tensors: Tensors, adapter: Adapter) -> Ties:
    """Return how to store the tied weights of `model`, which has no weights.

    Raises DataError if the adapter changes them differently and the architecture cannot separate them.
    """
    files = files_of(model, tensors.places)
    groups: dict[str, list[str]] = {}
    for name, source in model.all_tied_weights_keys.items():
        groups.setdefault(source, [source]).append(name)
    same: set[str] = set()
    parted: list[list[str]] = []
    for names in groups.values():
        stored = [name for name in names if name in files]
        if not stored or not _are_equal(tensors, [files[name] for name in stored]):
            continue  # transformers does not tie weights that differ in the files
        if _change_alike(adapter, names):
            same |= {*names} - {*stored}
        else:
            parted.append(names)
    if not parted:
        return Ties(same=same)
    ties = Ties(_settings(model, adapter, parted))
    config = deepcopy(model.config)
    ties.apply(config)
    with torch.device("meta"):
        separate = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    weights, tied = separate.state_dict(), separate.all_tied_weights_keys
    # Zamba 2 has a slot for each layer in each block, but uses only the slot of the layer. The other slots are omitted.
    ties.dropped = model.state_dict().keys() - weights.keys()
    ties.same = same & tied.keys()
    for names in groups.values():
        for name in names:
            if name in weights and name not in tied and name not in files:
                ties.copies[name] = next(files[one] for one in names if one in files)
    return ties


def _are_equal(tensors: Tensors, names: list[str]) -> bool:
    if len(names) < 2:
        return True
    first = tensors.read(names[0])
    return all(torch.equal(first, tensors.read(name)) for name in names[1:])


def _change_alike(adapter: Adapter, names: Sequence[str]) -> bool:
    """Return whether the adapter changes all these equal weights in the same way."""
    first = _change(adapter, names[0])
    return all(
        one.keys() == first.keys() and all(torch.equal(value, one[part]) for part, value in first.items())
        for one in (_change(adapter, name) for name in names[1:])
    )


def _change(adapter: Adapter, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors that define the change of a weight; {} if it is unchanged."""
    if name in adapter.whole:
        return {"whole": adapter.read_whole(name)}
    return adapter.read_layer(name) if name in adapter.layers else {}


def _settings(model: Any, adapter: Adapter, parted: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the settings of the config that separate these weights.

    Raises DataError if there are none.
    """
    config = model.config.get_text_config()
    names = {name for group in parted for name in group}
    if hasattr(config, "num_mem_blocks") and all(".shared_transformer." in name for name in names):
        return {"num_mem_blocks": len(config.hybrid_layer_ids)}
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    embeddings = model.get_input_embeddings().weight
    # This setting separates all tied weights of a model, so all of them must be embeddings.
    if tied == {name for name, value in model.named_parameters(remove_duplicate=False) if value is embeddings}:
        return {"tie_word_embeddings": False}
    alone = sorted({name.split(".")[-2] for name in adapter.layers.keys() - tied})
    fix = f", or train with lora_targets: [{', '.join(alone)}], which are not shared" if alone else ""
    raise DataError(
        "cannot_merge",
        f"{adapter.place}: the adapter changes {counted(len(parted), 'weight')} of a {config.model_type} model "
        f"differently in each layer that shares it (such as {' and '.join(parted[0][:2])}); {config.model_type} cannot "
        "store a weight for each layer, so base plus adapter cannot be one model; load them with "
        f"AutoPeftModelForCausalLM.from_pretrained{fix}",
    )
