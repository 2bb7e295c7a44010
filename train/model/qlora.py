"""Build the trained model: a frozen base in 4 bits with a LoRA adapter in fp32.

    base model ─load_model─▶ NF4, double quantization, with an adapter ─check─▶ both actually in effect, or an error

PEFT's `prepare_model_for_kbit_training` is not used, because it converts the head and the embeddings to fp32 (+2.1 GB
for an 8B model). This module does all its other steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tasks.core.errors import DataError, PartMissing, UsageError
from tasks.core.printable import counted
from train.config import TrainingConfig
from train.machine.process import is_shortage
from train.model import states
from train.model.adapter import add_adapter
from train.model.attention import BACKENDS, separate_by_positions
from train.model.base_model import read_config, unreadable


def load_model(
    base: Path | str, config: TrainingConfig, device: torch.device | str, dtype: torch.dtype, attention: str = "sdpa"
) -> Any:
    """Load the frozen base model on `device`, and add an adapter: a PeftModel.

    A model to be sharded stays on the CPU. Weights that are not quantized and the computations of NF4 are in `dtype`.
    The adapter is in fp32, and a new one is initialized from `config.seed`. Raises DataError or InputMissing if the
    model cannot be read or does not fit the settings, PartMissing if quantization is not in effect.
    """
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        # Mamba computes with the weights of `dt_proj`, which therefore must not be packed.
        llm_int8_skip_modules=["lm_head", "dt_proj"] if read_config(base).model_type == "mamba" else None,
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
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if is_shortage(error):
            raise PartMissing(
                "out_of_memory", f"{base}: does not fit into the memory of {device}; use a smaller base_model"
            ) from None
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
    model = add_adapter(model, config, base)
    separate_by_positions(model)
    states.use_way(model, states.ways(model, attention)[0])
    if config.activation_checkpointing and model.supports_gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    check(model, config)
    return model.train()


def check(model: Any, config: TrainingConfig) -> None:
    """Raise PartMissing or DataError if the model does not match the config."""
    if config.quantization == "nf4":
        kinds = {layer.weight.quant_state.quant_type for layer in quantized(model) if layer.weight.quant_state}
        linear = [type(layer) for layer in model.get_decoder().modules() if isinstance(layer, torch.nn.Linear)]
        # Some models define linear layers of their own, such as FalconLinear.
        if not kinds and (own := [kind.__name__ for kind in linear if kind.__module__.startswith("transformers.")]):
            raise PartMissing(
                "no_nf4",
                f"quantization: nf4 is not in effect: the layers of a {model.config.model_type} model are of the class "
                f"{own[0]}, and transformers quantizes only torch's own Linear; set quantization: none",
            )
        if kinds != {"nf4"}:
            raise PartMissing(
                "no_nf4",
                f"quantization: nf4 is not in effect: the model has {', '.join(kinds) or 'no 4-bit weights'}; "
                "use a base model that is not quantized yet, or set quantization: none",
            )
    trained = {name: weights for name, weights in model.named_parameters() if weights.requires_grad}
    # Whole modules are named by modules_to_save, or by the adapter that the run starts from.
    whole = model.peft_config["default"].modules_to_save or ()
    if outside := [name for name in trained if "lora_" not in name and not (whole and ".modules_to_save." in name)]:
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


def is_sharded(model: Any) -> bool:
    return bool(getattr(model, "shards_frozen_weights", False))


def share_of_rank(model: Any) -> float:
    """Return the share of frozen bytes that this rank keeps between two passes."""
    frozen = [weights for weights in model.parameters() if not weights.requires_grad]
    kept = sum(weights.to_local().nbytes if isinstance(weights, DTensor) else weights.nbytes for weights in frozen)
    return kept / max(1, sum(weights.nbytes for weights in frozen))


def check_ranks(config: TrainingConfig) -> None:
    """Raise UsageError if `sharding: full` is set with one rank or with samples."""
    if config.sharding == "full" and config.samples:
        raise UsageError(
            "bad_setting", "samples: one rank generates them, which sharding: full does not allow; set samples: 0"
        )
    if config.sharding == "full" and not torch.distributed.is_initialized():
        raise UsageError("bad_setting", "sharding: full needs several ranks; set sharding: none, or use more GPUs")


def shard(model: Any, device: torch.device | str) -> None:
    """Move a model to `device` and divide its frozen weights among all ranks.

    The model has an adapter. Only the layers of its decoder are divided. Embeddings, norms outside the layers, the
    head, and the adapter stay whole. Raises DataError if the model has no list of layers.
    """
    device, decoder = torch.device(device), model.get_decoder()
    layers = next((child for child in decoder.children() if isinstance(child, torch.nn.ModuleList)), None)
    if not layers:
        raise DataError("bad_model", f"sharding: full: a {model.config.model_type} model has no list of layers")
    trained = {weights for weights in model.parameters() if weights.requires_grad}
    whole = trained | (set(model.parameters()) - set(layers.parameters()))
    states = {layer: layer.weight.quant_state for layer in quantized(model)}
    for tensor in (*whole, *model.buffers()):
        tensor.data = tensor.data.to(device)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=trained)
    fully_shard(decoder, mesh=mesh, ignored_params=whole)
    for layer, state in states.items():
        state.to(device)
        # bitsandbytes reads the state of the layer once its weight has been gathered. The counts of weights read the
        # state of the weight.
        layer.quant_state = layer.weight.quant_state = state
    model.hf_device_map = model.get_base_model().hf_device_map = {"": device}
    model.shards_frozen_weights = True


def data_parallel(model: Any, accelerator: Any) -> Any:
    """Wrap a sharded model for training, because accelerate refuses sharded weights."""
    model = accelerator.prepare_model(model, evaluation_mode=True)  # autocast only
    model._ddp_params_and_buffers_to_ignore = [
        name for name, weights in model.named_parameters() if not weights.requires_grad
    ]
    options = accelerator.ddp_handler.to_kwargs() if accelerator.ddp_handler else {}
    index = accelerator.device.index
    return DistributedDataParallel(model, device_ids=[index] if accelerator.device.type == "cuda" else None, **options)
