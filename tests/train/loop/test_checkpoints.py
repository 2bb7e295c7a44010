"""Only complete checkpoints are used."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.damage.kinds import DAMAGES

from tasks.core.errors import DataError
from train.loop.checkpoints import COMPLETE, Checkpoints, newest_complete, seal

CORPUS, OTHER = "a" * 64, "b" * 64


def written(folder: Path, step: int, corpus: str = CORPUS, sealed: bool = True) -> Path:
    """Write checkpoint-STEP with two files, one of them in a folder."""
    checkpoint = folder / f"checkpoint-{step}"
    (checkpoint / "deeper").mkdir(parents=True)
    (checkpoint / "adapter.safetensors").write_bytes(random.Random(step).randbytes(1000))
    (checkpoint / "deeper" / "state.json").write_text(f'{{"step": {step}}}')
    if sealed:
        seal(checkpoint, {"corpus": corpus, "step": step})
    return checkpoint


def test_the_newest_by_number_is_chosen(tmp_path: Path) -> None:
    assert newest_complete(tmp_path, CORPUS) is None
    for step in (9, 10, 2):
        written(tmp_path, step)
    assert newest_complete(tmp_path, CORPUS) == tmp_path / "checkpoint-10"


def test_an_incomplete_checkpoint_is_removed(tmp_path: Path) -> None:
    before = written(tmp_path, 4)
    left = written(tmp_path, 8, sealed=False)
    assert newest_complete(tmp_path, CORPUS) == before
    assert not left.exists()


def test_a_checkpoint_of_another_corpus_is_rejected(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, 4, OTHER)
    with pytest.raises(DataError, match=f"{checkpoint}: was made on corpus bbbbbbbbbbbb, this is corpus aaaaaaaaaaaa"):
        newest_complete(tmp_path, CORPUS)


@pytest.mark.parametrize("name", ["adapter.safetensors", "deeper/state.json"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "extended", "missing"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = written(tmp_path, 4) / name
    DAMAGES[damage](path)
    with pytest.raises(DataError, match=f"{path}: changed since it was written"):
        newest_complete(tmp_path, CORPUS)


def test_old_checkpoints_are_removed_after_the_new_one_is_sealed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        written(tmp_path, step)
    written(tmp_path, 4, sealed=False)
    after = Checkpoints({"corpus": CORPUS}, keep=2)
    after.on_save(SimpleNamespace(output_dir=tmp_path, process_index=0), SimpleNamespace(global_step=4), None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-4"]
    assert (tmp_path / "checkpoint-4" / COMPLETE).exists()
    assert newest_complete(tmp_path, CORPUS) == tmp_path / "checkpoint-4"


def test_only_the_first_rank_removes_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        written(tmp_path, step)
    written(tmp_path, 4, sealed=False)
    after = Checkpoints({"corpus": CORPUS}, keep=1)
    after.on_save(SimpleNamespace(output_dir=tmp_path, process_index=1), SimpleNamespace(global_step=4), None)
    assert len(list(tmp_path.iterdir())) == 4
    assert not (tmp_path / "checkpoint-4" / COMPLETE).exists()
