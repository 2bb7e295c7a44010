"""The loss of the trained tokens alone equals the loss of the whole model.

This holds for heads that scale or cap their logits, for trained heads, and for wrappers around a language model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.training.architectures import EXPERTS, HEAD, SIZES, WINDOW
from support.training.loaded_model import batch_of
from support.training.tiny_training import gradients, largest_difference, tiny_model
from torch.utils.hooks import RemovableHandle
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from packcorpus.train.model import token_loss
from packcorpus.train.model.options import try_fused_loss
from packcorpus.train.model.token_loss import fuse_loss

LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
GEMMA = HEAD | WINDOW | {"query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
MAMBA = HEAD | {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 32}
# Settings besides SIZES, and the tower of those that wrap a language model.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "granite": {"logits_scaling": 8.0},
    "cohere2": HEAD | WINDOW | {"logit_scale": 0.25, "layer_types": ["sliding_attention", "full_attention"]},
    "minicpm3": LATENT | {"num_key_value_heads": 4, "dim_model_base": 16},
    "falcon_h1": MAMBA | {"lm_head_multiplier": 0.3},
    "llama4": HEAD | EXPERTS | {"intermediate_size_mlp": 64},
    "gemma4": GEMMA | {"layer_types": ["sliding_attention", "full_attention"]},
}
TOWERS: dict[str, dict[str, Any]] = {"llama4": TOWER | {"image_size": 32, "patch_size": 16}, "gemma4": TOWER}
# Heads that do more than multiply by their weights.
CHANGED = [name for name in MODELS if name not in ("llama", "llama4")]


def build(name: str) -> Any:
    torch.manual_seed(0)
    if name not in TOWERS:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES | MODELS[name])).train()
    config = AutoConfig.for_model(name, text_config=SIZES | MODELS[name], vision_config=TOWERS[name])
    return AutoModelForImageTextToText.from_config(config).train()


def inputs(name: str = "llama") -> dict[str, Any]:
    batch = batch_of(0, 1)
    return batch | ({"mm_token_type_ids": torch.zeros_like(batch["input_ids"])} if name == "gemma4" else {})


def watched(model: Any) -> tuple[list[int], RemovableHandle]:
    """Return the numbers of tokens in the passes of the head."""
    seen: list[int] = []
    head = model.get_output_embeddings()
    return seen, head.register_forward_hook(lambda _head, _given, out: seen.append(out.shape[:-1].numel()))


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_loss, "CHUNK", 70)
    model, batch = build(name), inputs(name)
    plain, expected = gradients(model, **batch)  # of all weights, also of the head
    undo = fuse_loss(model)
    seen, hook = watched(model)
    fused, found = gradients(model, **batch)
    hook.remove()
    trained, rows = int((batch["labels"][:, 1:] != -100).sum()), len(batch["labels"])
    assert fused == pytest.approx(plain, rel=1e-6)
    assert largest_difference(expected, found) < 1e-5
    assert sum(seen) == trained + rows
    assert max(seen) <= 70
    with torch.no_grad():
        logits = model(**{key: x for key, x in batch.items() if key != "labels"})["logits"]
        right = model(**batch).predicted
    assert right == (logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]).sum()
    undo()
    assert gradients(model, **batch)[0] == plain


@pytest.mark.parametrize("name", CHANGED)
def test_a_head_that_forgets_how_logits_are_changed_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, model = token_loss._decode, build(name)
    head = model.get_output_embeddings()
    monkeypatch.setattr(token_loss, "_decode", lambda *given: (real(*given)[0], head, real(*given)[2]))
    assert try_fused_loss(model, inputs(name), torch.float32, 1).note.startswith("fused_loss: not used: loss or grad")
    monkeypatch.undo()
    assert try_fused_loss(model, inputs(name), torch.float32, 1).used


def test_a_model_with_another_loss_is_not_used() -> None:
    model = tiny_model("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    assert not try_fused_loss(model, inputs(), torch.float32, 1).used


def test_a_batch_without_trained_tokens_has_no_loss_and_no_gradient() -> None:
    model, batch = build("gemma2"), inputs()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    fuse_loss(model)
    loss, found = gradients(model, **batch, num_items_in_batch=9)
    assert loss == 0
    assert all(gradient.abs().max() == 0 for gradient in found.values())
    assert found.keys() == {name for name, _ in model.named_parameters()}, "DDP waits for all gradients"


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_with_a_bias_and_an_adapter_learns(tied: bool) -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny_model(adapter=False, tie_word_embeddings=tied)
    model.lm_head.bias = torch.nn.Parameter(torch.randn(model.config.vocab_size))
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    plain, expected = gradients(model, **inputs())
    fuse_loss(model)
    fused, found = gradients(model, **inputs())
    assert any("lm_head" in name for name in found)
    assert fused == pytest.approx(plain, rel=1e-6)
    assert largest_difference(expected, found) < 1e-5
