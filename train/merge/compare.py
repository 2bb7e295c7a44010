"""Compare the logits of the merged model with the logits of base plus adapter.

    rows of the corpus, or random IDs ─▶ base with the unmerged adapter, base alone ──▶ logits, kept
                                      └▶ the merged folder, loaded as users will ───▶ logits ─compare─▶ Comparison

Only one model is in memory at a time, in fp32 if it fits, or else in the precision of its files. In either precision, a
GPU is used if the model fits into its free memory.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tasks.core.errors import DataError
from train.machine import devices
from train.machine.devices import free_memory
from train.merge.weights.adapter import NAME, read_config
from train.merge.weights.tensor_files import Tensors

ROWS, TOKENS = 2, 256

# Largest relative difference of a token's logits that rounding can explain, by the precision of the merged weights. The
# limits are more than twice the differences in tiny models of 38 architectures with random weights and no experts:
# 2e-5, 4e-2, and 2.3e-1. Trained models are less sensitive. LOST limits the change of an adapter's effect, and
# LAYER_LIMITS the change of each layer.
LIMITS = {torch.float32: 1e-3, torch.float16: 1e-1, torch.bfloat16: 5e-1}
# Share of the tokens that may exceed the limit if the model has experts: rounding sends some tokens to other experts.
BEYOND = 0.2
# Share of the adapter's effect that rounding may hide.
LOST = 0.5
# An adapter that changes the logits by less has not learned anything that could be lost.
NO_EFFECT = 1e-4

# A model needs at most this multiple of the size of its weights.
ROOM = 1.25


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences of logits, relative to their size.

    Each token counts. The mean of its logits is subtracted first.
    """

    tokens: int
    largest: float
    limit: float
    beyond: float  # share of the tokens above the limit
    agreement: float  # share of the tokens with the same most likely next token
    effect: float  # of the adapter on the logits of the base model
    lost: float  # difference, as a share of the effect


@dataclass(frozen=True, slots=True)
class Place:
    """Device and precision in which logits are computed."""

    device: Literal["cuda", "cpu"]
    dtype: torch.dtype


def places_that_fit(tensors: Tensors, whole: int, dtype: torch.dtype) -> list[Place]:
    """Return the places where a model fits into the free memory, the best first.

    The precision is fp32, or else `dtype`, the precision of the merged weights. A GPU is faster, but never a reason for
    a lower precision, which would hide more of the differences. `whole` is the number of weights that the adapter has
    in addition to the weights of the base model.
    """
    weights = whole + sum(place.bytes // place.dtype.itemsize for place in tensors.places.values())
    places = [Place(device, one) for one in dict.fromkeys((torch.float32, dtype)) for device in ("cuda", "cpu")]
    free = {"cuda": free_on_gpu(), "cpu": free_memory()}
    return [place for place in places if ROOM * weights * place.dtype.itemsize <= free[place.device]]


def free_on_gpu() -> int:
    """Return the free bytes of the GPU; 0 without a GPU that torch can use."""
    try:
        if not devices.gpu_count() or devices.no_code_reason():
            return 0
        return int(torch.cuda.mem_get_info()[0])
    except RuntimeError:  # it has no memory left for a context, or its driver fails
        return 0


def inputs(rows: Sequence[Sequence[int]], config: Any) -> torch.Tensor:
    """Return token IDs [rows, tokens] of the corpus, or random IDs without `rows`."""
    config = config.get_text_config()
    length = min([TOKENS, *map(len, rows), getattr(config, "max_position_embeddings", None) or TOKENS])
    if rows:
        return torch.tensor([row[:length] for row in rows])
    return torch.randint(config.vocab_size, (ROWS, length), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def logits_of_base(base: Path, adapter: Path, ids: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the base model with the unmerged adapter, and without it."""
    model = _load(base, place)
    alone = _logits(model, ids)  # before PEFT, which replaces some tied weights of the base model
    # Without torch_device, PEFT reads an adapter to the GPU if there is one.
    model = PeftModel.from_pretrained(
        model, str(adapter), adapter_name=NAME, config=read_config(adapter), torch_device=place.device
    )
    return _logits(model.eval(), ids), alone


@torch.inference_mode()
def logits_of(folder: Path, ids: torch.Tensor, place: Place) -> torch.Tensor:
    """Return the logits of a model."""
    return _logits(_load(folder, place), ids)


def _load(folder: Path, place: Place) -> Any:
    where: dict[str, Any] = {}
    gc.collect()  # the previous model is part of reference cycles
    if place.device == "cuda":
        where["device_map"] = {"": place.device}  # each weight directly, without a copy of the model in main memory
        torch.cuda.empty_cache()
        # TF32 would round to 10 bits, and the limit for fp32 is 1e-3. Some containers turn it on.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=place.dtype, use_safetensors=True, trust_remote_code=False, **where
    )
    return model.eval()


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [tokens, vocabulary] in fp32, minus the mean of each token.

    softmax ignores this mean. The logits are on the CPU.
    """
    rows = ids.to(model.device)
    logits = torch.cat([model(input_ids=row[None], use_cache=False).logits[0].float().cpu() for row in rows])
    return logits - logits.mean(-1, keepdim=True)


def compare(expected: torch.Tensor, alone: torch.Tensor, found: torch.Tensor, weights: torch.dtype) -> Comparison:
    """Compare the logits of the merged model with base plus adapter.

    `found` are the logits of the merged model, `expected` of base plus adapter, and `alone` of the base model.
    `weights` is the precision of the merged weights.
    """
    limit = LIMITS[weights]
    size = expected.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    off = (found - expected).norm(dim=-1) / size
    effect = float((expected - alone).norm() / expected.norm())
    return Comparison(
        tokens=len(off),
        largest=float(off.max()),
        limit=limit,
        beyond=float((~(off <= limit)).float().mean()),
        agreement=float((found.argmax(-1) == expected.argmax(-1)).float().mean()),
        effect=effect,
        lost=float((found - expected).norm() / (expected - alone).norm()) if effect else 0.0,
    )


def has_experts(config: Any) -> bool:
    """Return whether a model routes tokens to experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(config.get_text_config(), name, None) or 0) > 1 for name in names)


def require_same(comparison: Comparison, experts: bool, precision: str) -> None:
    """Raise DataError unless the merged model equals base plus adapter.

    Differences within the limits of `precision` are allowed. `experts` is whether the model routes tokens to experts,
    because rounding may send some tokens to other experts.
    """
    if not comparison.beyond <= (BEYOND if experts else 0):
        raise DataError(
            "merge_differs",
            f"the logits of the merged model differ by up to {comparison.largest:.1e} from those of base plus adapter, "
            f"for {comparison.beyond:.1%} of {comparison.tokens} tokens by more than {comparison.limit:g} (relative); "
            + ("report this with your training.json" if precision == "fp32" else "merge with --dtype fp32"),
        )
    if comparison.effect > NO_EFFECT and not comparison.lost <= LOST:
        raise DataError(
            "merge_differs",
            f"rounding to {precision} hides {min(comparison.lost, 1):.0%} of what the adapter changes in the logits "
            f"({comparison.effect:.1e}, relative); "
            + ("report this with your training.json" if precision == "fp32" else "merge with --dtype fp32"),
        )
