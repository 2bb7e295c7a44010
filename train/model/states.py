"""Keep the conversations of a row apart if attention alone cannot.

A convolution or a scan passes a state from each token to the next, across the bounds of conversations. The code of some
other models builds masks without positions. There are three remedies, the fastest first:

    positions of a batch ─cut─▶ ┬─ kernels   layers with a state see the batch as one sequence, with `seq_idx` and
                                │            `cu_seq_lens_q`; needs a GPU and the packages with the kernels
                                ├─ layers    layers with a state run on conversations, as the rows of a batch
                                └─ model     the whole decoder runs on conversations

train.model.isolation proves which remedy keeps conversations apart, and uses the first that passes.

Conversations that are rows of a batch are padded to the longest. Each is at least half as long as the longest, so less
than half of the batch is padding, and rows of L tokens need at most log2(L) + 1 batches. Tokens do not see later
tokens, so the padding has no effect. It repeats the last token, which has finite gradients.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from packcorpus.train.model.attention import decoder_of, segments, without_adapter

ATTENTION, KERNELS, LAYERS, MODEL = "attention", "kernels", "layers", "model"
SUMMARIES = {
    ATTENTION: "",
    KERNELS: "states are reset between conversations by the kernels",
    LAYERS: "layers with a state run on each conversation alone",
    MODEL: "the model runs on each conversation alone",
}

# Reasons to try the next way.
LEAKS = {
    ATTENTION: "its attention does not separate them",
    KERNELS: "its kernels do not separate them",
    LAYERS: "other parts of it do not separate them",
    MODEL: "",
}
# Backends for which the remedy `model` is tried. If another backend fails, these may be better than a slow model.
ALONE = ("sdpa", "eager")
# Prefixes of the keywords that mark the segments of the whole batch.
OF_BATCH = ("cu_seq_lens_", "max_length_", "seq_idx")


@dataclass(frozen=True, slots=True)
class Cuts:
    """Places to cut a batch of shape [B, L]: where conversations and padding begin."""

    shape: tuple[int, int]
    bounds: torch.Tensor  # int32[n + 1], of the batch as one sequence
    numbers: torch.Tensor  # int32[1, B · L], the number of the segment of each token
    batches: Sequence[torch.Tensor]  # int64[segments, longest]: indexes of tokens in the sequence
    back: torch.Tensor  # int64[B · L]: where each token is in the outputs of the batches, one after another


def cut(position_ids: torch.Tensor) -> Cuts:
    """Cut a batch wherever its positions, int[B, L], are 0, and between rows."""
    bounds, _ = segments(position_ids)
    starts, lengths = bounds[:-1].long(), bounds.diff().long()
    batches, back, done = [], torch.empty_like(position_ids, dtype=torch.long).flatten(), 0
    for group in groups(lengths.tolist()):
        longest = int(lengths[group[0]])
        members = torch.tensor(group, device=bounds.device)
        column = torch.arange(longest, device=bounds.device)
        size = lengths[members][:, None]
        tokens = starts[members][:, None] + column.minimum(size - 1)
        # Padding repeats a token, so only the places of real tokens count.
        places = done + torch.arange(tokens.numel(), device=bounds.device).view_as(tokens)
        real = column < size
        back[tokens[real]] = places[real]
        batches.append(tokens)
        done += tokens.numel()
    numbers = torch.repeat_interleave(torch.arange(len(lengths), device=bounds.device), lengths).to(torch.int32)
    rows, length = position_ids.shape
    return Cuts((rows, length), bounds, numbers[None], batches, back)


def groups(lengths: Sequence[int]) -> list[list[int]]:
    """Group segments; none is less than half as long as the longest of its group."""
    found: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if not found or 2 * lengths[number] < lengths[found[-1][0]]:
            found.append([])
        found[-1].append(number)
    return found


# -- a model -----------------------------------------------------------------------------------------------------------


@dataclass
class Separation:
    """Method by which a model keeps conversations apart."""

    way: str = ATTENTION
    reason: str = ""  # why no faster way is used
    cuts: Cuts | None = None  # of the current batch; None if the batch has no bounds
    replaced: list[tuple[Any, Any]] = field(default_factory=list)  # modules, and their own forward


def separation(model: Any) -> Separation:
    """Return how a model, with or without an adapter, keeps conversations apart."""
    found: Separation = getattr(decoder_of(model), "separation", None) or Separation()
    return found


def layers_with_state(model: Any) -> list[Any]:
    """Return the decoder layers that mix tokens by a convolution."""
    modules = decoder_of(model).modules()
    layers = [layer for layer in modules if any(isinstance(part, torch.nn.Conv1d) for part in layer.children())]
    # A layer whose forward has no **kwargs takes more than hidden states, or returns other shapes.
    named = (inspect.signature(type(layer).forward).parameters.values() for layer in layers)
    return layers if all(any(name.kind is name.VAR_KEYWORD for name in names) for names in named) else []


def ways(model: Any, attention: str) -> list[str]:
    """Return the ways to keep conversations apart, the fastest first."""
    last = [MODEL] if attention in ALONE else []
    if not layers_with_state(model):
        return [ATTENTION, *last]
    return [KERNELS] * (model.device.type == "cuda") + [LAYERS, *last]


def missing(model: Any) -> str:
    """Return why the fastest way is not available to a model; "" if it is."""
    return "" if model.device.type == "cuda" or not layers_with_state(model) else "kernels need a GPU"


def cause(model: Any, error: Exception) -> str:
    """Return the first line of an error, which may name a package to install."""
    text = next(iter(str(error).splitlines()), "").rstrip(".")
    if text and isinstance(error, ImportError | RuntimeError | ValueError):
        return text
    # Such errors are not written for users, so say whose they are, and where.
    base = without_adapter(model)
    frames = [(Path(frame.filename).name, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    file, line = next((frame for frame in reversed(frames) if frame[0].startswith("modeling_")), frames[-1])
    detail = f"{type(error).__name__}{f': {text}' if text else ''}"
    return f"{type(base).__name__} fails in {file}, line {line} ({detail})"


def use_way(model: Any, way: str, reason: str = "") -> None:
    """Make a model, with or without an adapter, keep conversations apart in this way.

    The bounds come from the `position_ids` of each batch. A batch without them or with an `attention_mask` is left
    alone, because it has one conversation per row.
    """
    decoder, state = decoder_of(model), separation(model)
    for module, forward in state.replaced:
        module.forward = forward
    state.way, state.reason, state.cuts, state.replaced = way, reason, None, []
    if way != ATTENTION and not hasattr(decoder, "separation"):
        decoder.separation = state
        # PEFT calls the model that it wraps.
        base = without_adapter(model)
        base.register_forward_pre_hook(_note_cuts, with_kwargs=True)
    for layer in layers_with_state(model) if way != ATTENTION else []:
        _replace(state, layer, _run_layer)
    if way == MODEL:
        _replace(state, decoder, _run_decoder)


def _replace(state: Separation, module: Any, forward: Any) -> None:
    state.replaced.append((module, module.forward))
    # The number and the lengths of conversations differ in every batch, so compiled code could not be reused.
    module.forward = torch.compiler.disable(partial(forward, state, module, module.forward))


def _note_cuts(model: Any, _args: Any, named: dict[str, Any]) -> None:
    """Cut a batch before the model runs, because some models drop its positions."""
    state, positions = separation(model), named.get("position_ids")
    apart = state.way != ATTENTION and positions is not None and named.get("attention_mask") is None
    # The cuts are kept until the next batch, because activation checkpointing reruns layers in the backward pass.
    state.cuts = cut(positions) if apart else None


def _run_layer(state: Separation, layer: Any, plain: Any, /, *args: Any, **named: Any) -> Any:
    """Run a layer with a state, in the current way."""
    mode = layer.training
    # In training mode, the kernels of Mamba would read the weights of linear layers directly. This would ignore their
    # adapters, and fail if they are quantized. The flag of the layer prevents it; its parts have their own flags.
    layer.training = False
    try:
        if state.cuts is None or state.way == MODEL:
            return plain(*args, **named)
        hidden = next(iter((*args, *named.values())))
        if hidden.shape[:2] != state.cuts.shape:
            raise RuntimeError(f"a layer has {tuple(hidden.shape[:2])} tokens, but the batch has {state.cuts.shape}")
        return run_apart(state.cuts, plain, args, named, whole=state.way == KERNELS)
    finally:
        layer.training = mode


def _run_decoder(state: Separation, _decoder: Any, plain: Any, /, *args: Any, **named: Any) -> Any:
    """Run a whole decoder, on separate conversations if the batch has cuts."""
    if state.cuts is None:
        return plain(*args, **named)

    named.pop("attention_mask", None)  # for the whole batch, from train.model.attention

    def with_positions(*args: Any, **named: Any) -> Any:
        # As in use, the model counts positions itself, from 2 in some models. Those of padding continue, so that no
        # mask is needed.
        return plain(*args, **named | {"position_ids": None} if "position_ids" in named else named)

    return run_apart(state.cuts, with_positions, args, named)


def run_apart(
    cuts: Cuts, call: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], whole: bool = False
) -> Any:
    """Call a module with segments as rows, and join its outputs to [B, L, …].

    With `whole`, it is called once, with the batch as one sequence and with its bounds.
    """
    if not whole:
        named = {name: value for name, value in named.items() if not name.startswith(OF_BATCH)}
    bounds = {"seq_idx": cuts.numbers, "cu_seq_lens_q": cuts.bounds} if whole else {}
    parts = []
    for tokens in [slice(None)] if whole else cuts.batches:
        out = call(*_each(cuts, tokens, args), **_each(cuts, tokens, named) | bounds)
        parts.append((out if isinstance(out, torch.Tensor) else out[0]).flatten(0, 1))
    hidden = torch.cat(parts)[slice(None) if whole else cuts.back].unflatten(0, cuts.shape)
    if isinstance(out, torch.Tensor):
        return hidden
    return (hidden, *out[1:]) if isinstance(out, tuple) else type(out)(last_hidden_state=hidden)


def _each(cuts: Cuts, tokens: Any, value: Any) -> Any:
    """Take `tokens` of each tensor with the tokens of the batch, also in containers."""
    if isinstance(value, torch.Tensor) and value.shape[1:2] == cuts.shape[1:]:
        flat = value.expand(cuts.shape[0], *value.shape[1:]) if len(value) == 1 else value
        taken = flat.flatten(0, 1)[tokens]
        return taken[None] if isinstance(tokens, slice) else taken
    if isinstance(value, dict):
        return {name: _each(cuts, tokens, x) for name, x in value.items()}
    return type(value)(_each(cuts, tokens, x) for x in value) if type(value) in (tuple, list) else value
