"""Only complete checkpoints are used."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.damage.kinds import DAMAGES
from support.training.gloo_ranks import gloo_ranks

from packcorpus.tasks.core.errors import DataError
from packcorpus.train.loop.checkpoints import COMPLETE, Checkpoints, Disk, newest_complete, newest_of_all, seal

CORPUS, OTHER = "a" * 64, "b" * 64


def written(folder: Path, step: int, corpus: str = CORPUS, sealed: bool = True) -> Path:
    """Write checkpoint-STEP with two files, one of them in a folder."""
    checkpoint = folder / f"checkpoint-{step}"
    (checkpoint / "deeper").mkdir(parents=True)
    (checkpoint / "adapter_model.safetensors").write_bytes(random.Random(step).randbytes(1000))
    (checkpoint / "deeper" / "state.json").write_text(f'{{"step": {step}}}')
    if sealed:
        seal(checkpoint, {"corpus": corpus, "step": step})
    return checkpoint


def arguments(folder: Path, writes: bool) -> SimpleNamespace:
    return SimpleNamespace(output_dir=folder, process_index=0, save_on_each_node=False, should_save=writes)


def test_the_newest_by_number_is_chosen(tmp_path: Path) -> None:
    assert newest_complete(tmp_path, CORPUS) is None
    for step in (9, 10, 2):
        written(tmp_path, step)
    assert newest_complete(tmp_path, CORPUS) == tmp_path / "checkpoint-10"


def test_an_incomplete_checkpoint_is_removed(tmp_path: Path) -> None:
    before = written(tmp_path, 4)
    left = written(tmp_path, 8, sealed=False)
    assert newest_of_all(tmp_path, CORPUS, Disk(shared=True, writes=True)) == before
    assert not left.exists()


def test_a_checkpoint_of_another_corpus_is_rejected(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, 4, OTHER)
    with pytest.raises(
        DataError, match=f"{checkpoint}: belongs to corpus bbbbbbbbbbbb, but this is corpus aaaaaaaaaaaa"
    ):
        newest_complete(tmp_path, CORPUS)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "deeper/state.json"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "extended", "missing"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = written(tmp_path, 4) / name
    DAMAGES[damage](path)
    with pytest.raises(DataError, match=f"{path}: changed since it was written"):
        newest_complete(tmp_path, CORPUS)


@pytest.mark.parametrize("writes", [True, False])
def test_a_rank_that_writes_removes_old_checkpoints_after_the_new_one_is_sealed(tmp_path: Path, writes: bool) -> None:
    for step in (1, 2, 3):
        written(tmp_path, step)
    written(tmp_path, 4, sealed=False)
    after = Checkpoints({"corpus": CORPUS})
    after.on_save(arguments(tmp_path, writes), SimpleNamespace(global_step=4), None)
    kept = sorted(int(path.name.partition("-")[2]) for path in tmp_path.iterdir())
    assert kept == ([3, 4] if writes else [1, 2, 3, 4])
    assert (tmp_path / "checkpoint-4" / COMPLETE).exists() == writes
    assert newest_complete(tmp_path, CORPUS) == tmp_path / f"checkpoint-{4 if writes else 3}"


# -- several machines --------------------------------------------------------------------------------------------------

SEALED = """
from pathlib import Path
from packcorpus.tasks.core.errors import PackError
from packcorpus.train.loop.checkpoints import exchange_random_states, newest_of_all
from packcorpus.train.loop.checkpoints import Disk
folder = Path(given["folders"][rank])
"""
NEWEST = """
try:
    newest = newest_of_all(folder, given["corpus"], Disk(shared=False, writes=True))
    result = newest and newest.name
except PackError as error:
    result = str(error)
"""


def resumed_on(folders: list[Path]) -> list[str | None]:
    given = {"folders": list(map(str, folders)), "corpus": CORPUS}
    return gloo_ranks(len(folders), SEALED + NEWEST, given)


def test_machines_resume_from_the_newest_checkpoint_that_all_have(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        written(folder, 4)
        written(folder, 8)
    written(first, 12)
    written(second, 12, sealed=False)  # killed before it was complete
    assert resumed_on([first, second]) == ["checkpoint-8"] * 2
    for folder in (first, second):
        assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-4", "checkpoint-8"]


def test_machines_start_over_only_if_none_has_a_checkpoint(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    assert resumed_on([first, second]) == [None, None]
    written(second, 4)
    for message in resumed_on([first, second]):
        assert message is None or "no checkpoint in common" in message or message == ""
    (message,) = {message for message in resumed_on([first, second]) if message}
    assert "rank 0 has none; rank 1 has checkpoint-4" in message
    assert (second / "checkpoint-4" / COMPLETE).exists()


def test_equal_steps_of_different_runs_are_not_mixed(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a", 4), written(tmp_path / "b", 4, sealed=False)
    (second / "adapter_model.safetensors").write_bytes(b"other weights")
    seal(second, {"corpus": CORPUS, "step": 4})
    messages = [message for message in resumed_on([first.parent, second.parent]) if message]
    assert messages
    assert all("no checkpoint in common" in message for message in messages)


def test_every_machine_has_the_random_states_of_all_ranks(tmp_path: Path) -> None:
    code = """
(folder / f"rng_state_{rank}.pth").write_bytes(bytes([rank]) * 3)
exchange_random_states(folder, rank, writes=rank in (0, 2))
result = sorted((path.name, list(path.read_bytes())) for path in folder.iterdir())
"""
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    given = {"folders": [str(first), str(first), str(second), str(second)]}
    gloo_ranks(4, SEALED + code, given)
    for folder in (first, second):
        found = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert found == {f"rng_state_{rank}.pth": bytes([rank]) * 3 for rank in range(4)}
