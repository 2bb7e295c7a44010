"""What is frozen, quantized, and adapted; options change only speed.

A tiny model is saved in the usual way, loaded by the real code on the CPU, and trained on real rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training.tiny_training import LENGTH, VOCABULARY, packed_rows, tiny_model
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from tasks.core.errors import DataError, PackError, PartMissing
from train.config import TrainingConfig
from train.machine.devices import compiler
from train.model import base_model, qlora
from train.model.attention import Collator
from train.model.flops import parameters, share_in_4_bits
from train.model.qlora import apply_options, check, compile_layers, fuse_loss, load_model, loss_and_gradient

PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

needs_compiler = pytest.mark.skipif(compiler() is None, reason="torch.compile needs a C++ compiler on a CPU")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model that can learn (weights of the usual size), tied embeddings."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model(adapter=False, initializer_range=0.02, tie_word_embeddings=True, use_cache=True).save_pretrained(folder)
    return folder


def load(base: Path, bf16: bool = False, **changes: Any) -> Any:
    return load_model(base, TrainingConfig(**changes), "cpu", bf16)


def batch_of(*rows: int) -> dict[str, torch.Tensor]:
    return Collator("sdpa")([packed_rows()[i] for i in rows])


def adapter(model: Any) -> dict[str, torch.Tensor]:
    return {name: weights.detach().clone() for name, weights in model.named_parameters() if weights.requires_grad}


def adapted(model: Any) -> set[str]:
    """Return the last names of the layers that have an adapter."""
    return {name.split(".")[-4] for name, weights in model.named_parameters() if weights.requires_grad}


def gradients(model: Any, **inputs: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**inputs)["loss"]
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the relative difference over all gradients."""
    assert one.keys() == other.keys()
    off, size = (
        torch.cat([x.flatten() for x in values]).norm() for values in ([one[n] - other[n] for n in one], one.values())
    )
    return float(off / size)


# -- base and adapter --------------------------------------------------------------------------------------------------


