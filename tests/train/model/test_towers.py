"""Checkpoints with towers for images and sound train on text, with their class.

tiny model ─save─▶ checkpoint ─load_model─▶ adapter on its decoder ─▶ loss == loss of each conversation alone
                                                 └─save, merge─▶ loaded with the checkpoint's own class
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.training.architectures import ALONE, STATE, TRAINS
from support.training.finished_runs import merged, randomize, run_on
from support.training.loaded_model import adapter
from support.training.multimodal import CLASSES, MULTIMODAL, build, config_of
from support.training.tiny_training import LENGTH, Row, packed_rows
from transformers import AutoConfig, AutoModelForImageTextToText

from packcorpus.tasks.core.errors import PackError
from packcorpus.train.certify.adapter_checks import lost_by_peft
from packcorpus.train.config import TrainingConfig
from packcorpus.train.loop.trainer import Measured
from packcorpus.train.measures import flops_per_token
from packcorpus.train.merge.find_run import Base
from packcorpus.train.merge.merge_run import without_weights
from packcorpus.train.model import isolation, states
from packcorpus.train.model.attention import Collator, backend_to_load, batch_of
from packcorpus.train.model.base_model import check_model, read_config
from packcorpus.train.model.checkpoint import auto_class, require_causal_text
from packcorpus.train.model.isolation import choose_rows, require_isolation
from packcorpus.train.model.options import fuse_loss, loss_and_gradient
from packcorpus.train.model.qlora import load_model

CONFIG = TrainingConfig(quantization="none")
# One for each way in which a checkpoint has its text decoder.
KINDS = ["qwen3_vl", "mistral3", "gemma4", "llama4"]
WAYS = {states.ATTENTION: TRAINS, states.LAYERS: STATE, states.MODEL: ALONE}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(isolation, "ROWS", 2)


def rows() -> list[Row]:
    halves = [{name: column[: LENGTH // 2] for name, column in row.items()} for row in packed_rows()]
    return [halves[number] for number in choose_rows(halves, 2)]


def load(base: Path) -> tuple[Any, dict[str, Any]]:
    """Load a checkpoint as a run does, and prove its isolation."""
    config = read_config(base)
    check_model(base, config, int(max(row["input_ids"].max() for row in rows())), LENGTH // 2)
    backend, _ = backend_to_load(config, "sdpa")
    model = load_model(base, CONFIG, "cpu", torch.float32, backend)
    require_causal_text(base, model, Collator(backend))
    require_isolation(model, rows(), Collator(backend), 2, attention=backend, seed=1)
    return model, batch_of(rows(), range(2), Collator(backend), model.device)


@torch.no_grad()
def loss_of_each_alone(base: Path) -> float:
    """Return the mean loss, with each conversation as a batch of its own."""
    config = AutoConfig.from_pretrained(base)
    backend, _ = backend_to_load(config, "eager")
    model = auto_class(base, config).from_pretrained(base, dtype=torch.float32, attn_implementation=backend).eval()
    loss, trained = 0.0, 0
    for row in rows():
        starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
        for start, stop in zip(starts, [*starts[1:], len(row["labels"])], strict=True):
            ids, labels = row["input_ids"][start:stop].long(), row["labels"][start + 1 : stop]
            is_trained = labels >= 0
            if is_trained.any():
                logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1][is_trained]
                loss += float(torch.nn.functional.cross_entropy(logits, labels[is_trained], reduction="sum"))
                trained += int(is_trained.sum())
    return loss / trained


# Some of each kind. bench/training/architectures.py runs the table as a whole.
CHOSEN = [
    "gemma3", "gemma4", "llama4", "mistral3", "qwen2_vl", "qwen3_vl_moe", "lfm2_vl", "kosmos-2.5", "paligemma", "blip",
    "evolla", "phi4_multimodal",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_a_multimodal_model_trains_as_the_table_says(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    expected = MULTIMODAL[name][1]
    if expected not in WAYS.values():
        with pytest.raises(PackError, match=expected):
            load(tmp_path)
        return
    model, batch = load(tmp_path)
    loss, norm = loss_and_gradient(model, batch, torch.float32)
    assert loss == pytest.approx(loss_of_each_alone(tmp_path), rel=1e-5)
    assert norm > 0
    assert WAYS[states.separation(model).way] == expected


def test_the_backend_is_one_that_every_tower_has() -> None:
    assert [backend_to_load(config_of(name), "sdpa")[0] for name in ("vibevoice_asr", "qwen3_vl")] == ["eager", "sdpa"]


@pytest.mark.parametrize("name", CLASSES)
def test_checkpoints_of_other_classes_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    with pytest.raises(PackError, match=MULTIMODAL[name][1]):
        load(tmp_path)


@pytest.mark.parametrize("name", KINDS)
def test_an_adapter_has_the_names_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    build(name).save_pretrained(base)
    model, batch = load(base)
    for in_training in (True, False):  # a cache would be used only in evaluations
        loss, _ = loss_and_gradient(model.train(in_training), batch, torch.float32)
        assert loss == pytest.approx(loss_of_each_alone(base), rel=1e-5)
    trained = [name for name, weights in model.named_parameters() if weights.requires_grad]
    assert trained
    assert all("language_model." in name for name in trained), "only the text decoder"
    with torch.no_grad():
        for weights in model.parameters():
            if weights.requires_grad:
                weights.add_(0.05 * torch.randn_like(weights))
    model.save_pretrained(adapter)
    own = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(own, adapter)
    with torch.no_grad():
        expected, other = (each.eval()(**batch, use_cache=False).logits for each in (model, loaded))
    torch.testing.assert_close(other, expected)
    loss, norm = loss_and_gradient(model, batch, torch.float32)
    fuse_loss(model)
    assert loss_and_gradient(model, batch, torch.float32) == pytest.approx((loss, norm), rel=1e-5)


def test_towers_do_no_work(tmp_path: Path) -> None:
    build("qwen3_vl").save_pretrained(tmp_path)
    model, batch = load(tmp_path)
    flops = flops_per_token(model, batch["position_ids"])
    model.get_base_model().model.visual.another = torch.nn.Linear(64, 64)
    assert flops_per_token(model, batch["position_ids"]) == flops


@pytest.mark.parametrize("name", KINDS)
def test_a_merge_changes_only_the_text_decoder(name: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    build(name).to(torch.bfloat16).save_pretrained(base)
    (base / "preprocessor_config.json").write_text("{}")
    folder = merged(run_on(tmp_path / "run", base), tmp_path / "merged")
    before, after = (load_file(path / "model.safetensors") for path in (base, folder))
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed
    assert all("language_model" in key for key in changed)
    assert (folder / "preprocessor_config.json").read_text() == "{}"
    loaded, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert type(loaded).__name__ == AutoConfig.from_pretrained(base).architectures[0]
    assert not any(info.values())


# PEFT renames weights of these models when it loads them, and leaves some of them out.
LOST = ["inkling2", "mistral_large4", "unlimited_ocr", "deepseek_ocr2"]


@pytest.mark.parametrize("name", [*LOST, "qwen3_vl"])
def test_a_run_continues_with_every_weight_of_its_adapter(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    build(name).save_pretrained(tmp_path / "base")
    backend, _ = backend_to_load(read_config(tmp_path / "base"), "sdpa")

    def loaded(config: TrainingConfig = CONFIG) -> Any:
        return load_model(tmp_path / "base", config, "cpu", torch.float32, backend)

    model = loaded()
    randomize(model)
    model.save_pretrained(tmp_path / "run")
    expected, resumed = adapter(model), loaded()
    Measured._load_from_checkpoint(SimpleNamespace(model=resumed), str(tmp_path / "run"))  # type: ignore[arg-type]
    for found in (adapter(resumed), adapter(loaded(CONFIG.model_copy(update={"adapter": str(tmp_path / "run")})))):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    base = without_weights(Base(tmp_path / "base", "base", None, None))
    assert bool(lost_by_peft(tmp_path / "run", base)) == (name in LOST), "what certify reports"
