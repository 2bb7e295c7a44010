"""Sources and root in buckets give the same corpus as in folders.

Each byte of a source is read about once. The tests also use stores that fail.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.bucket_roots import WAYS, Tree, own_scratch, tree_of
from support.servers.remote import SECRET, FaultyS3, faulty_s3, needs_remote, new_bucket, s3, use
from support.small_corpus import conversations, pack_corpus, write_project

from packcorpus.tasks.config import load_config
from packcorpus.tasks.core.errors import PackError
from packcorpus.tasks.core.messages import as_text
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.inspection.sources import config_overview
from packcorpus.tasks.recipe import Recipe, resolve
from packcorpus.tasks.sources import blocks, digests, locate
from packcorpus.tasks.sources.parts import PartReader, Share
from packcorpus.tasks.storage.files import HashingWriter, read_receipt, write_receipt
from packcorpus.tasks.storage.layout import Layout
from packcorpus.tasks.stores import mirror
from packcorpus.tasks.stores.bucket import Bucket, open_bucket, open_store
from packcorpus.tasks.stores.urls import root_of
from packcorpus.tasks.work import TokenizePart, run_stage

needs_remote()

BLOCK = 512
SETTINGS: dict[str, Any] = {"part_size": 8 * BLOCK}


def lines(count: int, seed: int) -> bytes:
    return b"".join(orjson.dumps(record) + b"\n" for record in conversations(count, seed))


FILES = {
    "a.jsonl": lines(40, 0),
    "b.jsonl": lines(45, 1),
    "c.jsonl.gz": gzip.compress(lines(15, 2), mtime=0),
    "d.jsonl": lines(35, 3),
}


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bucket:
    """Return a bucket with FILES, read in small blocks."""
    use(monkeypatch, s3())
    own_scratch(monkeypatch, tmp_path / "scratch")
    for module in (digests, blocks):
        monkeypatch.setattr(module, "BLOCK", BLOCK)
    store = open_store(f"s3://{new_bucket()}/chats")
    for name, content in FILES.items():
        store.put(name, content)
    return store


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the bytes that are read of each object.

    The keys are the last part of an object's key, and `tokens` for all token files.
    """
    found = Counter[str]()

    def counted(method: Any) -> Any:
        def call(self: Bucket, key: str, *rest: Any) -> Any:
            result = method(self, key, *rest)
            size = len(result) if isinstance(result, bytes) else rest[1].size
            found["tokens" if key.endswith(".arrow") else key.rpartition("/")[2]] += size
            return result

        return call

    for name in ("read", "fetch", "get"):
        monkeypatch.setattr(Bucket, name, counted(getattr(Bucket, name)))
    return found


def recipe_of(folder: Path, sources: Bucket, root: str | Path, **settings: Any) -> Recipe:
    config = write_project(folder, [], sources=[{"path": sources.url_of("*")}], **SETTINGS | settings)
    return resolve(config, root_of(root))


# -- the same corpus, and each byte about once -------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS[2:], ids=lambda way: way.__name__)
def test_sources_in_a_bucket_give_what_a_folder_gives(
    tmp_path: Path, sources: Bucket, monkeypatch: pytest.MonkeyPatch, way: Callable[..., None]
) -> None:
    """A bucket gives the same outputs as a folder.

    For a root in a folder, sources are fetched whole. For a root in a bucket, each machine fetches the blocks it needs.
    """
    pack_corpus(recipe_of(tmp_path / "project", sources, tmp_path / "root"))
    root, machines = f"s3://{new_bucket()}/root", iter(range(100))
    recipe = recipe_of(tmp_path / "project", sources, root)
    way(recipe, lambda: own_scratch(monkeypatch, tmp_path / f"machine-{next(machines)}"))
    assert tree_of(root) == tree_of(tmp_path / "root")


