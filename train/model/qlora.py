"""Build the trained model: a frozen base in 4 bits with a LoRA adapter in fp32.

    base model ─load_model─▶ NF4, double quantization, with an adapter ─check─▶ both actually in effect, or an error
    decoder ─target_layers, target_experts─▶ names of its linear layers and of weights of experts ─┐
    folder of an adapter ─read_adapter─▶ LoraConfig, checked against the settings ─────────────────┴─add_adapter─▶

Nothing outside the decoder is adapted: neither the head nor, in a multimodal model, the towers for images and sound.
For new tokens, embeddings and head can be trained as a whole (`modules_to_save`).

A run may start from the adapter of an earlier run or of another tool, which determines rank, alpha, variant, targets,
and whole modules. A setting that differs from its default must agree with it. The settings determine the dropout,
because the weights do not depend on it.

PEFT's `prepare_model_for_kbit_training` is not used, because it converts the head and the embeddings to fp32 (+2.1 GB
for an 8B model). This module does all its other steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.pytorch_utils import Conv1D

from packcorpus.tasks.core.errors import DataError, PackError, PartMissing, UsageError
from packcorpus.tasks.core.printable import counted, suggest
from packcorpus.train.config import TrainingConfig, adapter_files, folder_digest
from packcorpus.train.machine.process import is_shortage
from packcorpus.train.measures import ROUTING
from packcorpus.train.model import states
from packcorpus.train.model.attention import BACKENDS, autocast, decoder_of, separate_by_positions
from packcorpus.train.model.base_model import read_config, unreadable
from packcorpus.train.model.checkpoint import auto_class, mark_as_text, use_inner_head, without_head
from packcorpus.train.model.checkpointing import usable, use_checkpointing
from packcorpus.train.model.quantization import (
    check_experts,
    check_loaded,
    how_to_load,
    nf4_of,
    require_repackable,
    shape_of,
    unpack_on_use,
    unpacked_on_use,
    use_quantized_experts,
    watch,
)
from packcorpus.train.model.refusal import named


def load_model(
    base: Path | str, config: TrainingConfig, device: torch.device | str, dtype: torch.dtype, attention: str = "sdpa"
) -> Any:
    """Load the frozen base model on `device`, and add an adapter: a PeftModel.

    A model to be sharded stays on the CPU. Weights that are not quantized and the computations of NF4 are in `dtype`.
    The adapter is in fp32, and a new one is initialized from `config.seed`. Raises DataError or InputMissing if the
    model cannot be read or does not fit the settings, PartMissing if quantization is not in effect.
    """
    model = load_base(base, config, device, dtype, attention)
    skipped: list[str] = []
    while packed := watch(model, partial(_pass, model, dtype, attention)):
        skipped = sorted({*skipped, *packed})
        require_repackable(base, model, packed)
        del model  # both do not fit into the memory
        model = load_base(base, config, device, dtype, attention, skipped)
    with named(model, "adding an adapter"):
        model = add_adapter(model, config, base)
        separate_by_positions(model)
        states.use_way(model, states.ways(model, attention)[0])
        # Until `auto` is measured, trials need as little memory as possible.
        wanted = config.activation_checkpointing
        use_checkpointing(model, usable(model, True if wanted == "auto" else wanted)[0])
        check(model, config)
    return model.train()


def load_base(
    base: Path | str,
    config: TrainingConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    attention: str,
    skipped: Sequence[str] = (),
) -> Any:
    """Load the frozen base model, quantized if the config says so, except `skipped`."""
    auto = auto_class(base, read_config(base))
    try:
        model, loaded = auto.from_pretrained(
            base,
            **how_to_load(base, nf4_of(dtype, skipped) if config.quantization == "nf4" else None),
            output_loading_info=True,
            dtype=dtype,
            attn_implementation=BACKENDS[attention],
            device_map={"": "cpu" if config.sharding == "full" else device},
            use_safetensors=True,  # never a pickle
            trust_remote_code=False,
        )
    except PackError:
        raise
    except Exception as error:  # the code of each model checks its config in its own way
        if is_shortage(error):
            raise PartMissing(
                "out_of_memory", f"{base}: does not fit into the memory of {device}; use a smaller base_model"
            ) from None
        raise unreadable(base, error) from None
    check_loaded(base, loaded)
    if missing := sorted(loaded["missing_keys"]):
        # transformers would initialize them randomly.
        raise without_head(base, model) or DataError(
            "bad_model", f"{base}: lacks {counted(len(missing), 'weight')}, such as {missing[0]}; copy the model again"
        )
    use_inner_head(base, model)
    mark_as_text(model)
    for part in (model.config, model.config.get_text_config(), decoder_of(model).config):
        part.use_cache = False  # with a cache, conversations see each other
    for layer in quantized(model):
        # transformers compares the shapes of all weights except these.
        if tuple(layer.weight.quant_state.shape) != (layer.out_features, layer.in_features):
            raise DataError(
                "bad_model", f"{base}: the shapes of its weights do not match its config.json; copy the model again"
            )
        # Otherwise the first pass without gradients repacks the weights to compute in bf16.
        layer.support_avx512bf16_for_cpu = False
        layer.compute_dtype = dtype  # a checkpoint in NF4 names its own
    model.in_16_bits = sorted(skipped)
    model.unused_weights = sorted(loaded["unexpected_keys"])
    return model


def _pass(model: Any, dtype: torch.dtype, attention: str, ids: torch.Tensor) -> None:
    """Run a pass as in training."""
    states.use_way(model, states.ways(model, attention)[0])
    with named(model), keep_random(model.device), autocast(model.device, dtype):
        model.train()(input_ids=ids)


def check(model: Any, config: TrainingConfig) -> None:
    """Raise PartMissing or DataError if the model does not match the config."""
    if config.quantization == "nf4":
        # Towers in NF4 show nothing about the decoder.
        weights = [layer.weight for layer in quantized(decoder_of(model))]
        kinds = {weight.quant_state.quant_type for weight in weights if weight.quant_state}
        linear = [type(layer) for layer in decoder_of(model).modules() if isinstance(layer, torch.nn.Linear)]
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
    check_experts(model)
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


def infinite_weights(model: Any) -> list[str]:
    """Return the names of weights that contain NaN or infinity."""

    def parts(weights: Any) -> list[Any]:
        state = getattr(weights, "quant_state", None)  # of 4-bit weights
        return [getattr(weights, "_local_tensor", weights), *([state.absmax, state.offset] if state else [])]

    return [
        name
        for name, weights in model.named_parameters()
        if not all(part.isfinite().all() for part in parts(weights) if part is not None and part.is_floating_point())
    ]


def quantized(model: Any) -> list[Any]:
    """Return the layers whose weights bitsandbytes stores in 4 bits."""
    from bitsandbytes.nn import Linear4bit

    return [layer for layer in model.modules() if isinstance(layer, Linear4bit)]


# -- the adapter ------------------------------------------------------------------------------------------------------

# Names of the attention projections in the model families of transformers. Some combine q, k, and v in one layer.
ATTENTION = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "query_key_value", "c_attn", "W_pack", "Wqkv", "qkv",
)  # fmt: skip


def add_adapter(model: Any, config: TrainingConfig, base: Path | str = "") -> Any:
    """Add `config.adapter` or a new LoRA adapter, and freeze everything else."""
    layers = target_layers(model, config.lora_targets)
    if not config.adapter:
        experts = target_experts(model) if config.lora_targets == "all" else []
        whole = whole_modules(model, config.modules_to_save or [])
        rank = rank_of_experts(model, config.lora_r)
        # Servers read only one scale, so that of experts is the same.
        share = rank / config.lora_r
        alpha = config.lora_alpha * (share**0.5 if config.lora_variant == "rslora" else share)
        others = experts if rank != config.lora_r else []
        lora = LoraConfig(
            r=config.lora_r,
            lora_alpha=config.lora_alpha,
            rank_pattern=dict.fromkeys(others, rank),
            alpha_pattern=dict.fromkeys(others, alpha),
            # An adapter for the weights of experts is added to these weights, so there are no activations to drop.
            lora_dropout=0.0 if experts else config.lora_dropout,
            use_rslora=config.lora_variant == "rslora",
            use_dora=config.lora_variant == "dora",
            target_modules=_not_experts(model, layers, config.lora_targets),
            target_parameters=experts or None,
            modules_to_save=whole or None,
            ensure_weight_tying=bool(whole) and is_tied(model),
            task_type="CAUSAL_LM",
        )
        return _with_adapter(model, lora, config)
    folder = Path(config.adapter)
    lora = read_adapter(folder, config, base)
    if lora.modules_to_save and lora.ensure_weight_tying:
        lora.modules_to_save = whole_modules(model, [name.rpartition(".")[2] for name in lora.modules_to_save])
    model = _with_adapter(model, lora, config)
    load_weights(model, folder, config, layers)
    return model


def rank_of_experts(model: Any, rank: int) -> int:
    """Return the rank of experts: the rank, divided by the experts of a token.

    A token then passes as many weights of adapters in a layer with experts as in one without. With the whole rank, the
    adapter of Qwen3-30B-A3B would take 10 GB with its gradients and the optimizer.
    """
    config = model.config.get_text_config()
    chosen = next((count for name in ROUTING[0] if (count := getattr(config, name, None))), 1)
    return max(1, rank // chosen)


def _not_experts(model: Any, layers: list[str], wanted: str | list[str]) -> list[str]:
    """Return the layers that PEFT can adapt; DataError if the config names others."""
    # In DeepSeek V2 and V3, Qwen3-Next, and other models, PEFT takes every layer named gate_proj, up_proj, or down_proj
    # for an expert of an old checkpoint, both when it creates and when it loads an adapter. It would leave out dense
    # layers and shared experts, and adapt the stacked experts instead, with twice the rank.
    taken = []
    for name in sorted({layer.rpartition(".")[2] for layer in layers}):
        probe = LoraConfig(target_modules=[name])
        with suppress(ValueError):  # PEFT converts gate_proj only together with up_proj
            convert_peft_config_for_transformers(probe, model, None)
            if name in (probe.target_modules or ()):
                continue
        taken.append(name)
    if wanted != "all" and taken:
        raise DataError(
            "no_such_layers",
            f"lora_targets: {', '.join(taken)}: PEFT takes layers of this name for experts in a "
            f"{model.config.model_type} model, and would adapt those; leave {'it' if len(taken) == 1 else 'them'} out",
        )
    return [layer for layer in layers if layer.rpartition(".")[2] not in taken]


def left_out(model: Any) -> list[str]:
    """Return the names of the decoder's linear layers that have no adapter."""
    inside = (".base_layer", ".lora_", ".original_module", ".modules_to_save")
    unused = model.peft_config["default"].exclude_modules or ()  # see train.model.first_pass
    names = _linear_layers(model.get_base_model())
    return [name for name in names if name not in unused and not any(part in name for part in inside)]


