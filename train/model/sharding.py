"""Divide the frozen weights of a model among the ranks.

A model that is larger than one GPU can be trained this way.

    model on the CPU ─shard─▶ every rank keeps 1/N of the frozen weights of each layer (FSDP2, still in 4 bits)
    forward, backward ─▶ the weights of one layer at a time are gathered, used, and freed

The adapter stays whole on every rank. DistributedDataParallel trains it as without sharding, so optimizer, checkpoints,
and results are the same. accelerate's FSDP2 would leave 4-bit weights whole, and the Trainer could not resume.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tasks.core.errors import DataError, UsageError
from train.config import TrainingConfig
from train.model.qlora import quantized


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