def test_three_machines_read_each_source_once(
    tmp_path: Path, sources: Bucket, monkeypatch: pytest.MonkeyPatch, read: Counter[str]
) -> None:
    """The first machine identifies and hashes; the others read their own parts."""
    root, size = f"s3://{new_bucket()}/root", sum(map(len, FILES.values()))
    own = {}
    for number in (1, 2, 3):
        own_scratch(monkeypatch, tmp_path / f"machine-{number}")
        before = Counter(read)
        recipe = recipe_of(tmp_path / "project", sources, root)
        run_stage(recipe, TokenizePart, Share(number, 3))
        own[number] = sum((read - before)[name] for name in FILES)
    assert own[1] == size, "what shows the format is not read again to be hashed"
    for number in (2, 3):
        assert own[number] < size * 0.4, "a third"
    assert [*open_store(root).list("data/engines")], "the check of the encoder is shared, too"
    recipe = recipe_of(tmp_path / "project", sources, root)
    before = Counter(read)
    pack_corpus(recipe)
    assert sum((read - before)[name] for name in FILES) == 0, "another run reads nothing again"


def test_a_later_command_reads_nothing(
    tmp_path: Path, sources: Bucket, monkeypatch: pytest.MonkeyPatch, read: Counter[str]
) -> None:
    """No machine reads a source again to find its format.

    The recorded format belongs to the object and to the settings of its source.
    """
    root, project = f"s3://{new_bucket()}/root", tmp_path / "project"
    first = recipe_of(project, sources, root)
    own_scratch(monkeypatch, tmp_path / "another")
    read.clear()
    found = recipe_of(project, sources, root).files
    here = [(old.path, old.mtime_ns) for old in first.files]
    assert [replace(file, path=path, mtime_ns=ns) for file, (path, ns) in zip(found, here, strict=True)] == [
        *first.files
    ]
    looked_at = config_overview(project / "corpus.yaml", root_of(root) / "manifests").sources
    assert [source.name for source in looked_at] == [file.name for file in found]
    assert not read.keys() & FILES.keys()
    named = write_project(project, [], sources=[{"path": sources.url_of("*"), "format": "sharegpt"}], **SETTINGS)
    assert {file.format for file in resolve(named, root_of(root)).files} == {"sharegpt"}
    sources.put("a.jsonl", b'{"text": "Another format."}\n')
    again = recipe_of(project, sources, root)
    assert [file.format for file in again.files] == ["text", "messages", "messages", "messages"]


def test_commands_that_look_write_nothing(tmp_path: Path, sources: Bucket) -> None:
    root, project = f"s3://{new_bucket()}/root", tmp_path / "project"
    path = write_project(project, [], sources=[{"path": sources.url_of("*")}], **SETTINGS)
    config = load_config(path)
    assert len(config_overview(path, root_of(root) / "manifests").sources) == len(FILES)
    predict(config, project, root_of(root))
    assert not [*open_store(root).list()]


def test_sources_that_are_checked_are_read_as_a_whole(
    tmp_path: Path, sources: Bucket, monkeypatch: pytest.MonkeyPatch, read: Counter[str]
) -> None:
    """Checked sources are read whole, whatever the bucket has recorded.

    This corrects a wrong format in the record, and the next run finds the right format there.
    """
    root, size = f"s3://{new_bucket()}/root", sum(map(len, FILES.values()))
    for path in recipe_of(tmp_path / "project", sources, root).layout.digests().glob("*.json"):
        if "format" in (values := read_receipt(path)):
            write_receipt(path, values | {"format": "text"})
            open_store(root).put(f"data/digests/{path.name}", path)
    for number, (checked, format) in enumerate([(False, "text"), (True, "messages"), (False, "messages")]):
        own_scratch(monkeypatch, tmp_path / f"machine-{number}")
        read.clear()
        found = resolve(tmp_path / "project" / "corpus.yaml", root_of(root), check_sources=checked)
        assert {file.format for file in found.files} == {format}
        assert sum(read[name] for name in FILES) == (size if checked else 0)


