"""A run is found by its key; other corpora and settings never use its folder."""

from __future__ import annotations

import fcntl
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.core.errors import Busy, DataError, UsageError
from train.config import WITHOUT_EFFECT, TrainingConfig
from train.data.corpus import Corpus
from train.loop.run_folder import Choices, RunFolder

CORPUS = Corpus(
    folder=Path("x"), format_version="3.0", key="a" * 64, sequence_length=64, manifest=None, splits={}, isolated=True,
    name="mine", notes=(),
)  # fmt: skip

CHOICES = Choices("cpu", "fp32", 1, "sdpa", 4, 2, 99.5, ["a line"], ["a note"])

CHANGED = {
    "base_model": "some/model", "tokenizer": "t.model", "allow_unisolated": True, "device": "cpu", "precision": "fp32",
    "attention": "eager", "quantization": "none", "lora_r": 8, "lora_alpha": 8.0, "lora_dropout": 0.0,
    "lora_targets": "attention", "lora_variant": "dora", "activation_checkpointing": False, "compile": True,
    "fused_loss": True, "optimizer": "paged_adamw_8bit", "learning_rate": 1e-5, "schedule": "linear", "warmup": 0.1,
    "weight_decay": 0.1, "max_grad_norm": 0.5, "epochs": 2.0, "max_steps": 7, "tokens_per_step": 99, "micro_batch": 3,
    "eval_every": 5, "seed": 1, "sharding": "full",
}  # fmt: skip


def test_every_setting_that_changes_the_adapter_changes_the_folder(tmp_path: Path) -> None:
    assert set(CHANGED) == set(TrainingConfig.model_fields) - WITHOUT_EFFECT
    configs = [TrainingConfig(), *(TrainingConfig(**{name: value}) for name, value in CHANGED.items())]  # type: ignore[arg-type]
    folders = [RunFolder(tmp_path, config, CORPUS).path for config in configs]
    assert len(set(folders)) == len(configs)
    assert RunFolder(tmp_path, TrainingConfig(), replace(CORPUS, key="b" * 64)).path not in folders
    assert RunFolder(tmp_path, TrainingConfig(), CORPUS).path == folders[0]


@pytest.mark.parametrize("setting", sorted(WITHOUT_EFFECT - {"output"}))
def test_settings_without_effect_keep_the_folder(tmp_path: Path, setting: str) -> None:
    values = {"load": "mmap", "gpus": 2, "save_every": 3, "keep_checkpoints": 5, "report_to": "wandb"}
    changed = TrainingConfig(**{setting: values[setting]})  # type: ignore[arg-type]
    assert RunFolder(tmp_path, changed, CORPUS).path == RunFolder(tmp_path, TrainingConfig(), CORPUS).path


def test_a_local_model_is_identified_by_its_files(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"layers": 2}')
    config = TrainingConfig(base_model=str(model))
    before = RunFolder(tmp_path, config, CORPUS)
    moved = model.rename(tmp_path / "moved")
    found = RunFolder(tmp_path, TrainingConfig(base_model=str(moved)), CORPUS)
    assert found.identity["base_model"] == before.identity["base_model"]
    moved.rename(model)
    assert RunFolder(tmp_path, config, CORPUS).path == before.path
    (model / "config.json").write_text('{"layers": 3}')
    assert RunFolder(tmp_path, config, CORPUS).path != before.path


@pytest.mark.parametrize("megabytes", [1, 3, 40])
def test_other_weights_of_the_same_size_are_another_run(tmp_path: Path, megabytes: int) -> None:
    """As after fine-tuning: one tensor of many, the first, or the last bytes."""
    path, size = tmp_path / "model" / "model.safetensors", megabytes << 20
    path.parent.mkdir()
    config = TrainingConfig(base_model=str(path.parent))
    weights = bytearray(random.Random(1).randbytes(size))
    path.write_bytes(weights)
    before = RunFolder(tmp_path, config, CORPUS).path
    tensor = size // 100
    for start in (0, size // 3, size - tensor):
        changed = weights[:start] + random.Random(2).randbytes(tensor) + weights[start + tensor :]
        path.write_bytes(changed)
        assert len(changed) == size
        assert RunFolder(tmp_path, config, CORPUS).path != before
    path.write_bytes(weights)
    assert RunFolder(tmp_path, config, CORPUS).path == before


def test_choices_are_kept_for_the_next_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, TrainingConfig(), CORPUS)
    folder.check()
    assert folder.choices() is None
    folder.write(CHOICES)
    again = RunFolder(tmp_path, TrainingConfig(), CORPUS)
    again.check()
    assert again.choices() == CHOICES


def test_another_corpus_is_rejected(tmp_path: Path) -> None:
    config = TrainingConfig(output=str(tmp_path / "run"))
    RunFolder(tmp_path, config, CORPUS).write(CHOICES)
    with pytest.raises(DataError, match=r"run: was trained on corpus aaaaaaaaaaaa, this is corpus bbbbbbbbbbbb"):
        RunFolder(tmp_path, config, replace(CORPUS, key="b" * 64)).check()


def test_other_settings_are_rejected_and_named(tmp_path: Path) -> None:
    config = TrainingConfig(output=str(tmp_path / "run"))
    RunFolder(tmp_path, config, CORPUS).write(CHOICES)
    with pytest.raises(UsageError, match=r"other settings \(lora_r 16 → 8\)"):
        RunFolder(tmp_path, config.model_copy(update={"lora_r": 8}), CORPUS).check()


def test_a_folder_of_other_files_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="contains files that do not belong"):
        RunFolder(tmp_path, TrainingConfig(output=str(tmp_path)), CORPUS).check()


def test_a_partially_written_first_file_is_accepted(tmp_path: Path) -> None:
    (tmp_path / ".run.json.a1b2c3.tmp").write_text("{")
    RunFolder(tmp_path, TrainingConfig(output=str(tmp_path)), CORPUS).check()


def test_a_folder_in_use_is_rejected(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, TrainingConfig(output=str(tmp_path / "run")), CORPUS)
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "run.lock").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Busy, match="another run is using this folder"):
            folder.claim()
    folder.claim()
    folder.check()  # the lock file alone is accepted