def test_the_loss_falls_with_nf4_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By more than 10 % in 20 steps, while no weight of the base model changes."""
    monkeypatch.setattr(base_model, "PARAMETERS", 500_000)
    model = load(base_model.build_small_llama(VOCABULARY, LENGTH, 42, tmp_path))
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    for _ in range(20):
        loss = model(**batch_of(0, 1))["loss"]
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


def test_the_adapter_is_fp32_on_a_bf16_base(base: Path) -> None:
    model = load(base, bf16=True)
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert qlora.quantized(model)[0].compute_dtype == torch.bfloat16
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


def test_missing_or_pickled_weights_are_rejected(base: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    rejected(DataError, "cannot be read", lambda: load(tmp_path))
    torch.save({}, tmp_path / "pytorch_model.bin")
    rejected(DataError, "cannot be read", lambda: load(tmp_path))


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


# -- the fused loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("items", [None, 77, torch.tensor(1234)])
def test_the_fused_loss_equals_the_loss(base: Path, items: Any, checkpointing: bool) -> None:
    model = load(base, lora_dropout=0.0, activation_checkpointing=checkpointing)
    inputs = batch_of(0, 1, 2) | ({} if items is None else {"num_items_in_batch": items})
    plain, expected = gradients(model, **inputs)
    undo = fuse_loss(model)
    fused, found = gradients(model, **inputs)
    assert fused == pytest.approx(plain, rel=1e-5)
    assert largest_difference(expected, found) < 1e-4
    assert model(**inputs).logits is None
    undo()
    assert model(**inputs).logits is not None


def test_a_fused_loss_in_bf16_is_not_rounded_to_bf16(tmp_path: Path) -> None:
    tiny_model(adapter=False, initializer_range=0.1).save_pretrained(tmp_path)
    model, batch = load(tmp_path, bf16=True), batch_of(*range(16))
    plain, _ = loss_and_gradient(model, batch, True)
    fuse_loss(model)
    fused, _ = loss_and_gradient(model, batch, True)
    assert fused == pytest.approx(plain, rel=5e-4)


def test_a_pass_without_labels_still_has_logits(base: Path) -> None:
    model = load(base).eval()
    inputs = batch_of(0)
    del inputs["labels"]
    with torch.no_grad():
        plain = model(**inputs)["logits"]
        fuse_loss(model)
        assert torch.equal(model(**inputs)["logits"], plain)


def test_the_fused_loss_works_under_ddp(base: Path) -> None:
    model = load(base, lora_dropout=0.0)
    expected = gradients(model, **batch_of(0, 1))
    fuse_loss(model)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        found = gradients(DistributedDataParallel(model), **batch_of(0, 1))
    finally:
        torch.distributed.destroy_process_group()
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert largest_difference(expected[1], {n.removeprefix("module."): g for n, g in found[1].items()}) < 1e-4


# -- options are tested first ------------------------------------------------------------------------------------------


def same_as_before(model: Any, before: dict[str, torch.Tensor]) -> bool:
    now = adapter(model)
    return all(torch.equal(before[name], now[name]) for name in before) and all(
        p.grad is None for p in model.parameters()
    )


def test_every_weight_of_the_adapter_has_a_gradient_to_compare(base: Path) -> None:
    model = load(base)
    before = adapter(model)
    assert not all(g.any() for g in gradients(model, **batch_of(0))[1].values()), "a new adapter is not the hard case"
    with qlora._adapter_with_gradients(model, 1):
        assert all(g.any() for g in gradients(model, **batch_of(0))[1].values())
    model.zero_grad()
    assert same_as_before(model, before)


def test_only_requested_options_are_tried(base: Path) -> None:
    assert apply_options(load(base), TrainingConfig(), batch_of(0), False) == []


@pytest.mark.parametrize("bf16", [False, True])
def test_the_fused_loss_is_used(base: Path, bf16: bool) -> None:
    model, config = load(base, bf16=bf16), TrainingConfig(fused_loss=True)
    before, random = adapter(model), torch.get_rng_state()
    (note,) = apply_options(model, config, batch_of(0, 1), bf16)
    assert note.startswith("fused_loss: used")
    assert same_as_before(model, before)
    assert torch.equal(torch.get_rng_state(), random)
    assert model(**batch_of(0)).logits is None
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {config.lora_dropout, 0.0} - {0.0}


@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_a_fused_loss_that_differs_is_not_used(base: Path, monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    real = torch.nn.functional.linear_cross_entropy
    monkeypatch.setattr(torch.nn.functional, "linear_cross_entropy", lambda *a, **b: real(*a, **b) * wrong)
    model = load(base)
    before = adapter(model)
    (note,) = apply_options(model, TrainingConfig(fused_loss=True), batch_of(0, 1), False)
    assert note.startswith("fused_loss: not used: loss or gradient differs by")
    assert model(**batch_of(0)).logits is not None
    assert same_as_before(model, before)


def test_a_wrong_gradient_of_a_correct_loss_is_not_used(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.nn.functional.linear_cross_entropy

    def off(*arguments: Any, **named: Any) -> torch.Tensor:
        loss = real(*arguments, **named)
        return loss.detach() + 1.01 * (loss - loss.detach())

    monkeypatch.setattr(torch.nn.functional, "linear_cross_entropy", off)
    (note,) = apply_options(load(base), TrainingConfig(fused_loss=True), batch_of(0, 1), False)
    assert note.startswith("fused_loss: not used")


def test_a_compiler_that_fails_is_not_used(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("\nNo working C++ compiler found.\nmore lines")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    model = load(base)
    before = adapter(model)
    (note,) = apply_options(model, TrainingConfig(compile=True), batch_of(0), False)
    assert note == "compile: not used: RuntimeError: No working C++ compiler found."
    assert same_as_before(model, before)
    model(**batch_of(0))["loss"].backward()


@needs_compiler
def test_compiled_layers_give_the_same_loss(base: Path) -> None:
    # Compiling 4-bit layers and adapters on all of them takes a minute.
    quick = {"quantization": "none", "lora_targets": "attention", "lora_dropout": 0.0}
    model, batch = load(base, **quick), batch_of(0)
    names = list(model.state_dict())
    expected = gradients(model, **batch)
    counters.clear()
    (note,) = apply_options(model, TrainingConfig(compile=True), batch, False)
    assert note.startswith("compile: used")
    assert counters["stats"]["unique_graphs"] == 1, "not one graph for all layers"
    assert all(layer._compiled_call_impl is not None for layer in model.get_decoder().layers)
    assert list(model.state_dict()) == names
    found = gradients(model, **batch)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert largest_difference(expected[1], found[1]) < 1e-4


def test_compilation_can_be_undone(base: Path) -> None:
    model = load(base)
    undo = compile_layers(model)
    undo()
    assert all(layer._compiled_call_impl is None for layer in model.get_decoder().layers)
    assert loss_and_gradient(model, batch_of(0), False)[0] > 0
