"""The memory limit is enforced by the system and removed afterwards."""

from __future__ import annotations

import resource
from pathlib import Path

import pyarrow as pa
import pytest

from tasks.core import memory_limit
from tasks.core.memory_limit import bounded_memory

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
    monkeypatch.setattr(memory_limit, "STATM", tmp_path / "statm")
    before = state()
    with bounded_memory(MIB):
        assert state() == before
        bytearray(200 * MIB)
