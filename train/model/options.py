"""Turn on options that save memory or time, after a trial on real rows.

model + rows ─try_fused_loss─▶ used if loss and gradient stay the same
            ├weigh_loss──────▶ the loss of rows with `loss_weight`, for a corpus that has them
            └try_compile─────▶ used if both stay the same, torch really compiled, and passes are faster
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.nn.functional import pad
from transformers.modeling_outputs import CausalLMOutputWithPast

from tasks.core.errors import DataError
from tasks.core.printable import counted
from tasks.storage.schemas import LOSS_WEIGHT
from train.machine.alarm import fail_alike
from train.machine.ranks import largest
from train.model.adapters.adapter import keep_random, set_random
from train.model.attention import autocast

# Relative difference of loss and gradient norm up to which two steps count as equal.
SAME = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 1e-2}

# Number of tokens whose logits are in memory at a time. torch returns their loss in the precision of the weights. The
# loss of all tokens at once would be rounded to the 8 bits of bf16, and its curve would have steps.
CHUNK = 512

# Number of tokens of a row on which losses are compared. All logits of a row might fit only with the fused loss.
COMPARED = 4 * CHUNK

# Compiled passes must be faster by this share: less is noise, and compiling takes minutes at every start.
FASTER = 0.03
PASSES = 3  # number of timed passes, with and without compilation

Undo = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Tried:
    """Result of a trial: whether an option is in use, and a note for the user.

    `seconds` is the time of a pass with the option, if it was timed.
    """

    used: bool
    note: str
    seconds: float = math.nan


def no_fused_loss_reason() -> str:
    """Return why this torch has no fused loss; "" if it has one."""
    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        return ""
    return f"it needs torch 2.13 or later, not {torch.__version__}"


def try_fused_loss(model: Any, batch: dict[str, torch.Tensor], dtype: torch.dtype, seed: int) -> Tried:
    """Use the fused loss if a step with it gives the same loss and gradient.

    See `loss_and_gradient`.
    """
    if reason := no_fused_loss_reason():
        return Tried(False, f"fused_loss: not used: {reason}")
    undo, off, reason = _try(model, fuse_loss, batch, dtype, seed)
    if reason:
        undo()
        return Tried(False, f"fused_loss: not used: {reason}")
    return Tried(True, f"fused_loss: used (a step with it differs by {off:.1e})")


def try_compile(
    model: Any, batch: dict[str, torch.Tensor], dtype: torch.dtype, seed: int, *, timed: bool = True
) -> Tried:
    """Compile the layers if loss and gradient stay the same and passes are faster.

    `batch` has as many rows as the batches of training, because torch compiles for this size. Without `timed`, for
    example if a run is resumed, the speed does not matter.
    """
    plain = _seconds(model, batch, dtype) if timed else math.nan
    before = _compiled()
    undo, off, reason = _try(model, compile_layers, batch, dtype, seed)
    seconds = math.nan
    if not reason:
        if timed:
            seconds = _seconds(model, batch, dtype)
        plain, seconds = largest([plain, seconds], model.device)
        times = f"a pass takes {seconds:.3g} s with it and {plain:.3g} s without"
        reason, flaws = _flaws(before, _compiled())
        if largest([float(bool(reason))], model.device)[0]:
            reason = reason or "another rank could not"
        elif timed and seconds > (1 - FASTER) * plain:
            reason = f"{times}{flaws}"
    if reason:
        undo()
        return Tried(False, f"compile: not used: {reason}")
    detail = times if timed else "as at the first start"
    return Tried(True, f"compile: used: {detail} (a step differs by {off:.1e}){flaws}", seconds)


def _try(
    model: Any, turn_on: Callable[[Any], Undo], batch: dict[str, torch.Tensor], dtype: torch.dtype, seed: int
) -> tuple[Undo, float, str]:
    """Turn on an option, and compare a step with and without it.

    Returns a function that undoes the option, the relative difference, and the reason not to use the option.
    """
    undo: Undo = lambda: None  # noqa: E731
    off, reason = math.nan, ""
    # The zero weights of a new adapter hide most gradients.
    with _adapter_with_gradients(model, seed):
        try:
            plain = loss_and_gradient(model, batch, dtype)
            undo = turn_on(model)
            other = loss_and_gradient(model, batch, dtype)
            off = max(abs(b - a) / abs(a) for a, b in zip(plain, other, strict=True))
            reason = "" if off <= SAME[dtype] else f"loss or gradient differs by {off:.1e} (relative)"
        except Exception as error:  # a missing compiler and an untraceable model raise different classes
            fail_alike(model, error)
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
            reason = f"{type(error).__name__}: {lines[0][:160]}"
    model.zero_grad()
    if largest([float(bool(reason))], model.device)[0]:  # all ranks use it, or none
        reason = reason or "another rank could not"
    return undo, off, reason


def loss_and_gradient(model: Any, batch: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple[float, float]:
    """Return the mean loss of the trained tokens and the gradient norm of one step.

    Clears the gradient afterwards. Dropout is off, because compiled code draws different random numbers.
    """
    dropouts = list(_dropouts(model))
    for module, name, _ in dropouts:
        setattr(module, name, 0.0)
    # As in training, the loss is scaled in fp16, because small gradients would vanish. If large ones overflow, the
    # scale is reduced.
    scale = 2.0**16 if dtype == torch.float16 else 1.0
    try:
        while True:
            model.zero_grad()
            with autocast(model.device, dtype):
                loss = model(**batch)["loss"]
            (scale * loss).backward()
            gradients = [weights.grad for weights in model.parameters() if weights.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients).item() / scale
            if math.isfinite(norm) or scale == 1:
                return loss.item(), norm
            scale /= 16
    finally:
        model.zero_grad()
        for module, name, p in dropouts:
            setattr(module, name, p)


def _dropouts(model: Any) -> Iterator[tuple[Any, str, float]]:
    """Yield (module, attribute, rate) for each dropout rate of a model."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            yield module, "p", module.p
        # Some models, such as OPT and BioGPT, call the dropout function with their own rate.
        yield from ((module, name, p) for name, p in vars(module).items() if "drop" in name and isinstance(p, float))


