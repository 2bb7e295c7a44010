"""Build the trained model: a frozen base in 4 bits, a LoRA adapter in fp32.

    base model ─load_model─▶ NF4, double quantization, with an adapter ─check─▶ both actually in effect, or an error
    model + a batch of real rows ─apply_options─▶ compile, fused_loss: kept if loss and gradient stay the same

PEFT's `prepare_model_for_kbit_training` is not used: it converts the head and the embeddings to fp32 (+2.1 GB for an 8B
model), and everything else it does is done here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from tasks.core.errors import DataError, PartMissing
from tasks.core.printable import counted
from train.config import TrainingConfig
from train.model.adapter import add_adapter, keep_random
from train.model.attention import BACKENDS
from train.model.base_model import unreadable
from train.model.masks import separate_by_positions

# Relative difference of loss and gradient norm up to which two steps count as the same.
SAME = {False: 1e-4, True: 1e-2}  # fp32, bf16

# Tokens whose logits are in memory at a time. torch returns their loss in the precision of the weights: the loss of all
# tokens at once would be rounded to the 8 bits of bf16, and its curve would have steps.
CHUNK = 512

# -- base and adapter --------------------------------------------------------------------------------------------------


def load_model(
    base: Path | str, config: TrainingConfig, device: torch.device | str, bf16: bool, attention: str = "sdpa"
) -> Any:
    """Load the base model on `device`, frozen, with a new adapter: a PeftModel.

    A model to be sharded stays on the CPU.

    Weights that are not quantized, and the computations of NF4, are bf16 or fp32; the adapter is fp32 and starts from
    `config.seed`. Raises DataError or InputMissing if the model cannot be read or does not fit the settings,
    PartMissing if quantization is not in effect.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            base,
            output_loading_info=True,
            dtype=dtype,
            attn_implementation=BACKENDS[attention],
            quantization_config=quantization if config.quantization == "nf4" else None,
            device_map={"": "cpu" if config.sharding == "full" else device},
            use_safetensors=True,  # never a pickle
            trust_remote_code=False,
        )
    except torch.OutOfMemoryError:
        raise PartMissing(
            "out_of_memory", f"{base}: does not fit into the memory of {device}; use a smaller base_model"
        ) from None
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise unreadable(base, error) from None
    if missing := sorted(loaded["missing_keys"]):
        # transformers would initialize them randomly.
        raise DataError(
            "bad_model", f"{base}: lacks {counted(len(missing), 'weight')}, such as {missing[0]}; copy the model again"
        )
    model.config.use_cache = False  # with a cache, conversations see each other
    for layer in quantized(model):
        # transformers compares the shapes of all weights except these.
        if tuple(layer.weight.quant_state.shape) != (layer.out_features, layer.in_features):
            raise DataError(
                "bad_model", f"{base}: the shapes of its weights do not match its config.json; copy the model again"
            )
        # Otherwise the first pass without gradients repacks the weights to compute in bf16.
        layer.support_avx512bf16_for_cpu = False
    model = add_adapter(model, config)
    separate_by_positions(model)
    if config.activation_checkpointing and model.supports_gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    check(model, config)
    return model.train()


def check(model: Any, config: TrainingConfig) -> None:
    """Raise PartMissing or DataError if the model does not match the config."""
    if config.quantization == "nf4":
        kinds = {layer.weight.quant_state.quant_type for layer in quantized(model) if layer.weight.quant_state}
        if kinds != {"nf4"}:
            raise PartMissing(
                "no_nf4",
                f"quantization: nf4 is not in effect: the model has {', '.join(kinds) or 'no 4-bit weights'}; "
                "use a base model that is not quantized yet, or set quantization: none",
            )
    trained = {name: weights for name, weights in model.named_parameters() if weights.requires_grad}
    if outside := [name for name in trained if "lora_" not in name]:
        raise DataError(
            "wrong_weights",
            f"{counted(len(outside), 'weight')} outside the adapter would be trained, such as {outside[0]}",
        )
    if low := [name for name, weights in trained.items() if weights.dtype != torch.float32]:
        raise DataError("wrong_weights", f"{low[0]} is {trained[low[0]].dtype}; the weights of an adapter must be fp32")


