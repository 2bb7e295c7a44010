"""The adapter is on the configured layers of the text decoder, and only there."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from peft import get_peft_model
from support.training.architectures import ARCHITECTURES, EXPERTS, HEAD, MAMBA, SIZES, build
from support.training.tiny_training import tiny_model
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from packcorpus.tasks.core.errors import DataError
from packcorpus.train.config import TrainingConfig
from packcorpus.train.model.qlora import add_adapter, left_out, target_experts, target_layers

PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def last_names(layers: list[str]) -> set[str]:
    return {layer.rpartition(".")[2] for layer in layers}


def adapted(model: Any) -> set[str]:
    """Return the names of the modules that have an adapter."""
    return {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}


def test_all_layers_those_of_attention_or_those_of_a_list() -> None:
    model = tiny_model(adapter=False)
    assert last_names(target_layers(model, "all")) == PROJECTIONS
    assert len(target_layers(model, "all")) == 2 * len(PROJECTIONS)
    assert last_names(target_layers(model, "attention")) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert target_layers(model, ["up_proj"]) == ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]
    assert target_layers(build("gpt2", n_embd=64, n_layer=2, n_head=4), "attention")[0] == "transformer.h.0.attn.c_attn"


def test_a_name_that_the_model_lacks_is_reported_with_the_closest() -> None:
    with pytest.raises(DataError, match=r"lora_targets: qproj: a llama .*; did you mean q_proj\?"):
        target_layers(tiny_model(adapter=False), ["v_proj", "qproj"])
    with pytest.raises(DataError, match=r"no linear layer of that name; it has down_proj, gate_proj, k_proj"):
        target_layers(tiny_model(adapter=False), ["Wqkv_of_another_model"])
    with pytest.raises(DataError, match=r"attention: a jetmoe .*; set lora_targets: all, or some of \[kv_proj"):
        target_layers(build("jetmoe", **EXPERTS | {"kv_channels": 16}), "attention")


def test_other_towers_of_a_model_are_not_adapted() -> None:
    text = SIZES | HEAD | {"num_hidden_layers": 1}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=3)
    )
    assert any("vision" in name and "q_proj" in name for name, _ in model.named_modules())
    layers = target_layers(model, "all")
    assert last_names(layers) == PROJECTIONS
    assert len(layers) == len(PROJECTIONS)
    with_adapter = add_adapter(model, TrainingConfig())
    assert len(adapted(with_adapter)) == len(PROJECTIONS)
    assert not any("vision" in name for name in adapted(with_adapter))


def test_experts_are_adapted_without_dropout() -> None:
    model = build("qwen3_moe", **EXPERTS | HEAD)
    assert target_experts(model) == ["experts.down_proj", "experts.gate_up_proj"]
    with_adapter = add_adapter(model, TrainingConfig(lora_dropout=0.1))
    assert with_adapter.peft_config["default"].lora_dropout == 0.0
    assert any("experts" in name for name in adapted(with_adapter))
    assert not any("gate." in name for name in adapted(with_adapter)), "routers keep their choice"
    attention = add_adapter(
        build("qwen3_moe", **EXPERTS | HEAD), TrainingConfig(lora_targets="attention", lora_dropout=0.1)
    )
    assert attention.peft_config["default"].lora_dropout == 0.1
    assert not any("experts" in name for name in adapted(attention))
    assert target_experts(tiny_model(adapter=False)) == []


def test_every_layer_is_adapted_with_the_rank_or_known_to_be_left_out() -> None:
    # PEFT takes gate_proj, up_proj, and down_proj for experts in these models, also when it loads the adapter.
    for name, dense in (("deepseek_v3", 6), ("qwen2_moe", 0)):
        model = build(name, **ARCHITECTURES[name][0])
        layers = target_layers(model, "all")
        model = add_adapter(model, TrainingConfig(quantization="none", lora_r=4))
        adapters = {key: value for key, value in model.named_parameters() if ".lora_B." in key}
        sizes = {value.shape[1] for key, value in adapters.items()}
        assert sizes == {4, 2 * 8}, "those of 8 experts are stacked, and a token has two"
        missing = left_out(model)
        assert len(missing) == dense
        found = {key.removeprefix("base_model.model.") for key in adapted(model)}
        assert {layer for layer in layers if layer not in found} == {*missing}
        assert model.peft_config["default"].rank_pattern == {"experts.gate_up_proj": 2, "experts.down_proj": 2}
        assert {*model.peft_config["default"].target_parameters} == {"experts.gate_up_proj", "experts.down_proj"}
        again = get_peft_model(build(name, **ARCHITECTURES[name][0]), deepcopy(model.peft_config["default"]))
        assert adapted(again) == adapted(model)
    with pytest.raises(DataError, match="lora_targets: gate_proj, up_proj: PEFT takes layers of this name for experts"):
        add_adapter(
            build("deepseek_v3", **ARCHITECTURES["deepseek_v3"][0]),
            TrainingConfig(quantization="none", lora_targets=["gate_proj", "up_proj", "q_b_proj"]),
        )


def test_what_a_kernel_of_mamba_reads_directly_is_not_adapted() -> None:
    layers = target_layers(build("falcon_h1", **MAMBA | HEAD | {"mamba_d_ssm": 64, "mamba_n_heads": 4}), "all")
    assert "in_proj" in last_names(layers)
    assert "out_proj" not in last_names(layers)


@pytest.mark.parametrize(("variant", "scale"), [("lora", 32 / 16), ("rslora", 32 / 16**0.5), ("dora", 32 / 16)])
def test_variants(variant: str, scale: float) -> None:
    model = add_adapter(tiny_model(adapter=False), TrainingConfig(lora_variant=variant, lora_r=16, lora_alpha=32))
    layer = next(module for name, module in model.named_modules() if name.endswith("q_proj"))
    assert layer.scaling["default"] == pytest.approx(scale)
    assert bool(layer.lora_magnitude_vector) == (variant == "dora")


def test_the_adapter_starts_from_the_seed_and_leaves_other_random_numbers() -> None:
    def weights(seed: int) -> torch.Tensor:
        model = tiny_model(adapter=False)
        state = torch.random.get_rng_state()
        model = add_adapter(model, TrainingConfig(seed=seed))
        assert torch.equal(torch.random.get_rng_state(), state)
        found: torch.Tensor = next(values for name, values in model.named_parameters() if "lora_A" in name)
        return found

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_what_peft_refuses_is_one_message() -> None:
    model = build("qwen3_moe", **EXPERTS | HEAD)
    with pytest.raises(
        DataError, match=r"lora_targets: all: a qwen3_moe model does not support this adapter \("
    ) as caught:
        add_adapter(model, TrainingConfig(lora_variant="dora"))
    assert "\n" not in str(caught.value)
