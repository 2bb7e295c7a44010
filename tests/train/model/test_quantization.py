"""Weights in 4 bits: experts, weights read directly, quantized checkpoints.

A model in NF4 is compared with a model in fp32 that has the same values, which is loaded without quantization.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from safetensors.torch import load_file, save_file
from support.training.architectures import ARCHITECTURES, EXPERTS, HEAD, LATENT, WINDOW, build
from support.training.finished_runs import randomize
from support.training.loaded_model import adapter, batch_of
from support.training.mxfp4 import save_mxfp4
from support.training.tiny_training import gradients, largest_difference
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from packcorpus.tasks.core.errors import DataError, UsageError
from packcorpus.train.config import TrainingConfig
from packcorpus.train.loop.trainer import Measured
from packcorpus.train.measures import parameters
from packcorpus.train.model import base_model, qlora, quantization
from packcorpus.train.model.qlora import load_model, quantized
from packcorpus.train.model.quantization import QuantizedExperts

# Architectures whose code reads weights of linear layers directly, or has linear layers of its own.
DIRECT: dict[str, dict[str, Any]] = {
    "gemma3n_text": HEAD | WINDOW | {
        "layer_types": ["sliding_attention", "full_attention"], "intermediate_size": [128, 128],
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 500, "laurel_rank": 8,
        "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0],
    },
    "longcat_flash": LATENT | {
        "num_layers": 2, "zero_expert_num": 2, "ffn_hidden_size": 128, "expert_ffn_hidden_size": 32, "moe_topk": 2,
        "head_dim": 8,
    },
    "deepseek_v4": HEAD | EXPERTS | {
        "q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2, "qk_rope_head_dim": 8, "index_n_heads": 2,
        "index_head_dim": 16, "num_hidden_layers": 3,
    },
    "mamba": ARCHITECTURES["mamba"][0],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quick() -> None:
    torch.set_num_threads(1)


def save(folder: Path, name: str, **settings: Any) -> Path:
    """Write a tiny model, and return its folder."""
    torch.manual_seed(3)
    given = DIRECT.get(name) or ARCHITECTURES[name][0]
    build(name, **given | settings).save_pretrained(folder)
    return folder


def load(base: Path, quantization: str = "nf4", **config: Any) -> Any:
    """Load a model with an adapter whose B is not zero."""
    given = TrainingConfig(quantization=quantization, lora_dropout=0.0, **config)
    model = load_model(base, given, "cpu", torch.float32, "eager")
    randomize(model, 0.05)
    return model


def unpacked(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights of the base model by name, all in fp32."""
    found = {}
    for name, module in model.get_base_model().named_modules():
        if ".lora_" in name or ".parametrizations" in name:
            continue
        place = name.replace(".base_layer", "")
        values = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        for key in getattr(module, "parametrizations", {}):
            values[key] = getattr(module, key)
        for key, value in values.items():
            state = getattr(value, "quant_state", None)
            found[f"{place}.{key}".lstrip(".")] = value if state is None else dequantize_4bit(value.data, state)
    return found


def in_fp32(model: Any, folder: Path, name: str, **settings: Any) -> Path:
    """Write the values of a model in NF4 as a checkpoint in fp32."""
    plain = build(name, **(DIRECT.get(name) or ARCHITECTURES[name][0]) | settings)
    values = unpacked(model)
    plain.load_state_dict({key: values[key] for key in plain.state_dict()})
    plain.save_pretrained(folder)
    return folder


# -- experts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "granitemoe", "jetmoe", *DIRECT])
def test_loss_and_gradients_are_those_of_the_same_values_in_fp32(
    name: str, checkpointing: bool, tmp_path: Path
) -> None:
    packed = load(save(tmp_path / "base", name), activation_checkpointing=checkpointing)
    plain = load(in_fp32(packed, tmp_path / "fp32", name), quantization="none", activation_checkpointing=checkpointing)
    assert adapter(packed).keys() == adapter(plain).keys()
    assert all(torch.equal(value, adapter(plain)[key]) for key, value in adapter(packed).items())
    found, expected = (gradients(model, **batch_of(0, 1)) for model in (packed, plain))
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys()
    assert largest_difference(expected[1], found[1]) < 1e-5
    if name in ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "granitemoe"):
        assert all(found[1][key].any() for key in adapter(packed)), "an adapter has no effect"
    again = gradients(packed, **batch_of(0, 1))
    assert again[0] == found[0], "something of the first pass is left"
    assert largest_difference(found[1], again[1]) == 0


