"""A run is found by its key; other corpora and settings never use its folder."""

from __future__ import annotations

import fcntl
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packcorpus.tasks.core.errors import Busy, DataError, UsageError
from packcorpus.tasks.storage.layout import RowLayout
from packcorpus.train.config import WITHOUT_EFFECT, TrainingConfig, folder_digest
from packcorpus.train.data.corpus import Corpus
from packcorpus.train.loop import run_folder
from packcorpus.train.loop.run_folder import Choices, RunFolder

CORPUS = Corpus(
    folder=Path("x"), format_version="3.0", key="a" * 64, sequence_length=64, manifest=None, splits={}, isolated=True,
    layout=RowLayout((64,)), name="mine", notes=(),
)  # fmt: skip

CHOICES = Choices("cpu", "fp32", 1, "sdpa", 4, 2, 99.5, ["a line"], ["a note"])

CHANGED = {
    "base_model": "some/model", "tokenizer": "t.model", "allow_unisolated": True, "device": "cpu", "precision": "fp32",
    "attention": "eager", "quantization": "none", "lora_r": 8, "lora_alpha": 8.0, "lora_dropout": 0.1,
    "lora_targets": "attention", "lora_variant": "dora", "activation_checkpointing": False, "compile": True,
    "fused_loss": True, "optimizer": "paged_adamw_8bit", "learning_rate": 1e-5, "schedule": "linear", "warmup": 0.1,
    "weight_decay": 0.1, "max_grad_norm": 0.5, "epochs": 2.0, "max_steps": 7, "tokens_per_step": 99, "eval_every": 5,
    "seed": 1, "modules_to_save": ["lm_head"], "keep": "best", "early_stopping": 3, "sharding": "full",
}  # fmt: skip


def test_every_setting_that_changes_the_adapter_changes_the_folder(tmp_path: Path) -> None:
    changed = CHANGED | {"adapter": str(an_adapter(tmp_path / "adapter"))}
    assert set(changed) == set(TrainingConfig.model_fields) - WITHOUT_EFFECT
    configs = [TrainingConfig(), *(TrainingConfig(**{name: value}) for name, value in changed.items())]  # type: ignore[arg-type]
    folders = [RunFolder(tmp_path, config, CORPUS).path for config in configs]
    assert len(set(folders)) == len(configs)
    assert RunFolder(tmp_path, TrainingConfig(), replace(CORPUS, key="b" * 64)).path not in folders
    assert RunFolder(tmp_path, TrainingConfig(), CORPUS).path == folders[0]


def test_the_base_model_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, built = tmp_path / "named", tmp_path / "built"
    for folder in (named, built):
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)
    read: list[Path] = []
    monkeypatch.setattr(run_folder, "folder_digest", lambda folder: read.append(folder) or folder_digest(folder))
    run = RunFolder(tmp_path, TrainingConfig(base_model=str(named)), CORPUS)
    digests = [run.base_digest(folder) for folder in (named, built) * 2]
    assert digests == [folder_digest(named), folder_digest(built)] * 2
    assert run.identity["base_model"] == digests[0]
    assert read == [named, built]


def an_adapter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_other_weights_of_the_adapter_are_another_run(tmp_path: Path) -> None:
    adapter = an_adapter(tmp_path / "adapter")
    config = TrainingConfig(adapter=str(adapter))
    before = RunFolder(tmp_path, config, CORPUS).path
    (adapter / "adapter_model.safetensors").write_bytes(b"WEIGHTS")
    assert RunFolder(tmp_path, config, CORPUS).path != before


@pytest.mark.parametrize("setting", sorted(WITHOUT_EFFECT - {"output"}))
def test_settings_without_effect_keep_the_folder(tmp_path: Path, setting: str) -> None:
    values = {"load": "mmap", "gpus": 2, "micro_batch": 4, "save_every": 3, "report_to": "wandb"}
    values |= {"loader_workers": 2, "profile": 3, "samples": 4}
    changed = TrainingConfig(**{setting: values[setting]})  # type: ignore[arg-type]
    assert RunFolder(tmp_path, changed, CORPUS).path == RunFolder(tmp_path, TrainingConfig(), CORPUS).path


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({}, "6d523acd6e065c9c8819ce3df74ac4496e5be083eadb748ab068692c5c92f7a1"),
        ({"fused_loss": False}, "6d523acd6e065c9c8819ce3df74ac4496e5be083eadb748ab068692c5c92f7a1"),
        ({"fused_loss": True}, "6885e360d2fc4bfb80b8cbe1f9db9fff07188db86554651548e276ff4cbab73b"),
        ({"load": "memory"}, "6d523acd6e065c9c8819ce3df74ac4496e5be083eadb748ab068692c5c92f7a1"),
        ({"lora_r": 8, "seed": 7}, "c234ca8a69187c5494092459989789e0212b58e872b1a61fea3c34f728dc7b55"),
    ],
)
def test_runs_of_earlier_versions_keep_their_keys(settings: dict[str, Any], key: str) -> None:
    # They had other defaults, and micro_batch among the settings of a run.
    defaults: dict[str, Any] = {"attention": "sdpa", "lora_dropout": 0.05}
    assert RunFolder(Path(), TrainingConfig(**defaults, **settings), CORPUS).key == key
    before = {"compile": False, "activation_checkpointing": True}
    assert RunFolder(Path(), TrainingConfig(**defaults, **before, **settings), CORPUS).key == key


