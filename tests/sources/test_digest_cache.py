"""The next run hashes only changed files again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.sources import digests, parts
from packcorpus.tasks.sources.digests import DigestCache
from packcorpus.tasks.sources.model import Part, Source, SourceFile
from packcorpus.tasks.sources.parts import PartReader, find_parts

LINES = b"".join(b'{"text": "line %d"}\n' % number for number in range(40))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records the names of hashed files."""
    names: list[str] = []
    chunks = digests._chunks
    monkeypatch.setattr(parts, "HASH_THREADS", 1)  # hash in order
    monkeypatch.setattr(digests, "_chunks", lambda path, *rest: names.append(path.name) or chunks(path, *rest))
    return names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two sources that look an hour old, because the clock is an hour ahead."""
    now = time.time_ns
    monkeypatch.setattr(digests.time, "time_ns", lambda: now() + 3600 * 10**9)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(LINES.replace(b"line", name[:1].encode()))
    return tmp_path


def found(folder: Path, fresh: bool = False, part_size: int = 300) -> list[tuple[SourceFile, list[Part]]]:
    return find_parts([Source(path="*.jsonl")], folder, part_size, cache=DigestCache(folder / "digests", fresh))


def test_an_unchanged_file_is_hashed_once(folder: Path, hashed: list[str]) -> None:
    first = found(folder)
    assert hashed == ["a.jsonl", "b.jsonl"]
    assert found(folder) == first
    # `==` does not compare the blocks.
    assert [file.blocks for file, _ in found(folder)] == [file.blocks for file, _ in first]
    assert all(file.blocks and file.blocks.joined for file, _ in first)
    assert len(hashed) == 2
    assert len(first[0][1]) > 1
    assert found(folder, part_size=500) != first, "other parts have digests of their own"
    assert len(hashed) == 4
    assert found(folder, fresh=True) == first == found(folder)
    assert len(hashed) == 6, "--check-sources hashes all, and what it found is kept"


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"7", b"8"))


def restore_times(path: Path) -> None:
    stat = path.stat()
    rewrite(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def replace(path: Path) -> None:
    stat, other = path.stat(), path.with_name("new")
    other.write_bytes(path.read_bytes().replace(b"7", b"8"))
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.rename(path)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b'{"text": "more"}\n')


@pytest.mark.parametrize("change", [rewrite, restore_times, replace, append])
def test_a_changed_file_is_hashed_again(change: Callable[[Path], None], folder: Path, hashed: list[str]) -> None:
    before = found(folder)
    change(folder / "a.jsonl")
    after = found(folder)
    assert hashed[2:] == ["a.jsonl"]
    assert after[0][0].sha256 != before[0][0].sha256
    assert after[1] == before[1]


def test_a_file_that_was_just_written_is_not_believed(folder: Path, hashed: list[str], monkeypatch: Any) -> None:
    """A file that was just written is hashed again.

    A change within the same tick of the clock would not change its times.
    """
    monkeypatch.setattr(digests.time, "time_ns", lambda: (folder / "a.jsonl").stat().st_mtime_ns + 1_999_999_999)
    found(folder)
    assert not (folder / "digests").exists()
    found(folder)
    assert hashed == ["a.jsonl", "b.jsonl"] * 2


def test_a_file_that_changes_while_it_is_hashed_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DigestCache(folder / "digests")
    [(file, _), _] = found(folder)
    started = cache.start(file)
    restore_times(file.path)
    hashed = digests.Hashed("0" * 64, [], file.blocks)  # type: ignore[arg-type]
    cache.keep(file, 77, started, hashed)
    assert cache.find(file, 77) is None
    cache.keep(file, 77, cache.start(file), hashed)
    assert cache.find(file, 77) == hashed


@settings(max_examples=examples(60), deadline=None)
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7), st.floats(0, 1))
def test_a_damaged_entry_is_ignored(tmp_path_factory: pytest.TempPathFactory, at: float, bit: int, left: float) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "a.jsonl").write_bytes(LINES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "RACY_NS", -(10**15))
        first = found(folder)
        [entry] = (folder / "digests").glob("*.json")
        content = bytearray(entry.read_bytes())
        content[int(at * len(content))] ^= 1 << bit
        entry.write_bytes(content[: int(left * len(content))])
        assert found(folder) == first
        assert DigestCache(folder / "digests").find(first[0][0], 300), "a sound entry takes its place"


def test_entries_of_deleted_files_are_removed(folder: Path, hashed: list[str]) -> None:
    found(folder)
    (folder / "digests" / "damaged.json").write_text("{}")
    (folder / "a.jsonl").unlink()
    rewrite(folder / "b.jsonl")
    found(folder)
    assert len([*(folder / "digests").iterdir()]) == 1
    assert found(folder)[0][0].name == "b.jsonl"
    assert hashed == ["a.jsonl", "b.jsonl", "b.jsonl"]


def test_a_cache_that_cannot_be_written_is_as_good_as_none(folder: Path, hashed: list[str]) -> None:
    (folder / "digests").write_text("a file")
    assert found(folder) == found(folder)
    assert len(hashed) == 4


def test_what_is_read_is_compared_with_the_digests_of_an_earlier_run(folder: Path) -> None:
    found(folder)
    [(file, [part, *_]), _] = found(folder)
    restore_times(file.path)
    with pytest.raises(DataError, match=r"a\.jsonl: changed while it was read; run again"):
        list(PartReader(part))