def test_the_loss_is_that_of_linear_layers_in_nf4(tmp_path: Path) -> None:
    """A stack is quantized like the weight of a linear layer of the same values."""
    base = save(tmp_path, "qwen3_moe")
    original, stacks = AutoModelForCausalLM.from_pretrained(base), 0
    found = unpacked(load(base))
    for name, value in original.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        stacks += 1
        flat = value.detach().flatten(0, 1)
        layer = bitsandbytes.nn.Linear4bit(flat.shape[1], flat.shape[0], bias=False, quant_type="nf4")
        layer.load_state_dict({"weight": flat})
        weight = layer.to("cpu").weight
        assert torch.equal(dequantize_4bit(weight.data, weight.quant_state).view(value.shape), found[name])
        # Each expert on its own has the same 4 bits. Only the mean of the scales is that of the stack.
        together, _ = quantize_4bit(flat, blocksize=64, compress_statistics=True, quant_type="nf4")
        alone = [quantize_4bit(expert.contiguous(), blocksize=64, quant_type="nf4")[0] for expert in value.detach()]
        assert torch.equal(torch.cat(alone), together)
    assert stacks == 4


def test_experts_are_packed_and_counted(tmp_path: Path) -> None:
    base = save(tmp_path, "qwen3_moe")
    model = load(base)
    stacks = [module for module in model.modules() if hasattr(module, "parametrizations")]
    assert len(stacks) == 2
    for module in stacks:
        for name in ("gate_up_proj", "down_proj"):
            packed = module.parametrizations[name].original
            assert packed.dtype == torch.uint8
            assert 2 * packed.numel() == math.prod(getattr(module, name).shape)
            assert len(module.parametrizations[name]) == 1
    assert parameters(model) == parameters(load(base, quantization="none"))


def test_only_one_stack_is_in_16_bits_while_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save(tmp_path, "mixtral", num_hidden_layers=6)
    alive: set[int] = set()
    most = 0

    def counted(value: torch.Tensor, **how: Any) -> Any:
        nonlocal most
        if value.ndim == 3:
            storage = value.untyped_storage()
            alive.add(id(storage))
            most = max(most, len([module for module in models for part in floating_stacks(module)]))
        return quantize_4bit(value, **how)

    models: list[Any] = []
    convert = quantization._Quantize.convert

    def watched(self: Any, input_dict: Any, model: Any = None, **others: Any) -> Any:
        models[:] = [model]
        return convert(self, input_dict, model=model, **others)

    def floating_stacks(model: Any) -> list[Any]:
        return [
            weights
            for weights in model.parameters()
            if weights.ndim == 3 and weights.is_floating_point() and weights.device.type != "meta"
        ]

    monkeypatch.setattr(bitsandbytes.functional, "quantize_4bit", counted)
    monkeypatch.setattr(quantization._Quantize, "convert", watched)
    load(base)
    assert len(alive) > 0
    assert most == 0, "the model holds no stack before it is packed"


def test_the_adapter_fits_the_original_model(tmp_path: Path) -> None:
    base = save(tmp_path / "base", "qwen3_moe")
    files = {}
    for way in ("nf4", "none"):
        model = load(base, quantization=way)
        model.save_pretrained(tmp_path / way)
        files[way] = load_file(tmp_path / way / "adapter_model.safetensors")
    assert {name: value.shape for name, value in files["nf4"].items()} == {
        name: value.shape for name, value in files["none"].items()
    }
    configs = [json.loads((tmp_path / way / "adapter_config.json").read_text()) for way in files]
    assert sorted(configs[0].pop("target_parameters")) == sorted(configs[1].pop("target_parameters"))
    assert sorted(configs[0].pop("target_modules")) == sorted(configs[1].pop("target_modules"))
    assert configs[0] == configs[1]
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "nf4")
    assert all(
        torch.equal(value, files["nf4"][key]) for key, value in plain.state_dict().items() if key in files["nf4"]
    )
    again = load(base, adapter=str(tmp_path / "nf4"))
    assert all(key.replace(".default", "") in files["nf4"] for key in adapter(again))