@contextmanager
def _adapter_with_gradients(model: Any, seed: int) -> Iterator[None]:
    """Make LoRA's B non-zero in this context, so that A has a gradient too."""
    weights = [weights for name, weights in model.named_parameters() if "lora_B" in name]
    kept = [tensor.detach().clone() for tensor in weights]
    with keep_random(model.device), torch.no_grad():
        set_random(model.device, seed)
        for tensor in weights:
            tensor.normal_(std=0.02)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, old in zip(weights, kept, strict=True):
                tensor.copy_(old)


# -- compile -----------------------------------------------------------------------------------------------------------


def compile_layers(model: Any) -> Undo:
    """Compile each decoder layer in place.

    All layers share one graph per batch size, and weights keep their names. Activation checkpointing is part of
    transformers' layers, so it is compiled with them.
    """
    layers = model.get_decoder().layers
    for layer in layers:
        layer.compile()

    def undo() -> None:
        for layer in layers:
            layer._compiled_call_impl = None

    return undo


def _seconds(model: Any, batch: dict[str, torch.Tensor], dtype: torch.dtype) -> float:
    """Return the median seconds of a forward and backward pass; infinity if it fails."""
    times = []
    try:
        with keep_random(model.device):
            for _ in range(1 + PASSES):
                start = time.perf_counter()
                with autocast(model.device, dtype):
                    loss = model(**batch)["loss"]
                loss.backward()
                if model.device.type == "cuda":
                    torch.cuda.synchronize(model.device)
                times.append(time.perf_counter() - start)
    except RuntimeError as error:
        fail_alike(model, error)
        return math.inf
    finally:
        model.zero_grad()
    return statistics.median(times[1:])


@dataclass(frozen=True, slots=True)
class _Compiled:
    """Counts of torch's compilations in this process so far."""

    graphs: int
    breaks: int
    failed: int  # functions that run uncompiled, because they could not be compiled
    refused: int  # functions that run uncompiled, because they were compiled too often


def _compiled() -> _Compiled:
    limits = sum(n for text, n in counters["unimplemented"].items() if "recompile limit exceeded" in text)
    failed = counters["frames"]["total"] - counters["frames"]["ok"]
    return _Compiled(counters["stats"]["unique_graphs"], counters["graph_break"].total(), failed, limits)


def _flaws(before: _Compiled, now: _Compiled) -> tuple[str, str]:
    """Return why the layers are not compiled, or else which parts of them are not.

    torch reports neither.
    """
    if now.graphs == before.graphs:
        causes = {
            "TORCHDYNAMO_DISABLE is set": torch._dynamo.config.disable,
            "torch._dynamo.config.suppress_errors hides the error": torch._dynamo.config.suppress_errors,
        }
        cause = next((f" ({cause})" for cause, holds in causes.items() if holds), "")
        return f"torch compiled nothing and ran the layers as they are{cause}", ""
    if now.refused > before.refused:
        limit = torch._dynamo.config.recompile_limit
        return f"torch compiled a layer {limit} times, its limit, and then ran it as it is", ""
    breaks, failed = now.breaks - before.breaks, now.failed - before.failed
    found = [counted(breaks, "graph break")] * bool(breaks)
    found += [f"{counted(failed, 'function')} not compiled"] * bool(failed)
    return "", f"; {', '.join(found)}" if found else ""


def gave_up() -> bool:
    """Return whether torch stopped compiling in this process, without reporting it."""
    return bool(_compiled().refused)


# -- the fused loss ----------------------------------------------------------------------------------------------------


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    """Return COMPARED tokens of a row, including the first that is trained on.

    A shorter row is returned whole.
    """
    trained = (torch.as_tensor(row["labels"]) >= 0).nonzero()
    first = int(trained[0]) if len(trained) else 0
    start = max(0, min(first - 1, len(row["labels"]) - COMPARED))
    return {name: column[start : start + COMPARED] for name, column in row.items()}


