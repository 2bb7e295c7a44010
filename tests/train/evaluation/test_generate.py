"""Greedy generation takes the highest logit of a whole pass for each token.

It leaves the model as it was.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.training.architectures import ARCHITECTURES, TRAINS, build
from support.training.tiny_training import force_attention, plain_kernels, tiny_model

from packcorpus.train.config import TrainingConfig
from packcorpus.train.evaluation import generating, greedy
from packcorpus.train.model.attention import separate_by_positions
from packcorpus.train.model.qlora import add_adapter

PROMPT, LIMIT = list(range(5, 45)), 12


def whole_passes(model: Any, prompt: list[int], limit: int) -> list[int]:
    """Generate without a cache: each token takes one pass over all tokens."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(limit):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def generated(model: Any, limit: int = LIMIT, stops: Any = ()) -> list[int]:
    with generating(model, torch.float32):
        return greedy(model, PROMPT, limit, stops)


# Scaled and capped logits, windows, masks that are built here, experts, latent attention, learned positions, a layer
# between the decoder and the head.
MODELS = ("granite", "cohere", "gemma2", "exaone4", "gpt_oss", "deepseek_v3", "gpt_neo", "modernbert-decoder")


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_whole_passes(name: str) -> None:
    settings, result = ARCHITECTURES[name]
    assert result == TRAINS
    torch.manual_seed(3)
    model = build(name, **settings)
    model.config.use_cache = False
    model = add_adapter(model, TrainingConfig(quantization="none", lora_r=4))
    separate_by_positions(model)
    with torch.no_grad():
        for weight_name, weights in model.named_parameters():
            if "lora_B" in weight_name:
                weights.normal_(std=0.05)
    if model.supports_gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    found = generated(model.train())
    assert found == whole_passes(model.eval(), PROMPT, LIMIT)
    assert len(found) == LIMIT


@pytest.mark.parametrize("backend", ["varlen", "flash2", "flex"])
def test_a_backend_of_packed_rows_is_replaced_and_restored(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    plain_kernels(monkeypatch)
    monkeypatch.setattr("packcorpus.train.model.attention.unavailable_reason", lambda *_: None)
    expected = whole_passes(tiny_model().eval(), PROMPT, LIMIT)
    model = tiny_model()
    force_attention(model, backend)
    kind = model.config._attn_implementation
    monkeypatch.setattr(type(model.get_base_model()), "set_attn_implementation", _set_without_package)
    assert generated(model) == expected
    assert model.config._attn_implementation == kind


def _set_without_package(model: Any, kind: str) -> None:
    model.config._attn_implementation_internal = kind


def test_generation_changes_neither_weights_nor_modes_nor_random_numbers() -> None:
    model = tiny_model(dropout=0.5)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = whole_passes(tiny_model().eval(), PROMPT, LIMIT)
    state, threads = torch.get_rng_state(), torch.is_grad_enabled()
    with generating(model, torch.float32):
        assert not any(module.training for module in model.modules())
        torch.rand(3)
        assert greedy(model, PROMPT, LIMIT, ()) == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled() == threads
    assert all(module.training for module in model.modules())
    assert model.config.use_cache is False
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())


def test_compiled_layers_run_as_written() -> None:
    model = tiny_model()
    expected, compiled = generated(model), []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    for layer in model.get_decoder().layers:
        layer.compile(backend=backend)
    assert generated(model) == expected
    assert not compiled
    model(input_ids=torch.tensor([PROMPT]))
    assert compiled, "training compiles them"


def test_generation_ends_with_a_stop_token_or_at_the_limit() -> None:
    model = tiny_model()
    found = generated(model)
    assert generated(model, stops={found[4]}) == found[: found.index(found[4]) + 1]
    assert generated(model, limit=3) == found[:3]
    assert generated(model, limit=0) == []
