"""The estimate of memory, from the config alone, is what a pass needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.training.tree_rows import columns_of, tree_rows, write_trees
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, MixtralConfig

from packcorpus.tasks.core.errors import UsageError
from packcorpus.train import doctor, fits
from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.memory import ACTIVATIONS, LOGITS, MASKS, WEIGHTS, Estimator, skeleton, static
from packcorpus.train.model import qlora, token_loss
from packcorpus.train.model.attention import Collator, run_pass
from packcorpus.train.model.trees import use_trees

SIZES: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "gemma3_text": Gemma3TextConfig(**SIZES, head_dim=32, sliding_window=64),
    # On a CPU, attention with dropout keeps all scores, unlike on a GPU.
    "gpt2": GPT2Config(vocab_size=1000, n_embd=128, n_layer=4, n_head=4, attn_pdrop=0.0),
}


def peak_of(model: Any, batch: dict[str, torch.Tensor]) -> int:
    """Return the most bytes of torch's allocator in a pass, by its profiler."""
    run_pass(model, batch, torch.float32)  # gradients exist from here on
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        run_pass(model, batch, torch.float32)
    events = [event for event in traced.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_estimate_is_the_measured_peak_within_a_tenth(
    tmp_path: Path, name: str, checkpointing: bool, fused: bool
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(tmp_path)
    config = TrainingConfig(base_model=str(tmp_path), activation_checkpointing=checkpointing, lora_dropout=0)
    model = qlora.load_model(tmp_path, config, "cpu", torch.float32)
    if fused:
        token_loss.fuse_loss(model)
    ids, positions = torch.randint(0, 1000, (2, 512)), (torch.arange(512) % 200).expand(2, 512)
    labels = torch.where(torch.arange(512) % 2 == 0, ids, -100)
    measured = peak_of(model, {"input_ids": ids, "labels": labels, "position_ids": positions})
    found = Estimator(tmp_path, config, torch.float32, "sdpa", fused=fused, trained=0.5).estimate(2, 512)
    expected = sum(size for part, size in found.parts.items() if part in (MASKS, ACTIVATIONS, LOGITS))
    assert expected == pytest.approx(measured, rel=0.1)


def test_the_estimate_counts_the_masks_of_trees(tmp_path: Path) -> None:
    # For other rows, the estimate is that of a kernel without a mask.
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODELS["gemma3_text"]).save_pretrained(tmp_path / "base")
    base = tmp_path / "base"
    config = TrainingConfig(base_model=str(base), activation_checkpointing=False, lora_dropout=0, fused_loss=False)
    model = qlora.load_model(base, config, "cpu", torch.float32)
    use_trees(model)
    rows = tree_rows(2, 512)
    corpus = open_corpus(write_trees(tmp_path / "rows" / "train-00000-of-00001.arrow", columns_of(rows)))
    found = fits.fits_of(str(base), config.model_copy(update={"attention": "auto"}), corpus)
    without = fits.fits_of(str(base), config.model_copy(update={"attention": "auto"}), None)
    for checkpointing in (True, False):
        more = found.estimate(checkpointing, 8, 512).total - without.estimate(checkpointing, 8, 512).total
        assert more >= 8 * 512 * 512, "a byte per pair of places"
    batch = {name: values.long() for name, values in Collator("sdpa")(rows).items() if name != "loss_weight"}
    measured = peak_of(model, batch)
    parts = Estimator(base, config, torch.float32, "sdpa", fused=False).estimate(2, 512).parts
    assert sum(parts[part] for part in (MASKS, ACTIVATIONS, LOGITS)) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("name", [*MODELS, "mixtral"])
def test_the_weights_are_those_of_the_loaded_model(tmp_path: Path, name: str) -> None:
    config = MODELS.get(name) or MixtralConfig(**SIZES, num_local_experts=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    settings = TrainingConfig(base_model=str(tmp_path))
    loaded = static(qlora.load_model(tmp_path, settings, "cpu", torch.float32), settings.optimizer)
    assert static(skeleton(tmp_path, settings, torch.float32, "sdpa"), settings.optimizer) == pytest.approx(loaded)
    assert loaded[WEIGHTS]


# (layers, rows, tokens of a row, checkpointing, dropout): peak in GB on an H100 or H200, from bench/LOG.md
RECORDED = {
    (4, 8, 2048, True, 0.0): 8.41,
    (4, 16, 1024, True, 0.0): 8.39,
    (4, 8, 2048, False, 0.0): 20.76,
    (4, 4, 2048, True, 0.0): 4.78,
    (32, 4, 2048, True, 0.05): 10.4,
    (32, 4, 2048, False, 0.05): 79.6,
}


@pytest.mark.parametrize("case", RECORDED)
def test_the_estimate_is_the_peak_that_was_recorded_on_gpus(
    tmp_path: Path, case: tuple[int, int, int, bool, float]
) -> None:
    layers, rows, length, checkpointing, dropout = case
    LlamaConfig(
        vocab_size=32768, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=4096,
    ).save_pretrained(tmp_path)  # fmt: skip
    settings = TrainingConfig(base_model="x", activation_checkpointing=checkpointing, lora_dropout=dropout)
    found = Estimator(tmp_path, settings, torch.bfloat16, "sdpa", fused=False).estimate(rows, length)
    assert found.total / 1e9 == pytest.approx(RECORDED[case], rel=0.03)


def test_rows_beyond_the_positions_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaConfig(**SIZES | {"max_position_embeddings": 512}).save_pretrained(tmp_path)
    assert doctor.main(["--base-model", str(tmp_path)]) == 0
    assert "GB for rows of 512 tokens" in capsys.readouterr().out


def test_doctor_shows_what_fits_at_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MODELS["llama"].save_pretrained(tmp_path)
    console = Console(width=80, markup=False, emoji=False, highlight=False)
    assert doctor.main(["--base-model", str(tmp_path)], console) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[1:])) <= 80
    assert [line.split()[0] for line in lines if " GB  " in line][: len(fits.CARDS)] == [str(n) for n in fits.CARDS]
    with pytest.raises(UsageError, match="--corpus x: needs --base-model"):
        doctor.main(["--corpus", "x"])
