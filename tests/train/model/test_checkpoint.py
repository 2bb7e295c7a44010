"""A folder that cannot be trained is refused with the true reason and a fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training.loaded_model import save_base
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from packcorpus.tasks.core.errors import DataError
from packcorpus.train.config import TrainingConfig
from packcorpus.train.model.attention import Collator
from packcorpus.train.model.base_model import check_model, read_config, unreadable
from packcorpus.train.model.checkpoint import POINTER, require_causal_text
from packcorpus.train.model.qlora import load_model

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 500,
    "d_model": 64, "num_layers": 2, "num_heads": 4,
}  # fmt: skip


def start(base: Path) -> None:
    """Load a folder as a run does."""
    check_model(base, read_config(base), 499, 128)
    model = load_model(base, TrainingConfig(quantization="none"), "cpu", torch.float32)
    require_causal_text(base, model, Collator("sdpa"))


def refusal(base: Path) -> str:
    with pytest.raises(DataError) as caught:
        start(base)
    text = str(caught.value)
    assert str(base) in text
    assert "copy the model again" not in text
    return text


@pytest.mark.parametrize(
    ("auto", "kind", "name"),
    [
        (AutoModelForSeq2SeqLM, "t5", "T5ForConditionalGeneration"),
        (AutoModelForSeq2SeqLM, "bart", "BartForConditionalGeneration"),
        (AutoModelForMaskedLM, "bert", "BertForMaskedLM"),
        (AutoModelForSequenceClassification, "llama", "LlamaForSequenceClassification"),
    ],
)
def test_other_models_are_named(auto: Any, kind: str, name: str, tmp_path: Path) -> None:
    auto.from_config(AutoConfig.for_model(kind, **SMALL)).save_pretrained(tmp_path)
    assert f"is not a causal language model: {name}" in refusal(tmp_path)


def test_a_model_for_images_is_named(tmp_path: Path) -> None:
    AutoConfig.for_model("vit", architectures=["ViTForImageClassification"]).save_pretrained(tmp_path)
    assert "is not a causal language model: ViTForImageClassification" in refusal(tmp_path)


def test_a_decoder_that_sees_later_tokens(tmp_path: Path) -> None:
    save_base(tmp_path)
    model = load_model(tmp_path, TrainingConfig(quantization="none"), "cpu", torch.float32)
    require_causal_text(tmp_path, model, Collator("sdpa"))
    for layer in model.get_decoder().layers:
        layer.self_attn.is_causal = False
    with pytest.raises(DataError, match="the tokens of a llama model see later tokens"):
        require_causal_text(tmp_path, model, Collator("sdpa"))


def test_weights_that_are_only_pickles(tmp_path: Path) -> None:
    save_base(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "has weights only as pickles" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    assert "has no weights" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("consolidated.safetensors", "has weights only as consolidated.safetensors, in the layout of another library"),
        ("model-00001-of-00002.safetensors", "lacks model.safetensors.index.json; copy it as well"),
    ],
)
def test_weights_with_another_name(name: str, reason: str, tmp_path: Path) -> None:
    save_base(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    assert reason in refusal(tmp_path)


def test_weights_of_another_size(tmp_path: Path) -> None:
    save_base(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 72}))
    assert "the shapes of its weights do not match its config.json" in refusal(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_pointer_of_git_lfs(file: str, tmp_path: Path) -> None:
    save_base(tmp_path)
    (tmp_path / file).write_bytes(POINTER + b".github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull`" in refusal(tmp_path)


def test_code_of_a_repository_is_never_run(tmp_path: Path) -> None:
    save_base(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "needs code from its repository, which is never run" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", "two"), ("vocab_size", None), ("num_attention_heads", 0),
        ("num_key_value_heads", 0), ("hidden_act", "no_such"), ("rope_parameters", {"rope_type": "no_such"}),
        ("max_position_embeddings", "long"), ("dtype", "no_such"), ("quantization_config", []),
        ("architectures", 3),
    ],
)  # fmt: skip
def test_a_value_of_a_config_that_is_not_valid(name: str, value: Any, tmp_path: Path) -> None:
    save_base(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {name: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"base_model: .*cannot be read \("):
        start(tmp_path)


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    save_base(tmp_path)
    error = ImportError("TimmWrapperModel requires the timm library but it was not found in your environment.")
    assert str(unreadable(tmp_path, error)).endswith("needs the package timm, which is not installed; pip install timm")
