"""`packcorpus clean` deletes only what no corpus uses and a run can write again."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest
from support.commands import BIN, packcorpus
from support.small_corpus import conversations, write_project

from packcorpus.tasks.core.errors import Busy
from packcorpus.tasks.inspection.unused import delete_unused, find_unused
from packcorpus.tasks.recipe import resolve
from packcorpus.tasks.storage.files import write_receipt
from packcorpus.tasks.storage.layout import Layout
from packcorpus.tasks.stores.store import Facts, place_of_copy
from packcorpus.tasks.work import claim


def _pack(folder: Path, *words: str) -> str:
    done = packcorpus(folder, "pack", *words, "--workers", "1", "--quiet")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _bytes(folder: Path, *below: str) -> dict[str, bytes]:
    """Return all files of some folders of a root, but not the record of a run."""
    files = [path for name in below for path in (folder / name).rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files if path.name != "run.json"}


def _forget(folder: Path, manifest: str) -> None:
    shutil.rmtree(folder / "data/corpora" / Path(manifest).stem)
    (folder / manifest).unlink()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a root with a corpus and the remains of another one, of other texts.

    The folder and the manifest of the second corpus were deleted. A run has trained a tokenizer for each.
    """
    write_project(tmp_path, conversations(80), tokenizer=None, vocab_size=300)
    _pack(tmp_path, "corpus.yaml")
    other = (tmp_path / "corpus.yaml").read_text().replace("chat.jsonl", "other.jsonl")
    (tmp_path / "other.yaml").write_text(other)
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in conversations(90, seed=1)))
    _forget(tmp_path, _pack(tmp_path, "other.yaml"))
    for name in ("data/adapters/run/adapter.bin", "data/exports/x/a.bin", "data/notes.txt", "data/tokens/ab/mine.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "data/corpora/.train-00000.arrow.0123456789abcdef.tmp").write_bytes(b"dead")
    return tmp_path


def test_what_no_corpus_uses_is_deleted_and_can_be_packed_again(project: Path) -> None:
    """Corpora stay complete, and a deleted corpus is packed to the same bytes."""
    manifest = _pack(project, "other.yaml")
    expected = _bytes(project, "data/corpora", "manifests")
    _forget(project, manifest)
    kept = _bytes(project, "data/corpora", "manifests", "data/adapters", "data/exports")
    done = packcorpus(project, "clean", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    kinds = {kind["name"]: kind for kind in json.loads(done.stdout)["usage"]["kinds"]}
    for name in ("tokens", "plans", "engines", "tokenizers"):
        assert kinds[name]["used"]["files"] == kinds[name]["unused"]["files"] > 0, name
    assert kinds["temporary files"]["unused"]["files"] == 1
    assert kinds["notes.txt"]["what"] == "not written by packcorpus"
    del kept["data/corpora/.train-00000.arrow.0123456789abcdef.tmp"]
    assert _bytes(project, "data/corpora", "manifests", "data/adapters", "data/exports") == kept
    assert (project / "data/notes.txt").read_text() == (project / "data/tokens/ab/mine.txt").read_text() == "mine"
    assert not find_unused(project).unused.files
    assert packcorpus(project, "verify").returncode == 0
    assert "already packed" in packcorpus(project, "pack", "corpus.yaml").stderr
    assert _pack(project, "other.yaml") == manifest
    del expected["data/corpora/.train-00000.arrow.0123456789abcdef.tmp"]
    assert _bytes(project, "data/corpora", "manifests") | {"manifests/.last": b""} == expected | {
        "manifests/.last": b""
    }


def test_without_a_terminal_it_only_lists(project: Path) -> None:
    before = _bytes(project, "data")
    done = packcorpus(project, "clean")
    assert done.returncode == 0, done.stderr
    assert "nothing was deleted; to delete " in done.stdout
    assert done.stdout.rstrip().endswith("run again with --yes")
    assert _bytes(project, "data") == before


@pytest.mark.parametrize(("answer", "deletes"), [(b"y\n", True), (b"\n", False)])
def test_a_terminal_is_asked(project: Path, answer: bytes, deletes: bool) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [str(BIN / "packcorpus"), "clean"], cwd=project, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    text = b""
    while b"[y/N]" not in text:
        text += os.read(ours, 4096)
    os.write(ours, answer)
    with open(ours, "rb", buffering=0) as rest:
        while True:
            try:
                chunk = rest.read(4096)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            text += chunk
    assert process.wait(60) == 0
    assert (b"deleted " in text) == deletes
    assert bool(find_unused(project).unused.files) != deletes


def test_nothing_is_deleted_while_a_run_works(project: Path) -> None:
    """Also if the run started after the question was asked."""
    usage, before = find_unused(project), _bytes(project, "data")
    assert not usage.is_busy
    claim(resolve(project / "corpus.yaml", project))  # as every run does
    with pytest.raises(Busy, match="a run is working here"):
        delete_unused(usage)
    assert find_unused(project).is_busy
    assert before.items() <= _bytes(project, "data").items()


def test_a_manifest_without_its_folder_is_named_and_keeps_its_token_files(project: Path) -> None:
    [manifest] = (project / "manifests").glob("*.json")
    shutil.rmtree(project / "data/corpora" / manifest.stem)
    usage = find_unused(project)
    assert usage.gone == [manifest]
    tokens = next(kind for kind in usage.kinds if kind.name == "tokens")
    assert tokens.used.files > 0
    assert f"manifests/{manifest.name}: the corpus folder is gone" in packcorpus(project, "clean").stdout


def test_a_corpus_whose_manifest_cannot_be_read_keeps_what_it_may_use(project: Path) -> None:
    [manifest] = (project / "manifests").glob("*.json")
    manifest.write_text("{}")
    usage = find_unused(project)
    assert usage.unreadable == [manifest]
    unused = {kind.name: kind.unused.files for kind in usage.kinds}
    assert unused["tokenizers"] == 0
    assert unused["tokens"] == 2


def test_checksums_and_copies_are_used_while_a_corpus_has_their_source(project: Path) -> None:
    """A copy is whole, with a receipt, or has only the blocks that were read."""
    [manifest] = (project / "manifests").glob("*.json")
    sha256 = json.loads(manifest.read_text())["sources"][0]["sha256"]
    layout, url = Layout(project), "s3://bucket/chats.jsonl"
    shutil.rmtree(layout.digests(), ignore_errors=True)
    for number, digest in enumerate((sha256, "0" * 64)):
        facts = Facts(9, f"version-{number}")
        write_receipt(layout.digests() / f"{number:064x}.json", {"path": url, "state": [*facts], "sha256": digest})
        for with_holes in (False, True):
            copy = place_of_copy(url, facts, layout.remote(), with_holes=with_holes)
            copy.parent.mkdir(parents=True)
            copy.write_bytes(b"a" * 9)
            if not with_holes:
                write_receipt(copy.with_name(f"{copy.name}.receipt.json"), {"url": url, "sha256": digest})
    kinds = {kind.name: (kind.used.files, kind.unused.files) for kind in find_unused(project).kinds}
    assert (kinds["digests"], kinds["remote"]) == ((1, 1), (3, 3))
