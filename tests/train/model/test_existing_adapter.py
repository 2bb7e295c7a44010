"""An adapter is saved, loaded, and continued with the same logits.

Adapters that do not fit are an error.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, IA3Config, get_peft_model
from safetensors.torch import load_file, save_file
from support.training.architectures import ARCHITECTURES, build
from support.training.tiny_training import packed_rows
from transformers import Trainer, TrainingArguments

from packcorpus.tasks.core.errors import DataError, UsageError
from packcorpus.train.config import TrainingConfig, adapter_digest
from packcorpus.train.measures import flops_per_token
from packcorpus.train.model.attention import Collator
from packcorpus.train.model.options import loss_and_gradient
from packcorpus.train.model.qlora import add_adapter, load_model
from packcorpus.train.model.token_loss import fuse_loss


def base_of(folder: Path, name: str = "llama", **settings: Any) -> Path:
    torch.manual_seed(3)
    build(name, **ARCHITECTURES[name][0] | settings).save_pretrained(folder)
    return folder


def loaded(base: Path, **settings: Any) -> Any:
    return load_model(
        base, TrainingConfig(**{"quantization": "none", "lora_r": 4} | settings), "cpu", torch.float32, "eager"
    )


def change(model: Any) -> None:
    """Change every trained weight, as training does."""
    torch.manual_seed(5)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.requires_grad:
                weights += torch.randn_like(weights) * 0.05


def saved(model: Any, folder: Path, base: Path) -> Path:
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    return folder


def logits(model: Any) -> torch.Tensor:
    model.eval()
    row = packed_rows()[0]
    stop = int((row["position_ids"] == 0).nonzero()[1])
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=row["input_ids"][None, :stop], use_cache=False).logits
    return found


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: weights for name, weights in model.named_parameters() if weights.requires_grad}


BOTH = {"modules_to_save": ["embed_tokens", "lm_head"]}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "experts": ("mixtral", {}, {}),
    "other experts, and the head": ("qwen3_moe", {}, {"modules_to_save": ["lm_head"]}),
    "a hybrid": ("lfm2", {}, {}),
    "dora": ("llama", {}, {"lora_variant": "dora"}),
    "rslora": ("llama", {}, {"lora_variant": "rslora"}),
    "embeddings and head": ("llama", {"tie_word_embeddings": False}, BOTH),
    "tied, both named": ("llama", {"tie_word_embeddings": True}, BOTH),
    "tied, one named": ("llama", {"tie_word_embeddings": True}, {"modules_to_save": ["embed_tokens"]}),
    "tied, other names": ("gpt2", {"tie_word_embeddings": True}, {"modules_to_save": ["wte"]}),
    "in 4 bits": ("llama", {"tie_word_embeddings": True}, BOTH | {"quantization": "nf4"}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_is_the_same_after_it_is_loaded(case: str, tmp_path: Path) -> None:
    name, sizes, settings = CASES[case]
    base = base_of(tmp_path / "base", name, **sizes)
    model = loaded(base, **settings)
    before = logits(model)
    change(model)
    expected, adapter = logits(model), saved(model, tmp_path / "adapter", base)
    assert (expected - before).abs().max() > 0.1
    assert all(weights.dtype == torch.float32 for weights in trained(model).values())
    if "quantization" not in settings:
        by_peft = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32)
        assert torch.allclose(logits(by_peft), expected, atol=1e-4)
    # A new run continues the adapter, with its rank, variant, targets, and whole modules.
    kept = {"quantization": settings.get("quantization", "none"), "lora_r": 16}
    again = loaded(base, adapter=str(adapter), **kept)
    assert torch.equal(logits(again), expected)
    assert {name: x.dtype for name, x in trained(again).items()} == dict.fromkeys(trained(model), torch.float32)
    # The Trainer loads a checkpoint in this way.
    resumed = loaded(base, **settings)
    resumed.load_adapter(adapter, "default", is_trainable=True)
    assert torch.equal(logits(resumed), expected)


# -- modules that are trained as a whole -------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("names", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_exactly_the_named_modules_are_trained_in_fp32(tmp_path: Path, names: list[str], tied: bool) -> None:
    base = base_of(tmp_path, tie_word_embeddings=tied)
    config = TrainingConfig(quantization="none", modules_to_save=names)
    model = load_model(base, config, "cpu", torch.bfloat16)  # the other weights are bf16
    whole = {name.split(".modules_to_save.")[0].rpartition(".")[2] for name in trained(model) if "lora" not in name}
    assert whole == ({"embed_tokens"} if tied else set(names)), "tied weights are one"
    assert {weights.dtype for weights in trained(model).values()} == {torch.float32}
    same = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert same == tied
    with torch.autocast("cpu", torch.bfloat16):
        model(**Collator("sdpa")(packed_rows()[:1])).loss.backward()
    for name, weights in trained(model).items():
        if ".modules_to_save." in name:
            assert weights.grad.abs().max() > 0


def test_other_modules_are_an_error(tmp_path: Path) -> None:
    base = base_of(tmp_path)
    with pytest.raises(DataError, match=r"norm: only the embeddings and the head .* they are embed_tokens and lm_head"):
        loaded(base, modules_to_save=["norm"])
    with pytest.raises(DataError, match=r"embed_token: .*; did you mean embed_tokens\?"):
        loaded(base, modules_to_save=["embed_token"])


def test_a_head_that_would_lose_its_tie_is_an_error() -> None:
    model = build("llama", tie_word_embeddings=True)
    model.config.tie_word_embeddings = False  # PEFT then sees no tie
    with pytest.raises(DataError, match="have the same weights, which PEFT cannot train together"):
        add_adapter(model, TrainingConfig(modules_to_save=["embed_tokens"]))


def test_a_whole_head_works_with_the_fused_loss_and_counts_once(tmp_path: Path) -> None:
    base = base_of(tmp_path, tie_word_embeddings=False)
    model, plain = loaded(base, **BOTH), loaded(base)
    batch = Collator("sdpa")(packed_rows()[:2])
    expected = loss_and_gradient(model, batch, torch.float32)
    fuse_loss(model)
    assert loss_and_gradient(model, batch, torch.float32) == pytest.approx(expected, rel=1e-5)
    place, head = torch.zeros(1, 1, dtype=torch.int32), model.get_output_embeddings().weight.numel()
    assert flops_per_token(model, place) - flops_per_token(plain, place) == 2 * head


def test_training_resumes_from_a_checkpoint_with_whole_modules(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", tie_word_embeddings=True)

    def train(folder: Path, checkpoint: Path | None) -> dict[str, torch.Tensor]:
        model = loaded(base, **BOTH)
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=4, save_steps=2, use_cpu=True, report_to="none", disable_tqdm=True,
            learning_rate=1e-2, remove_unused_columns=False, seed=1, per_device_train_batch_size=1,
        )  # fmt: skip
        Trainer(model, arguments, Collator("sdpa"), packed_rows()[:4]).train(resume_from_checkpoint=checkpoint)
        return trained(model)

    whole = train(tmp_path / "whole", None)
    resumed = train(tmp_path / "resumed", tmp_path / "whole" / "checkpoint-2")
    assert whole.keys() == resumed.keys()
    assert all(torch.allclose(whole[name], resumed[name], atol=1e-6) for name in whole)
    first = load_file(tmp_path / "whole" / "checkpoint-2" / "adapter_model.safetensors")
    last = load_file(tmp_path / "whole" / "checkpoint-4" / "adapter_model.safetensors")
    name = next(name for name in first if "embed_tokens" in name)
    assert not torch.equal(first[name], last[name])


# -- adapters that do not fit ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of rank 4 on q and v, next to its model."""
    folder = tmp_path_factory.mktemp("existing")
    model = loaded(base_of(folder / "base"), lora_alpha=8, lora_targets=["q_proj", "v_proj"])
    return saved(model, folder / "adapter", folder / "base")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora_r": 8}, "lora_r is 8, but .*adapter_config.json has 4; leave lora_r out, or start a new adapter"),
        ({"lora_alpha": 64}, "lora_alpha is 64.0, but .* has 8"),
        ({"lora_variant": "dora"}, "lora_variant is dora, but .* has lora"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\], but .* has None"),
        ({"lora_targets": "attention"}, "lora_targets is attention, but the layers of .* are q_proj, v_proj; leave"),
        ({"lora_targets": ["q_proj"]}, r"lora_targets is \['q_proj'\], but"),
    ],
)
def test_a_setting_that_contradicts_the_adapter_is_an_error(
    adapter: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        loaded(adapter.parent / "base", **{"adapter": str(adapter), "lora_r": 16} | settings)


def test_settings_that_agree_with_the_adapter_and_the_dropout_are_used(adapter: Path) -> None:
    agreeing = {"lora_r": 4, "lora_alpha": 8, "lora_targets": ["v_proj", "q_proj"], "lora_dropout": 0.25}
    model = loaded(adapter.parent / "base", adapter=str(adapter), **agreeing)
    assert model.peft_config["default"].lora_dropout == 0.25
    assert {name.split(".")[-4] for name in trained(model)} == {"q_proj", "v_proj"}


def altered(adapter: Path, folder: Path, **settings: Any) -> Path:
    """Copy an adapter with other settings."""
    shutil.copytree(adapter, folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def test_an_adapter_of_another_model_is_an_error(adapter: Path, tmp_path: Path) -> None:
    base = adapter.parent / "base"
    other = base_of(tmp_path / "other", num_hidden_layers=1)
    with pytest.raises(DataError, match=f"was trained on {base}, which is not {other}; set base_model to that model"):
        loaded(other, adapter=str(adapter))
    copy = shutil.copytree(base, tmp_path / "copy")
    assert loaded(copy, adapter=str(adapter)), "a copy of the model is the same model"
    unknown = altered(adapter, tmp_path / "unknown", base_model_name_or_path=None)
    with pytest.raises(DataError, match=r"has weights that the model lacks, such as .*layers\.1\..*\(4 such weights\)"):
        loaded(other, adapter=str(unknown))
    wide = base_of(tmp_path / "wide", hidden_size=32)
    with pytest.raises(DataError, match=r"does not fit the model or cannot be read .*size mismatch"):
        loaded(wide, adapter=str(unknown))
    by_name = altered(adapter, tmp_path / "named", base_model_name_or_path="some/model")
    with pytest.raises(DataError, match="was trained on some/model, which is not another/model"):
        add_adapter(build("llama"), TrainingConfig(adapter=str(by_name)), "another/model")


def test_missing_damaged_and_unsafe_adapters_are_errors(adapter: Path, tmp_path: Path) -> None:
    base = adapter.parent / "base"
    with pytest.raises(DataError, match="nowhere: no such folder"):
        loaded(base, adapter=str(tmp_path / "nowhere"))
    few = altered(adapter, tmp_path / "few")
    weights = load_file(few / "adapter_model.safetensors")
    gone = sorted(weights)[0]
    save_file({name: x for name, x in weights.items() if name != gone}, few / "adapter_model.safetensors")
    with pytest.raises(DataError, match=r"lacks .*lora_A.* \(1 such weight\); it was trained on another model"):
        loaded(base, adapter=str(few))
    (few / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(DataError, match="does not fit the model or cannot be read"):
        loaded(base, adapter=str(few))
    (few / "adapter_model.safetensors").rename(few / "adapter_model.bin")
    with pytest.raises(DataError, match=r"adapter_model\.bin, a pickle, which can run any code .*; save the adapter"):
        loaded(base, adapter=str(few))
    (few / "adapter_model.bin").unlink()
    with pytest.raises(DataError, match=r"contains no adapter_model\.safetensors; use a folder written by"):
        loaded(base, adapter=str(few))
    broken = altered(adapter, tmp_path / "broken", peft_type="NOTHING")
    with pytest.raises(DataError, match=r"adapter_config\.json: does not fit the model or cannot be read"):
        loaded(base, adapter=str(broken))
    biased = altered(adapter, tmp_path / "biased", target_modules=["nothing"])
    with pytest.raises(
        DataError, match=f"adapter: {biased}: a llama model does not support this adapter .*; use another"
    ):
        loaded(base, adapter=str(biased))


def test_an_adapter_of_another_type_is_an_error(adapter: Path, tmp_path: Path) -> None:
    base = adapter.parent / "base"
    model = get_peft_model(build("llama"), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(DataError, match="is an adapter of type IA3, and only LORA can be trained here"):
        loaded(base, adapter=str(saved(model, tmp_path / "ia3", base)))


def test_the_digest_is_that_of_weights_and_settings(adapter: Path, tmp_path: Path) -> None:
    same = altered(adapter, tmp_path / "same")
    (same / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    (same / "notes.txt").write_text("not a part of it")
    assert adapter_digest(same) == adapter_digest(adapter)
    assert adapter_digest(altered(adapter, tmp_path / "other", lora_alpha=9)) != adapter_digest(adapter)
