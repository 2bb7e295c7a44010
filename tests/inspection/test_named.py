"""What a person names: every name that `list` shows leads to its manifest, and what is none is called what it is."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from support.commands import BIN, command
from support.small_corpus import conversations, make_recipe, pack_corpus

from tasks.core.errors import DataError, InputMissing, UsageError
from tasks.inspection.manifests import complete_file, complete_manifest, find_damaged, find_file, find_manifest
from tasks.storage.manifest import load_manifest


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_corpus(make_recipe(tmp_path_factory.mktemp("made"), conversations(12))).parent.parent


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a corpus, another manifest of its name, and one of another name."""
    root = tmp_path / "project"
    shutil.copytree(made, root)
    [own] = (root / "manifests").iterdir()
    for age, name in enumerate(("small-0123456789ab", "small-0123aaaaaaaa", "other-name-ffff00000000")):
        shutil.copy(own, root / "manifests" / f"{name}.json")
        os.utime(root / "manifests" / f"{name}.json", (age, age))
    monkeypatch.chdir(root)
    return root


def test_every_manifest_is_found_by_path_file_stem_and_key(here: Path) -> None:
    for path in Path("manifests").iterdir():
        key = path.stem.rpartition("-")[2]
        for name in (path, path.name, path.stem, key, key[:6]):
            assert find_manifest(Path(name)) == path == find_damaged(Path(name))
    [corpus] = Path("data/corpora").iterdir()
    assert find_manifest(corpus) == corpus / "manifest.json"


def test_of_several_of_one_name_the_newest_is_meant_and_of_keys_none(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = find_manifest(Path("small"))
    assert found == max(Path("manifests").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert capsys.readouterr().err == f"{found}: the newest of 3 named small\n"
    assert find_manifest(Path("other-name")).stem == "other-name-ffff00000000"
    with pytest.raises(UsageError, match="0123: is the begin of 2 keys: small-0123456789ab and small-0123aaaaaaaa"):
        find_manifest(Path("0123"))


def test_what_is_not_there_is_told_without_a_command_that_packs_something_else(here: Path) -> None:
    for name in ("smal-0123456789ab", "nothing"):
        with pytest.raises(InputMissing) as told:
            find_manifest(Path(name))
        assert "luigi" not in str(told.value)
    for name, code in (("nope.jsonl", "E301"), ("nope.yaml", "E102"), ("nope", "E501")):
        with pytest.raises(InputMissing, match=f"^{name}: no such file") as missing:
            find_file(Path(name))
        assert missing.value.code == code


def test_what_is_no_manifest_is_called_what_it_is(here: Path) -> None:
    with pytest.raises(DataError, match=r"corpus.yaml: is a config, not a manifest; its corpora: manifests/small-"):
        find_manifest(Path("corpus.yaml"))
    with pytest.raises(DataError, match=r"chat.jsonl: is a source, not a manifest"):
        find_damaged(Path("chat.jsonl"))
    Path("README.md").write_text("# Mine\n")
    with pytest.raises(DataError, match=r"README.md:1:1: is not JSON: .*, so it is not a manifest$") as told:
        load_manifest(find_manifest(Path("README.md")))
    assert told.value.code == "E502"


def test_repair_wants_a_name_and_says_which(here: Path) -> None:
    newest = max(Path("manifests").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    with pytest.raises(UsageError, match=f"the newest: packcorpus repair {newest}"):
        find_damaged(None)
    newest.unlink()  # its corpus has the other copy
    assert find_damaged(newest) == newest


def test_shells_are_offered_manifests_where_one_is_wanted(here: Path) -> None:
    assert complete_manifest("small-0123a") == ["small-0123aaaaaaaa"]
    assert complete_manifest("cor") == []
    assert complete_file("cor") == ["corpus.yaml"]
    assert len(complete_manifest("manifests/small")) == 3


@pytest.mark.parametrize("words", [["verify"], ["report"], ["repair"], ["diff", "small"]])
def test_every_command_says_so(here: Path, words: list[str]) -> None:
    done = command(here, str(BIN / "packcorpus"), *words, "corpus.yaml", "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (DataError.exit_code, "E502")
    assert "is a config, not a manifest" in error["message"]