def quantized(model: Any) -> list[Any]:
    """Return the layers whose weights bitsandbytes stores in 4 bits."""
    from bitsandbytes.nn import Linear4bit

    return [layer for layer in model.modules() if isinstance(layer, Linear4bit)]


# -- options -----------------------------------------------------------------------------------------------------------

Undo = Callable[[], None]


def apply_options(model: Any, config: TrainingConfig, batch: dict[str, torch.Tensor], bf16: bool) -> list[str]:
    """Turn on `compile` and `fused_loss` if configured and equivalent.

    Loss and gradient norm of the adapter on `batch`, real rows on the model's device, must stay within 1e-4 (fp32) or
    1e-2 (bf16). An option that differs or fails is undone. Returns a note for the user on each requested option.
    """
    requested = [("fused_loss", fuse_loss)] * config.fused_loss + [("compile", compile_layers)] * config.compile
    notes = []
    for name, turn_on in requested:
        # The zero weights of a new adapter hide most gradients.
        with _adapter_with_gradients(model, config.seed):
            plain = loss_and_gradient(model, batch, bf16)
            undo: Undo | None = None
            try:
                undo = turn_on(model)
                other = loss_and_gradient(model, batch, bf16)
                off = max(abs(b - a) / abs(a) for a, b in zip(plain, other, strict=True))
                reason = None if off <= SAME[bf16] else f"loss or gradient differs by {off:.1e} (relative)"
            except Exception as error:  # a missing compiler or an untraceable model: each has its own class
                lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
                reason, off = f"{type(error).__name__}: {lines[0][:160]}", math.nan
        if reason and undo:
            undo()
        model.zero_grad()
        notes.append(f"{name}: not used: {reason}" if reason else f"{name}: used (a step with it differs by {off:.1e})")
    return notes


def loss_and_gradient(model: Any, batch: dict[str, torch.Tensor], bf16: bool) -> tuple[float, float]:
    """Return the mean loss of the trained tokens and the gradient norm of one step.

    Clears the gradient afterwards. Dropout is off, because compiled code draws other random numbers.
    """
    dropouts = [(module, module.p) for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    for module, _ in dropouts:
        module.p = 0.0
    try:
        model.zero_grad()
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            loss = model(**batch)["loss"]
        loss.backward()
        gradients = [weights.grad for weights in model.parameters() if weights.grad is not None]
        return loss.item(), torch.nn.utils.get_total_norm(gradients).item()
    finally:
        model.zero_grad()
        for module, p in dropouts:
            module.p = p


@contextmanager
def _adapter_with_gradients(model: Any, seed: int) -> Iterator[None]:
    """Make LoRA's B non-zero in this context, so that A has a gradient too."""
    weights = [weights for name, weights in model.named_parameters() if "lora_B" in name]
    kept = [tensor.detach().clone() for tensor in weights]
    with keep_random(model.device), torch.no_grad():
        torch.manual_seed(seed)
        for tensor in weights:
            tensor.normal_(std=0.02)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, old in zip(weights, kept, strict=True):
                tensor.copy_(old)


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


def fuse_loss(model: Any) -> Undo:
    """Make a causal language model compute its loss without all logits in memory.

    The loss is computed from the hidden states in chunks. A pass with labels then returns the loss but no logits; one
    without labels is unchanged. With `num_items_in_batch` the loss is the sum over the trained tokens divided by it, as
    the Trainer's accumulation requires.
    """
    causal = model.get_base_model()
    plain = causal.forward
    causal.forward = partial(_forward_with_fused_loss, causal, plain)

    def undo() -> None:
        del causal.forward  # restores the method of its class

    return undo


def _forward_with_fused_loss(
    causal: Any,
    plain: Callable[..., Any],
    input_ids: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
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
            reduction="sum",
            options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK, chunking_method=None),
        ).float()
        for x, target in chunks
    ]
    items = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return CausalLMOutputWithPast(loss=torch.stack(sums).sum() / items)
