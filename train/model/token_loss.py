"""Compute the loss of a causal language model from its trained tokens only.

batch ─decoder─▶ hidden states ─trained tokens─▶ chunks ─the model's own code─▶ logits ─▶ Σ loss and its gradient

A model computes logits from hidden states in its own way: it may scale or cap them, or apply another norm. Its forward
therefore runs unchanged, and only the call of its decoder is answered: in the first pass with the states of one token,
and then with those of a chunk. Logits of a chunk are freed before the next chunk, because their gradient is computed at
once. Tokens that are not trained on have no logits at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers.modeling_outputs import CausalLMOutputWithPast

from packcorpus.train.model.attention import decoder_of, without_adapter

CHUNK = 512  # tokens whose logits are in memory at a time

Undo = Callable[[], None]
Logits = Callable[[torch.Tensor], torch.Tensor]  # [n, hidden] → [n, vocabulary]


@dataclass
class TokenOutput(CausalLMOutputWithPast):
    """Output with `token_loss`, the mean loss of the trained tokens without weights.

    `predicted` is the number of trained tokens that have the highest logit, in a pass without logits or gradients.
    """

    token_loss: torch.Tensor | None = None
    predicted: torch.Tensor | None = None


def fuse_loss(model: Any) -> Undo:
    """Make a causal language model compute its loss without all logits in memory.

    A pass with labels then returns the loss but no logits. A pass without labels is unchanged. With
    `num_items_in_batch`, the loss is the sum over the trained tokens divided by this number, as the Trainer's
    accumulation requires. `loss_weight` is applied as by `weigh_loss`.
    """
    return _replace_forward(model, fused=True)


def weigh_loss(model: Any) -> Undo:
    """Make a causal language model compute its loss from logits and `loss_weight`.

    `loss_weight` is float32[B, L]; without it, each trained token counts alike. A pass without labels is unchanged.
    Without this function, models of transformers silently ignore `loss_weight`. Returns a function that restores the
    model.

        undo = packcorpus.weigh_loss(model)
        loss = model(**batch).loss  # Σ weight · loss / Σ weight
    """
    return _replace_forward(model, fused=False)


def _replace_forward(model: Any, fused: bool) -> Undo:
    causal = without_adapter(model)
    former = vars(causal).get("forward")
    path = _path(causal) if fused else None
    causal.forward = partial(_forward, causal.forward, path)

    def undo() -> None:
        del causal.forward  # restores the method of its class
        if former is not None:
            causal.forward = former

    return undo


def _path(causal: Any) -> list[Any]:
    """Return the modules that lead to the decoder and do not contain the head."""
    decoder, head = decoder_of(causal), causal.get_output_embeddings()
    name = next(name for name, module in causal.named_modules() if module is decoder)
    parts = name.split(".")
    modules = [causal.get_submodule(".".join(parts[: end + 1])) for end in range(len(parts))]
    return [module for module in modules if all(inner is not head for inner in module.modules())]


def _forward(
    plain: Callable[..., Any],
    path: list[Any] | None,
    input_ids: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    loss_weight: torch.Tensor | None = None,
    **inputs: Any,
) -> Any:
    if labels is None:
        return plain(input_ids=input_ids, **inputs)
    items = inputs.pop("num_items_in_batch", None)
    call = partial(plain, input_ids=input_ids, **inputs)
    targets = pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    weights = None if loss_weight is None else pad(loss_weight, (0, 1))[:, 1:].flatten().float()
    logits = predicted = None
    if path is None:
        logits = call()["logits"]
        values = logits.float().flatten(0, 1)
        targets = targets.to(values.device)
        losses = torch.nn.functional.cross_entropy(values, targets, ignore_index=-100, reduction="none")
        weights = None if weights is None else weights.to(values.device) * (targets != -100)
        weighted, total = (losses if weights is None else losses * weights).sum(), losses.detach().sum()
    else:
        hidden, head, trained_weights = _decode(call, path)
        trained = (targets.to(hidden.device) != -100).nonzero().flatten()
        targets = targets.to(hidden.device).index_select(0, trained)
        weights = None if weights is None else weights.to(hidden.device).index_select(0, trained)
        chosen = hidden.flatten(0, 1).index_select(0, trained)
        if torch.is_grad_enabled():
            sums = _Sums.apply(head, targets, weights, chosen, *trained_weights)
        else:
            sums, _ = _add_up(head, targets, weights, chosen, None)
            predicted = sums[2]
        weighted, total = sums[0], sums[1].detach()
    # The result is Σ w·loss / Σ w over the trained tokens, where w is the weight of the predicted token, or 1. With
    # `items`, the sum of the weights of all micro-batches of a step on all ranks, it is Σ w·loss / items.
    count = (targets != -100).sum()
    if items is None:
        items = count if weights is None else weights.sum()
    return TokenOutput(loss=weighted / items, logits=logits, token_loss=total / count, predicted=predicted)


# -- the decoder, and the head of a model ------------------------------------------------------------------------------


def _decode(call: Callable[[], Any], path: Sequence[Any]) -> tuple[torch.Tensor, Logits, list[torch.Tensor]]:
    """Run the decoder of a model, and return how to compute logits from its states.

    Returns the hidden states [B, L, hidden], a function that computes the logits of some of them, and the trained
    weights that this function reads.
    """
    former = [module._compiled_call_impl for module in path]
    output, first = None, torch.empty(0)

    def decode(module: Any, *args: Any, **named: Any) -> Any:
        nonlocal output, first
        with _calling(path, former):
            output = module(*args, **named)
        first = output[0][:, :1].detach().requires_grad_()
        return _with_hidden(output, first)

    def head(states: torch.Tensor) -> torch.Tensor:
        answer = _with_hidden(output, states[None])
        with _calling(path, [lambda *_, **__: answer] * len(path)):
            logits: torch.Tensor = call()["logits"]
        return logits.flatten(0, 1)  # an index would copy their gradient

    # A module of the path may call the next one, or the model may call only the last.
    with _calling(path, [partial(decode, module) for module in path]):
        logits = call()["logits"]
    if output is None:
        raise RuntimeError("the model does not call its decoder")
    return output[0], head, [leaf for leaf in _leaves(logits) if leaf is not first]


@contextmanager
def _calling(modules: Sequence[Any], functions: Sequence[Any]) -> Iterator[None]:
    """Call these functions instead of modules, or the modules themselves for None."""
    # Unlike a replaced `forward`, this also skips hooks, such as those that gather the weights of a sharded decoder.
    former = [module._compiled_call_impl for module in modules]
    for module, function in zip(modules, functions, strict=True):
        module._compiled_call_impl = function
    try:
        yield
    finally:
        for module, function in zip(modules, former, strict=True):
            module._compiled_call_impl = function


def _with_hidden(output: Any, hidden: torch.Tensor) -> Any:
    """Return the output of a decoder with other hidden states."""
    return (hidden, *output[1:]) if isinstance(output, tuple) else replace(output, last_hidden_state=hidden)


def _leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a gradient of `tensor` reaches."""
    seen, waiting, found = set[Any](), [tensor.grad_fn], []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found += [node.variable] if hasattr(node, "variable") else []
        waiting += [other for other, _ in node.next_functions]
    return found


