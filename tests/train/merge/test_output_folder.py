"""A merged model is complete or missing, and a finished merge is not repeated."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training.finished_runs import finished_run, merged, run_on

from packcorpus.tasks.core.errors import Busy, PackError, StorageError, UsageError
from packcorpus.train.merge import merge_run as command
from packcorpus.train.merge.merge_run import being_written


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("run"))


def models_in(folder: Path) -> list[str]:
    """Return the names in a folder that look like a model to a user."""
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]


# -- interrupted -------------------------------------------------------------------------------------------------------

STEPS = ("write_weights", "find_facts", "write_other_files", "model_card", "_compare", "write_record")


@pytest.mark.parametrize("step", STEPS)
def test_a_merge_that_fails_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    right = getattr(command, step)

    def fail(*given: Any) -> None:
        right(*given)
        raise KeyboardInterrupt if step == "find_facts" else OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(command, step, fail)
        with pytest.raises((KeyboardInterrupt, StorageError)) as raised:
            merged(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    if not isinstance(raised.value, KeyboardInterrupt):
        assert "No space left on device" in str(raised.value)


@pytest.mark.parametrize("step", ["write_weights", "_compare", "write_record"])
def test_a_merge_that_is_killed_leaves_nothing_that_looks_like_a_model(run: Path, tmp_path: Path, step: str) -> None:
    if (child := os.fork()) == 0:
        right = getattr(command, step)
        setattr(command, step, lambda *given: (right(*given), os._exit(9)))
        try:
            merged(run, tmp_path / "out")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert models_in(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == [".out.merging"]
    (tmp_path / ".out.merging" / "leftover").mkdir()
    folder = merged(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert set(json.loads((folder / "merge.json").read_text())["files"]) | {"merge.json"} == {
        path.name for path in folder.iterdir()
    }


def test_two_merges_do_not_write_the_same_folder(tmp_path: Path) -> None:
    (tmp_path / ".out.merging").mkdir()
    with (tmp_path / ".out.merging" / "merge.lock").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Busy, match="another merge is writing this model"), being_written(tmp_path / "out"):
            pass
    assert (tmp_path / ".out.merging").is_dir()


# -- again -------------------------------------------------------------------------------------------------------------


def test_a_finished_merge_is_not_repeated(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()  # an empty folder may be used
    folder = merged(run, tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    capsys.readouterr()
    monkeypatch.setattr(command, "_write", None)
    assert merged(run, tmp_path / "out") == folder
    assert capsys.readouterr().err == "already merged, nothing to do\n"
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def refused(run: Path, output: Path, message: str, dtype: str | None = None) -> None:
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=message) as raised:
        merged(run, output, dtype)
    assert raised.value.reason == "merge_folder_taken"
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before


def test_other_files_are_not_overwritten(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    refused(run, tmp_path / "out", "out: exists and is not a merged model; choose another --output")
    (tmp_path / "file").write_text("years of work")
    refused(run, tmp_path / "file", "file: exists and is not a merged model")
    refused(run, run, "exists and is not a merged model")


def test_another_merge_is_not_overwritten(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    folder = merged(run, tmp_path / "out")
    refused(run, folder, r"contains a different merge \(dtype fp32, now bf16\)", "bf16")
    other = run_on(tmp_path / "other", tmp_path / "base", scale=0.03)
    refused(other, folder, r"contains a different merge \(adapter \w{12}, now \w{12}\)")


@pytest.mark.parametrize("name", ["model.safetensors", "README.md"])
def test_a_merge_with_a_damaged_file_is_named(run: Path, tmp_path: Path, name: str) -> None:
    folder = merged(run, tmp_path / "out")
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    refused(run, folder, rf"{name}: is missing or truncated; delete .*, then merge again")
    (folder / name).unlink()
    refused(run, folder, rf"{name}: is missing or truncated")


def test_a_record_that_is_not_one_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for text in ("{", "[]", "{}", '{"files": []}'):
        (tmp_path / "out" / command.RECORD).write_text(text)
        refused(run, tmp_path / "out", "is not a merged model")


def test_a_full_disk_is_reported_before_anything_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "free_disk", lambda path: 1_000_000)
    with pytest.raises(StorageError, match=r"out: needs 101 MB, but only 1\.0 MB are free; free some space"):
        merged(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PackError, match="file"):
        merged(run, tmp_path / "file" / "out")


def test_an_adapter_that_changed_is_another_merge_than_the_finished_one(tmp_path: Path) -> None:
    """A run that was trained again in its folder is not `nothing to do`."""
    run = finished_run(tmp_path)
    folder = merged(run, tmp_path / "out")
    run_on(run, tmp_path / "base", scale=0.05)
    refused(run, folder, "contains a different merge")