@dataclass
class WeightedOutput(CausalLMOutputWithPast):
    """Output of a model for a batch with `loss_weight`.

    `token_loss` is the mean loss without weights.
    """

    token_loss: torch.Tensor | None = None


def weigh_loss(model: Any) -> Undo:
    """Make a causal language model apply the `loss_weight` of a batch.

    `loss_weight` is float32[B, L]; see `weighted_loss`. A pass without it or without labels is unchanged. Without this
    function, models of transformers silently ignore `loss_weight`.
    """
    causal = _causal(model)
    return _replace_forward(causal, partial(_forward_with_weights, causal, causal.forward))


def weighted_loss(
    losses: torch.Tensor, labels: torch.Tensor, loss_weight: torch.Tensor, items: torch.Tensor | int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted loss of a batch, and the mean loss of its trained tokens.

    The weighted loss is Σ w·loss / Σ w, where w is the weight of the predicted token. With `items`, it is
    Σ w·loss / items; `items` is the sum of the weights of all micro-batches of a step on all ranks. `losses`, [B × L],
    has the loss of each predicted token in order, starting with the second token of each row. It is 0 if the token is
    not trained on.
    """
    trained = (pad(labels, (0, 1), value=-100)[:, 1:] != -100).flatten()
    weights = pad(loss_weight, (0, 1))[:, 1:].flatten().to(losses.dtype) * trained
    total = weights.sum() if items is None else items
    return (losses * weights).sum() / total, losses.detach().sum() / trained.sum()


def require_same_loss(model: Any, batch: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Raise DataError unless weights of 1 leave the loss of a model unchanged.

    Call this after `weigh_loss`. A model may add other terms to the loss of its tokens.
    """
    plain = {name: values for name, values in batch.items() if name != LOSS_WEIGHT}
    ones = plain | {LOSS_WEIGHT: torch.ones_like(batch[LOSS_WEIGHT])}
    with torch.no_grad(), autocast(model.device, dtype):
        own, ours = (float(model(**each)["loss"]) for each in (plain, ones))
    if not abs(ours - own) <= SAME[dtype] * abs(own):
        raise DataError(
            "not_trainable",
            f"the corpus has a loss_weight for each token, and the loss of this model is not the mean of its tokens "
            f"({own:g}, which would be {ours:g}); pack the corpus with loss_weight: none, or use another model",
        )


def _causal(model: Any) -> Any:
    """Return the causal language model, without an adapter around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _replace_forward(causal: Any, forward: Callable[..., Any]) -> Undo:
    former = vars(causal).get("forward")
    causal.forward = forward

    def undo() -> None:
        del causal.forward  # restores the method of its class
        if former is not None:
            causal.forward = former

    return undo


def _forward_with_weights(
    causal: Any,
    plain: Callable[..., Any],
    input_ids: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    loss_weight: torch.Tensor | None = None,
    **inputs: Any,
) -> Any:
    if labels is None or loss_weight is None:
        inputs |= {} if labels is None else {"labels": labels}
        return plain(input_ids=input_ids, **inputs)
    items = inputs.pop("num_items_in_batch", None)
    outputs = plain(input_ids=input_ids, **inputs)
    targets = pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    logits = outputs.logits.float().flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(logits, targets.to(logits.device), ignore_index=-100, reduction="none")
    loss, token_loss = weighted_loss(losses, labels, loss_weight, items)
    return WeightedOutput(loss=loss, logits=outputs.logits, token_loss=token_loss)


def fuse_loss(model: Any) -> Undo:
    """Make a causal language model compute its loss without all logits in memory.

    The loss is computed from the hidden states in chunks. A pass with labels then returns the loss but no logits. A
    pass without labels is unchanged. With `num_items_in_batch`, the loss is the sum over the trained tokens divided by
    this number, as the Trainer's accumulation requires. `loss_weight` is applied as by `weigh_loss`.
    """
    causal = _causal(model)
    return _replace_forward(causal, partial(_forward_with_fused_loss, causal, causal.forward))


def _forward_with_fused_loss(
    causal: Any,
    plain: Callable[..., Any],
    input_ids: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    loss_weight: torch.Tensor | None = None,
    **inputs: Any,
) -> Any:
    if labels is None:
        return plain(input_ids=input_ids, **inputs)
    hidden = causal.get_decoder()(input_ids=input_ids, **inputs)[0]
    head = causal.get_output_embeddings()
    targets = pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    chunks = zip(hidden.flatten(0, 1).to(head.weight.dtype).split(CHUNK), targets.split(CHUNK), strict=True)
    sums = [
        torch.nn.functional.linear_cross_entropy(
            x,
            head.weight,
            target,
            linear_bias=head.bias,
            reduction="sum" if loss_weight is None else "none",
            options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK, chunking_method=None),
        ).float()
        for x, target in chunks
    ]
    if loss_weight is not None:
        loss, token_loss = weighted_loss(torch.cat(sums), labels, loss_weight, num_items_in_batch)
        return WeightedOutput(loss=loss, token_loss=token_loss)
    items = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return CausalLMOutputWithPast(loss=torch.stack(sums).sum() / items)