# -- sums over chunks --------------------------------------------------------------------------------------------------


class _Sums(torch.autograd.Function):
    """Sums of `_add_up`, of which the first has a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        head: Logits,
        targets: torch.Tensor,
        weights: torch.Tensor | None,
        hidden: torch.Tensor,
        *trained_weights: torch.Tensor,
    ) -> torch.Tensor:
        sums, gradients = _add_up(head, targets, weights, hidden, trained_weights)
        ctx.save_for_backward(*gradients)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # In 16 bits, the factor would be rounded, or be 0.
        return None, None, None, *((x.float() * outer[0]).to(x.dtype) for x in ctx.saved_tensors)


def _add_up(
    head: Logits,
    targets: torch.Tensor,
    weights: torch.Tensor | None,
    hidden: torch.Tensor,
    trained_weights: Sequence[torch.Tensor] | None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Add up Σ w·loss, Σ loss, and the number of predicted tokens.

    `hidden` is [n, hidden]; `targets` and `weights` are [n]. Also returns the gradients of the first sum, for `hidden`
    and for `trained_weights`. If these are None, there are no gradients; otherwise predictions are not counted.
    """
    sums = torch.zeros(3, device=hidden.device)
    learns, leaves = trained_weights is not None, [*(trained_weights or ())]
    gradients = [torch.zeros_like(tensor) for tensor in (hidden, *leaves)] if learns else []

    def add(part: slice) -> None:
        states = hidden[part].detach().requires_grad_(learns)
        with torch.set_grad_enabled(learns):
            logits = head(states)
        place = targets[part, None]
        scores = logits.detach().log_softmax(-1, dtype=torch.float32)
        losses = -scores.gather(1, place)[:, 0]
        weighted = losses if weights is None else losses * weights[part]
        sums.add_(torch.stack([weighted.sum(), losses.sum(), torch.zeros_like(sums[2])]))
        if not learns:
            sums[2] += (logits.argmax(-1) == place[:, 0]).sum()
            return
        # The gradient of a loss is the probability of each token, minus 1 for the target.
        slope = scores.exp_()
        slope.scatter_add_(1, place, torch.full_like(losses[:, None], -1.0))
        if weights is not None:
            slope *= weights[part, None]
        with torch.autocast(hidden.device.type, enabled=False):
            of_states, *of_weights = torch.autograd.grad(
                logits, (states, *leaves), slope.to(logits.dtype), allow_unused=True
            )
        gradients[0][part] = of_states
        for total, gradient in zip(gradients[1:], of_weights, strict=True):
            if gradient is not None:
                total += gradient

    for start in range(0, len(targets), CHUNK):  # in a function, so that everything of a chunk is freed
        add(slice(start, start + CHUNK))
    return sums, gradients
