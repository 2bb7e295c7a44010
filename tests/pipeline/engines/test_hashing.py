"""A cluster hashes large sources, and the run finds their digests in the cache."""

from __future__ import annotations

import gzip
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.containers import as_lines
from support.small_corpus import conversations, pack_corpus, write_project

from pipeline import graph
from pipeline.engines import hashing
from pipeline.engines.hashing import hash_sources
from tasks import steps
from tasks.core.errors import PackError
from tasks.recipe import Recipe, resolve
from tasks.sources import parts
from tasks.sources.digests import digest_cache, sent_digests
from tasks.sources.digests.digest_cache import DigestCache
from tasks.sources.model import SourceFile
from tasks.sources.source_files import find_files
from tasks.steps import HashFile, attempt, run

NAMES = ("a.jsonl", "b.jsonl.gz", "c.jsonl")
resolve_on_workers = partial(resolve, hash_first=partial(hash_sources, "workers:2"))


def write_chat(path: Path, count: int) -> None:
    path.write_bytes(as_lines(conversations(count)))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records the files that the command hashes itself."""
    names, hash_file = list[str](), parts.hash_file
    monkeypatch.setattr(parts, "hash_file", lambda file, *rest: names.append(file.name) or hash_file(file, *rest))
    return names


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a config with three sources that look an hour old and count as large."""
    monkeypatch.setattr(hashing, "HASHED_HERE", 1)
    now = time.time_ns
    monkeypatch.setattr(digest_cache.time, "time_ns", lambda: now() + 3600 * 10**9)
    config = write_project(tmp_path, (), sources=[*NAMES], part_size=2048)
    for number, name in enumerate(NAMES):
        write_chat(tmp_path / name.removesuffix(".gz"), 30 + number)
    (tmp_path / NAMES[1]).write_bytes(gzip.compress((tmp_path / "b.jsonl").read_bytes(), mtime=0))
    return config


def digests_of(recipe: Recipe) -> Any:
    return [(file.sha256, file.blocks) for file in recipe.files], recipe.parts


def test_an_engine_hashes_what_the_command_would_hash(project: Path, tmp_path: Path, here: list[str]) -> None:
    expected = digests_of(resolve(project, tmp_path / "one"))
    assert sorted(here) == [*NAMES]
    here.clear()
    assert digests_of(resolve_on_workers(project, tmp_path / "other")) == expected
    assert not here
    assert digests_of(resolve_on_workers(project, tmp_path / "other", check_sources=True)) == expected
    assert sorted(here) == [*NAMES], "it trusts no entry"


def test_an_engine_hashes_only_what_changed(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: list[str]
) -> None:
    opened, open_engine = [], hashing.open_engine
    monkeypatch.setattr(hashing, "open_engine", lambda *given: opened.append(given) or open_engine(*given))
    resolve_on_workers(project, tmp_path)
    assert opened == [("workers:2", 1)]
    resolve_on_workers(project, tmp_path)
    assert len(opened) == 1
    write_chat(tmp_path / "c.jsonl", 50)
    monkeypatch.setattr(hashing, "HASHED_HERE", (tmp_path / "c.jsonl").stat().st_size)
    changed = resolve_on_workers(project, tmp_path)
    assert len(opened) == 2
    assert not here
    write_chat(tmp_path / "c.jsonl", 20)
    resolve_on_workers(project, tmp_path)
    assert len(opened) == 2, "these bytes are too few"
    assert here == ["c.jsonl"]
    assert changed.files[2].sha256 != resolve(project, tmp_path).files[2].sha256


def test_few_bytes_are_not_looked_for(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum((tmp_path / name).stat().st_size for name in NAMES)
    monkeypatch.setattr(hashing, "HASHED_HERE", size + 1)
    monkeypatch.setattr(DigestCache, "missing", lambda *_: pytest.fail("this takes a request for each object"))
    assert len(resolve_on_workers(project, tmp_path).files) == len(NAMES)


def test_the_command_hashes_files_whose_times_another_machine_may_not_trust(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: list[str]
) -> None:
    youngest = max((tmp_path / name).stat().st_ctime_ns for name in NAMES)
    monkeypatch.setattr(digest_cache.time, "time_ns", lambda: youngest + 59 * 10**9)
    resolve_on_workers(project, tmp_path)
    assert sorted(here) == [*NAMES]


def test_the_template_starts_before_the_engine(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is forked, which is not safe once a cluster's threads exist."""
    forks: list[int] = []
    started: list[bool] = []
    fork, open_engine = os.fork, hashing.open_engine
    monkeypatch.setattr(os, "fork", lambda: forks.append(1) or fork())
    monkeypatch.setattr(hashing, "open_engine", lambda *given: started.append(bool(forks)) or open_engine(*given))
    write_project(tmp_path, (), sources=[*NAMES], template="own.jinja")
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}")
    resolve_on_workers(project, tmp_path)
    assert started == [True]


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(("change", "code"), [(shorten, "E321"), (Path.unlink, "E701")])
def test_a_file_that_has_changed_or_disappeared_is_named(
    project: Path, tmp_path: Path, change: Callable[[Path], None], code: str
) -> None:
    [_, file, _] = find_files(resolve(project, tmp_path / "other").config.sources, tmp_path)
    change(file.path)
    error = attempt(HashFile(tmp_path, file, 2048)).error
    assert isinstance(error, PackError)
    assert error.code == code, error
    assert str(error).startswith("b.jsonl.gz: ")


@pytest.mark.parametrize("sent", [sent_digests.SENT, 0], ids=["small", "large"])
def test_the_command_hashes_a_file_for_which_no_entry_is_valid(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: list[str], sent: int
) -> None:
    """While a step hashes the file, only the time of its last change becomes new."""
    monkeypatch.setattr(sent_digests, "SENT", sent)
    hash_file, keep = steps.hash_file, DigestCache.keep

    def changing(file: SourceFile, *rest: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(DigestCache, "keep", lambda *given: file.path.chmod(0o600) or keep(*given))
            return hash_file(file, *rest)

    monkeypatch.setattr(steps, "hash_file", changing)
    recipe = resolve_on_workers(project, tmp_path)
    assert sorted(here) == [*NAMES]
    assert digests_of(recipe) == digests_of(resolve(project, tmp_path / "other"))


def test_a_connection_ends_if_the_corpus_is_there(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster may have hashed its sources, and training may follow."""
    left: list[bool] = []
    task = graph.PackCorpus(config=str(project), root=str(tmp_path), on="ray://auto")
    monkeypatch.setattr(graph, "leave", lambda: left.append(True))
    monkeypatch.setattr(graph, "hash_sources", lambda *_: None)
    assert not task.complete()
    assert not left
    pack_corpus(resolve(project, tmp_path))
    assert task.complete()
    assert left


def test_a_step_that_is_done_is_not_repeated(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [file, *_] = find_files(resolve(project, tmp_path / "other").config.sources, tmp_path)
    step = HashFile(tmp_path, file, 2048)
    first = run(step)
    monkeypatch.setattr(steps, "hash_file", lambda *_: pytest.fail("hashed again"))
    assert run(step)["sha256"] == first["sha256"]
    assert first["sha256"] == resolve(project, tmp_path / "other").files[0].sha256
