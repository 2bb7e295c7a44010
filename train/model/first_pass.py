"""Learn from passes over a real row what no attribute of a model shows.

    row ─learn─▶ the loss is the mean of the trained tokens of a step: the model's own, or ours
           └──drop_unused─▶ adapters that get no gradient are removed

Every rank runs the same row and decides alike, also in a resumed run.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.core.printable import counted
from packcorpus.tasks.storage.schemas import LOSS_WEIGHT
from packcorpus.train.machine.ranks import gather
from packcorpus.train.model import isolation
from packcorpus.train.model.attention import autocast, run_pass, without_adapter
from packcorpus.train.model.qlora import keep_random, set_random
from packcorpus.train.model.token_loss import weigh_loss

# Relative difference up to which two losses of the same logits are equal.
SAME = 1e-5


def learn(model: Any, batch: dict[str, Any], dtype: torch.dtype, seed: int, attention: str) -> list[str]:
    """Settle the loss of a model with one row, and leave a gradient.

    The loss becomes the mean of the trained tokens, weighted if the batch has `loss_weight`. With `num_items_in_batch`,
    it becomes their sum divided by this number, as the accumulation of the Trainer requires. The gradient is for
    `drop_unused`. Returns a note if the loss was another. Raises DataError if the logits are not finite.
    """
    plain = {name: values for name, values in batch.items() if name != LOSS_WEIGHT}
    causal = without_adapter(model)
    with keep_random(model.device), autocast(model.device, dtype):
        with torch.no_grad():
            reason = _why_not_own(model, plain, seed, attention)
        if reason or LOSS_WEIGHT in batch:
            weigh_loss(model)
        causal.accepts_loss_kwargs = True  # the Trainer reads it; the classes of some models deny it without a reason
        run_pass(model, plain, torch.float32)  # in the precision of the autocast above
    return [f"loss: computed here, because {reason}"] if reason else []


def _why_not_own(model: Any, batch: dict[str, Any], seed: int, attention: str) -> str:
    """Return why the loss of a model is not the mean; "" if it is."""
    labels = batch["labels"]
    tokens = int((labels[:, 1:] != -100).sum())
    for items in (None, tokens, 2 * tokens):
        set_random(model.device, seed)
        try:
            outputs = model(**batch, **({} if items is None else {"num_items_in_batch": items}))
            loss = outputs["loss"]
        except (TypeError, KeyError):
            return f"a {model.config.model_type} model takes no count of the tokens of a step"
        logits = outputs["logits"]
        wanted = ForCausalLMLoss(logits, labels, logits.shape[-1], num_items_in_batch=items)
        if not wanted.isfinite():
            raise isolation.not_finite(model, attention)
        if loss is None or not abs(float(loss) - float(wanted)) <= SAME * abs(float(wanted)):
            what = "the mean of the trained tokens" if items is None else "divided by the tokens of a step"
            return f"the loss of a {model.config.model_type} model is not {what}"
    return ""


# -- gradients ---------------------------------------------------------------------------------------------------------


def drop_unused(model: Any) -> list[str]:
    """Remove the adapters that got no gradient in the last pass; return a note.

    Examples are the towers of a multimodal model, layers that a model never runs, and indexers that only choose what
    attention sees. Clears all gradients. Raises DataError if no adapter got one.
    """
    with_gradient = {
        name: any(weights.grad is not None for weights in layer.parameters() if weights.requires_grad)
        for name, layer in _adapted(model).items()
    }
    model.zero_grad(set_to_none=True)
    used = set().union(*gather({name for name, has_one in with_gradient.items() if has_one}))
    unused = _without_experts([name for name in with_gradient if name not in used], used)
    if not used:
        raise DataError(
            "unfit_model",
            f"no layer with an adapter gets a gradient in a {model.config.model_type} model; name other lora_targets, "
            "or use another model",
        )
    if not unused:
        return []
    config = model.peft_config["default"]
    for name in unused:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, model.get_submodule(name).get_base_layer())
    short = [name.removeprefix("base_model.model.") for name in unused]
    # Otherwise PEFT would add them again when it loads the adapter.
    config.exclude_modules = sorted({*(config.exclude_modules or ()), *short})
    if config.target_parameters:
        config.target_parameters = _parameters(model)
    kinds = sorted({name.rpartition(".")[2] for name in short})
    return [
        f"adapter: {counted(len(unused), 'layer')} left out, because the loss does not depend on "
        f"{'it' if len(unused) == 1 else 'them'}, such as {short[0]} ({', '.join(kinds)})"
    ]


def _adapted(model: Any) -> dict[str, Any]:
    """Return the outermost layers of an adapter by name."""
    layers: dict[str, Any] = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and not name.endswith(".base_layer"):
            layers[name] = module
    return layers


def _parameters(model: Any) -> list[str]:
    """Return the full names of the parameters of experts that have an adapter."""
    names = []
    for name, module in model.named_modules():
        if hasattr(module, "parameter_name"):
            place = name.removeprefix("base_model.model.").replace(".base_layer", "")
            names.append(f"{place}.{module.parameter_name}")
    return sorted(names)


def _without_experts(unused: list[str], used: Collection[str]) -> list[str]:
    """Return the unused layers without experts that other batches may use.

    An expert in a list of modules gets no gradient in a batch that sends it no token.
    """
    kinds = {kind for name in used if (kind := _kind_of_expert(name))}
    return [name for name in unused if _kind_of_expert(name) not in kinds]


def _kind_of_expert(name: str) -> str:
    """Return a name without the number of its expert; "" if it has none."""
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name) if re.search(r"\.experts\.\d+\.", name) else ""


def has_listed_experts(model: Any) -> bool:
    """Return whether a step may use only some of the experts with an adapter."""
    return any(_kind_of_expert(name) for name in _adapted(model))
