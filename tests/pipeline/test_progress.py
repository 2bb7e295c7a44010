"""The figures of a run add up, and the time left is estimated well from them.

Simulated runs have a known end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples

from packcorpus.pipeline import display
from packcorpus.pipeline.patches import reporting
from packcorpus.pipeline.progress import Count, Run, run, seconds_left, state
from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.core.reading import Reading
from packcorpus.tasks.dry_run.cost_model import COMMIT, ROW_BYTES, TASK, WRITTEN_BYTE, plan_seconds
from packcorpus.tasks.work import Outcome


@pytest.fixture
def fresh() -> Iterator[Run]:
    run.begin(1)
    yield run
    run.begin(1)


def counted(now: Run, stage: str, *counts: Count) -> list[Count]:
    return now.counts(stage, stage, lambda: list(counts))


def test_the_record_of_a_run_sums_its_stages() -> None:
    now = Run()
    parts = counted(now, "tokenize", Count(size=2), Count(size=2), Count(is_reused=True, is_done=True))
    for part in parts[:2]:
        part.take(Outcome(conversations=5, rejected=1, tokens=50, seconds=2, cpu=1, peak=int(5e12)))
    [shard] = counted(now, "write", Count())
    shard.take(Outcome(tokens=7, seconds=1))
    now.started = time.time() - 4
    record = now.record()
    assert record["stages"]["TokenizePart"] == {"seconds": 4.0, "cpu_seconds": 2.0}
    assert record["stages"]["WriteShard"] == {"seconds": 1.0, "cpu_seconds": 0.0}
    assert (record["conversations"], record["tokens"], record["tasks_found_done"]) == (10, 100, 1)
    assert record["conversations_per_second"] == pytest.approx(2.5, rel=0.2)
    assert record["peak_memory_bytes"] == 5e12


def test_the_state_of_a_run_weighs_parts_by_size() -> None:
    now = Run()
    parts = counted(now, "tokenize", Count(size=300), Count(size=100))
    counted(now, "write", Count(), Count())
    parts[0].take(Outcome(conversations=5, rejected=1, tokens=50, seconds=2, cpu=1))
    found = state("a", now)
    assert [(stage.name, stage.tasks, stage.done, stage.share) for stage in found.stages] == [
        ("tokens", 2, 1, 0.75),
        ("shards", 2, 0, 0.0),
    ]
    assert (found.conversations, found.rejected, found.tokens) == (5, 1, 50)
    assert found.tokens_per_second == pytest.approx(25, rel=0.2)


def test_seconds_increase_until_the_work_is_done() -> None:
    count = Count()
    assert count.seconds == 0
    count.started = time.time() - 5
    assert count.seconds == pytest.approx(5, abs=1)
    count.take(Outcome(seconds=2.5))
    assert count.seconds == 2.5


def test_an_error_is_reported_once(fresh: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task calls others, which report their errors themselves."""
    written: list[str] = []
    monkeypatch.setattr(display, "write", written.append)
    for message in ("a.jsonl: changed while it was read", "a.jsonl: changed while it was read", "b.jsonl: vanished"):
        with pytest.raises(DataError), reporting(), reporting():
            raise DataError("input_changed", message)
    assert [text.count("a.jsonl") for text in written] == [1, 0]
    assert fresh.exit_code == DataError.exit_code


# -- the time left ----------------------------------------------------------------------------------------------------

PACE = 2e-7  # seconds a byte, of one worker
TOKENS_PER_BYTE = 0.25
CONVERSATION_BYTES = 1000


