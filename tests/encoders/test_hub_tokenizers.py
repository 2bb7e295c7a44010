"""Tokenizers on the Hub are fetched at one commit, which is recorded."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import packcorpus
from support.servers.remote import SECRET, HubStandIn, hub_stand_in, needs_remote
from support.small_corpus import conversations, make_recipe, pack_corpus, write_project
from support.tokenizer_kinds import kind_path

from packcorpus.tasks.core.errors import InputMissing, PackError, StorageError, UsageError
from packcorpus.tasks.recipe import resolve
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.verification.rebuild import rebuild
from packcorpus.tasks.verification.repair import repair

needs_remote()

NAME = "owner/model"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
DOWNLOAD = "hf download owner/model --include '*.json' --include '*.jinja' --include '*.model'"
NOWHERE = "http://127.0.0.1:9"


def tokenizer_files(**more: bytes) -> dict[str, bytes]:
    folder = Path(kind_path("hf_byte_level"))
    folder = folder if folder.is_dir() else folder.parent
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return files | {"model.safetensors": b"weights", "README.md": b"#", "vocab.txt": b"x"} | more


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStandIn]:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    with hub_stand_in() as stand_in:
        monkeypatch.setenv("HF_ENDPOINT", stand_in.url)
        stand_in.publish(NAME, tokenizer_files())
        yield stand_in


def pack(folder: Path, tokenizer: Any = NAME, **settings: Any) -> Path:
    return pack_corpus(make_recipe(folder, conversations(30), tokenizer=tokenizer, **settings))


def shards_of(manifest: Path) -> list[str]:
    return [shard.sha256 for split in load_manifest(manifest).splits.values() for shard in split.shards]


def test_a_name_gives_the_rows_and_the_key_of_a_folder_with_the_same_files(hub: HubStandIn, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)
    there, here = pack(tmp_path / "there"), pack(tmp_path / "here", tokenizer=str(folder))
    assert there.name == here.name
    assert shards_of(there) == shards_of(here)
    assert load_manifest(there).tokenizer.revision == hub.revisions[NAME]["main"]
    assert load_manifest(here).tokenizer.revision == ""
    fetched = {request.rpartition("/")[2] for request in hub.requests if "/resolve/" in request}
    assert fetched == {"tokenizer.json", "tokenizer_config.json"} & tokenizer_files().keys()


def test_all_files_are_of_one_commit_and_a_rebuild_uses_it(hub: HubStandIn, tmp_path: Path) -> None:
    first = hub.revisions[NAME]["main"]
    manifest = pack(tmp_path / "a", template="chatml")
    settings = tokenizer_files()["tokenizer_config.json"]
    hub.publish(NAME, tokenizer_files(**{"tokenizer_config.json": settings + b" "}))
    assert "identical" in rebuild(manifest)
    assert load_manifest(manifest).tokenizer.revision == first
    again = load_manifest(pack(tmp_path / "b", template="chatml"))
    assert again.tokenizer.revision == hub.revisions[NAME]["main"] != first
    pinned = load_manifest(pack(tmp_path / "c", tokenizer=f"{NAME}@{first}"))
    assert (pinned.tokenizer.revision, pinned.key) == (first, load_manifest(manifest).key)


def test_repair_takes_a_lost_file_from_the_recorded_commit(hub: HubStandIn, tmp_path: Path) -> None:
    manifest = pack(tmp_path)
    hub.publish(NAME, tokenizer_files(**{"tokenizer.json": b"{}"}))
    lost = tmp_path / load_manifest(manifest).corpus / "tokenizer" / "tokenizer.json"
    lost.unlink()
    [restored] = repair(manifest)
    assert (restored.path, restored.source) == (lost, "a copy")


def test_another_process_uses_the_commit_of_the_run(hub: HubStandIn, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, conversations(5), tokenizer=NAME)
    sent = pickle.dumps(recipe)
    hub.publish(NAME, tokenizer_files(**{"tokenizer.json": b"{}"}))
    received = pickle.loads(sent)  # noqa: S301 - our own
    assert received.tokenizer_files.sha256() == recipe.tokenizer_files.sha256()


@pytest.mark.parametrize("revision", ["", "@v1"])
def test_without_network_the_cache_is_used(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str
) -> None:
    hub.publish(NAME, tokenizer_files(), revision="v1")
    first = pack(tmp_path / "a", tokenizer=NAME + revision)
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    again = pack(tmp_path / "b", tokenizer=NAME + revision)
    assert again.read_bytes() == first.read_bytes()
    assert "identical" in rebuild(first)


def test_the_cache_is_also_used_if_access_is_denied(hub: HubStandIn, tmp_path: Path) -> None:
    first = pack(tmp_path / "a")
    hub.status = 403
    assert pack(tmp_path / "b").read_bytes() == first.read_bytes()


def test_a_path_that_exists_is_not_looked_for_on_the_hub(hub: HubStandIn, tmp_path: Path) -> None:
    config = write_project(tmp_path, conversations(5), tokenizer=NAME)
    shutil.copytree(kind_path("hf_byte_level"), tmp_path / NAME)
    hub.requests.clear()
    assert resolve(config, tmp_path).tokenizer_files.main == tmp_path / NAME / "tokenizer.json"
    assert resolve(config, tmp_path).tokenizer_commit == ""
    assert hub.requests == []
    (tmp_path / "explicit").mkdir()
    config = write_project(tmp_path / "explicit", conversations(5), tokenizer=f"hf://{NAME}")
    assert resolve(config, tmp_path).tokenizer_commit == hub.revisions[NAME]["main"]


def test_the_chat_template_of_a_tokenizer_on_the_hub(hub: HubStandIn, tmp_path: Path) -> None:
    hub.publish(NAME, tokenizer_files(**{"chat_template.jinja": TEMPLATE.encode()}))
    manifest = load_manifest(pack(tmp_path, template="tokenizer"))
    assert [file.path for file in manifest.template_files] == ["template.jinja"]


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        ("owner/other", r"no such file or folder \(.*/owner/other\).*no such model on the Hub.*hf auth login"),
        (f"{NAME}@v9", "no such file or revision in the model"),
        ("hf://owner/other", "^hf://owner/other: no such model on the Hub"),
        ("owner/weights", r"has no tokenizer.json or .model file"),
    ],
)
def test_what_the_hub_does_not_have(hub: HubStandIn, tmp_path: Path, tokenizer: str, words: str) -> None:
    hub.publish("owner/weights", {"config.json": b"{}", "model.safetensors": b""})
    with pytest.raises(InputMissing, match=words) as caught:
        pack(tmp_path, tokenizer=tokenizer)
    assert SECRET not in str(caught.value)


def test_a_gated_model_names_the_login(hub: HubStandIn, tmp_path: Path) -> None:
    hub.gated.add(NAME)
    with pytest.raises(InputMissing, match=r"access must be granted .*hf auth login") as caught:
        pack(tmp_path)
    assert DOWNLOAD in str(caught.value)
    assert SECRET not in str(caught.value)


def test_without_network_and_cache_the_command_for_another_machine_is_named(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    with pytest.raises(InputMissing, match="cannot be reached") as caught:
        pack(tmp_path)
    assert str(caught.value).endswith(DOWNLOAD)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputMissing, match="--revision v1 --include"):
        pack(tmp_path, tokenizer=f"{NAME}@v1")


def test_a_cache_that_cannot_be_written_is_named(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    with pytest.raises(StorageError, match=r"/file.*: Not a directory"):
        pack(tmp_path / "a")


def test_a_name_may_be_loaded_as_files(hub: HubStandIn, tmp_path: Path) -> None:
    manifest = pack(tmp_path, tokenizer={"path": NAME, "as": "files"})
    hub.publish(NAME, tokenizer_files(**{"tokenizer.json": b"{}"}))
    assert "identical" in rebuild(manifest)
    assert load_manifest(manifest).tokenizer_name == f"{NAME}@{load_manifest(manifest).tokenizer.revision[:8]}"


def test_files_that_stop_arriving_are_not_used(hub: HubStandIn, tmp_path: Path) -> None:
    hub.fails = lambda request: "resolve" in request and "tokenizer_config" in request
    with pytest.raises(PackError, match=r"cannot be reached|HTTP 500"):
        pack(tmp_path)
    hub.fails = None
    pack(tmp_path)


@pytest.mark.parametrize(
    "tokenizer",
    ["tok/tokenizer.json", "a.model", "./owner/model", "../model", "/owner/model", "a/b/c", ".hidden"],
)
def test_what_can_only_be_a_path_is_not_looked_for_on_the_hub(hub: HubStandIn, tmp_path: Path, tokenizer: str) -> None:
    with pytest.raises(InputMissing, match="no such tokenizer"):
        pack(tmp_path, tokenizer=tokenizer)
    assert hub.requests == []


@pytest.mark.parametrize("url", ["https://huggingface.co/owner/model", "https://huggingface.co/owner/model/tree/main"])
def test_a_pasted_address_gets_the_name_as_advice(hub: HubStandIn, tmp_path: Path, url: str) -> None:
    with pytest.raises(UsageError, match=re.escape("did you mean owner/model?")):
        pack(tmp_path, tokenizer=url)


@pytest.mark.slow
def test_commands_use_the_cache_of_hf_home(hub: HubStandIn, tmp_path: Path) -> None:
    config = write_project(tmp_path, conversations(20), tokenizer=NAME)
    place = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    checked = packcorpus(tmp_path, "check", config.name, **place)
    assert checked.returncode == 0, checked.stderr
    commit = hub.revisions[NAME]["main"]
    assert f"{NAME}@{commit[:8]}" in checked.stdout
    place |= {"HF_HUB_OFFLINE": "1"}
    packed = packcorpus(tmp_path, "pack", config.name, **place)
    assert packed.returncode == 0, packed.stderr
    manifest = packed.stdout.splitlines()[-1]
    assert json.loads((tmp_path / manifest).read_text())["tokenizer"]["revision"] == commit
    shown = packcorpus(tmp_path, "inspect", manifest, **place)
    assert f"{NAME}@{commit[:8]}" in shown.stdout
    assert f"of `{NAME}@{commit[:8]}`" in next(tmp_path.glob("data/corpora/*/README.md")).read_text()
    reported = packcorpus(tmp_path, "report", manifest, **place)
    assert f"of {NAME}@{commit[:8]}" in (tmp_path / reported.stdout.splitlines()[-1]).read_text()