def test_a_run_of_an_earlier_version_with_its_defaults_is_named(tmp_path: Path) -> None:
    """The same command is another run today, which nobody might expect."""
    config = TrainingConfig(lora_r=8)
    former = RunFolder(tmp_path, config.model_copy(update={"attention": "sdpa", "lora_dropout": 0.05}), CORPUS)
    assert RunFolder(tmp_path, config, CORPUS).warnings() == []
    former.write(CHOICES)
    today = RunFolder(tmp_path, config, CORPUS)
    assert today.path != former.path
    (said,) = today.warnings()
    assert said.startswith(
        f"{former.path}: an earlier version, with the defaults attention: sdpa, lora_dropout: 0.05, "
    )
    assert former.warnings() == []
    set_by_the_user = TrainingConfig(lora_r=8, lora_dropout=0.1, attention="eager")
    assert RunFolder(tmp_path, set_by_the_user, CORPUS).warnings() == []
    with pytest.raises(UsageError, match=r"other settings \(attention sdpa → auto, lora_dropout 0\.05 → 0\.0\)"):
        RunFolder(tmp_path, config.model_copy(update={"output": str(former.path)}), CORPUS).check()
    today.write(CHOICES)
    assert today.warnings() == [], "it has been said at the first start"


def test_ranks_may_keep_their_rows_in_memory_or_map_them(tmp_path: Path) -> None:
    facts = [RunFolder(tmp_path, TrainingConfig(load=load), CORPUS).facts for load in ("memory", "mmap")]  # type: ignore[arg-type]
    assert facts[0] == facts[1]


def test_a_run_of_an_earlier_version_that_streamed_cannot_be_resumed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, TrainingConfig(output=str(tmp_path / "run")), CORPUS)
    folder.write(CHOICES)
    path = tmp_path / "run" / "run.json"
    written = json.loads(path.read_text())
    written["settings"]["load"] = "stream 1"
    written["key"] = "0" * 64
    path.write_text(json.dumps(written))
    with pytest.raises(
        UsageError, match="was trained with load: stream, which was removed with its order of rows; set"
    ):
        folder.check()


def test_a_run_of_an_earlier_version_with_a_micro_batch_is_resumed_in_its_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, TrainingConfig(output=str(tmp_path / "run"), micro_batch=4), CORPUS)
    folder.write(CHOICES)
    path = tmp_path / "run" / "run.json"
    written = json.loads(path.read_text())
    written["settings"]["micro_batch"] = 4
    written["key"] = "dcb964381e4980704d7e44e39b1cc1bfea5da9972efbee1f1854bd39605f7a9e"
    del written["choices"]["options"], written["choices"]["reduced"]
    path.write_text(json.dumps(written))
    folder.check()
    assert folder.choices() == CHOICES
    other = TrainingConfig(output=str(tmp_path / "run"), lora_r=8)
    with pytest.raises(UsageError, match=r"other settings \(lora_r 16 → 8"):
        RunFolder(tmp_path, other, CORPUS).check()


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 4))
def test_half_the_micro_batch_keeps_the_rows_of_a_step(micro_batch: int, accumulation: int, ranks: int) -> None:
    choices = replace(CHOICES, micro_batch=micro_batch, accumulation=accumulation, ranks=ranks)
    found, sizes = choices, []
    while (smaller := found.halved("why")) is not None:
        assert smaller.micro_batch <= found.micro_batch / 2
        assert smaller.rows_per_step == choices.rows_per_step
        found = smaller
        sizes.append(found.micro_batch)
    assert found.micro_batch == 1
    assert found.reduced == ["why"] * len(sizes)


def test_a_reduction_is_described(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, TrainingConfig(output=str(tmp_path)), CORPUS)
    smaller = CHOICES.halved("step 5 ran out of memory with 4 rows per pass")
    assert smaller is not None
    folder.write(smaller)
    why = "step 5 ran out of memory with 4 rows per pass: continuing from"
    assert folder.last_reduction() == f"{why} the beginning with 2"
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "complete.json").write_text("{}")
    assert folder.last_reduction() == f"{why} checkpoint-3 with 2"


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
    # It is at the start, in the middle, or at the end of the file.
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
    with pytest.raises(DataError, match=r"run: was trained on corpus aaaaaaaaaaaa, but this is corpus bbbbbbbbbbbb"):
        RunFolder(tmp_path, config, replace(CORPUS, key="b" * 64)).check()


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
