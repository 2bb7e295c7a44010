"""Limits of the system are named in one message, and limits of memory hold."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from support.commands import BIN

from packcorpus.tasks.core import process
from packcorpus.tasks.core.errors import DataError, PackError, StorageError
from packcorpus.tasks.core.messages import to_pack_error
from packcorpus.tasks.core.process import (
    bomb,
    bounded_memory,
    bounded_table,
    cores,
    may_allocate,
    of_memory,
    versions_of,
)
from packcorpus.tasks.core.startup import LEAST_MEMORY

RECORDS = '{"prompt": "a", "completion": "b"}\n' * 50


def caught(raise_it: Callable[[], object]) -> PackError:
    try:
        raise_it()
    except Exception as error:
        return to_pack_error(error)
    raise AssertionError("nothing was raised")


def raising(error: Exception, cause: Exception | None = None, shown: bool = False) -> Callable[[], object]:
    def raise_it() -> object:
        if cause is None:
            raise error
        try:
            raise cause
        except Exception as first:
            raise error from (first if shown else None)

    return raise_it


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a.jsonl"),
        OSError("[Errno 24] Failed to open local file 'a'. Detail: [errno 24] Too many open files"),
        ImportError("libarrow.so: cannot open shared object file: Too many open files"),
    ],
)
def test_too_many_open_files(error: Exception) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    expected = (
        f"too many files are open; the limit is {limit:,} files (ulimit -n); raise it, or run with fewer --workers"
    )
    for found in (
        caught(raising(error)),
        caught(raising(StorageError("cannot_write", "a: cannot be written"), error)),
        caught(raising(DataError("bad_tokenizer", "not a tokenizer"), error, shown=True)),
    ):
        assert (found.code, str(found)) == ("E705", expected)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        pa.ArrowMemoryError("realloc of size 8388608 failed"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        ValueError("Not enough memory to allocate buffer for parsing: line 1 column 1 (char 0)"),
        RuntimeError("can't start new thread"),
        ImportError("libarrow.so: failed to map segment from shared object"),
    ],
)
def test_memory_that_ran_out(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    found = caught(raising(DataError("bad_tokenizer", "not a tokenizer"), error))
    assert (found.code, str(found)) == ("E705", "memory ran out; run with fewer --workers")
    monkeypatch.setattr(
        resource, "getrlimit", lambda number: (2 << 30, -1) if number == resource.RLIMIT_AS else (-1, -1)
    )
    advice = "the limit is 2,097,152 KiB (ulimit -v); raise it, or run with fewer --workers"
    assert str(caught(raising(error))) == f"memory ran out; {advice}"
    assert of_memory() == " (its limit is 2,097,152 KiB (ulimit -v))"


def test_other_errors_stay() -> None:
    other = DataError("empty_source", "a.jsonl: Too many open files")
    assert caught(raising(other)) is other
    assert caught(raising(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))).code == "E791"
    assert caught(raising(bomb("a", "x"), MemoryError())).code == "E323"
    assert caught(raising(FileNotFoundError(errno.ENOENT, "No such file", "a"))).code == "E704"


def test_a_table_is_not_a_bomb_if_a_limit_of_the_system_is_stricter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert may_allocate(1 << 60)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (16 << 30, hard))
        assert may_allocate(1 << 30)
        assert not may_allocate(17 << 30)
        with pytest.raises(MemoryError), bounded_table("a", 1 << 40, "a batch"):
            bytearray(15 << 30 | 1 << 40)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    with pytest.raises(DataError, match="a batch takes over 640 MiB"), bounded_table("a", 0, "a batch"):
        bytearray(1 << 40)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (resource.RLIMIT_AS, LEAST_MEMORY // 2, "the limit of memory is 524,288 KiB (ulimit -v); it must be at least"),
        (resource.RLIMIT_NOFILE, 6, "too many files are open; the limit is 6 files (ulimit -n)"),
    ],
)
def test_a_command_names_the_limit(kind: int, value: int, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(RECORDS)
    (tmp_path / "c.yaml").write_text("sources: [a.jsonl]\nvocab_size: 300\n")
    done = subprocess.run(
        [BIN / "packcorpus", "pack", "c.yaml", "--on", "here"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(kind, (value, value)),
        check=False,
    )
    assert done.returncode == 74, done.stderr
    assert f"E705 error: {message}" in done.stderr


# -- limits that are set here ------------------------------------------------------------------------------------------

MIB = 1 << 20


def state() -> tuple[tuple[int, int], str]:
    return resource.getrlimit(resource.RLIMIT_DATA), pa.default_memory_pool().backend_name


@pytest.mark.parametrize("allocate", [bytearray, pa.allocate_buffer], ids=["Python", "Arrow"])
def test_an_allocation_beyond_the_limit_fails_and_one_below_does_not(allocate: object) -> None:
    assert callable(allocate)
    before = state()
    with bounded_memory(200 * MIB):
        assert len(memoryview(allocate(100 * MIB))) == 100 * MIB
        with pytest.raises(MemoryError):
            allocate(300 * MIB)
    assert state() == before
    assert len(memoryview(allocate(300 * MIB))) == 300 * MIB


def test_a_nested_limit_does_not_raise_the_outer_one() -> None:
    before = state()
    with bounded_memory(100 * MIB):
        outer = resource.getrlimit(resource.RLIMIT_DATA)
        with bounded_memory(1 << 40):  # not an allocation, for which the process may have freed enough memory
            assert resource.getrlimit(resource.RLIMIT_DATA) == outer
        assert resource.getrlimit(resource.RLIMIT_DATA) == outer
    assert state() == before


def test_there_is_no_limit_if_the_system_does_not_report_memory_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "STATM", tmp_path / "statm")
    before = state()
    with bounded_memory(MIB):
        assert state() == before
        bytearray(200 * MIB)


# -- cores -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, dict[str, str]], int]:
    """Return a function that counts the cores of 16 with these control groups."""
    monkeypatch.delenv("PYTHON_CPU_COUNT", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(process, "PROC_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(process, "CGROUPS", tmp_path / "groups")

    def count(own: str, files: dict[str, str]) -> int:
        (tmp_path / "cgroup").write_text(own)
        for name, content in files.items():
            (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "groups" / name).write_text(content)
        return cores()

    return count


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("", {}, 16),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "6400000 100000\n"}, 16),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "400000 100000\n"}, 3),
        ("0::/../../host\n", {"cpu.max": "200000 100000\n"}, 2),
        ("4:cpu,cpuacct:/docker/1\n3:memory:/x\n0::/x\n",
         {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "50000\n"}, 4),
        ("4:cpu,cpuacct:/d\n", {"cpu/d/cpu.cfs_quota_us": "-1\n", "cpu/d/cpu.cfs_period_us": "100000\n"}, 16),
        ("9:cpuset:/d\n", {"cpu/d/cpu.cfs_quota_us": "100000\n", "cpu/d/cpu.cfs_period_us": "100000\n"}, 16),
        ("0::/\n", {"cpu.max": "damaged\n"}, 16),
    ],
)  # fmt: skip
def test_the_cores_of_a_container_are_counted(
    groups: Callable[[str, dict[str, str]], int], own: str, files: dict[str, str], expected: int
) -> None:
    assert groups(own, files) == expected


def test_affinity_and_a_variable_limit_the_cores(
    groups: Callable[[str, dict[str, str]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 7})
    assert groups("0::/\n", {}) == 3
    monkeypatch.setenv("PYTHON_CPU_COUNT", "5")
    assert cores() == 5


def test_versions_of_what_is_not_installed_are_left_out() -> None:
    assert versions_of("no-such-distribution", "numpy").keys() == {"numpy"}
