"""The settings in effect are read from the model.

Warnings name the settings in effect that differ from the configured ones.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.architectures import ARCHITECTURES, EXPERTS, HEAD, build
from support.training.tiny_training import tiny_model

from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.loop.callbacks import RankSpeed
from packcorpus.train.loop.feed import PackedFeed
from packcorpus.train.loop.record import Steps, _adapter, advice_of, warnings
from packcorpus.train.loop.run import Run
from packcorpus.train.loop.run_folder import Choices
from packcorpus.train.model import states
from packcorpus.train.model.qlora import add_adapter


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_corpus(make_recipe(tmp_path_factory.mktemp("corpus"), conversations(40)))


def warned(manifest: Path, model: Any, device: str = "cpu", **settings: Any) -> str:
    corpus, config = open_corpus(manifest), TrainingConfig(**settings)
    choices = Choices(device, "fp32", 1, "sdpa", 1, 1, 1.0, [], [])
    known = {"corpus": corpus, "config": config, "feed": PackedFeed(corpus, config), "choices": choices}
    run = Run(**dict.fromkeys(field.name for field in fields(Run)) | known | {"warnings": [], "model": model})
    return "\n".join(warnings(run, Steps(1000, 1000)))


def test_the_rank_whose_batches_are_late_is_named_and_not_one_that_waits_for_it() -> None:
    result = {"phases": {"data": 0.3, "optimizer": 0.01}}
    ranks = [RankSpeed(rank, f"host{rank}", "CPU", 9, 1.0, 1.0, wait) for rank, wait in enumerate((0.001, 0.3))]
    (late,) = advice_of(result, ranks, TrainingConfig())
    assert str(late).startswith("time spent waiting for data by rank 1 (host1): 30 %, should be 5 % or less; set load")
    assert advice_of(result, ranks[:1], TrainingConfig()) == [], (
        "other ranks, and the sum of their tokens, take time, too"
    )
    (late,) = advice_of(result, ranks[1:], TrainingConfig())
    assert late.name == "time spent waiting for data"


@pytest.mark.parametrize(
    ("settings", "actions"),
    [
        ({"activation_checkpointing": True}, ["set activation_checkpointing: false"]),
        ({"micro_batch": 2, "activation_checkpointing": "offload"}, ["set activation_checkpointing: false"]),
        ({"micro_batch": 2}, ["raise micro_batch"]),
        ({"micro_batch": 2, "activation_checkpointing": False}, ["raise micro_batch"]),
        # Larger passes were measured, and are not faster.
        ({"activation_checkpointing": False}, []),
        ({}, []),
    ],
)
def test_free_memory_of_a_gpu_is_a_reason_for_what_makes_steps_faster(
    settings: dict[str, Any], actions: list[str]
) -> None:
    result = {"phases": {"data": 0.0, "optimizer": 0.01}, "gpu_share": 0.99, "memory_share": 0.1}
    found = advice_of(result, [RankSpeed(0, "host", "H200", 9, 1.0, 1.0, 0.0)], TrainingConfig(**settings))
    assert [(one.found, one.action.partition(",")[0]) for one in found] == [("10 %", action) for action in actions]


def test_what_experts_cannot_have_is_a_warning(manifest: Path) -> None:
    config = TrainingConfig(quantization="none", lora_dropout=0.05)
    experts = add_adapter(build("qwen3_moe", **EXPERTS | HEAD), config)
    said = "lora_dropout is 0, not 0.05: adapters of experts cannot have dropout"
    assert said in warned(manifest, experts, lora_dropout=0.05)
    plain = add_adapter(tiny_model(adapter=False), config)
    assert "lora_dropout" not in warned(manifest, plain, lora_dropout=0.05)


def test_layers_that_peft_takes_for_experts_are_a_warning(manifest: Path) -> None:
    config = TrainingConfig(quantization="none")
    shared = add_adapter(build("qwen3_next", **ARCHITECTURES["qwen3_next"][0]), config)
    said = "lora_targets: all leaves out 6 layers (down_proj, gate_proj, up_proj), which PEFT confuses with"
    assert said in warned(manifest, shared)
    assert "leaves out" not in warned(
        manifest, add_adapter(build("qwen2_moe", **ARCHITECTURES["qwen2_moe"][0]), config)
    )


def test_few_weights_in_4_bits_are_a_warning_unless_the_model_is_the_small_llama(manifest: Path) -> None:
    model = add_adapter(tiny_model(adapter=False), TrainingConfig())
    said = "frozen weights in 4 bits: 0 %"
    assert said in warned(manifest, model, base_model="some/model")
    assert said not in warned(manifest, model, base_model="some/model", quantization="none")
    assert said not in warned(manifest, model)


def test_a_slow_way_to_keep_conversations_apart_is_a_warning_with_its_reason(manifest: Path) -> None:
    model = add_adapter(build("lfm2", **ARCHITECTURES["lfm2"][0]), TrainingConfig(quantization="none"))
    for way, on_cpu, on_gpu in [
        (states.KERNELS, "", ""),
        (states.LAYERS, "", "layers with a state run on each conversation alone, which is slower: no `fla`"),
        *[(states.MODEL, *["the model runs on each conversation alone, which is slower: no `fla`"] * 2)],
    ]:
        states.use_way(model, way, "no `fla`")
        for device, expected in (("cpu", on_cpu), ("cuda", on_gpu)):
            said = warned(manifest, model, device)
            assert (expected in said) if expected else ("slower" not in said)


def test_modules_that_are_trained_as_a_whole_are_named_with_their_memory(manifest: Path) -> None:
    config = TrainingConfig(modules_to_save=["embed_tokens", "lm_head"], lora_targets=["q_proj"])
    model = add_adapter(tiny_model(adapter=False, vocab_size=200_000), config)
    assert _adapter(model) == "LoRA of rank 16, dropout 0, on q_proj; as a whole, embed_tokens, lm_head"
    assert "modules_to_save: embed_tokens and lm_head need 0.4 GB with" in warned(manifest, model)
    tied = add_adapter(tiny_model(adapter=False, vocab_size=200_000, tie_word_embeddings=True), config)
    assert "modules_to_save: embed_tokens need 0.2 GB with" in warned(manifest, tied)
    assert "modules_to_save" not in warned(manifest, tiny_model())


@pytest.mark.parametrize(("variant", "name"), [("lora", "LoRA"), ("rslora", "rank-stabilized LoRA"), ("dora", "DoRA")])
def test_the_adapter_is_described_as_it_is(variant: str, name: str) -> None:
    config = TrainingConfig(lora_variant=variant, lora_r=4, lora_targets=["q_proj", "v_proj"])
    model = add_adapter(tiny_model(adapter=False), config)
    assert _adapter(model) == f"{name} of rank 4, dropout 0, on q_proj, v_proj"
