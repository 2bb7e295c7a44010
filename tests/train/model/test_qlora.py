"""Weights that are frozen, quantized, and adapted.

A tiny model is saved in the usual way, loaded by the real code on the CPU, and trained on real rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.training.loaded_model import adapter, batch_of, load, save_base
from support.training.tiny_training import (
    LENGTH,
    VOCABULARY,
    gradients,
    largest_difference,
)
from transformers import FalconConfig, FalconForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

from packcorpus.tasks.core.errors import DataError, PackError, PartMissing
from packcorpus.train.config import TrainingConfig
from packcorpus.train.measures import parameters, share_in_4_bits
from packcorpus.train.model import base_model, qlora
from packcorpus.train.model.qlora import check

PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


def adapted(model: Any) -> set[str]:
    """Return the last parts of the names of the layers that have an adapter."""
    return {name.split(".")[-4] for name, weights in model.named_parameters() if weights.requires_grad}


def test_layers_of_a_class_of_its_own_are_named_if_they_cannot_be_quantized(tmp_path: Path) -> None:
    config = FalconConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    FalconForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(PartMissing, match=r"falcon model are of the class FalconLinear.*set quantization: none"):
        load(tmp_path)


# -- base and adapter --------------------------------------------------------------------------------------------------


def test_the_loss_falls_with_nf4_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It falls by over 10 % in 20 steps, and no weight of the base model changes."""
    monkeypatch.setattr(base_model, "PARAMETERS", 500_000)
    model = load(base_model.build_small_llama(VOCABULARY, LENGTH, 42, tmp_path))
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    for _ in range(20):
        loss = model(**batch_of(0))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if not p.requires_grad)


def test_every_linear_layer_except_the_head_is_quantized_and_adapted(base: Path) -> None:
    model = load(base)
    assert {type(layer).__name__ for name, layer in model.named_modules() if name.endswith("base_layer")} == {
        "Linear4bit"
    }
    assert len(qlora.quantized(model)) == 2 * len(PROJECTIONS)
    assert type(model.get_output_embeddings()) is torch.nn.Linear
    assert adapted(model) == PROJECTIONS
    state = qlora.quantized(model)[0].weight.quant_state
    assert (state.quant_type, state.nested, state.dtype) == ("nf4", True, torch.float32)
    assert {weights.dtype for weights in adapter(model).values()} == {torch.float32}
    assert model.is_activation_checkpointing
    assert not model.config.use_cache


def test_the_share_in_4_bits_is_that_of_the_frozen_weights(base: Path) -> None:
    model = load(base)
    in_4_bits = sum(layer.in_features * layer.out_features for layer in qlora.quantized(model))
    frozen = in_4_bits + sum(
        weights.numel()
        for weights in model.parameters()
        if not weights.requires_grad and not hasattr(weights, "quant_state")
    )
    assert share_in_4_bits(model) == in_4_bits / frozen
    assert 0.5 < share_in_4_bits(model) < 0.9, "the embeddings are not"
    assert share_in_4_bits(load(base, quantization="none")) == 0


def test_attention_only_without_quantization(base: Path) -> None:
    model = load(base, lora_targets="attention", quantization="none", lora_r=4, activation_checkpointing=False)
    assert adapted(model) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert qlora.quantized(model) == []
    assert {weights.shape[0] for name, weights in adapter(model).items() if "lora_A" in name} == {4}
    assert not model.is_activation_checkpointing


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_adapter_is_fp32_on_a_base_of_16_bits(base: Path, dtype: torch.dtype) -> None:
    model = load(base, dtype)
    assert model.get_input_embeddings().weight.dtype == dtype
    assert qlora.quantized(model)[0].compute_dtype == dtype
    assert {weights.dtype for weights in adapter(model).values()} == {torch.float32}