def _with_adapter(model: Any, lora: LoraConfig, config: TrainingConfig) -> Any:
    tied = is_tied(model)
    try:
        with keep_random(model.device):
            set_random(model.device, config.seed)
            use_quantized_experts(model, lora)
            found = get_peft_model(model, lora)
            unpack_on_use(found)
    except (ValueError, NotImplementedError, TypeError, AttributeError, KeyError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        what = f"adapter: {config.adapter}" if config.adapter else f"lora_targets: {config.lora_targets}"
        fix = "use another adapter" if config.adapter else "name other layers, such as lora_targets: [q_proj, v_proj]"
        raise DataError(
            "no_such_layers",
            f"{what}: a {model.config.model_type} model does not support this adapter ({reason}); {fix}",
        ) from None
    if tied != is_tied(found):
        raise DataError(
            "no_such_layers",
            f"modules_to_save: the embeddings and the head of a {model.config.model_type} model have the same weights, "
            "which PEFT cannot train together; leave modules_to_save out",
        )
    # PEFT would write a card full of placeholders with every checkpoint.
    found.create_or_update_model_card = lambda _output_dir: None
    # PEFT copies whole modules in the precision of the model, but trained weights must be fp32.
    for name, weights in found.named_parameters():
        if ".modules_to_save." in name:
            weights.data = weights.data.float()
    return found


def is_tied(model: Any) -> bool:
    """Return whether the embeddings and the head share their weights."""
    head = model.get_output_embeddings()
    return getattr(head, "weight", None) is model.get_input_embeddings().weight


def whole_modules(model: Any, wanted: Sequence[str]) -> list[str]:
    """Return the names of modules to train as a whole; tied ones have one name."""
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    known = [names[module] for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module]
    for name in wanted:
        if name not in known:
            hint = suggest(name, known) or f"; they are {' and '.join(known)}"
            raise DataError(
                "no_such_layers",
                f"modules_to_save: {name}: only the embeddings and the head of a {model.config.model_type} model can "
                f"be trained as a whole{hint}",
            )
    # PEFT recognizes shared weights by the name of the head.
    return known[-1:] if wanted and is_tied(model) else list(dict.fromkeys(wanted))


def target_layers(model: Any, wanted: str | Sequence[str]) -> list[str]:
    """Return the full names of the linear layers: all, attention, or by name."""
    layers = _linear_layers(model)
    if wanted == "all":
        return layers
    names = ATTENTION if wanted == "attention" else wanted
    chosen = [layer for layer in layers if layer.rpartition(".")[2] in names]
    known = sorted({layer.rpartition(".")[2] for layer in layers})
    if wanted != "attention" and (name := next((name for name in names if name not in known), None)) is not None:
        hint = suggest(name, known) or f"; it has {', '.join(known)}"
        raise DataError(
            "no_such_layers",
            f"lora_targets: {name}: a {model.config.model_type} model has no linear layer of that name{hint}",
        )
    if not chosen:
        raise DataError(
            "no_such_layers",
            f"lora_targets: attention: a {model.config.model_type} model has no layers named {', '.join(ATTENTION)}; "
            f"set lora_targets: all, or some of [{', '.join(known)}]",
        )
    return chosen


def target_experts(model: Any) -> list[str]:
    """Return the names of parameters that hold all experts of a layer."""
    experts = [module for name, module in decoder_of(model).named_modules() if name.rpartition(".")[2] == "experts"]
    parameters = (pair for module in experts for pair in module.named_parameters(recurse=False))
    return sorted({f"experts.{name}" for name, values in parameters if len(shape_of(values)) == 3})


def _linear_layers(model: Any) -> list[str]:
    """Return the full names of the linear layers of the decoder, except the head."""
    decoder = decoder_of(model)
    [prefix] = [name for name, module in model.named_modules() if module is decoder]
    modules, head = dict(decoder.named_modules()), model.get_output_embeddings()
    found = []
    for name, module in modules.items():
        parent = modules[name.rpartition(".")[0]]
        # Mamba reads the weights of these layers and would ignore their adapter. Zamba 2 uses only a few of the layers
        # in `_adapter_list`.
        in_kernel = name.endswith(("out_proj", "dt_proj")) and hasattr(parent, "conv1d") and hasattr(parent, "D")
        in_kernel |= "_adapter_list." in name
        is_router = "Router" in type(module).__name__  # returns more than a tensor
        is_router |= hasattr(module, "no_adapter")
        if isinstance(module, torch.nn.Linear | Conv1D) and not (module is head or in_kernel or is_router):
            found.append(f"{prefix}.{name}".lstrip("."))
    return found


def keep_random(device: torch.device) -> Any:
    """Return a context that restores the random state of CPU and `device`."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def set_random(device: torch.device, seed: int) -> None:
    """Seed the random numbers of the CPU and, if `device` is a GPU, of all GPUs."""
    # torch.manual_seed also formats the stack, once for each kind of device that is not in use.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


def read_adapter(folder: Path, config: TrainingConfig, base: Path | str) -> LoraConfig:
    """Read the settings of an adapter, and check them against those of the run."""
    _, path = adapter_files(folder)
    try:
        lora = PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _unreadable(path, error) from None
    if not isinstance(lora, LoraConfig):
        kind = getattr(lora.peft_type, "value", lora.peft_type)
        raise DataError("bad_adapter", f"{path}: is an adapter of type {kind}, and only LORA can be trained here")
    if recorded := lora.base_model_name_or_path:
        there, here = Path(recorded), Path(base)
        if there.is_dir() and here.is_dir():
            same = there.resolve() == here.resolve() or folder_digest(there) == folder_digest(here)
        else:  # a folder may be a copy of the model that the other name refers to; shapes are compared later
            same = there.is_dir() or here.is_dir() or there.is_absolute() or recorded == str(base)
        if not same:
            text = f"{path}: was trained on {recorded}, which is not {base}; set base_model to that model"
            raise DataError("bad_adapter", text)
    whole: list[str] | None = sorted({name.rpartition(".")[2] for name in lora.modules_to_save or ()})
    wanted = config.modules_to_save
    # If embeddings and head have the same weights, one name means both.
    if whole and wanted and (lora.ensure_weight_tying or whole == sorted(set(wanted))):
        whole = wanted
    for name, theirs in {
        "lora_r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "lora_variant": "dora" if lora.use_dora else "rslora" if lora.use_rslora else "lora",
        "modules_to_save": whole or None,
    }.items():
        ours, default = getattr(config, name), TrainingConfig.model_fields[name].default
        if ours not in (default, theirs):
            text = f"{name} is {ours}, but {path} has {theirs}; leave {name} out, or start a new adapter"
            raise UsageError("other_adapter", text)
    lora.inference_mode = False
    lora.lora_dropout = 0.0 if lora.target_parameters else config.lora_dropout
    return lora


def load_weights(model: Any, folder: Path, config: TrainingConfig, targets: list[str]) -> None:
    """Load the weights of an adapter into a model with an adapter of the same kind."""
    # `targets` are the layers that `config.lora_targets` names.
    path, _ = adapter_files(folder)
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from None
    adapted = {name.partition(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    adapted = {name.removeprefix("base_model.model.") for name in adapted}
    unused = model.peft_config["default"].exclude_modules or ()  # see train.model.first_pass
    if config.lora_targets != "all" and adapted != set(targets) - set(unused):
        theirs = sorted({name.rpartition(".")[2] for name in adapted})
        raise UsageError(
            "other_adapter",
            f"lora_targets is {config.lora_targets}, but the layers of {path} are {', '.join(theirs)}; "
            "leave lora_targets out, or start a new adapter",
        )
    if load_exactly(model, weights):
        return
    try:
        # PEFT knows the names and the layouts that other versions of transformers gave to the same weights.
        result = set_peft_model_state_dict(model, weights)
    except (RuntimeError, ValueError, KeyError) as error:
        raise _unreadable(path, error) from None
    trained = {name for name, values in model.named_parameters() if values.requires_grad}
    strange, absent = sorted(result.unexpected_keys), sorted(trained & set(result.missing_keys))
    if strange or absent:
        what = f"has weights that the model lacks, such as {strange[0]}" if strange else f"lacks {absent[0]}"
        raise DataError(
            "bad_adapter",
            f"{path}: {what} ({counted(len(strange) + len(absent), 'such weight')}); it was trained on another model",
        )


@torch.no_grad()
def load_exactly(model: Any, weights: dict[str, torch.Tensor], adapter: str = "default") -> bool:
    """Load the weights of an adapter if it has the names and shapes of this one.

    Returns False, and loads nothing, if it has others. PEFT renames weights when it loads them, and then leaves out
    those whose names no longer fit, with a warning at most, for example in Inkling 2 and Mistral Large 4.
    """
    own = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    if {name: tensor.shape for name, tensor in own.items()} != {name: x.shape for name, x in weights.items()}:
        return False
    for name, tensor in own.items():
        tensor.copy_(weights[name])
    return True


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = " ".join(str(error).split())[:300].rstrip(".")
    return DataError("bad_adapter", f"{path}: does not fit the model or cannot be read ({reason})")


# -- several ranks ----------------------------------------------------------------------------------------------------


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
    device, decoder = torch.device(device), decoder_of(model)
    layers = next((child for child in decoder.children() if isinstance(child, torch.nn.ModuleList)), None)
    if not layers:
        raise DataError("unfit_model", f"sharding: full: a {model.config.model_type} model has no list of layers")
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
    for steps in unpacked_on_use(model):
        steps[0].quant_state.to(device)
        steps.original.quant_state = steps[0].quant_state
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
