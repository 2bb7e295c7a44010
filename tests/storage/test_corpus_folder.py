"""The record of the latest run is written atomically and read defensively."""

from __future__ import annotations

from pathlib import Path

import pytest

from packcorpus.tasks.storage.corpus_folder import LAST, last_manifest, remember_manifest


def test_the_last_manifest_is_remembered(tmp_path: Path) -> None:
    assert last_manifest(tmp_path) is None
    for name in ("a-0123456789ab.json", "b-0123456789ab.json"):
        remember_manifest(tmp_path, name)
        assert last_manifest(tmp_path) is None, "its manifest does not exist"
        (tmp_path / "manifests" / name).write_text("{}")
        assert last_manifest(tmp_path) == tmp_path / "manifests" / name
    assert (tmp_path / "manifests" / LAST).read_text() == "b-0123456789ab.json\n"
    (tmp_path / "manifests" / "b-0123456789ab.json").unlink()
    assert last_manifest(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"\n", b"..\n", b"../outside.json\n", b"\xff\n", b"a\0b\n", b"x" * 300])
def test_a_damaged_record_is_ignored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "outside.json").write_text("{}")
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / LAST).write_bytes(content)
    assert last_manifest(tmp_path) is None


def test_a_record_that_cannot_be_written_fails_no_run(tmp_path: Path) -> None:
    (tmp_path / "manifests").write_text("not a folder")
    remember_manifest(tmp_path, "a-0123456789ab.json")
    assert last_manifest(tmp_path) is None