def test_the_naive_order_trains_only_a_part_and_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save(tmp_path, "qwen3_moe")
    monkeypatch.setattr(QuantizedExperts, "_activate_lora", ParamWrapper._activate_lora)
    _, found = gradients(load(base, activation_checkpointing=False), **batch_of(0, 1))
    assert any(not values.any() for values in found.values()) or found.keys() != adapter(load(base)).keys()
    monkeypatch.setattr(qlora, "use_quantized_experts", lambda *_: None)
    with pytest.raises(DataError, match="an adapter on experts in NF4 would be ignored"):
        load(base)


def test_the_rank_of_experts_is_divided_by_the_experts_of_a_token(tmp_path: Path) -> None:
    model = load(save(tmp_path, "qwen3_moe", num_experts_per_tok=4), lora_r=8, lora_alpha=16)
    layers = {name.rpartition(".")[2]: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    assert layers["q_proj"].r["default"] == 8
    assert {layer.r["default"] for layer in model.modules() if isinstance(layer, QuantizedExperts)} == {2}
    assert {layer.scaling["default"] for layer in layers.values()} == {2.0}, "servers read only one scale"


# -- weights that are read directly ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gemma3n_text", {"prediction_coefs", "correction_coefs"}), ("longcat_flash", {"classifier"}),
        ("mamba", {"dt_proj"}), ("deepseek_v4", set()), ("qwen3_moe", set()),
    ],
)  # fmt: skip
def test_weights_that_are_read_directly_stay_unpacked_and_are_not_adapted_if_the_layer_never_runs(
    name: str, kinds: set[str], tmp_path: Path
) -> None:
    model = load(save(tmp_path, name))
    kept = model.get_base_model().in_16_bits
    assert {place.rpartition(".")[2] for place in kept} == kinds
    in_4_bits = [layer for layer in quantized(model) if hasattr(layer.weight, "quant_state")]
    assert in_4_bits
    adapted = {key.split(".")[-4] for key in adapter(model)}
    assert adapted.isdisjoint({"correction_coefs", "classifier", "dt_proj", "o_a_proj"})
    notes, warnings = quantization.described(tmp_path, model, TrainingConfig())
    assert warnings == []
    assert (
        notes
        == [
            f"quantization: {len(kept)} layers ({', '.join(sorted(kinds))}) are not quantized, because the code of "
            f"{model.config.model_type} models reads their weights directly"
        ]
        * bool(kinds)
        or len(kept) == 1
    )


# -- checkpoints that are quantized ------------------------------------------------------------------------------------


