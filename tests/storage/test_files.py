"""A file is the old one or the new one as a whole, even after interruptions."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples

from packcorpus.tasks.core.errors import StorageError
from packcorpus.tasks.sources.blocks import open_holes
from packcorpus.tasks.storage import files
from packcorpus.tasks.storage.files import (
    atomic_file,
    copy_file,
    give_usual_mode,
    read_json,
    sha256_of,
    to_json,
    write_bytes,
)


class Stop(Exception):
    """A test raises this error within a block."""


@settings(max_examples=examples(150), deadline=None)
@given(
    old=st.none() | st.binary(max_size=50),
    chunks=st.lists(st.binary(max_size=200), max_size=6),
    stop_at=st.none() | st.integers(0, 6),
)
def test_a_file_is_the_old_one_or_the_new_one(old: bytes | None, chunks: list[bytes], stop_at: int | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "some" / "file.bin"
        if old is not None:
            write_bytes(path, old)
        try:
            with atomic_file(path) as out:
                for number, chunk in enumerate(chunks):
                    if number == stop_at:
                        raise Stop
                    assert out.write(chunk) == len(chunk)
                    assert path.exists() == (old is not None), "the file appeared before it was whole"
        except Stop:
            expected = old
        else:
            expected = b"".join(chunks)
            assert (out.size, out.digest()) == (len(expected), hashlib.sha256(expected).hexdigest())
            assert sha256_of(path) == out.digest()
        assert (path.read_bytes() if path.exists() else None) == expected
        assert [p for p in path.parent.iterdir() if p != path] == [], "debris"


def test_order_of_sync_and_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    seen: list[str] = []
    fsync, rename = os.fsync, os.rename

    def spy_fsync(handle: int) -> None:
        seen.append("fsync folder" if os.path.samestat(os.fstat(handle), tmp_path.stat()) else "fsync file")
        fsync(handle)

    def spy_rename(source: Any, target: Any) -> None:
        assert Path(source).stat().st_size == 3, "renamed before it was flushed"
        seen.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "rename", spy_rename)
    write_bytes(path, b"abc")
    assert seen == ["fsync file", "rename", "fsync folder"]


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o027, 0o077])
def test_files_and_folders_have_the_mode_that_the_umask_allows(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_bytes(tmp_path / "new" / "a", b"abc")
        (tmp_path / "private").touch(0o600)
        give_usual_mode(tmp_path / "private")
        open_holes(tmp_path / "holes", 10).close()
    finally:
        os.umask(before)
    for name in ("new/a", "private", "holes"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o666 & ~mask, name
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o777 & ~mask
    assert sorted(path.name for path in tmp_path.iterdir()) == ["holes", "new", "private"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_failed_write_names_the_file_and_keeps_the_old_one(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shard.arrow"
    write_bytes(path, b"old")

    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(StorageError, match=r"shard\.arrow: cannot be written: ") as caught:
        write_bytes(path, b"new")
    assert os.strerror(number) in str(caught.value)
    assert caught.value.exit_code == 74
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Let the kernel refuse to grow any file of this process beyond `size`."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_short_write_by_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")
    with no_file_above(1 << 20), pytest.raises(StorageError, match="file: cannot be written: File too large"):
        write_bytes(path, bytes(2 << 20))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_short_write_below_arrow(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    batch = pa.record_batch({"x": pa.array(range(1 << 18))})
    with no_file_above(1 << 20), pytest.raises(StorageError, match=r"rows\.arrow: cannot be written"):  # noqa: SIM117
        with atomic_file(path) as out, pa.ipc.new_stream(pa.PythonFile(out, "w"), batch.schema) as writer:
            writer.write_batch(batch)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    with pytest.raises(StorageError, match="file/below: cannot be written"):
        write_bytes(tmp_path / "file" / "below", b"")
    (tmp_path / "folder" / "x").mkdir(parents=True)
    with pytest.raises(StorageError, match="folder: cannot be written: Is a directory"):
        write_bytes(tmp_path / "folder", b"")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_files_left_by_a_killed_writer_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "file[1].bin"
    write_bytes(path, b"old")
    script = (
        "import sys, time; from pathlib import Path; from packcorpus.tasks.storage.files import atomic_file\n"
        "with atomic_file(Path(sys.argv[1])) as out:\n"
        "    out.write(b'half'); out.flush(); print('ready', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    [debris] = [p for p in tmp_path.iterdir() if p != path]

    write_bytes(path, b"while the other one lives")
    assert debris.exists(), "the temporary file of a living writer was removed"

    process.kill()
    process.wait()
    process.stdout.close()
    assert path.read_bytes() == b"while the other one lives"
    write_bytes(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"new"


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_file(path) as first:
        first.write(b"first, ")
        assert files.remove_abandoned(path), "it is being written"
        with atomic_file(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
        first.write(b"whole")
    assert path.read_bytes() == b"first, whole"
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / ".file.0.tmp").write_bytes(b"abandoned")
    assert not files.remove_abandoned(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_temporary_file_removed_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flock = tmp_path / "file", fcntl.flock
    left = [1, 1]

    def after_another_cleans_up(file: Any, how: int) -> None:
        if file.mode == "xb" and left:
            left.pop()
            files.remove_abandoned(path)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", after_another_cleans_up)
    before = os.listdir("/proc/self/fd")
    write_bytes(path, b"new")
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert path.read_bytes() == b"new"
    assert not left
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_that_clean_up_leave_a_new_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One opens an abandoned file; before it locks the file, others replace it."""
    path, flock = tmp_path / "file", fcntl.flock
    abandoned = tmp_path / ".file.0.tmp"
    abandoned.write_bytes(b"abandoned")
    left = [1]

    def after_another_removed_and_created_it(file: Any, how: int) -> None:
        if left:
            left.pop()
            assert not files.remove_abandoned(path)
            abandoned.write_bytes(b"new")
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", after_another_removed_and_created_it)
    files.remove_abandoned(path)
    assert not left
    assert abandoned.read_bytes() == b"new"


