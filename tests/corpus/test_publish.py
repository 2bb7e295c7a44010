"""The manifest vouches only for the bytes that were planned."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.small_corpus import conversations, make_recipe, pack_corpus

from packcorpus.tasks.core.errors import StorageError
from packcorpus.tasks.corpus import publish
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.verification.verify import verify


@pytest.mark.parametrize("name", publish.COPIED)
def test_a_plan_that_changes_after_its_check_is_not_published(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {"messages": [{"role": "assistent", "content": "x"}]}
    records = conversations(5, longest=99)
    again = {"messages": [*records[0]["messages"][:-1], {"role": "assistant", "content": "and so on " * 20}]}
    once_more = {"messages": [{"role": "user", "content": "then " + again["messages"][0]["content"]}]}
    once_more["messages"] += again["messages"][1:]
    given = {"duplicates": "near"} if name == publish.DROPPED else {}
    recipe = make_recipe(tmp_path, [*records, again, once_more, bad], max_rejects=1.0, **given)
    files_beside = publish.files_beside

    def damage_then_list(recipe: Recipe) -> dict[str, Path | bytes]:
        """Damage a file of the plan, which was checked just before."""
        data = bytearray((recipe.plan_folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (recipe.plan_folder / name).write_bytes(data)
        return files_beside(recipe)

    monkeypatch.setattr(publish, "files_beside", damage_then_list)
    with pytest.raises(StorageError, match=rf"{name}: damaged or missing; run again"):
        pack_corpus(recipe)
    assert not recipe.published.exists()
    monkeypatch.undo()
    verify(pack_corpus(recipe))
