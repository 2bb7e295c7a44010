"""What an earlier run left behind: taken only where it is whole, and by one run at a time."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest
from support.small_corpus import conversations, make_recipe, pack_corpus

from tasks.core.errors import Busy
from tasks.corpus import publish
from tasks.corpus.publish import claim, has_artefact, has_plan, is_published
from tasks.storage.files import to_json

WRONG: list[Any] = [{}, [], None, 5, "bytes", {"bytes": "4"}, {"bytes": 3}, {"bytes": None}]


def test_an_artefact_is_there_where_its_receipt_speaks_of_its_size(tmp_path: Path) -> None:
    file, receipt = tmp_path / "tokens.arrow", tmp_path / "tokens.json"
    assert not has_artefact(file, receipt)
    file.write_bytes(b"1234")
    assert not has_artefact(file, receipt)
    for wrong in WRONG:
        receipt.write_bytes(to_json(wrong))
        assert not has_artefact(file, receipt), wrong
    receipt.write_bytes(b"{")
    assert not has_artefact(file, receipt)
    receipt.write_bytes(to_json({"bytes": 4, "engine": "gigatoken"}))
    assert has_artefact(file, receipt)
    assert has_artefact(file, receipt, refused="reference")
    assert not has_artefact(file, receipt, refused="gigatoken")
    file.unlink()
    assert not has_artefact(file, receipt)


def test_a_plan_is_there_where_every_file_of_it_has_its_size(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert not has_plan(tmp_path)
    for name in ("plan.arrow", "index.arrow"):
        (tmp_path / name).write_bytes(b"1234")
    wrong = [{}, [], None, {"files": []}, {"files": {"plan.arrow": 3}}, {"files": {"gone.arrow": 4}}]
    for value in [*wrong, {"files": {"plan.arrow": 4, "index.arrow": 5}}]:
        plan.write_bytes(to_json(value))
        assert not has_plan(tmp_path), value
    plan.write_bytes(b"{")
    assert not has_plan(tmp_path)
    plan.write_bytes(to_json({"files": {"plan.arrow": 4, "index.arrow": 4}}))
    assert has_plan(tmp_path)


def test_a_corpus_is_made_by_one_run_at_a_time(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, conversations(3))
    path = recipe.layout.lock(recipe.config.name, recipe.corpus_key)
    path.parent.mkdir(parents=True)
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Busy, match=rf"{recipe.corpus_folder}: another run is writing this corpus; wait for it"):
            claim(recipe)
    claim(recipe)
    with path.open("ab") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_manifest_that_a_killed_run_published_is_synced_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, conversations(3))
    pack_corpus(recipe)
    synced: list[Path] = []
    monkeypatch.setattr(publish, "sync_folder", synced.append)
    assert is_published(recipe)
    assert synced == [recipe.published.parent]
