"""Every architecture trains as the table says.

The models are tiny and have random weights. All go through the command; see support.training.tiny_runs, and
bench/training/architectures.py, which prints the same results.

    config ─▶ model ─save─▶ load_model ─▶ adapter ─▶ isolation ─▶ one step        TRAINS, STATE, ALONE, or the error
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import tiny_runs
from support.training.architectures import ALONE, ARCHITECTURES, STATE, TRAINS, build
from support.training.multimodal import MULTIMODAL
from support.training.tiny_training import LENGTH, Row, packed_rows
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from packcorpus.tasks.core.errors import PackError
from packcorpus.train.config import TrainingConfig
from packcorpus.train.measures import flops_per_token
from packcorpus.train.model import isolation, states
from packcorpus.train.model.attention import Collator, backend_to_load, batch_of
from packcorpus.train.model.base_model import read_config
from packcorpus.train.model.isolation import choose_rows, require_isolation
from packcorpus.train.model.options import loss_and_gradient
from packcorpus.train.model.qlora import load_model


@cache
def rows() -> list[Row]:
    """Return the first halves of rows that have several conversations there."""
    # Whole rows would be slow for layers with a state.
    halves = [{name: column[: LENGTH // 2] for name, column in row.items()} for row in packed_rows()]
    return [halves[number] for number in choose_rows(halves, 4)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(isolation, "ROWS", 2)


def saved(name: str, folder: Path, **settings: Any) -> Path:
    torch.manual_seed(3)
    build(name, **settings).save_pretrained(folder)
    return folder


def outcome(base: Path, config: TrainingConfig) -> str:
    """Return how the model trains after one step, or the error."""
    try:
        backend, _ = backend_to_load(read_config(base), config.attention)
        model = load_model(base, config, "cpu", torch.float32, backend)
        require_isolation(model, rows(), Collator(backend), 2, attention=backend, seed=1)
    except PackError as error:
        return str(error)
    batch = batch_of(rows(), range(2), Collator(backend), model.device)
    loss, norm = loss_and_gradient(model, batch, torch.float32)
    assert 0 < loss < 100
    assert norm > 0, "the adapter has no effect"
    assert flops_per_token(model, rows()[0]["position_ids"][None]) > 0
    return {states.ATTENTION: TRAINS, states.LAYERS: STATE, states.MODEL: ALONE}[states.separation(model).way]


# Some of each kind. bench/training/architectures.py runs both tables as a whole, which takes an hour.
CHOSEN = [
    "llama", "gpt2", "gemma2", "cohere", "granite", "jetmoe", "llama4_text", "modernbert-decoder", "mixtral", "gpt_oss",
    "deepseek_v3", "falcon", "opt", "bert", "plbart", "mamba", "lfm2", "qwen3_next", "xlnet", "prophetnet",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_an_architecture_trains_as_the_table_says(name: str, tmp_path: Path) -> None:
    found = tiny_runs.outcome(name, tmp_path)
    assert found.agrees(ARCHITECTURES[name][1]), found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v32", "qwen4_exp_text", "plbart"])
def test_two_ranks_train_layers_of_which_some_have_no_gradient(name: str, tmp_path: Path) -> None:
    found = tiny_runs.outcome(name, tmp_path, ranks=2)
    assert found.agrees(ARCHITECTURES[name][1]), found
    assert found.unused


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "bamba", "jamba", "mamba", "zamba2"])
def test_layers_with_a_state_train_in_4_bits(name: str, tmp_path: Path) -> None:
    assert outcome(saved(name, tmp_path, **ARCHITECTURES[name][0]), TrainingConfig()) == STATE


def test_the_tables_have_every_text_and_every_multimodal_model_of_transformers() -> None:
    need_timm = {"fast_vlm", "gemma3n", "perception_lm"}
    # Of these, only the text and audio decoders, or drafts for another model, are causal.
    parts = {"gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"}
    assert {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - need_timm - parts <= {*ARCHITECTURES, *MULTIMODAL}
    for names in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES):
        assert {*names} - need_timm <= {*MULTIMODAL, *ARCHITECTURES}
    assert len(ARCHITECTURES) >= 160
    assert len(MULTIMODAL) >= 100
