"""Measure the phases of a step, judge the figures of a run, and count FLOP.

    enter("data") … enter("copy") … enter("forward") … ─take─▶ {"data": seconds, "copy": …}
    {"data": 0.11, "steps": 40, …} ─advise─▶ [Advice("time spent waiting for data", "11 %", "5 % or less", …), …]
    model, position_ids ─flops_per_token─▶ FLOP        name of the GPU ─peak_flops─▶ FLOP/s

A phase lasts until the next phase is entered. On a GPU, it lasts until the GPU has finished its work. The marks are
read once per step, when the loss is read anyway.

`data` differs from `data_wait`, the share of a step in which this rank waits for its own batches, by the clock of the
CPU. `data` also includes counting the trained tokens of a step and adding them up over all ranks. It therefore includes
waiting for a rank whose batches are late. On a GPU, `data` begins when the GPU has finished all earlier work.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# In the order of a step. `backward` includes waiting for the gradients of other ranks, and `optimizer` clipping.
PHASES = ("data", "copy", "forward", "backward", "optimizer")
# Phases in which a GPU computes.
COMPUTE = ("forward", "backward", "optimizer")


class Clock:
    """Clock of a device; a time on a GPU is an event in its queue."""

    # It can be read only after the GPU has passed it.

    def __init__(self, device: torch.device):
        self._is_gpu = device.type == "cuda"

    def now(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        from torch.cuda import Event

        event = Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, moment: Any) -> bool:
        return not self._is_gpu or moment.query()

    def wait_for(self, moment: Any) -> None:
        if self._is_gpu:
            moment.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two times that have passed."""
        return float(start.elapsed_time(end) / 1000 if self._is_gpu else end - start)


class Phases:
    """Marks of one optimizer step."""

    def __init__(self, device: torch.device):
        self._clock = Clock(device)
        self._marks: list[tuple[str, Any]] = []

    def enter(self, phase: str) -> None:
        """End the current phase and begin `phase`, or none if it is ""."""
        self._marks.append((phase, self._clock.now()))

    def clear(self) -> None:
        self._marks = []

    def take(self) -> dict[str, float]:
        """Return the seconds of every phase since the last call; waits for the GPU."""
        seconds = dict.fromkeys(PHASES, 0.0)
        if self._marks:
            self._clock.wait_for(self._marks[-1][1])
        for (phase, start), (_, end) in pairwise(self._marks):
            if phase:
                seconds[phase] += self._clock.seconds(start, end)
        self._marks = []
        return seconds


# -- advice ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rule:
    """Lowest or highest value of a figure, and the action if the figure misses it."""

    figure: str
    name: str
    action: str
    at_least: float | None = None
    at_most: float | None = None
    is_share: bool = True

    def shown(self, value: float) -> str:
        return f"{100 * value:.3g} %" if self.is_share else f"{value:,.0f}"


@dataclass(frozen=True, slots=True)
class Advice:
    """Figure that misses its target."""

    name: str
    found: str
    target: str
    action: str

    def __str__(self) -> str:
        return f"{self.name}: {self.found}, should be {self.target}; {self.action}"


RULES = (
    Rule("data", "time spent waiting for data", "set load: memory, or loader_workers: 2 if rows are mapped",
         at_most=0.05),
    Rule("gpu", "time in the model and the optimizer", "batches are loaded or copied too slowly; set load: memory",
         at_least=0.85),
    Rule("optimizer", "time in the optimizer", "raise tokens_per_step, so that there are fewer steps",
         at_most=0.10),
    Rule("padding", "padding in the rows", "pack the conversations (packing: true), or use another sequence_length",
         at_most=0.03),
    Rule("memory_high", "memory of the GPU", "little is left: one longer batch may not fit; halve micro_batch, or set "
         "fused_loss: true", at_most=0.95),
    Rule("checkpointed", "memory of the GPU", "set activation_checkpointing: false, which is faster if it fits",
         at_least=0.70),
    Rule("small_batch", "memory of the GPU", "raise micro_batch, or set it to auto", at_least=0.70),
    Rule("steps", "optimizer steps", "a model learns little in so few steps; raise max_steps or epochs, or "
         "lower tokens_per_step", at_least=100, is_share=False),
    Rule("share_in_4_bits", "frozen weights in 4 bits", "the other weights, such as embeddings, take "
         "four times the memory", at_least=0.80),
    Rule("wsl", "Linux inside Windows (WSL)", "keep corpora in the Linux file system (~), not below "
         "/mnt/c, and give WSL more memory in .wslconfig",
         at_most=0, is_share=False),
    Rule("workers", "loader workers for rows in memory", "set loader_workers: 0; a worker would only copy the rows "
         "again", at_most=0, is_share=False),
)  # fmt: skip


def advise(figures: Mapping[str, float], whose: Mapping[str, str] | None = None) -> list[Advice]:
    """Return advice for the figures that miss their targets, in the order of RULES."""
    # `whose` maps a figure of a single rank to a suffix for its name.
    found = []
    for rule in RULES:
        value, low, high = figures.get(rule.figure), rule.at_least, rule.at_most
        target = None
        if value is not None and low is not None and value < low:
            target = f"{rule.shown(low)} or more"
        elif value is not None and high is not None and value > high:
            target = f"{rule.shown(high)} or less"
        if value is not None and target:
            name = rule.name + (whose or {}).get(rule.figure, "")
            found.append(Advice(name, rule.shown(value), target, rule.action))
    return found