def test_the_adapter_depends_only_on_the_seed(base: Path) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    once = adapter(load(base, seed=5))
    assert torch.equal(before, torch.get_rng_state()), "random numbers of the caller were used"
    torch.manual_seed(2)
    again, other = adapter(load(base, seed=5)), adapter(load(base, seed=6))
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert not any(torch.equal(once[name], other[name]) for name in once if "lora_A" in name)


def test_nf4_parameters_are_counted_unpacked(base: Path) -> None:
    assert parameters(load(base)) == parameters(load(base, quantization="none"))


def test_evaluation_does_not_change_training(base: Path) -> None:
    """bitsandbytes may repack weights in place for inference on a CPU."""
    model, batch = load(base, lora_dropout=0.0), batch_of(0, 1)
    before = gradients(model, **batch)
    model.eval()
    with torch.no_grad():
        model(**batch)
    after = gradients(model.train(), **batch)
    assert after[0] == before[0]
    assert largest_difference(before[1], after[1]) == 0


@pytest.mark.parametrize("quantization", ["nf4", "none"])
def test_activation_checkpointing_gives_the_same_gradients(base: Path, quantization: str) -> None:
    on, off = (
        gradients(
            load(base, activation_checkpointing=flag, quantization=quantization, lora_dropout=0.0), **batch_of(0, 1)
        )
        for flag in (True, False)
    )
    assert on[0] == pytest.approx(off[0], rel=1e-6)
    assert largest_difference(on[1], off[1]) < 1e-5


# -- refusals ----------------------------------------------------------------------------------------------------------


def rejected(kind: type[PackError], message: str, call: Any, *arguments: Any) -> None:
    with pytest.raises(kind, match=message) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)


def test_quantization_without_effect_is_rejected(base: Path) -> None:
    model = load(base, quantization="none")
    check(model, TrainingConfig(quantization="none"))
    rejected(PartMissing, "nf4 is not in effect", check, model, TrainingConfig())
    quantized = load(base)
    qlora.quantized(quantized)[3].weight.quant_state.quant_type = "fp4"
    rejected(PartMissing, "nf4 is not in effect: the model has .*fp4", check, quantized, TrainingConfig())


def test_a_trainable_weight_outside_the_adapter_is_rejected(base: Path) -> None:
    model = load(base)
    model.get_input_embeddings().weight.requires_grad_(True)
    rejected(DataError, "1 weight outside .* such as .*embed_tokens.weight", check, model, TrainingConfig())


def test_an_adapter_in_low_precision_is_rejected(base: Path) -> None:
    model = load(base)
    for weights in model.parameters():
        if weights.requires_grad:
            weights.data = weights.data.bfloat16()
    rejected(DataError, "must be fp32", check, model, TrainingConfig())


def test_a_model_with_other_names_of_attention(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=50, **sizes)).save_pretrained(tmp_path)
    assert adapted(load(tmp_path, lora_targets="attention")) == {"query_key_value"}
    assert adapted(load(tmp_path)) == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_model_that_does_not_fit_is_not_called_damaged(
    base: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise kind("CUDA error: out of memory\nmore")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
    rejected(PartMissing, "does not fit into the memory of cpu", lambda: load(base))


def test_missing_or_pickled_weights_are_rejected(base: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    rejected(DataError, "has no weights; copy its", lambda: load(tmp_path))
    torch.save({}, tmp_path / "pytorch_model.bin")
    rejected(DataError, "has weights only as pickles", lambda: load(tmp_path))


def test_truncated_or_misshapen_weights_are_rejected(base: Path, tmp_path: Path) -> None:
    weights = (base / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    rejected(DataError, "cannot be read", lambda: load(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(weights)
    config = json.loads((base / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    for quantization in ("nf4", "none"):
        rejected(DataError, "shapes|size mismatch|mismatched", lambda q=quantization: load(tmp_path, quantization=q))


def test_missing_tensors_are_not_initialized_randomly(base: Path, tmp_path: Path) -> None:
    """transformers would initialize them randomly."""
    (tmp_path / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    config = json.loads((base / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    rejected(DataError, r"lacks \d+ weights?, such as", lambda: load(tmp_path))
