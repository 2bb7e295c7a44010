"""The time left of a run is estimated well from its counters.

Simulated runs have a known end.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples

from pipeline.progress.time_left import Work, seconds_left
from tasks.dry_run.cost_model import COMMIT, ROW_BYTES, TASK, WRITTEN_BYTE, plan_seconds

PACE = 2e-7  # seconds a byte, of one worker
TOKENS_PER_BYTE = 0.25
CONVERSATION_BYTES = 1000
FIRST_BATCH = 2e6  # bytes


def simulated(
    sizes: list[float], workers: int, shards: int, slow: float, at: float | None, copies: float = 1.0
) -> tuple[Work, float]:
    """Simulate a run over parts of these sizes at `slow` times its known cost.

    Returns its state at the time `at` and the time when it ends.
    """
    size = np.array(sizes)
    free, starts = [0.0] * workers, np.zeros(len(sizes))
    for place in np.argsort(-size, kind="stable"):  # the largest first
        worker = int(np.argmin(free))
        starts[place] = free[worker]
        free[worker] += (TASK + sizes[place] * PACE) * slow
    read_all = max(free)
    tokens, conversations = size.sum() * TOKENS_PER_BYTE, size.sum() / CONVERSATION_BYTES
    plan = TASK + plan_seconds(conversations * max(1, copies), tokens)
    shard = (TASK + WRITTEN_BYTE * ROW_BYTES * tokens * copies / shards) * slow
    planned = read_all + plan * slow
    shard_starts = planned + shard * (np.arange(shards) // workers)
    end = float(shard_starts[-1] + shard + COMMIT * slow)
    now = end if at is None else at
    seconds = np.clip(now - starts, 0, (TASK + size * PACE) * slow)
    first = np.minimum(size, FIRST_BATCH)
    first_seconds = (TASK + first * PACE) * slow
    measured = seconds >= first_seconds
    share = np.where(measured, (seconds / slow - TASK) / (size * PACE), 0)
    shard_seconds = np.clip(now - shard_starts, 0, shard)
    return Work(
        workers=workers,
        size=size,
        share=share,
        seconds=seconds,
        seconds_at_share=np.where(measured, seconds, 0),
        cpu=np.where(measured, seconds / slow, 0),
        conversations=float((size * share).sum() / CONVERSATION_BYTES),
        tokens=float((size * share).sum() * TOKENS_PER_BYTE),
        tokens_found=0.0,
        copies=copies,
        planned=now >= planned,
        plan_seconds=max(0.0, min(now, planned) - read_all),
        shard_done=(shard_seconds >= shard).astype(float),
        shard_seconds=shard_seconds,
    ), end


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.floats(1e7, 6e8), min_size=1, max_size=40),
    st.integers(1, 8),
    st.integers(1, 64),
    st.sampled_from([1.0, 2.0, 5.0]),
    st.floats(0.1, 0.99),
    st.sampled_from([0.3, 1.0, 30.0]),
)
def test_after_a_tenth_the_end_is_estimated_within_a_fifth(
    sizes: list[float], workers: int, shards: int, slow: float, share: float, copies: float
) -> None:
    _, end = simulated(sizes, workers, shards, slow, None, copies)
    work, _ = simulated(sizes, workers, shards, slow, share * end, copies)
    left = seconds_left(work)
    if left is None:
        assert not work.share.any(), "the first batch is enough for an estimate"
    else:
        assert (share * end + left) / end == pytest.approx(1, abs=0.2)


def test_the_last_long_part_counts_in_full() -> None:
    """Eight workers read one file no faster than one worker."""
    sizes = [1e7] * 7 + [2e9]
    work, end = simulated(sizes, 8, 8, 1.0, 20.0)
    assert seconds_left(work) == pytest.approx(end - 20, rel=0.1)


def test_there_is_no_estimate_before_the_first_batch() -> None:
    work, _ = simulated([1e8, 1e8], 2, 2, 1.0, 0.01)
    assert seconds_left(work) is None


def test_with_cached_token_files_only_the_plan_and_the_shards_remain() -> None:
    work, end = simulated([1e8], 1, 4, 1.0, None)
    nothing = np.zeros(1)
    found = {"seconds": nothing, "seconds_at_share": nothing, "share": nothing + 1, "cpu": nothing}
    again = {"planned": False, "plan_seconds": 0.0, "shard_done": np.zeros(4), "shard_seconds": np.zeros(4)}
    left = seconds_left(Work(**{**vars(work), **found, **again, "tokens": 0.0, "tokens_found": work.tokens}))
    assert left == pytest.approx(end - 1e8 * PACE, rel=0.5)


def test_the_shards_are_slower_by_the_same_factor_as_the_parts() -> None:
    """The factor of the parts applies to shards before any shard is measured.

    Work is slower if other programs use the cores, too. At this moment, only the time on a free core is known.
    """
    slow = 5.0
    _, end = simulated([1e9], 1, 8, slow, None)
    at = next(at for at in np.arange(0, end, 0.5) if simulated([1e9], 1, 8, slow, at)[0].planned)
    assert seconds_left(simulated([1e9], 1, 8, slow, at)[0]) == pytest.approx(end - at, rel=0.1)