def quantize_config(folder: Path, **values: Any) -> Path:
    """Write a tiny model whose config names a quantization."""
    save(folder, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": values}))
    return folder


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8"),
        ({"quant_method": "gptq", "bits": 4}, "GPTQ"),
        ({"quant_method": "awq", "bits": 4}, "AWQ"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "compressed-tensors"),
        ({"quant_method": "eetq"}, "EETQ"),
        ({"quant_method": "bitnet"}, "bitnet"),
        ({"quant_method": "of-next-year"}, "of-next-year"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"int8 \(bitsandbytes\)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "FP4"),
        ({"group_size": 64, "bits": 4}, "the format of MLX"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(values: dict[str, Any], named: str, tmp_path: Path) -> None:
    folder = quantize_config(tmp_path / "Model-7B-FP8-dynamic", **values)
    message = rf"is stored in {named}, which cannot be trained; use the original .* in 16 bits, such as Model-7B, "
    with pytest.raises(DataError, match=message) as caught:
        base_model.read_config(folder)
    assert caught.value.reason == "quantized_model"


@pytest.mark.parametrize("name", quantization.SIDECARS)
def test_a_file_beside_the_config_names_the_method(name: str, tmp_path: Path) -> None:
    save(tmp_path, "llama")
    (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match=r"is stored in .*, which cannot be trained"):
        base_model.read_config(tmp_path)


def test_quantized_tensors_without_any_config_are_no_damaged_file(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    values = load_file(tmp_path / "model.safetensors")
    weight = values.pop("model.layers.0.mlp.up_proj.weight")
    values["model.layers.0.mlp.up_proj.qweight"] = weight.to(torch.int32)
    save_file(values, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match="is stored in a quantized format, which cannot be trained"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "original"),
    [
        ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B"), ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B-Instruct"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B-Instruct"), ("TheBloke/Llama-2-7B-GPTQ", "Llama-2-7B"),
        ("RedHatAI/Qwen3-8B-quantized.w4a16", "Qwen3-8B"), ("RedHatAI/gemma-3-4b-it-FP8-dynamic", "gemma-3-4b-it"),
        ("mlx-community/Qwen3-4B-4bit", "Qwen3-4B"), ("nvidia/Qwen3-8B-NVFP4", "Qwen3-8B"),
        ("unsloth/Llama-3.2-1B-bnb-8bit", "Llama-3.2-1B"), ("deepseek-ai/DeepSeek-V3", ""),
    ],
)  # fmt: skip
def test_the_original_is_named_if_it_can_be_derived(name: str, original: str) -> None:
    text = str(quantization.refused(name, "FP8"))
    assert (f"in 16 bits, such as {original}, which" in text) if original else ("in 16 bits, which" in text)


def test_weights_that_the_class_of_a_model_does_not_have(tmp_path: Path) -> None:
    save(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    _, [warning] = quantization.described(tmp_path, load(tmp_path), TrainingConfig())
    assert "LlamaForCausalLM does not use 4 weights of the checkpoint, such as model.layers.0.self_attn.k" in warning


def test_a_name_on_the_hub_is_refused_before_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("llama", quantization_config={"quant_method": "fp8"})
    monkeypatch.setattr(base_model.AutoConfig, "from_pretrained", lambda *_, **__: config)
    with pytest.raises(DataError, match=r"base_model: Qwen/Qwen3-8B-FP8: is stored in FP8.*such as Qwen/Qwen3-8B,"):
        base_model.read_config("Qwen/Qwen3-8B-FP8")


def test_a_base_in_nf4_trains_with_a_warning(tmp_path: Path) -> None:
    base = save(tmp_path / "base", "llama")
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    AutoModelForCausalLM.from_pretrained(base, quantization_config=nf4).save_pretrained(tmp_path / "nf4")
    base_model.read_config(tmp_path / "nf4")
    packed = load(tmp_path / "nf4")
    assert {layer.compute_dtype for layer in quantized(packed)} == {torch.float32}
    plain = load(in_fp32(packed, tmp_path / "fp32", "llama"), quantization="none")
    found, expected = (gradients(model, **batch_of(0)) for model in (packed, plain))
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    _, [warning] = quantization.described(tmp_path / "nf4", packed, TrainingConfig())
    assert "is stored in NF4: the adapter can be used with it, but not merged" in warning
    with pytest.raises(DataError, match=r"is stored in NF4, .*; set quantization: nf4"):
        load(tmp_path / "nf4", quantization="none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_unpacked_and_trained_as_it_is_or_in_nf4(dtype: torch.dtype, tmp_path: Path) -> None:
    decoded = save_mxfp4(tmp_path)
    base_model.read_config(tmp_path)
    for way in ("none", "nf4"):
        model = load_model(tmp_path, TrainingConfig(quantization=way), "cpu", dtype, "eager")
        found = unpacked(model)
        for name, expected in decoded.items():
            assert found[name].dtype == dtype
            if way == "nf4":
                packed, state = quantize_4bit(
                    expected.to(dtype).contiguous(), blocksize=64, compress_statistics=True, quant_type="nf4"
                )
                expected = dequantize_4bit(packed, state)
            assert torch.equal(found[name], expected.to(dtype))
        assert bool(quantized(model)) == (way == "nf4")
        [note], [] = quantization.described(tmp_path, model, TrainingConfig(quantization=way))
        now = {"none": "in 16 bits", "nf4": "quantized to NF4"}[way]
        assert note.endswith(f"is stored in MXFP4; its experts were unpacked, and are {now}")
        randomize(model, 0.05)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            _, gradient = gradients(model, **batch_of(0))
        assert all(values.any() for values in gradient.values())
        assert gradient.keys() == adapter(model).keys()


def test_a_run_of_an_earlier_version_with_another_rank_of_experts_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, checkpoint = save(tmp_path / "base", "qwen3_moe"), tmp_path / "run" / "checkpoint-2"
    load(base, lora_r=8).save_pretrained(checkpoint)

    def resume() -> None:
        Measured._load_from_checkpoint(SimpleNamespace(model=load(base, lora_r=8)), str(checkpoint))  # type: ignore[arg-type]

    resume()
    monkeypatch.setattr(qlora, "rank_of_experts", lambda _model, rank: rank)
    with pytest.raises(UsageError, match=r"run: was trained with other weights .* by an earlier version; set"):
        resume()
