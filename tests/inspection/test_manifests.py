"""Every name that `list` shows leads to its manifest.

The errors for other files name the kind of the file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from support.commands import BIN, command
from support.small_corpus import conversations, make_recipe, pack_corpus

from packcorpus.tasks.core.errors import DataError, InputMissing, UsageError
from packcorpus.tasks.inspection.manifests import (
    complete_file,
    complete_manifest,
    find_damaged,
    find_file,
    find_manifest,
)
from packcorpus.tasks.storage.corpus_folder import remember_manifest
from packcorpus.tasks.storage.manifest import load_manifest


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_corpus(make_recipe(tmp_path_factory.mktemp("made"), conversations(12))).parent.parent


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy a project, add three manifests, and change to its folder.

    Two of the manifests have the name of the corpus.
    """
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


def test_a_name_means_the_newest_and_an_ambiguous_key_is_an_error(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = find_manifest(Path("small"))
    assert found == max(Path("manifests").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert capsys.readouterr().err == f"{found}: the newest of 3 named small\n"
    assert find_manifest(Path("other-name")).stem == "other-name-ffff00000000"
    with pytest.raises(
        UsageError, match=r"0123: is ambiguous: it matches 2 keys \(small-0123456789ab and small-0123aaaaaaaa\)"
    ):
        find_manifest(Path("0123"))


def test_a_missing_file_is_an_error_that_names_its_kind(here: Path) -> None:
    for name in ("smal-0123456789ab", "nothing"):
        with pytest.raises(InputMissing) as error:
            find_manifest(Path(name))
        assert "luigi" not in str(error.value)
    for name, code in (("nope.jsonl", "E301"), ("nope.yaml", "E102"), ("nope", "E501")):
        with pytest.raises(InputMissing, match=f"^{name}: no such file") as missing:
            find_file(Path(name))
        assert missing.value.code == code
    assert re.search(
        r"nope: no such file, and no such name or key in manifests/, which has \w+-\w+", str(missing.value)
    )


def test_another_file_is_called_what_it_is(here: Path) -> None:
    with pytest.raises(DataError, match=r"corpus.yaml: is a config, not a manifest; its corpora: manifests/small-"):
        find_manifest(Path("corpus.yaml"))
    with pytest.raises(DataError, match=r"chat.jsonl: is a source, not a manifest"):
        find_damaged(Path("chat.jsonl"))
    Path("README.md").write_text("# Mine\n")
    with pytest.raises(DataError, match=r"README.md:1:1: is not JSON: .*, so it is not a manifest$") as error:
        load_manifest(find_manifest(Path("README.md")))
    assert error.value.code == "E502"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"x.json:1:1: is not JSON: .*empty document, so it is not a manifest"),
        ("{\n", r"x.json:2:1: is not JSON: unexpected end of data, so it is not a manifest"),
        ('{"name": "x", "key":', r"x.json:1:21: is not JSON: unexpected end of data, so it is not a manifest"),
        ('[\n  {"a": 1}\n]\n', "x.json: is a source, not a manifest"),
        ('{"a": 1}\n{"a": 2}\n', "x.json: is a source, not a manifest"),
        ('[{"a": 1},' + '{"a": 1},' * 1000, "x.json: is a source, not a manifest"),
    ],
)
def test_a_broken_manifest_is_not_called_a_source(here: Path, text: str, message: str) -> None:
    Path("x.json").write_text(text)
    with pytest.raises(DataError, match=message) as error:
        find_manifest(Path("x.json"))
    assert error.value.code == "E502"


def test_repair_takes_a_manifest_that_is_gone(here: Path) -> None:
    newest = max(Path("manifests").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert find_damaged(None) == newest
    newest.unlink()  # the corpus has the other copy
    assert find_damaged(newest) == newest


def test_shells_complete_manifests(here: Path) -> None:
    assert complete_manifest("small-0123a") == ["small-0123aaaaaaaa"]
    assert complete_manifest("cor") == []
    assert complete_file("cor") == ["corpus.yaml"]
    assert len(complete_manifest("manifests/small")) == 3


@pytest.mark.parametrize("words", [["verify"], ["report"], ["repair"], ["diff", "small"]])
def test_every_command_refuses_another_file(here: Path, words: list[str]) -> None:
    done = command(here, str(BIN / "packcorpus"), *words, "corpus.yaml", "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (DataError.exit_code, "E502")
    assert "is a config, not a manifest" in error["message"]


def test_the_manifest_of_the_latest_run_is_the_default(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = max(Path("manifests").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert find_manifest(None) == newest
    assert capsys.readouterr().err == f"{newest}: the newest of 4\n"
    remember_manifest(Path(), "other-name-ffff00000000.json")
    latest = Path("manifests/other-name-ffff00000000.json")
    assert find_manifest(None) == find_file(None) == find_damaged(None) == latest
    assert capsys.readouterr().err == f"{latest}: from the latest run\n" * 3
    latest.unlink()
    assert find_manifest(None) == newest


def test_names_are_resolved_below_the_root(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = tmp_path / "project" / "manifests" / "other-name-ffff00000000.json"
    for root in (here, Path("project")):
        for find in (find_manifest, find_file, find_damaged):
            assert find(Path("other-name"), root).samefile(found)
        assert find_manifest(None, root).parent == root / "manifests"
    with pytest.raises(InputMissing, match="did you mean other-name"):
        find_manifest(Path("other-nam"), Path("project"))
    with pytest.raises(
        InputMissing,
        match=r"other-name: no such manifest, and no such name or key in manifests/, which has no manifests$",
    ):
        find_manifest(Path("other-name"))


@pytest.mark.parametrize(
    "words",
    [["inspect"], ["inspect", "small"], ["list"], ["verify"], ["verify", "small"], ["diff", "small", "small"],
     ["report"], ["repair", "small"]],
)  # fmt: skip
def test_every_command_takes_a_root(made: Path, tmp_path: Path, words: list[str]) -> None:
    shutil.copytree(made, tmp_path / "project")
    done = command(tmp_path, str(BIN / "packcorpus"), *words, "--root", "project", "--json")
    assert done.returncode == 0, done.stdout
    assert "project/manifests/small-" in done.stdout
