"""Corpora of earlier versions, whose manifests record settings that were removed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.packed_rows import folder_of
from support.small_corpus import conversations, make_recipe, pack_corpus

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.errors import UsageError
from packcorpus.tasks.storage.files import to_json
from packcorpus.tasks.storage.keys import ONE_PLAN
from packcorpus.tasks.storage.manifest import load_manifest, manifest_digest
from packcorpus.tasks.verification.rebuild import rebuild
from packcorpus.tasks.verification.repair import repair
from packcorpus.tasks.verification.verify import verify

# What manifests of earlier versions record if a removed setting had an effect.
RECORDED: list[dict[str, Any]] = [
    {"plan_group": 40, "plan_chunk": 3},
    {"plan_group": 5000},
    {"company_by": "embedding"},
]


@pytest.mark.parametrize("recorded", RECORDED, ids=str)
def test_a_corpus_that_depends_on_removed_settings_is_read_but_not_made_again(
    recorded: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Config.settings
    with monkeypatch.context() as patch:
        patch.setattr(Config, "settings", lambda self: usual(self) | recorded)
        path = pack_corpus(make_recipe(tmp_path, conversations(20)))
    assert load_manifest(path).config.items() >= recorded.items()
    assert verify(path)
    message = "\n".join(rf".*manifest\.json: {name} was removed; .*" for name in recorded)
    with pytest.raises(UsageError, match=message) as caught:
        rebuild(path)
    assert caught.value.reason == "removed_setting"
    assert list(repair(path)) == []
    shard = next(folder_of(path).glob("train-*.arrow"))
    whole = shard.read_bytes()
    shard.write_bytes(b"damaged")
    assert [file.path for file in repair(path)] == [shard], "the plan and its token files are enough"
    assert shard.read_bytes() == whole
    shard.write_bytes(b"damaged")
    shutil.rmtree(tmp_path / "data" / "plans")
    with pytest.raises(UsageError, match=message):
        list(repair(path))


def test_a_corpus_that_records_former_words_is_verified_and_made_again(tmp_path: Path) -> None:
    path = pack_corpus(make_recipe(tmp_path, conversations(20), neighbors="distinct"))
    values = orjson.loads(path.read_bytes())
    del values["config"]["neighbors"]
    values["config"]["company"] = "apart"
    values["digest"] = manifest_digest(values)
    for file in (path, folder_of(path) / "manifest.json"):
        file.write_bytes(to_json(values))
    assert load_manifest(path).config["neighbors"] == "distinct"
    assert verify(path)
    assert rebuild(path)


def test_a_recorded_value_without_effect_is_ignored(tmp_path: Path) -> None:
    path = pack_corpus(make_recipe(tmp_path, conversations(20)))
    assert load_manifest(path).config["plan_group"] == ONE_PLAN
    assert rebuild(path)