def test_a_part_costs_its_blocks(
    tmp_path: Path, sources: Bucket, monkeypatch: pytest.MonkeyPatch, read: Counter[str]
) -> None:
    root = f"s3://{new_bucket()}/root"
    part = recipe_of(tmp_path / "project", sources, root).parts[0]
    own_scratch(monkeypatch, tmp_path / "another")
    read.clear()
    copy = locate.with_copy(part, Layout(root_of(root)).remote())
    assert len(list(PartReader(copy))) > 10
    size = part.stop - part.start
    assert size <= read["a.jsonl"] <= size + 2 * BLOCK


def test_an_object_that_changes_is_hashed_again_and_no_block_of_the_other_is_used(
    tmp_path: Path, sources: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = f"s3://{new_bucket()}/root"
    first = recipe_of(tmp_path / "project", sources, root)
    sources.put("a.jsonl", FILES["a.jsonl"].replace(b"train", b"plane"))
    second = recipe_of(tmp_path / "project", sources, root)
    assert [file.sha256 for file in first.files[1:]] == [file.sha256 for file in second.files[1:]]
    assert first.files[0].path != second.files[0].path
    pack_corpus(second)
    pack_corpus(recipe_of(tmp_path / "project", sources, tmp_path / "root"))
    assert tree_of(root) == tree_of(tmp_path / "root")
    own_scratch(monkeypatch, tmp_path / "another")
    with pytest.raises(PackError) as found:
        pack_corpus(replace(first, layout=Layout(root_of(root))))
    assert found.value.code == "E692"


def test_a_damaged_entry_is_as_good_as_none(
    tmp_path: Path, sources: Bucket, monkeypatch: pytest.MonkeyPatch, read: Counter[str]
) -> None:
    root = f"s3://{new_bucket()}/root"
    expected = recipe_of(tmp_path / "project", sources, root).parts
    store = open_store(root)
    entries = [key for key, _ in store.list("data/digests")]
    assert len(entries) == 2 * len(FILES), "digests, and what the start shows"
    damages = (lambda old: b"", lambda old: b"{}", lambda old: old.replace(b'"path": "', b'"path": "0'))
    for number, damaged in enumerate(damages):
        for key in entries:
            assert damaged(store.get(key)) != store.get(key)
            store.put(key, damaged(store.get(key)))
        own_scratch(monkeypatch, tmp_path / f"machine-{number}")
        read.clear()
        found = recipe_of(tmp_path / "project", sources, root).parts
        assert [(part.sha256, part.start) for part in found] == [(part.sha256, part.start) for part in expected]
        assert read["a.jsonl"] >= len(FILES["a.jsonl"])


# -- stores and disks that fail ----------------------------------------------------------------------------------------


@pytest.fixture
def faulty(sources: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """Serve the bucket of the sources and the root through a proxy that can fail.

    A request is tried twice.
    """
    with faulty_s3() as store:
        use(monkeypatch, store.address)
        for module in (mirror, locate):
            monkeypatch.setattr(module, "open_store", lambda url: open_bucket(url, retries=1))
        yield store


def expect_failure(run: Callable[[], object], root: str, code: str) -> None:
    """Check that a run ends with an error, shows no secret, and publishes nothing."""
    with pytest.raises(PackError) as found:
        run()
    assert found.value.code == code, as_text(found.value)
    assert found.value.exit_code == {"E688": 66, "E692": 65}.get(code, 74)
    assert SECRET not in as_text(found.value)
    assert "s3://" in as_text(found.value) or code == "E702"
    assert not [*open_store(root).list("manifests")]


@pytest.mark.parametrize(
    ("method", "what", "fault", "code"),
    [
        ("GET", "chats/b.jsonl", "cut", "E691"),
        ("GET", "chats/b.jsonl", "403", "E687"),
        ("GET", "chats/b.jsonl", "404", "E688"),
        ("GET", "chats/b.jsonl", "429", "E689"),
        ("GET", "chats/b.jsonl", "503", "E689"),
        ("GET", ".arrow", "cut", "E691"),
        ("GET", ".arrow", "404", "E688"),
        ("PUT", "data/tokens", "403", "E687"),
        ("PUT", "data/corpora", "503", "E689"),
        ("PUT", "manifests/", "503", "E689"),
    ],
)
def test_a_store_that_fails_ends_the_run_and_the_next_one_completes_it(
    tmp_path: Path,
    sources: Bucket,
    faulty: FaultyS3,
    monkeypatch: pytest.MonkeyPatch,
    expected: Tree,
    method: str,
    what: str,
    fault: str,
    code: str,
) -> None:
    root = f"s3://{new_bucket()}/root"
    if what == ".arrow":  # another machine has made all token files
        run_stage(recipe_of(tmp_path / "project", sources, root), TokenizePart)
        own_scratch(monkeypatch, tmp_path / "another")

    def run() -> None:
        pack_corpus(recipe_of(tmp_path / "project", sources, root))

    faulty.fails(method, what, fault)
    expect_failure(run, root, code)
    assert faulty.met
    faulty.fails(method, what, fault, times=1)  # another attempt repairs one failure, if another attempt makes sense
    if fault in ("403", "404"):
        faulty.recovers()
    run()
    faulty.recovers()
    assert without_names(tree_of(root)) == expected


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """Return the shards, index, and token files of the same bytes in a folder.

    Keys of plans depend on the names of sources, so plans are left out.
    """
    folder = tmp_path_factory.mktemp("expected")
    (folder / "chats").mkdir()
    for name, content in FILES.items():
        (folder / "chats" / name).write_bytes(content)
    pack_corpus(resolve(write_project(folder, [], sources=[{"path": "chats"}], **SETTINGS), folder / "root"))
    return without_names(tree_of(folder / "root"))


def without_names(tree: Tree) -> Tree:
    """Return the files of a tree that do not depend on the names of sources."""
    return {key: content for key, content in tree.items() if key.endswith(".arrow") and "/plans/" not in key}


def test_an_object_that_changes_during_a_run_ends_it(
    tmp_path: Path, sources: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object changes between hashing and reading.

    The machine that reads it has fetched nothing before.
    """
    root, old = f"s3://{new_bucket()}/root", sources.get("b.jsonl")
    recipe = recipe_of(tmp_path / "project", sources, root)
    sources.put("b.jsonl", FILES["d.jsonl"])
    own_scratch(monkeypatch, tmp_path / "another")
    elsewhere = replace(recipe, layout=Layout(root_of(root)))
    expect_failure(lambda: pack_corpus(elsewhere), root, "E692")
    sources.put("b.jsonl", old)
    pack_corpus(recipe_of(tmp_path / "project", sources, root))
    pack_corpus(recipe_of(tmp_path / "project", sources, tmp_path / "root"))
    assert tree_of(root) == tree_of(tmp_path / "root")


@pytest.mark.parametrize(
    ("kept", "code"), [("/data/remote/", "E693"), ("/data/tokens/", "E702"), ("/data/tokens/ of others", "E693")]
)
def test_a_full_scratch_disk_ends_the_run(
    tmp_path: Path, sources: Bucket, monkeypatch: pytest.MonkeyPatch, expected: Tree, kept: str, code: str
) -> None:
    """The disk is full for source blocks, or for own or fetched token files."""
    root = f"s3://{new_bucket()}/root"
    kept, _, others = kept.partition(" of ")
    if others:
        run_stage(recipe_of(tmp_path / "project", sources, root), TokenizePart)
        own_scratch(monkeypatch, tmp_path / "another")
    write = HashingWriter.write

    def refuse(self: HashingWriter, data: Any) -> int:
        if kept in str(self._file.name) and memoryview(data).nbytes > 500:  # a receipt still has room
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(HashingWriter, "write", refuse)
        if kept == "/data/remote/":
            patch.setattr(blocks, "open_holes", lambda path, size: Full(os.devnull, "r+"))
        expect_failure(lambda: pack_corpus(recipe_of(tmp_path / "project", sources, root)), root, code)
    pack_corpus(recipe_of(tmp_path / "project", sources, root))
    assert without_names(tree_of(root)) == expected
