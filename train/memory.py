"""Estimate the memory of a training pass from the config of a model.

    config ─skeleton─▶ the model on `meta`, with NF4 weights and an adapter ─┬─static──▶ bytes of weights, gradients, …
                                                                             └─trace───▶ peak of a pass of B × S tokens

A tensor on `meta` has a shape and no data, so the real code of the model, of its adapter, and of checkpointing runs in
milliseconds, and the tensors that are alive at the same time are counted. Nothing is derived from a formula of one
architecture. Mixed precision and attention kernels, which `meta` lacks, are imitated.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from transformers import AttentionInterface
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.quantizers.quantizers_utils import should_convert_module

from packcorpus.train.config import TrainingConfig
from packcorpus.train.model import attention as attention_module
from packcorpus.train.model import base_model, qlora, quantization, token_loss
from packcorpus.train.model.checkpoint import auto_class
from packcorpus.train.model.checkpointing import usable, use_checkpointing

META = torch.device("meta")
# Bytes that the optimizer keeps for a trained weight: two moments, in fp32 or in 8 bits with a scale per 256.
MOMENTS = {"adamw_torch_fused": 8.0, "paged_adamw_8bit": 2.03}
# Attention backends that read a mask of [B, 1, S, S].
MASKED = ("sdpa", "eager")

WEIGHTS, OTHER, ADAPTER, GRADIENTS, OPTIMIZER = (
    "frozen weights in 4 bits", "other frozen weights", "adapter", "its gradients", "optimizer",
)  # fmt: skip
MASKS, ACTIVATIONS, LOGITS = "embeddings and masks", "activations", "logits and loss"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Peak of a pass, as bytes of each part; `rows` × `length` tokens."""

    rows: int
    length: int
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


# -- the model ---------------------------------------------------------------------------------------------------------


def skeleton(base: Path | str, settings: TrainingConfig, dtype: torch.dtype, attention: str) -> Any:
    """Return a model with an adapter on `meta`, as `qlora.load_model` builds it.

    Only the config of `base` is read. `attention` is sdpa or eager; any other backend has no mask, and its kernel keeps
    what FlashAttention keeps.
    """
    config = base_model.read_config(base)
    if hasattr(config, "quantization_config"):  # the weights are unpacked, and quantized to NF4
        del config.quantization_config
    kind = auto_class(base, config)
    with META:
        backend = attention if attention in MASKED else "estimated"
        model = kind.from_config(config, dtype=dtype, attn_implementation=backend, trust_remote_code=False)
    if settings.quantization == "nf4":
        _quantize(model, dtype)
    model.config.use_cache = False
    model.in_16_bits = []
    with (
        META,
        patch(
            "bitsandbytes.nn.parametrize.replace_parameter_4bit_prequantized",
            lambda module, name, *_: quantization.unpack_in_passes(module, name),
        ),
        patch("bitsandbytes.functional.QuantState.as_dict", lambda *_, **__: {}),  # it reads values
    ):
        model = qlora.add_adapter(model, settings)
    attention_module.separate_by_positions(model)
    how = settings.activation_checkpointing
    use_checkpointing(model, usable(model, True if how == "auto" else how)[0])
    return model.train()


def _quantize(model: Any, dtype: torch.dtype) -> None:
    """Quantize what `Nf4Quantizer` quantizes."""
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Linear4bit, Params4bit

    nf4 = quantization.nf4_of(dtype)
    kept = quantization.Nf4Quantizer.get_modules_to_not_convert(model, [], model._keep_in_fp32_modules)
    with META:
        replace_with_bnb_linear(model, kept, quantization_config=nf4, pre_quantized=False)
    for module in list(model.modules()):
        if isinstance(module, Linear4bit):
            plain = torch.empty(module.out_features, module.in_features, dtype=dtype, device=META)
            module.weight = Params4bit(plain, requires_grad=False, compress_statistics=True, quant_type="nf4")
            module.weight._quantize(META)
    for name, weights in list(model.named_parameters()):
        if quantization.stack_of(model, name) is not None and should_convert_module(name, kept):
            packed, state = quantize_4bit(weights.data, blocksize=64, compress_statistics=True, quant_type="nf4")
            owner, _, attribute = name.rpartition(".")
            stack = torch.nn.Parameter(packed, requires_grad=False)
            stack.quant_state = state
            model.get_submodule(owner)._parameters[attribute] = stack
    model.is_loaded_in_4bit = True  # PEFT asks for it


