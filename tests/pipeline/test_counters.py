"""Forked tasks share counters in memory, and no count is lost or counted twice.

A task that is killed does not hold the counters.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pipeline.progress import counters, display
from pipeline.run_guard import guard
from tasks.core.errors import DataError


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Count in other memory: a task of an earlier test may still be running."""
    memory = mmap.mmap(-1, counters._table.nbytes)
    monkeypatch.setattr(counters, "_table", np.frombuffer(memory, np.float64).reshape(counters._table.shape))
    counters.begin()
    yield
    counters.begin()


def forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def test_the_parent_sees_the_sum_of_what_its_children_counted() -> None:
    for number in range(20):
        assert counters.register(f"part {number}", "TokenizePart")
    children = [
        forked(lambda number=number: counters.put(f"part {number}", conversations=number, done=1))
        for number in range(20)
    ]
    for child in children:
        os.waitpid(child, 0)
    assert counters.total("conversations") == sum(range(20))
    assert counters.each("TokenizePart", "done").tolist() == [1] * 20
    assert counters.total("conversations", "WriteShard") == 0


def test_a_process_killed_while_counting_blocks_no_other() -> None:
    """With a lock, about every other kill would leave the counters locked."""

    def count_forever(task: str) -> None:
        while True:
            counters.put(task, conversations=1, tokens=2, rejected=3)

    for number in range(10):
        counters.register(f"part {number}", "TokenizePart")
        child = forked(lambda task=f"part {number}": count_forever(task))
        deadline = time.monotonic() + 300
        while not counters.of_task(f"part {number}", "tokens"):
            assert time.monotonic() < deadline, "it does not count"
        time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        counters.put(f"part {number}", done=1)
    assert counters.total("done") == 10
    assert counters.total("conversations") <= 10


def test_a_second_attempt_counts_once_and_keeps_its_size() -> None:
    counters.register("part", "TokenizePart")
    counters.put("part", size=1000)
    for _ in range(2):
        counters.restart("part")
        counters.put("part", conversations=7, share=0.5)
    assert counters.total("conversations") == 7
    assert counters.each("TokenizePart", "size").tolist() == [1000]


def test_a_task_is_registered_once_and_an_unregistered_one_is_still_counted() -> None:
    assert counters.register("part", "TokenizePart")
    assert not counters.register("part", "TokenizePart")
    counters.put("another", conversations=3)
    assert counters.total("conversations") == 3
    counters.begin()
    assert counters.total("conversations") == 0


def test_seconds_increase_until_a_task_is_done() -> None:
    counters.register("a", "TokenizePart")
    counters.register("b", "TokenizePart")
    assert counters.seconds("TokenizePart").tolist() == [0, 0]
    counters.restart("a")
    counters.put("a", started=time.time() - 5)
    assert counters.seconds("TokenizePart").tolist() == pytest.approx([5, 0], abs=1)
    assert counters.span("TokenizePart") == pytest.approx(5, abs=1)
    counters.put("a", seconds=2.5)
    assert counters.seconds("TokenizePart").tolist() == [2.5, 0]


def test_the_record_of_a_run_sums_its_stages() -> None:
    counters.register("part", "TokenizePart")
    counters.put("part", seconds=2, cpu=1, conversations=10, tokens=100, peak=5e12)
    counters.put(started=time.time() - 4)
    record = counters.run_record()
    assert record["stages"]["TokenizePart"] == {"seconds": 2.0, "cpu_seconds": 1.0}
    assert record["conversations_per_second"] == pytest.approx(2.5, rel=0.2)
    assert record["peak_memory_bytes"] == 5e12


def test_an_error_of_all_parts_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part runs in its own process, which sees no reports of the others."""
    written: list[str] = []
    monkeypatch.setattr(display, "write", written.append)
    counters.begin()
    for message in ("a.jsonl: changed while it was read", "a.jsonl: changed while it was read", "b.jsonl: vanished"):
        guard.reported.clear()
        with pytest.raises(DataError), guard.reporting():
            raise DataError("input_changed", message)
    assert [text.count("a.jsonl") for text in written] == [1, 0]