def test_only_files_of_that_name_are_removed(tmp_path: Path) -> None:
    others = [tmp_path / name for name in (".b.1234.tmp", "a.1234.tmp", ".a.1234.txt", ".a.tmp")]
    for other in others:
        other.touch()
    write_bytes(tmp_path / "a", b"")
    assert all(other.exists() for other in others)


def test_json_keeps_its_order_and_errors_have_a_position(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    value = {"b": 1, "a": [1.5, None, "é"]}
    assert to_json(value).endswith(b"\n")
    write_bytes(path, to_json(value))
    assert read_json(path) == value
    assert list(read_json(path)) == ["b", "a"]
    for bad in (b'{\n  "a": 1,\n}', b"", b"\xff", b"[" * 100_000):
        path.write_bytes(bad)
        with pytest.raises(StorageError, match=r"x\.json:\d+:\d+: is not JSON"):
            read_json(path)
    with pytest.raises(StorageError, match=r"y\.json: cannot be read: No such file"):
        read_json(tmp_path / "y.json")


def test_new_folders_are_synced_into_their_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def spy(handle: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", spy)
    write_bytes(tmp_path / "a" / "b" / "file", b"")
    assert [synced[0], synced[1], synced[3]] == [".", "a", "a/b"]
    write_bytes(tmp_path / "a" / "b" / "file", b"")
    assert len(synced) == 6, "folders that were there are synced again"


def test_write_bytes_returns_size_and_digest(tmp_path: Path) -> None:
    assert write_bytes(tmp_path / "file", b"abc") == {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}


def write_and_lose(path: Path) -> None:
    with atomic_file(path) as out:
        out.write(b"news")
        out.flush()
        [temporary] = path.parent.glob(".*.tmp")
        os.truncate(temporary, 1)


def test_a_file_is_copied_in_chunks(tmp_path: Path) -> None:
    data = bytes(range(256)) * 4096 * 9 + b"the rest"
    (tmp_path / "from").write_bytes(data)
    tracemalloc.start()
    try:
        facts = copy_file(tmp_path / "from", tmp_path / "to")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / "to").read_bytes() == data
    assert facts == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert peak < len(data) / 2


def test_an_interrupt_right_after_the_temporary_file_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def and_interrupt(path: Path, *how: Any) -> Any:
        file = opened(path, *how)
        if path.suffix == ".tmp":
            file.close()
            raise KeyboardInterrupt
        return file

    monkeypatch.setattr(Path, "open", and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_bytes(tmp_path / "file", b"")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("can_ask", [True, False])
def test_writeback_starts_while_a_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_ask: bool
) -> None:
    """Writeback starts while a file is written, once for each byte.

    Thus bytes that are already on disk stay in memory.
    """
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(files, "WRITEBACK_BYTES", 1000)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    if can_ask:
        monkeypatch.setattr(os, "posix_fadvise", lambda _, start, size, __: asked.append((start, size)), raising=False)
    with atomic_file(tmp_path / "file") as out:
        for size in (400, 700, 1, 998, 1, 5000, 3):
            out.write(b"x" * size)
    assert (tmp_path / "file").stat().st_size == 7103
    assert asked == ([(0, 1100), (1100, 1000), (2100, 5000)] if can_ask else [])


def test_a_system_without_writeback_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(files, "WRITEBACK_BYTES", 1)
    monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    assert write_bytes(tmp_path / "file", b"new")["bytes"] == 3


def test_lost_bytes_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")
    with pytest.raises(StorageError, match="file: cannot be written: 4 bytes were written, but the file has 1"):
        write_and_lose(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def refuse_locks(*_: Any) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_file_that_cannot_be_locked_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse_locks)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StorageError, match="file: cannot be written: No locks available"):
        write_bytes(tmp_path / "file", b"")
    with pytest.raises(StorageError, match=r"a\.lock: cannot be written: No locks available"):
        files.acquire_lock(tmp_path / "a.lock")
    assert [path.name for path in tmp_path.iterdir()] == ["a.lock"]
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_folder_at_the_path_of_a_lock(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written: Is a directory"):
        files.acquire_lock(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"a\.lock: cannot be written: "):
        files.acquire_lock(tmp_path / "file" / "a.lock")


def test_a_lock_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "a.lock"
    assert files.acquire_lock(path.with_name("b.lock"))
    with path.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        before = os.listdir("/proc/self/fd")
        assert not files.acquire_lock(path)
        assert len(os.listdir("/proc/self/fd")) == len(before)
    assert files.acquire_lock(path)
    monkeypatch.chdir(tmp_path)
    assert files.acquire_lock(Path("new/a.lock")), "this process has it"
    with path.open("ab") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_sync_folder_closes_it_and_names_a_missing_one(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    files.sync_folder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    with pytest.raises(StorageError, match="gone: cannot be written: No such file"):
        files.sync_folder(tmp_path / "gone")


def test_a_lock_is_held_by_one_at_a_time_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock has one holder at a time and leaves no file.

    The file is removed with the lock, so a waiting thread may lock a file that others cannot see.
    """
    monkeypatch.setattr(files, "LOCK_PAUSE", 0.0002)
    inside, most, path = 0, 0, tmp_path / "locks" / "a.lock"

    def hold() -> None:
        nonlocal inside, most
        for _ in range(40):
            with files.locked(path):
                inside += 1
                most = max(most, inside)
                time.sleep(0.0002)
                inside -= 1

    threads = [threading.Thread(target=hold) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert list(path.parent.iterdir()) == []


def test_who_waits_for_a_lock_can_be_stopped(tmp_path: Path) -> None:
    def stop() -> None:
        raise CancelledError

    with files.locked(tmp_path / "a.lock"):
        with pytest.raises(CancelledError), files.locked(tmp_path / "a.lock", stop):
            raise AssertionError("two have the lock")
        assert (tmp_path / "a.lock").exists(), "it is still held"
