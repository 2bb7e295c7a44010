"""Every way to checkpoint activations gives the same loss and the same gradients."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.architectures import ARCHITECTURES, build
from support.training.loaded_model import load
from support.training.tiny_training import gradients, largest_difference, packed_rows, tiny_model
from torch.autograd.graph import save_on_cpu
from transformers import modeling_utils
from transformers.modeling_layers import GradientCheckpointingLayer

from packcorpus.train.__main__ import main
from packcorpus.train.config import TrainingConfig
from packcorpus.train.model import checkpointing, states
from packcorpus.train.model.attention import Collator
from packcorpus.train.model.checkpointing import Checkpointing, described, usable, use_checkpointing
from packcorpus.train.model.qlora import add_adapter

WAYS: tuple[Checkpointing, ...] = (False, True, 1, 2, 3, "offload")


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Offload without pinned memory, which a CPU does not have; returns the calls."""
    called: list[bool] = []

    def save(pin_memory: bool, device_type: str) -> Any:
        called.append(pin_memory)
        return save_on_cpu(pin_memory=False, device_type=device_type)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(modeling_utils, "save_on_cpu", save)
    return called


@pytest.mark.parametrize(("name", "settings"), [("llama", {}), ("gemma3_text", {}), ("qwen3_moe", {}), ("bamba", {})])
def test_all_ways_give_the_same_gradients(name: str, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    offloads = as_on_a_gpu(monkeypatch)
    torch.manual_seed(1)
    layers = {} if name == "bamba" else {"num_hidden_layers": 3}
    model = add_adapter(build(name, **ARCHITECTURES[name][0] | layers), TrainingConfig(quantization="none")).train()
    model.config.use_cache = False
    states.use_way(model, states.ways(model, "sdpa")[0])
    batch = Collator("sdpa")(packed_rows()[:2])
    parts = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    use_checkpointing(model, False)
    loss, expected = gradients(model, **batch)
    for way in WAYS:
        assert usable(model, way) == (way, "")
        use_checkpointing(model, way)
        step = way if type(way) is int else 1
        assert [part.gradient_checkpointing for part in parts] == [
            way is not False and number % step == 0 for number in range(len(parts))
        ]
        found = gradients(model, **batch)
        assert bool(offloads) == (way == "offload")
        assert found[0] == pytest.approx(loss, rel=1e-6)
        assert largest_difference(expected, found[1]) < 1e-5
    use_checkpointing(model, False)
    assert not any(part.gradient_checkpointing for part in parts)
    assert not model.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize("quantization", ["nf4", "none"])
def test_a_model_is_loaded_with_the_setting(tmp_path: Path, quantization: str) -> None:
    tiny_model(adapter=False, num_hidden_layers=3).save_pretrained(tmp_path)
    for setting, expected in (("auto", [1, 1, 1]), (True, [1, 1, 1]), (2, [1, 0, 1]), (False, [0, 0, 0])):
        model = load(tmp_path, quantization=quantization, activation_checkpointing=setting)
        assert [layer.gradient_checkpointing for layer in model.get_decoder().layers] == expected


@pytest.mark.parametrize("name", ["jetmoe", "openai-gpt", "ctrl"])
def test_a_model_that_does_not_support_it_trains_without(name: str) -> None:
    model = add_adapter(build(name, **ARCHITECTURES.get(name, ({}, ""))[0]), TrainingConfig(quantization="none"))
    for way in WAYS[1:]:
        assert usable(model, way) == (False, f"{name} models do not support it")
    use_checkpointing(model, False)


def test_what_cannot_be_done_is_done_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    assert usable(model, "offload") == (True, "without a GPU, activations are in main memory anyway")
    monkeypatch.setattr(checkpointing, "GradientCheckpointingLayer", partial)
    assert usable(model, 2) == (True, "llama models support it only for all layers")
    assert [usable(model, way) for way in (False, True, 1)] == [(False, ""), (True, ""), (1, "")]


def test_the_ways_have_words() -> None:
    expected = ["off", "on", "on", "every 2 layers", "every 3 layers", "on, offloaded to main memory"]
    assert [described(way) for way in WAYS] == expected


@pytest.mark.parametrize("setting", ["auto", "true", "2"])
def test_a_run_of_a_model_that_does_not_support_it_succeeds(
    tmp_path: Path, setting: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("packcorpus.train.loop.record.picture", lambda *_: b"")
    manifest = pack_corpus(make_recipe(tmp_path, conversations(40, seed=3), sequence_length=128))
    build("jetmoe", **ARCHITECTURES["jetmoe"][0]).save_pretrained(tmp_path / "base")
    words = [
        *("--manifest", str(manifest), "--output", str(tmp_path / "run"), "--base-model", str(tmp_path / "base")),
        *("--device", "cpu", "--quantization", "none", "--max-steps", "1", "--tokens-per-step", "256"),
        *("--activation-checkpointing", setting),
    ]
    assert main(words) == 0
    choices = json.loads((tmp_path / "run" / "training.json").read_text())["choices"]
    assert choices["checkpointing"] is False
    assert "activation_checkpointing: off, because jetmoe models do not support it" in capsys.readouterr().err
