"""Repair restores exactly the damaged files, or reports the reason.

Files are restored byte for byte. If a repair fails, no file is changed.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.commands import BIN, ROOT, command
from support.damage.kinds import DAMAGES, flip
from support.profiles import examples
from support.small_corpus import conversations, pack_corpus, write_project
from support.tokenizer_kinds import CHATML_JINJA, kind_path

from packcorpus.tasks import recipe as recipe_module
from packcorpus.tasks.core.errors import (
    Busy,
    DataError,
    InputMissing,
    NotReproducible,
    PackError,
    StorageError,
    UsageError,
)
from packcorpus.tasks.recipe import resolve
from packcorpus.tasks.storage import corpus_folder
from packcorpus.tasks.storage.facts import FileFacts
from packcorpus.tasks.storage.files import read_json, read_receipt, sha256_of, to_json, write_receipt
from packcorpus.tasks.storage.keys import VERSIONS
from packcorpus.tasks.storage.manifest import load_manifest, manifest_digest
from packcorpus.tasks.verification import repair as repair_module
from packcorpus.tasks.verification.rebuild import rebuild
from packcorpus.tasks.verification.repair import _publish, repair
from packcorpus.tasks.verification.verify import verify
from packcorpus.tasks.work import Publish

BAD = {"messages": [{"role": "assistent", "content": "x"}]}

KINDS: dict[str, dict[str, Any]] = {
    "packed": {"validation": 0.2, "max_rejects": 1.0, "part_size": 4096},
    "whole": {"packing": False, "max_rejects": 1.0},
    "jinja": {"template": "own.jinja", "tokenizer": "hf", "max_rejects": 1.0},
    "trained": {"tokenizer": None, "vocab_size": 320, "max_rejects": 1.0},
}


def make(root: Path, **values: Any) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "own.jinja").write_text(CHATML_JINJA)
    shutil.copytree(kind_path("hf_byte_level"), root / "hf", dirs_exist_ok=True)
    return pack_corpus(resolve(write_project(root, [*conversations(100), BAD], **values), root))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe_module, "SOURCE_BYTES_PER_SHARD", 8000)
        return {kind: make(tmp_path_factory.mktemp(kind), **values) for kind, values in KINDS.items()}


@pytest.fixture(autouse=True)
def shards_of_8000_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_module, "SOURCE_BYTES_PER_SHARD", 8000)


class Copy:
    """A copy is a project to damage, with the original state of its corpus."""

    def __init__(self, made: Path, root: Path):
        shutil.copytree(made.parent.parent, root)
        self.root = root
        self.path = root / "manifests" / made.name
        self.folder = root / "data" / "corpora" / made.stem
        record = read_json(self.folder / "run.json")
        record["made_from"]["folder"] = str(root)
        (self.folder / "run.json").write_bytes(to_json(record))
        self.listed = [self.folder / file.path for file in load_manifest(self.path).listed()]
        self.before = self.files()

    def files(self) -> dict[Path, tuple[bytes, int, int]]:
        """Return content, inode, and time of each corpus file and of both manifests."""
        found = [*sorted(self.folder.rglob("*")), self.path]
        return {p: (p.read_bytes(), p.stat().st_ino, p.stat().st_mtime_ns) for p in found if p.is_file()}

    def without_plans(self) -> None:
        shutil.rmtree(self.root / "data" / "plans")

    def publish(self, values: dict[str, Any]) -> None:
        """Write both manifests with the digest of their values."""
        values["digest"] = manifest_digest(values)
        for path in (self.path, self.folder / "manifest.json"):
            path.write_bytes(to_json(values))

    def repair(self, *damaged: Path, path: Path | None = None) -> list[str]:
        """Repair the corpus, and return the origin of each file.

        The corpus must be as before the damage, and only the damaged files may be written.
        """
        restored = list(repair(path or self.path))
        assert sorted(m.path for m in restored) == sorted(damaged)
        after = self.files()
        assert {p: content for p, (content, *_) in after.items()} == {p: c for p, (c, *_) in self.before.items()}
        for file, facts in self.before.items():
            assert (after[file] == facts) is (file not in damaged), file
        assert not [p for p in damaged if p.is_symlink()]
        verify(self.path)
        return [m.source for m in restored]

    def refused_by(self, check: Callable[[Path], Any], kind: type[PackError]) -> str:
        with pytest.raises(kind) as caught:
            check(self.path)
        return str(caught.value)

    def refused(self, kind: type[PackError] = DataError, **options: Any) -> str:
        before = self.files()
        with pytest.raises(kind) as caught:
            list(repair(self.path, **options))
        assert self.files() == before, "something was touched"
        assert "\n" not in str(caught.value)
        return str(caught.value)


@pytest.fixture
def copy(made: dict[str, Path], tmp_path: Path) -> Copy:
    return Copy(made["packed"], tmp_path / "copy")


# -- restored files --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", ["plans and sources", "plans", "sources"])
def test_all_files_are_restored_at_once(kind: str, kept: str, made: dict[str, Path], tmp_path: Path) -> None:
    copy = Copy(made[kind], tmp_path / "copy")
    if kept == "plans":
        (copy.root / "chat.jsonl").unlink()
    elif kept == "sources":
        copy.without_plans()
        shutil.rmtree(copy.root / "data" / "tokens")
    for number, file in enumerate(copy.listed):
        DAMAGES[("flipped", "truncated", "emptied", "extended", "missing")[number % 5]](file)
    sources = copy.repair(*copy.listed)
    shards = sources[-sum("train-" in file.name or "validation-" in file.name for file in copy.listed) :]
    assert {*shards} == {"the plan and its token files" if kept != "sources" else "the sources"}
    assert list(repair(copy.path)) == []


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_all_damage_is_repaired_and_nothing_else_is_written(seed: int, copy: Copy) -> None:
    source = random.Random(seed)
    damaged = source.sample(copy.listed, source.randint(0, 4))
    damaged += source.sample([copy.path, copy.folder / "manifest.json"], source.randint(0, 1))
    for file in damaged:
        allowed = [name for name in DAMAGES if name != "folder" and (file != copy.path or "link" not in name)]
        how = source.choice(allowed)
        DAMAGES[how](file)
    try:
        copy.repair(*damaged)
    finally:
        copy.before = copy.files()


def test_a_moved_corpus_is_repaired_from_the_project_in_the_working_directory(
    copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "elsewhere" / "moved"
    shutil.copytree(copy.folder, moved)
    shard = moved / "train-00000-of-00003.arrow"
    flip(shard)
    monkeypatch.chdir(tmp_path)
    (copy.root / "chat.jsonl").rename(copy.root / "other.jsonl")
    with pytest.raises(InputMissing, match=r"train-00000-of-00003.arrow: cannot be restored: chat.jsonl"):
        list(repair(moved))
    assert not (tmp_path / "data").exists()
    monkeypatch.chdir(copy.root)
    assert [m.path for m in repair(moved)] == [shard]
    assert shard.read_bytes() == (copy.folder / shard.name).read_bytes()


def test_a_folder_replaced_by_a_link_is_restored(copy: Copy) -> None:
    inside = copy.folder / "tokenizer"
    outside = copy.root / "outside"
    inside.rename(outside)
    inside.symlink_to(outside)
    kept = {p: p.stat().st_mtime_ns for p in outside.iterdir()}
    copy.repair(*(file for file in copy.listed if file.parent == inside))
    assert not inside.is_symlink()
    assert {p: p.stat().st_mtime_ns for p in outside.iterdir()} == kept


# -- the origin of the bytes -----------------------------------------------------------------------------------------


def token_files(copy: Copy) -> dict[Path, int]:
    return {p: p.stat().st_mtime_ns for p in sorted((copy.root / "data" / "tokens").rglob("*.arrow"))}


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_only_a_damaged_token_file_is_rebuilt(how: str, copy: Copy) -> None:
    kept = token_files(copy)
    assert len(kept) > 2
    bad = max(kept, key=lambda path: path.stat().st_size)  # every shard has some of its conversations
    DAMAGES[how](bad)
    shards = [file for file in copy.listed if file.name.startswith("train-")]
    for shard in shards:
        flip(shard)
    assert "the sources" in copy.repair(*shards)
    after = token_files(copy)
    assert after.keys() == kept.keys()
    assert [p for p in kept if after[p] != kept[p]] == [bad]


def test_a_damaged_plan_is_not_used(copy: Copy) -> None:
    [plan] = (copy.root / "data" / "plans").glob("*/plan.arrow")
    flip(plan)
    flip(copy.listed[0])
    assert copy.repair(copy.listed[0]) == ["the sources"]


def test_cached_files_that_give_other_bytes_are_not_published(copy: Copy) -> None:
    """Cached files that give other bytes are not published.

    A changed receipt gives another index, so no cached file is used.
    """
    copy.without_plans()
    for receipt in (copy.root / "data" / "tokens").rglob("*.json"):
        values = read_receipt(receipt)
        values["records"] += 1
        write_receipt(receipt, values)
    index = copy.folder / "index.arrow"
    flip(index)
    assert copy.repair(index) == ["the sources (rebuilt from scratch)"]
    shutil.rmtree(copy.root / "data" / "plans")
    for receipt in (copy.root / "data" / "tokens").rglob("*.json"):
        write_receipt(receipt, {"bytes": receipt.with_suffix(".arrow").stat().st_size})
    flip(index)
    copy.before = copy.files() | {index: copy.before[index]}
    assert copy.repair(index) == ["the sources"]


def test_a_wrong_plan_is_not_published(copy: Copy) -> None:
    """A plan with correct checksums but wrong rows is not published."""
    [plan] = (copy.root / "data" / "plans").glob("*/plan.json")
    values = read_receipt(plan)
    values["token_files"].reverse()
    write_receipt(plan, values)
    shard = copy.folder / "train-00000-of-00003.arrow"
    flip(shard)
    assert copy.repair(shard) == ["the sources"]
    values["token_files"].reverse()
    for odd in (values | {"placements": []}, {"name": values["name"]}):
        write_receipt(plan, odd)
        flip(shard)
        copy.before = copy.files() | {shard: copy.before[shard]}
        assert copy.repair(shard) == ["the sources"]


def test_a_copy_in_another_corpus_is_found_without_the_config(copy: Copy) -> None:
    shutil.copytree(copy.folder, copy.folder.with_name("other-0123456789ab"))
    (copy.root / "tiny.model").unlink()
    (copy.folder / "run.json").unlink()
    copy.before = copy.files()
    tokenizer = copy.folder / "tokenizer" / "tiny.model"
    flip(tokenizer)
    assert copy.repair(tokenizer) == ["a copy"]


# -- damage that cannot be repaired ----------------------------------------------------------------------------------


def test_changed_sources_are_named_and_nothing_is_written(copy: Copy) -> None:
    copy.without_plans()
    flip(copy.listed[0])
    source = copy.root / "chat.jsonl"
    original = source.read_bytes()
    source.write_bytes(original + original.splitlines()[0] + b"\n")
    assert f"{source} has changed since" in copy.refused()
    source.write_bytes(original)
    config = copy.root / "corpus.yaml"
    config.write_text(config.read_text() + "seed: 43\n")
    assert "seed was 42, but the config has 43" in copy.refused(config_file=config)
    config.write_text(config.read_text().replace("seed: 43", "name: other"))
    source.with_name("more.jsonl").write_bytes(original)
    config.write_text(config.read_text().replace("chat.jsonl", "'*.jsonl'").replace("name: other", ""))
    assert "more.jsonl is a new source" in copy.refused(config_file=config)
    source.unlink()
    assert "the source chat.jsonl does not exist anymore" in copy.refused(config_file=config)


def test_a_changed_tokenizer_or_template_is_named(made: dict[str, Path], tmp_path: Path) -> None:
    copy = Copy(made["jinja"], tmp_path / "copy")
    copy.without_plans()
    flip(copy.listed[0])
    (copy.root / "own.jinja").write_text(CHATML_JINJA + " ")
    assert "the template own.jinja has changed" in copy.refused()
    flip(copy.root / "hf" / "tokenizer.json", 8)
    assert "the tokenizer has changed" in copy.refused()
    for name in ("tokenizer/tokenizer.json", "template.jinja"):
        file = copy.folder / name
        content = file.read_bytes()
        file.unlink()
        assert f"{name}: cannot be restored" in copy.refused()
        file.write_bytes(content)


@pytest.mark.parametrize("lost", [False, True])
def test_a_file_that_is_recorded_with_an_impossible_size_is_refused(lost: bool, copy: Copy) -> None:
    shard = copy.listed[0]
    size = shard.stat().st_size
    values = orjson.loads(copy.path.read_bytes())
    values["splits"]["train"]["shards"][0]["bytes"] += 1
    copy.publish(values)
    if lost:
        shard.unlink()
    else:
        flip(copy.folder / "tokenizer" / "tiny.model")  # this file comes first, and is not restored either
    assert copy.refused().endswith(
        f"{shard}: the content with the recorded SHA-256 has {size:,} bytes, but {size + 1:,} are recorded: the "
        "manifest was edited and its digest recomputed; the file was not changed; pack the corpus again"
    )


def test_another_version_cannot_rebuild_it(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    copy.without_plans()
    flip(copy.listed[0])
    monkeypatch.setitem(VERSIONS, "corpus", 99)
    assert "the version of packcorpus, has changed" in copy.refused()


def test_without_a_run_record_the_config_is_required(copy: Copy) -> None:
    shutil.rmtree(copy.root / "data" / "plans")
    shard = copy.listed[0]
    for record in (b"", b"{}", b'{"made_from": {"folder": "/nowhere", "part_size": 5}}', b'{"made_from": [1]}'):
        flip(shard)
        (copy.folder / "run.json").write_bytes(record)
        assert "name the config with --config FILE" in copy.refused(UsageError)
        flip(shard)
    flip(shard)
    (copy.folder / "run.json").write_bytes(b'{"made_from": {"folder": "/nowhere", "part_size": 5000}}')
    assert "/nowhere: the folder of the config does not exist; name the config" in copy.refused(InputMissing)
    assert [m.path for m in repair(copy.path, copy.root / "corpus.yaml")] == [shard]
    verify(copy.path)


def test_a_missing_tokenizer_is_an_error(copy: Copy) -> None:
    (copy.folder / "tokenizer" / "tiny.model").unlink()
    (copy.root / "tiny.model").unlink()
    assert "tiny.model: no such tokenizer" in copy.refused(InputMissing)
    (copy.folder / "run.json").unlink()
    assert "name the config with --config FILE" in copy.refused(UsageError)


def test_other_bytes_replace_nothing(copy: Copy) -> None:
    inside, outside = copy.folder / "tokenizer", copy.root / "outside"
    inside.rename(outside)
    inside.symlink_to(outside)
    facts = FileFacts(path="tokenizer/tiny.model", bytes=1, sha256="0" * 64)
    assert not _publish(b"other", inside / "tiny.model", copy.folder, facts)
    assert inside.is_symlink()


def test_a_source_that_changes_during_the_copy_is_not_published(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    index = copy.folder / "index.arrow"
    right, size = sha256_of(index), copy.listed[0].stat().st_size
    flip(index)
    lie = type("Lie", (), {"hexdigest": lambda self: right})
    monkeypatch.setattr(repair_module.hashlib, "file_digest", lambda *_: lie())
    before = index.read_bytes()
    with pytest.raises(DataError, match=r"index.arrow: its source changed while it was copied; run repair again"):
        _publish(copy.listed[0], index, copy.folder, FileFacts(path="index.arrow", bytes=size, sha256=right))
    assert index.read_bytes() == before
    assert not list(copy.folder.glob(".*"))


def test_an_unreadable_file_is_named(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(corpus_folder, "sha256_of", refuse)
    assert f"{copy.listed[0]}: cannot be read: Input/output error" in copy.refused_by(verify, StorageError)


def test_a_folder_instead_of_a_file_and_foreign_files_are_left_alone(copy: Copy) -> None:
    index = copy.folder / "index.arrow"
    index.unlink()
    index.mkdir()
    (index / "mine.txt").write_text("mine")
    assert f"{index}: is a folder; move it elsewhere" in copy.refused()
    shutil.rmtree(index)
    content = copy.path.read_bytes()
    copy.path.unlink()
    copy.path.mkdir()
    for named in (copy.path, copy.folder):
        with pytest.raises(DataError, match=f"{copy.path}: is a folder; move it elsewhere"):
            list(repair(named))
    copy.path.rmdir()
    copy.path.write_bytes(content)
    (copy.folder / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match=r"mine.txt: does not belong to this corpus; move it elsewhere"):
        list(repair(copy.path))
    (copy.folder / "yours.txt").write_text("yours")
    with pytest.raises(DataError, match=r"2 files do not match the manifest\n.*mine.txt: .*\n.*yours.txt: "):
        list(repair(copy.path))
    assert (copy.folder / "mine.txt").read_text() == "mine"
    (copy.folder / "mine.txt").unlink()
    (copy.folder / "yours.txt").unlink()
    verify(copy.path)


def test_a_full_disk_leaves_everything_unchanged(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    flip(copy.listed[0])
    monkeypatch.setattr(os, "rename", refuse)
    assert "No space left on device" in copy.refused(PackError)
    assert not list(copy.folder.glob(".*"))


def test_repair_is_refused_during_a_run_of_the_same_corpus(copy: Copy) -> None:
    flip(copy.listed[0])
    lock = copy.root / "data" / "plans" / f"{copy.path.stem}.lock"
    code = "import sys; from pathlib import Path; from packcorpus.tasks.storage.files import acquire_lock\n"
    code += "print(acquire_lock(Path(sys.argv[1]))); input()"
    words = (sys.executable, "-u", "-c", code, str(lock))
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as other:
        assert other.stdout
        assert other.stdout.readline() == b"True\n"
        assert "a run is packing this corpus" in copy.refused(Busy)
        other.communicate(b"\n")


# -- manifests -------------------------------------------------------------------------------------------------------


def test_two_damaged_or_two_different_manifests_are_refused(copy: Copy) -> None:
    own = copy.folder / "manifest.json"
    values = orjson.loads(own.read_bytes())
    values["noticed"]["control_text_seen"] += 1
    values["digest"] = manifest_digest(values)
    own.write_bytes(to_json(values))
    assert "differ, and neither was edited; delete the wrong copy" in copy.refused()
    flip(own)
    flip(copy.path)
    assert "every copy of the manifest is damaged" in copy.refused()
    with pytest.raises(InputMissing, match=r"nowhere.json: no such manifest"):
        list(repair(copy.root / "nowhere.json"))


def test_a_copied_manifest_finds_its_corpus(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = copy.root / "elsewhere.json"
    shutil.copy(copy.path, elsewhere)
    flip(copy.listed[0])
    assert [m.path for m in repair(elsewhere)] == [copy.listed[0]]
    verify(copy.path)


# -- rebuilding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_rebuilt_corpus_has_the_same_bytes(kind: str, made: dict[str, Path], tmp_path: Path) -> None:
    copy = Copy(made[kind], tmp_path / "copy")
    assert rebuild(copy.path).endswith(": identical")
    assert rebuild(copy.folder / "manifest.json", copy.root / "corpus.yaml") == rebuild(copy.path)
    assert copy.files() == copy.before


def check_that_another_value_is_reported(copy: Copy) -> None:
    values = orjson.loads(copy.path.read_bytes())
    values["packing_metadata"]["algorithm"] = "another"
    copy.publish(values)
    with pytest.raises(NotReproducible, match=r"manifest.json: .*: packing_metadata.algorithm was another, is \w"):
        rebuild(copy.path)


def test_a_corpus_that_differs_after_rebuilding_is_reported_by_its_first_file(copy: Copy) -> None:
    shard = copy.folder / "train-00001-of-00003.arrow"
    original = shard.read_bytes()
    flip(shard)
    with pytest.raises(NotReproducible, match=f"{shard}: differs after rebuilding$"):
        rebuild(copy.path)
    shard.write_bytes(original)
    check_that_another_value_is_reported(copy)
    (copy.root / "chat.jsonl").write_bytes(b'{"messages": []}\n')
    with pytest.raises(NotReproducible, match=r"chat.jsonl has changed since"):
        rebuild(copy.path)


# -- a corpus of an earlier version ----------------------------------------------------------------------------------


def as_before_texts_had_a_version(copy: Copy) -> None:
    """Change the corpus to one of a version before `texts_version`.

    Reject messages and the dataset card have other texts, and the manifest has the keys of that version.
    """
    values = orjson.loads(copy.path.read_bytes())
    del values["texts_version"]
    compared = {"texts": 100, "bytes": 2000, "differs": None, "reason": None}
    values["tokenizer"] |= {"engine": "gigatoken", "parity": compared}
    values["config"] = {"licence" if key == "license" else key: value for key, value in values["config"].items()}
    for file in values["files"]:
        if file["path"] in ("rejects.jsonl", "README.md"):
            path = copy.folder / file["path"]
            path.write_bytes(path.read_bytes().replace(b" ", b"  "))
            file |= {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    copy.publish(values)
    shutil.rmtree(copy.root / "data" / "tokens")
    copy.without_plans()
    copy.before = copy.files()


def test_an_earlier_corpus_is_verified_and_counts_as_packed(copy: Copy) -> None:
    as_before_texts_had_a_version(copy)
    verify(copy.path)
    manifest = load_manifest(copy.path)
    assert (manifest.texts_version, manifest.config["license"]) == (1, [])
    assert Publish(resolve(copy.root / "corpus.yaml", copy.root)).is_done(check_content=True)


def test_an_earlier_corpus_is_repaired_except_for_its_texts(copy: Copy) -> None:
    as_before_texts_had_a_version(copy)
    restorable = [file for file in copy.listed if file.name not in ("rejects.jsonl", "README.md")]
    assert len(restorable) == len(copy.listed) - 2
    for file in restorable:
        flip(file)
    copy.repair(*restorable)
    for name in ("rejects.jsonl", "README.md"):
        content = (copy.folder / name).read_bytes()
        (copy.folder / name).unlink()
        with pytest.raises(
            DataError, match=r"written by another version of packcorpus \(texts 1, .* texts 9\)"
        ) as caught:
            list(repair(copy.path))
        assert caught.value.reason == "origin_changed"
        assert str(caught.value).startswith(f"{copy.folder / name}: cannot be restored: it was written by")
        (copy.folder / name).write_bytes(content)
    assert list(repair(copy.path)) == []


def test_an_earlier_corpus_differs_only_in_its_texts_after_rebuilding(copy: Copy) -> None:
    as_before_texts_had_a_version(copy)
    said = r"rejects.jsonl, README.md, manifest.json: written by another version .*; all other files are identical$"
    with pytest.raises(NotReproducible, match=said):
        rebuild(copy.path)
    check_that_another_value_is_reported(copy)
    flip(copy.listed[0])
    with pytest.raises(NotReproducible, match=f"{copy.listed[0]}: differs after rebuilding$"):
        rebuild(copy.path)


@pytest.mark.slow
def test_the_commands(copy: Copy, tmp_path: Path) -> None:
    tool = str(BIN / "packcorpus")
    manifest = str(copy.path.relative_to(copy.root))
    flip(copy.listed[0])
    done = command(copy.root, tool, "verify", manifest)
    assert done.returncode == 65
    advice = done.stderr.splitlines()[0].rpartition("; run: ")[2].split()
    assert advice[:2] == ["packcorpus", "repair"]
    done = command(copy.root, str(BIN / advice[0]), *advice[1:])
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 1, "")
    assert done.stdout.startswith(
        f"repaired {copy.listed[0].relative_to(copy.root)} (does not have the recorded SHA-256"
    )
    done = command(copy.root, tool, "repair", manifest)
    assert (done.returncode, done.stdout) == (0, "nothing to repair: all files match the manifest\n")
    done = command(copy.root, tool, "verify", "--config", "corpus.yaml", manifest)
    assert (done.returncode, done.stderr.splitlines()[0]) == (64, "E101 error: --config requires --rebuild")
    done = command(copy.root, tool, "verify", "--rebuild", "--config", "nosuch.yaml", manifest)
    assert (done.returncode, done.stderr[:12]) == (66, "E102 error: ")  # not the exit code for a corpus that differs
    (copy.root / "chat.jsonl").write_bytes(b'{"messages": []}\n')
    done = command(copy.root, tool, "verify", "--rebuild", manifest)
    assert done.returncode == 104
    assert done.stderr.startswith("E524 error: ")
    assert "chat.jsonl has changed since" in done.stderr
    assert sha256_of(copy.path) == sha256_of(copy.folder / "manifest.json")
