"""The manifest vouches only for the bytes that were planned."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.small_corpus import conversations, make_recipe, pack_corpus

from tasks.core.errors import StorageError
from tasks.corpus import publish
from tasks.verification.verify import verify


@pytest.mark.parametrize("name", publish.COPIED)
def test_a_plan_that_changes_after_its_check_is_not_published(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {"messages": [{"role": "assistent", "content": "x"}]}
    recipe = make_recipe(tmp_path, [*conversations(5), bad], max_rejects=1.0)
    check = publish._check_plan

    def check_then_damage(folder: Path, checksums: dict[str, str]) -> None:
        check(folder, checksums)
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)

    monkeypatch.setattr(publish, "_check_plan", check_then_damage)
    with pytest.raises(StorageError, match=rf"{name}: damaged or missing; run again"):
        pack_corpus(recipe)
    assert not recipe.published.exists()
    monkeypatch.undo()
    verify(pack_corpus(recipe))