def simulated(
    sizes: list[float], workers: int, shards: int, slow: float, at: float | None, copies: float = 1.0
) -> tuple[Run, float]:
    """Simulate a run over parts of these sizes at `slow` times its known cost.

    Returns its figures at the time `at` and the time when it ends.
    """
    free, ends = [0.0] * workers, []
    for size in sorted(sizes, reverse=True):  # the largest first
        worker = free.index(min(free))
        free[worker] += (TASK + size * PACE) * slow
        ends.append(free[worker])
    tokens, conversations = sum(sizes) * TOKENS_PER_BYTE, sum(sizes) / CONVERSATION_BYTES
    plan = (TASK + plan_seconds(conversations * max(1, copies), tokens)) * slow
    shard = (TASK + WRITTEN_BYTE * ROW_BYTES * tokens * copies / shards) * slow
    planned = max(ends) + plan
    end = planned + shard * -(-shards // workers) + COMMIT * slow
    now = end if at is None else at

    figures = Run()
    figures.workers, figures.copies = workers, copies
    for count, done in zip(counted(figures, "tokenize", *map(Count, sorted(sizes, reverse=True))), ends, strict=True):
        if done <= now:
            cpu = TASK + count.size * PACE
            tokens, read = int(count.size * TOKENS_PER_BYTE), int(count.size / CONVERSATION_BYTES)
            count.take(Outcome(conversations=read, tokens=tokens, seconds=cpu * slow, cpu=cpu))
    [count] = counted(figures, "plan", Count())
    if max(ends) < now < planned:
        count.started = time.time() - (now - max(ends))
    elif planned <= now:
        count.take(Outcome(seconds=plan))
    for number, count in enumerate(counted(figures, "write", *(Count() for _ in range(shards)))):
        if planned + shard * (number // workers + 1) <= now:
            count.take(Outcome(seconds=shard))
    return figures, end


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.floats(1e6, 4e6), min_size=1, max_size=200),
    st.integers(1, 8),
    st.integers(1, 64),
    st.sampled_from([1.0, 2.0, 5.0]),
    st.floats(0.1, 0.99),
    st.sampled_from([0.3, 1.0, 30.0]),
)
def test_after_a_tenth_the_end_is_estimated_within_a_fifth(
    sizes: list[float], workers: int, shards: int, slow: float, share: float, copies: float
) -> None:
    """What is running counts in full, so a part or a shard may be counted twice."""
    _, end = simulated(sizes, workers, shards, slow, None, copies)
    figures, _ = simulated(sizes, workers, shards, slow, share * end, copies)
    left = seconds_left(figures)
    if left is None:
        assert not figures.total("tokens"), "the first part is enough for an estimate"
        return
    tokens = sum(sizes) * TOKENS_PER_BYTE * copies
    running = max((TASK + max(sizes) * PACE), TASK + WRITTEN_BYTE * ROW_BYTES * tokens / shards) * slow
    assert abs(share * end + left - end) <= 0.2 * end + running


def test_the_last_long_part_counts_in_full() -> None:
    """Eight workers read one file no faster than one worker."""
    figures, end = simulated([1e7] * 7 + [2e9], 8, 8, 1.0, 20.0)
    assert seconds_left(figures) == pytest.approx(end, rel=0.1)


def test_there_is_no_estimate_before_the_first_part() -> None:
    figures, _ = simulated([1e8, 1e8], 2, 2, 1.0, 0.01)
    assert seconds_left(figures) is None


def test_with_reused_parts_only_the_plan_and_the_shards_remain() -> None:
    _, end = simulated([1e8], 1, 4, 1.0, None)
    figures = Run()
    counted(figures, "tokenize", Count(size=1e8, tokens_found=1e8 * TOKENS_PER_BYTE, is_reused=True, is_done=True))
    counted(figures, "write", *(Count() for _ in range(4)))
    assert seconds_left(figures) == pytest.approx(end - 1e8 * PACE, rel=0.5)


def test_the_shards_are_slower_by_the_same_factor_as_the_parts() -> None:
    """The factor of the parts applies to shards before any shard is measured.

    Work is slower if other programs use the cores, too. At this moment, only the time on a free core is known.
    """
    slow = 5.0
    _, end = simulated([1e7] * 100, 1, 8, slow, None)
    times = (step * 0.5 for step in range(int(2 * end)))
    at = next(at for at in times if simulated([1e7] * 100, 1, 8, slow, at)[0].of("plan")[0].is_done)
    assert seconds_left(simulated([1e7] * 100, 1, 8, slow, at)[0]) == pytest.approx(end - at, rel=0.1)


def test_a_single_part_has_a_share_and_a_time_left_while_it_is_read() -> None:
    now = Run()
    [part] = counted(now, "tokenize", Count(size=1e6))
    counted(now, "plan", Count())
    assert (state("a", now).stages[0].share, seconds_left(now)) == (0.0, None)
    part.reading = Reading(0.25, 3.0, 3.0)
    assert state("a", now).stages[0].share == 0.25
    assert seconds_left(now) == pytest.approx(9, rel=0.1)


def test_the_time_left_does_not_stay_near_zero_if_work_takes_longer() -> None:
    now = Run()
    [part] = counted(now, "tokenize", Count(size=1e6))
    part.take(Outcome(tokens=10, seconds=1, cpu=1))
    for stage in ("plan", "publish"):
        [count] = counted(now, stage, Count())
        count.started = time.time() - 6
        assert (seconds_left(now) or 0) >= 3
        count.take(Outcome())