def static(model: Any, optimizer: str) -> dict[str, float]:
    """Return the bytes that exist between two passes."""
    found: Counter[str] = Counter()
    for weights in {id(weights): weights for weights in model.parameters()}.values():
        if weights.requires_grad:
            found[ADAPTER] += weights.nbytes
            found[GRADIENTS] += weights.nbytes
            found[OPTIMIZER] += round(MOMENTS[optimizer] * weights.numel())
        elif state := getattr(weights, "quant_state", None):
            tensors = (state.absmax, state.state2.absmax)
            found[WEIGHTS] += weights.nbytes + sum(tensor.nbytes for tensor in tensors)
        else:
            found[OTHER] += weights.nbytes
    found[OTHER] += sum(buffer.nbytes for buffer in model.buffers())
    return dict(found)


# -- a pass ------------------------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Count the bytes of tensors that were made in this context and are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.part = ""
        self.now: Counter[str] = Counter()
        self.at_peak: dict[str, float] = {}
        self.peak = self._total = 0
        self._sizes: dict[int, tuple[str, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_iter((args, kwargs)) if torch.is_tensor(tensor)}
        for tensor in tree_iter(out):
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in given:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes:
            return
        self._sizes[key] = self.part, size
        self.now[self.part] += size
        self._total += size
        if self._total > self.peak:
            self.peak, self.at_peak = self._total, dict(self.now)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        part, size = self._sizes.pop(key)
        self.now[part] -= size
        self._total -= size


@contextmanager
def _parts_of(model: Any, live: Live) -> Iterator[None]:
    """Name the part of the pass in which a tensor is made."""
    decoder = attention_module.decoder_of(model)
    layers = _layers_of(model)

    def enter(part: str) -> Any:
        def hook(*_: Any, **__: Any) -> None:
            live.part = part

        return hook

    def leave(module: Any, inputs: Any, out: Any) -> None:
        live.part = LOGITS
        hidden = out[0]
        if hidden.requires_grad:
            hidden.register_hook(enter(ACTIVATIONS))

    handles = [
        decoder.register_forward_pre_hook(enter(MASKS)),
        layers[0].register_forward_pre_hook(enter(ACTIVATIONS)),
        decoder.register_forward_hook(leave),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def trace(
    model: Any, rows: int, length: int, dtype: torch.dtype, *, fused: bool, trained: float = 1.0
) -> dict[str, float]:
    """Return the bytes of each part at the peak of a pass, without the static ones.

    `trained` is the share of the tokens that is trained on, which matters to the fused loss.
    """
    ids = torch.zeros(rows, length, dtype=torch.long, device=META)
    batch = {"input_ids": ids, "labels": ids, "position_ids": ids}
    undo = token_loss.fuse_loss(model) if fused else lambda: None
    for weights in model.parameters():
        if weights.requires_grad:  # gradients are part of `static`, and a pass adds to them
            weights.grad = torch.empty_like(weights)
    live = Live()
    try:
        with ExitStack() as contexts:
            contexts.enter_context(patch("torch.is_autocast_enabled", _is_enabled(dtype)))
            contexts.enter_context(patch("torch.autocast", _autocast))
            # Otherwise, `Imitated` is not in effect in the backward pass, which runs checkpointed layers again.
            contexts.enter_context(patch("torch.autograd.has_torch_function", lambda *_: False))
            contexts.enter_context(_parts_of(model, live))
            contexts.enter_context(Imitated(dtype, trained))
            contexts.enter_context(live)
            outputs = model(**batch)
            if dtype != torch.float32 and outputs.get("logits") is not None:  # accelerate converts all outputs
                live.part = LOGITS
                outputs["logits"] = outputs["logits"].float()
            loss = outputs["loss"]
            del outputs  # the Trainer keeps only the loss
            torch.autograd.backward(loss)
    finally:
        undo()
        for weights in model.parameters():
            weights.grad = None
    return live.at_peak


def _is_enabled(dtype: torch.dtype) -> Any:
    """Return torch.is_autocast_enabled as PEFT calls it in a pass in `dtype`."""
    real = torch.is_autocast_enabled
    return lambda *device: real(*device) if device else dtype != torch.float32


def _autocast(device_type: str, *others: Any, **named: Any) -> Any:
    """Return torch.autocast, which `meta` lacks."""
    return nullcontext() if device_type == META.type else torch.amp.autocast(device_type, *others, **named)


# Functions that compute in 16 bits or in 32 bits under autocast on a GPU (torch/amp), as far as decoders use them.
LOWER = {
    functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.bmm, torch.baddbmm,
    torch.einsum, torch.addmm, functional.conv1d,
}  # fmt: skip
HIGHER = {
    functional.softmax, torch.softmax, functional.log_softmax, functional.layer_norm, functional.cross_entropy,
    torch.pow, torch.Tensor.pow, torch.exp, torch.rsqrt, torch.Tensor.rsqrt, torch.cumsum, torch.sum, torch.Tensor.sum,
}  # fmt: skip


class Imitated(TorchFunctionMode):
    """Imitate mixed precision, attention kernels, and questions about values."""

    def __init__(self, dtype: torch.dtype, trained: float):
        super().__init__()
        self._dtype, self._trained = dtype, trained

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.__bool__:
            return False
        if function is torch.Tensor.nonzero:  # the numbers of the trained tokens
            return torch.empty(round(self._trained * args[0].numel()), args[0].ndim, dtype=torch.long, device=META)
        if function is functional.dropout:  # on a GPU, one kernel makes a mask of one byte
            return self._drop(*args, **kwargs)
        if function is functional.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if self._dtype != torch.float32:
            if function in LOWER:
                args, kwargs = self._cast((args, kwargs), torch.float32, self._dtype)
            elif function in HIGHER:
                args, kwargs = self._cast((args, kwargs), self._dtype, torch.float32)
        return function(*args, **kwargs)

    def _cast(self, values: Any, before: torch.dtype, after: torch.dtype) -> Any:
        return tree_map(lambda x: x.to(after) if torch.is_tensor(x) and x.dtype == before else x, values)

    def _drop(self, values: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(values, p, True)[0] if training and p else values

    def _attend(self, query: Any, key: Any, value: Any, attn_mask: Any = None, *_: Any, **__: Any) -> Any:
        query, key, value = self._cast((query, key, value), torch.float32, self._dtype)
        bias = None
        if attn_mask is not None:  # torch's kernels read a mask in the precision of the query
            bias = attn_mask if attn_mask.dtype == query.dtype else attn_mask.to(query.dtype)
        return Attention.apply(query, key, value, bias)


class Attention(torch.autograd.Function):
    """Attention that allocates what a fused kernel does."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, bias: Any) -> Any:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, bias, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def estimated_forward(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any) -> Any:
    """Compute attention without a mask, as flash, varlen, and flex do."""
    return functional.scaled_dot_product_attention(query, key, value).transpose(1, 2), None


AttentionInterface.register("estimated", estimated_forward)


# -- the estimate ------------------------------------------------------------------------------------------------------


class Estimator:
    """Estimates for one model and its settings.

    A pass is traced with one layer of each kind, and again with one more of each kind, because all layers of a kind
    need the same memory.
    """

    def __init__(
        self,
        base: Path | str,
        settings: TrainingConfig,
        dtype: torch.dtype,
        attention: str,
        *,
        fused: bool,
        trained: float = 1.0,
    ):
        self._model = skeleton(base, settings, dtype, attention)
        self._dtype, self._fused, self._trained = dtype, fused, trained
        self.static = static(self._model, settings.optimizer)
        self._list = _layers_of(self._model)
        self._layers = list(self._list)
        kinds: dict[Any, list[int]] = {}
        types = getattr(self._model.config.get_text_config(), "layer_types", None) or [""] * len(self._layers)
        for number, (layer, kind) in enumerate(zip(self._layers, types, strict=True)):
            shapes = tuple((name, tuple(weights.shape)) for name, weights in layer.named_parameters())
            kinds.setdefault((kind, shapes), []).append(number)
        self._kinds = list(kinds.values())

    def estimate(self, rows: int, length: int) -> Estimate:
        """Return the peak of a pass of `rows` rows."""
        first = [numbers[0] for numbers in self._kinds]
        least = self._trace(first, rows, length)
        found = Counter(least)
        for numbers in self._kinds:
            if len(numbers) > 1:
                more = Counter(self._trace([*first, numbers[1]], rows, length))
                more.subtract(least)
                for part, size in more.items():
                    found[part] += (len(numbers) - 1) * size
        return Estimate(rows, length, {**self.static, **found})

    def _trace(self, numbers: list[int], rows: int, length: int) -> dict[str, float]:
        """Trace a pass with some of the layers."""
        kept = self._list._modules
        self._list._modules = {str(place): self._layers[number] for place, number in enumerate(sorted(numbers))}
        try:
            return trace(self._model, rows, length, self._dtype, fused=self._fused, trained=self._trained)
        finally:
            self._list._modules = kept


def _layers_of(model: Any) -> torch.nn.ModuleList:
    return next(
        child for child in attention_module.decoder_of(model).children() if isinstance(child, torch.nn.ModuleList)
    )