# -- FLOP per token ----------------------------------------------------------------------------------------------------

# Dense bf16 or fp16 with fp32 accumulation, FLOP/s, from NVIDIA's data sheets, and for GeForce and RTX PRO from the
# white papers of Ampere, Ada, and Blackwell. The first match counts.
PEAK = {
    "B200": 2250e12, "H200 NVL": 835e12, "H200": 989e12, "GH200": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12,
    "H100": 989e12, "H800 PCIe": 756e12, "H800": 989e12, "H20": 148e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12,
    "L40": 181e12, "L20": 119.5e12, "L4": 121e12, "A40": 150e12, "A30": 165e12, "A10G": 70e12, "A10": 125e12,
    "RTX PRO 6000": 504e12, "RTX 6000 Ada": 364e12, "RTX A6000": 155e12, "RTX 5090": 209e12, "RTX 5080": 113e12,
    "RTX 4090": 165e12, "RTX 4080 SUPER": 104e12, "RTX 4080": 97e12, "RTX 3090": 71e12, "RTX 3080 Ti": 68e12,
    "RTX 3080": 59.5e12,
    # GPUs without bf16. All others are as fast in bf16 as in fp16.
    "V100-SXM2": 125e12, "V100-PCIE": 112e12, "T4": 65e12,
}  # fmt: skip

# Kinds of layers in `layer_types` that have no attention.
WITHOUT_ATTENTION = ("linear_attention", "conv", "mamba", "recurrent", "moe", "mlp")
# Names of settings: the number of experts of a token, and of all experts of a layer.
ROUTING = (
    ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"),
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
)


def share_in_4_bits(model: Any) -> float:
    """Return the share of the frozen weights that bitsandbytes stores in 4 bits."""
    frozen = [weights for weights in model.parameters() if not weights.requires_grad]
    quantized = sum(_count(weights) for weights in frozen if hasattr(weights, "quant_state"))
    return quantized / max(1, sum(map(_count, frozen)))


def parameters(model: Any) -> tuple[int, int]:
    """Return the numbers of all and of trainable parameters, with the adapter."""
    # A byte of NF4 holds two parameters. Tied weights are yielded once.
    counts = [(_count(weights), weights.requires_grad) for weights in model.parameters()]
    return sum(count for count, _ in counts), sum(count for count, trainable in counts if trainable)


def _count(weights: Any) -> int:
    state = getattr(weights, "quant_state", None)
    return int(weights.numel() if state is None else math.prod(state.shape))


def flops_per_token(model: Any, position_ids: torch.Tensor) -> float:
    """Return the useful FLOP per token, for the positions of typical rows.

    4 N        for each weight of a matrix product: 2 forward, 2 for the gradient of its input. Frozen weights have no
               gradient, hence 4 and not 6. An embedding that is only looked up does not count.
    6 N_lora   for each weight of the adapter, and of a head that is trained as a whole
    attention  12 · d · k per layer, with d = heads × head size and k = the tokens that one token attends to, including
               itself: 2 · d · k for the scores and 2 · d · k for their sum in the forward pass, and twice as much in
               the backward pass. On average over a conversation of n tokens, k = (n + 1) / 2. Attention is causal and
               ends at the conversation, so a kernel that also computes masked scores does no more useful work.

    Only the experts that a token is routed to count. Convolutions, scans, and the recomputation by activation
    checkpointing do not count, so the MFU of a model with such layers is a lower bound.
    """
    config = model.config.get_text_config()
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    looked_up = None if head is None or embeddings.weight is head.weight else embeddings.weight
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    # In some models, the layers differ in the size of their heads.
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * len(kinds)
    last = layers[-1]
    chosen, experts = (
        next((getattr(last, name) for name in names if getattr(last, name, None)), None) for names in ROUTING
    )
    # The share of a layer's experts that a token is routed to, if it is known.
    routed = min(1.0, chosen / experts) if chosen and experts else 1.0
    weighted = 0.0
    # Towers for images and sound do not run. get_decoder() of a few models returns less than the decoder.
    parts = (model.get_decoder(), head)
    used = {weights: name for part in parts if part is not None for name, weights in part.named_parameters()}
    if embeddings.weight not in used:
        used = {weights: name for name, weights in model.named_parameters()}
    for weights, name in used.items():
        parts = name.split(".")
        if weights is not looked_up and "original_module" not in parts:  # the copy in modules_to_save is used instead
            share = routed if "experts" in parts else 1.0
            weighted += (6 if weights.requires_grad else 4) * _count(weights) * share
    seen = position_ids.double() + 1
    attention = 0.0
    for kind, layer in zip(kinds, layers, strict=True):
        heads = 0 if kind in WITHOUT_ATTENTION else getattr(layer, "num_attention_heads", 0)  # Mamba has none
        width = heads * (getattr(layer, "head_dim", None) or layer.hidden_size // heads) if heads else 0
        window = getattr(layer, "sliding_window", None) if "sliding" in kind else None
        attention += 12 * width * seen.clamp(max=window or math.inf).mean().item()
    return weighted + attention


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a GPU; None in fp32, or if it is unknown."""
    if str(dtype) == "torch.float32" or re.search(r"\b(MIG|Laptop|Max-Q)\b", name):  # a part of the chip, or slower
        return None
    return next((peak for known, peak in PEAK.items() if re.search(rf"\b{known}\b", name)), None)


def si(value: float) -> str:
    """Format a number with an SI prefix: 1234 → 1.23 k."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"
