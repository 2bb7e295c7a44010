"""`check` compares what a run needs with what the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.one_file import one_file
from support.small_corpus import conversations, write_project

from packcorpus.tasks.config import load_config
from packcorpus.tasks.core import process
from packcorpus.tasks.dry_run import cost_model
from packcorpus.tasks.dry_run.dry_run import predict


@pytest.mark.parametrize(("share", "fails", "warns"), [(0.5, True, True), (0.9, False, True), (2.0, False, False)])
def test_a_disk_that_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, fails: bool, warns: bool
) -> None:
    config = load_config(write_project(tmp_path, conversations(60)))
    needed = sum(predict(config, tmp_path, tmp_path).bytes_on_disk.values())
    monkeypatch.setattr(cost_model, "free_disk", lambda folder: round(share * needed))
    run = predict(config, tmp_path, tmp_path)
    assert run.run_fails == fails
    assert any("where the root is" in line for line in run.warnings) == warns


def test_more_memory_than_the_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(write_project(tmp_path, conversations(60)))
    monkeypatch.setattr(cost_model, "memory_limit", lambda: 150_000_000)
    assert not any(line.startswith("memory: ") for line in predict(config, tmp_path, tmp_path, workers=1).warnings)
    assert any(
        line.startswith("memory: 2 workers ") for line in predict(config, tmp_path, tmp_path, workers=2).warnings
    )


@pytest.mark.parametrize(
    ("line", "folder", "name"), [("0::/a", "a", "memory.max"), ("4:memory:/a", "memory/a", "memory.limit_in_bytes")]
)
def test_the_control_group_limits_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, folder: str, name: str
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / name).write_text("5000000\n")
    (tmp_path / "cgroup").write_text(f"{line}\n")
    monkeypatch.setattr(process, "PROC_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(process, "CGROUPS", tmp_path)
    assert process.memory_limit() == 5_000_000


@pytest.mark.parametrize("kind", [".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow"])
def test_the_copies_of_an_unpacked_file_need_disk(kind: str, tmp_path: Path) -> None:
    records = conversations(300)
    plain, copied = (one_file(tmp_path / name, name, records) for name in (".jsonl", kind))
    size = plain.files[0].bytes
    runs = [predict(recipe.config, recipe.folder, recipe.layout.root) for recipe in (plain, copied)]
    assert "unpacked" not in runs[0].bytes_on_disk
    assert runs[1].bytes_on_disk["unpacked"] == pytest.approx(size, rel=0.02 if "jsonl" in kind else 0.7)
    assert (runs[1].peak_memory_bytes > runs[0].peak_memory_bytes) == ("jsonl" not in kind)
