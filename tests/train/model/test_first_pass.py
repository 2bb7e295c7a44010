"""What one row shows of a model: its loss, and which adapters get a gradient."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.training.architectures import ARCHITECTURES, build
from support.training.loaded_model import batch_of
from support.training.tiny_training import tiny_model
from transformers import AutoModelForCausalLM

from packcorpus.tasks.core.errors import DataError
from packcorpus.train.config import TrainingConfig
from packcorpus.train.model import first_pass
from packcorpus.train.model.first_pass import drop_unused, learn
from packcorpus.train.model.qlora import left_out, load_model


def learned(model: Any) -> list[str]:
    return learn(model, batch_of(0), torch.float32, 1, "sdpa")


def losses(model: Any) -> tuple[float, float]:
    """Return the own mean loss, and that of a step of 1000 tokens."""
    batch = batch_of(0, 1)
    with torch.no_grad():
        return float(model(**batch)["loss"]), float(model(**batch, num_items_in_batch=1000)["loss"])


def test_an_own_loss_that_is_right_is_kept_even_if_its_class_denies_it() -> None:
    model = tiny_model()
    causal = model.get_base_model()
    causal.accepts_loss_kwargs = False
    assert learned(model) == []
    assert causal.accepts_loss_kwargs
    assert "forward" not in vars(causal)


@pytest.mark.parametrize("weighted", [{}, {"loss_weight": 2.0}])
@pytest.mark.parametrize("fault", ["another term", "a mean of each pass", "not shifted", "no count"])
def test_another_loss_is_replaced_by_the_mean_of_the_trained_tokens(
    fault: str, weighted: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    expected, causal = losses(model), model.get_base_model()
    plain = causal.forward

    def forward(*, labels: Any = None, **inputs: Any) -> Any:
        if fault == "no count" and "num_items_in_batch" in inputs:
            raise TypeError("unexpected keyword argument 'num_items_in_batch'")
        if fault == "a mean of each pass":
            inputs.pop("num_items_in_batch", None)
        outputs = plain(labels=labels, **inputs)
        if labels is not None and fault == "another term":
            outputs["loss"] = outputs["loss"] + 0.01
        if labels is not None and fault == "not shifted":
            outputs["loss"] = torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())
        return outputs

    monkeypatch.setattr(causal, "forward", forward)
    weight = (batch_of(0)["labels"] >= 0).float()
    (note,) = learn(model, batch_of(0) | {name: n * weight for name, n in weighted.items()}, torch.float32, 1, "sdpa")
    assert note.startswith("loss: computed here, because")
    assert losses(model) == pytest.approx(expected, rel=1e-6)
    with torch.no_grad():
        ones, twos = (model(**batch_of(0), loss_weight=n * weight, num_items_in_batch=100)["loss"] for n in (1, 2))
    assert float(twos) == pytest.approx(2 * float(ones), rel=1e-6)


def test_logits_that_are_not_finite_are_an_error() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = math.nan
    with pytest.raises(DataError, match="NaN or infinity in 1 weight, such as"):
        learned(model)


def test_layers_without_a_gradient_lose_their_adapter(tmp_path: Path) -> None:
    torch.manual_seed(3)
    build("deepseek_v32", **ARCHITECTURES["deepseek_v32"][0]).save_pretrained(tmp_path / "base")
    model = load_model(tmp_path / "base", TrainingConfig(quantization="none"), "cpu", torch.float32)
    learned(model)
    with_gradient = [name for name, weights in model.named_parameters() if weights.grad is not None]
    (note,) = drop_unused(model)
    assert note.startswith("adapter: 6 layers left out, because the loss does not depend on them, such as ")
    trained = [name for name, weights in model.named_parameters() if weights.requires_grad]
    assert trained == with_gradient
    assert not any("indexer" in name for name in trained)
    assert all(weights.grad is None for weights in model.parameters())
    assert not any("indexer" in name for name in left_out(model)), "the warning is about layers of another kind"
    # The saved adapter has no such layer, and PEFT loads it without adding one.
    model.save_pretrained(tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter", is_trainable=True)
    assert [name for name, weights in loaded.named_parameters() if weights.requires_grad] == trained
    # A run may start from it.
    config = TrainingConfig(quantization="none", adapter=str(tmp_path / "adapter"))
    again = load_model(tmp_path / "base", config, "cpu", torch.float32)
    assert [name for name, weights in again.named_parameters() if weights.requires_grad] == trained
    learned(again)
    assert drop_unused(again) == []


def test_a_model_whose_loss_depends_on_no_adapter_is_refused() -> None:
    model = tiny_model()
    with pytest.raises(DataError, match="no layer with an adapter gets a gradient"):
        drop_unused(model)


def test_experts_without_tokens_keep_their_adapter() -> None:
    used = {"layers.0.mlp.experts.1.up_proj", "layers.0.self_attn.q_proj"}
    unused = ["layers.0.mlp.experts.0.up_proj", "layers.1.mlp.experts.0.up_proj", "layers.1.self_attn.q_proj"]
    assert first_pass._without_experts(unused, used) == unused[1:]
