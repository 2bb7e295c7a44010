"""Give the weights of a base model the values that a run computed with.

    record of a run, model without weights ─dequantized_of─▶ Dequantized: the weights that were in NF4
    weight of the files ─in the precision of the run─▶ NF4 ─▶ back

A run with `quantization: nf4` learns what is missing to the rounded weights of its base. transformers chooses the
weights, and transforms and quantizes them, exactly as when it loads the model for training. bitsandbytes computes on
the CPU, so that the result depends neither on a GPU nor on the number of threads.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer

from packcorpus.train.merge.find_run import Base, Run
from packcorpus.train.merge.tensors import PRECISIONS
from packcorpus.train.model.attention import decoder_of
from packcorpus.train.model.quantization import nf4_of


@dataclass(frozen=True)
class Dequantized:
    """Weights that a run had in NF4, by their names in the model."""

    model: Any  # without weights, its layers replaced by those of bitsandbytes
    layers: dict[str, Any]  # their modules: linear layers, or stacks of experts
    quantizer: Any
    dtype: torch.dtype  # of the computations of the run

    def value(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the values of a weight in the run, in the run's precision."""
        operation = self.quantizer.get_quantize_ops()
        [packed] = operation.convert({name: [weight.to("cpu", self.dtype)]}, model=self.model).values()
        found = dequantize_4bit(packed.data, packed.quant_state)
        is_turned = issubclass(getattr(self.layers[name], "source_cls", torch.nn.Module), Conv1D)
        return found.T.contiguous() if is_turned else found

    @torch.no_grad()
    def apply(self, model: Any) -> None:
        """Replace the weights of a loaded model."""
        shared = {model.get_parameter(name): name for name in self.layers}  # a block may be in several layers
        for weight, name in shared.items():
            weight.data = self.value(name, weight.data).to(weight.device, weight.dtype)


def dequantized_of(run: Run, base: Base, model: Any) -> Dequantized | None:
    """Return the weights that a run had in NF4; None for a run without quantization."""
    if run.record["config"].get("quantization") != "nf4":
        return None
    dtype = PRECISIONS[run.record["choices"]["precision"]]
    # Runs of earlier versions do not name the layers in 16 bits. They had `dt_proj` of Mamba there, and all experts.
    is_earlier = "in_16_bits" not in run.record
    skipped = ["dt_proj"] * (model.config.model_type == "mamba") if is_earlier else run.record["in_16_bits"]
    quantizer = AutoHfQuantizer.from_config(nf4_of(dtype, skipped), pre_quantized=False)
    replaced = deepcopy(model)
    # The last parameter is not quantized. While a model is loaded, it is often the head, which is not tied yet.
    if head := replaced.get_output_embeddings():
        head.weight = torch.nn.Parameter(head.weight.detach(), requires_grad=False)
    quantizer.preprocess_model(model=replaced, device_map={"": "cpu"})
    used = of_text(replaced)
    layers = {
        f"{name}.{weights}".lstrip("."): module
        for name, module in replaced.named_modules(remove_duplicate=False)
        if module in used
        for weights in module._parameters
        if quantizer.param_needs_quantization(replaced, f"{name}.{weights}".lstrip("."))
        and (isinstance(module, Linear4bit) or not is_earlier)
    }
    return Dequantized(replaced, layers, quantizer, dtype)


def of_text(model: Any) -> set[Any]:
    """Return the modules of the text decoder without the towers that it may contain.

    The run had the towers in NF4 as well, but did not use them.
    """
    decoder = decoder_of(model)
    parts = [child for child in decoder.children() if not any(isinstance(m, PreTrainedModel) for m in child.modules())]
    return {decoder}.union(*(part.modules() for part in parts))
