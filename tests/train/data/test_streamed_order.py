"""The order of streamed rows is a pure function.

Its inputs are the epoch, the rows of the shards, the seed, and the streams.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data.streamed_order import (
    RANKS,
    Stream,
    bounds,
    order,
    shards_of_window,
    share,
    steps,
    stream_count,
    uses,
)

Row = tuple[int, int]

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any)
STEPS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 20, 32, 48, 64, 96, 128, 192])
EPOCHS, SEEDS = st.integers(0, 3), st.integers(0, 2**31 - 1)


def rows_of(streams: list[Stream], per_stream: int, start: int = 0) -> list[list[Row]]:
    """Return the rows of each step, as (shard, row)."""
    places = [[window.places() for window in stream] for stream in streams]
    found = []
    for runs in steps(streams, per_stream, start):
        parts = [(places[run.stream][run.window], slice(run.first, run.last)) for run in runs]
        found.append([row for (shards, rows), part in parts for row in zip(shards[part], rows[part], strict=True)])
    return found


@given(EPOCHS, SIZES, SEEDS, STEPS)
def test_every_row_occurs_once_in_an_epoch_and_only_the_last_step_is_shorter(
    epoch: int, sizes: list[int], seed: int, rows_per_step: int
) -> None:
    streams = stream_count(rows_per_step)
    found = rows_of(order(epoch, sizes, seed, streams), rows_per_step // streams)
    assert sorted(row for step in found for row in step) == [(s, r) for s, n in enumerate(sizes) for r in range(n)]
    assert len(found) == math.ceil(sum(sizes) / rows_per_step)
    assert {len(step) for step in found[:-1]} <= {rows_per_step}


@given(EPOCHS, SIZES, SEEDS, STEPS, st.data())
def test_all_numbers_of_ranks_have_the_same_steps(
    epoch: int, sizes: list[int], seed: int, rows_per_step: int, data: st.DataObject
) -> None:
    ranks = data.draw(st.sampled_from([n for n in range(1, RANKS + 1) if rows_per_step % n == 0]))
    count = stream_count(rows_per_step)
    streams, per_stream = order(epoch, sizes, seed, count), rows_per_step // count
    whole = rows_of(streams, per_stream)
    of_ranks = [rows_of(list(share(streams, rank, ranks)), per_stream) for rank in range(ranks)]
    for step, rows in enumerate(whole):
        parts = [of_rank[step] if step < len(of_rank) else [] for of_rank in of_ranks]
        assert [row for part in parts for row in part] == rows
        sizes_of_parts = {len(part) for part in parts}
        if step < len(whole) - 1:
            assert sizes_of_parts == {rows_per_step // ranks}
        assert max(sizes_of_parts) - min(sizes_of_parts) <= 1
    cuts = bounds(sum(sizes), ranks)
    assert [sum(map(len, of_rank)) for of_rank in of_ranks] == np.diff(cuts).tolist()
    readers = Counter(shard for of_rank in of_ranks for shard in {shard for rows in of_rank for shard, _ in rows})
    assert sum(readers.values()) - len(readers) <= ranks - 1, "shards are read by more ranks than necessary"


@given(EPOCHS, SIZES, SEEDS, STEPS, st.integers(0, 20))
def test_an_epoch_that_starts_at_a_step_is_the_rest_of_it(
    epoch: int, sizes: list[int], seed: int, rows_per_step: int, start: int
) -> None:
    count = stream_count(rows_per_step)
    streams, per_stream = order(epoch, sizes, seed, count), rows_per_step // count
    assert rows_of(streams, per_stream, start) == rows_of(streams, per_stream)[start:]
    used = [(run.stream, run.window) for runs in steps(streams, per_stream, start) for run in runs]
    assert uses(streams, per_stream, start) == list(dict.fromkeys(used))


@given(SIZES, SEEDS, STEPS)
def test_each_stream_reads_a_bounded_number_of_shards_at_a_time(
    sizes: list[int], seed: int, rows_per_step: int
) -> None:
    count = stream_count(rows_per_step)
    for stream in order(0, sizes, seed, count):
        assert all(1 <= len(window.shards) <= shards_of_window(count) for window in stream)
        # One after the other: a shard belongs to one window, and windows follow each other without a gap.
        shards = [shard for window in stream for shard in window.shards]
        assert len(shards) == len(set(shards))
        starts = np.cumsum([0, *(window.rows for window in stream)])
        assert [window.start for window in stream] == starts[:-1].tolist()


@settings(max_examples=10)
@given(SEEDS)
def test_two_streams_read_the_shard_between_them_at_the_same_time(seed: int) -> None:
    streams = order(0, [30 + shard % 7 for shard in range(300)], seed, 64)
    shared = 0
    for left, right in pairwise(streams):
        both = {s for window in left for s in window.shards} & {s for window in right for s in window.shards}
        assert both in (set(), left[0].shards & right[0].shards, left[-1].shards & right[-1].shards)
        shared += len(both)
    assert shared > 30


@settings(max_examples=20)
@given(st.integers(200, 2000), SEEDS)
def test_another_epoch_or_seed_is_another_order_and_neighbors_are_mixed(rows: int, seed: int) -> None:
    sizes = [rows, rows, rows, rows]
    found = [
        [row for step in rows_of(order(epoch, sizes, number, 4), 1) for row in step]
        for epoch, number in ((0, seed), (1, seed), (0, seed + 1))
    ]
    assert len({tuple(rows) for rows in found}) == 3
    followers = sum(later == earlier + 1 for (_, earlier), (_, later) in zip(found[0][:-4], found[0][4:], strict=True))
    assert followers < rows / 10


def test_a_release_does_not_change_the_order() -> None:
    """Raise STREAM_VERSION in train/config.py with this digest."""
    found = rows_of(order(1, [5, 0, 17, 300, 2, 90], 42, stream_count(12)), 1)
    text = repr([[(int(shard), int(row)) for shard, row in step] for step in found])
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "0f23eaf6e539264bb9a78f9b3c504341448a477b57cfe52c198f153b90a0e601"
    )


@pytest.mark.parametrize("rows", [*range(1, 200), 320, 448, 1024])
def test_every_number_of_ranks_that_divides_a_step_divides_its_streams(rows: int) -> None:
    count = stream_count(rows)
    assert rows % count == 0
    assert all(count % ranks == 0 for ranks in range(1, RANKS + 1) if rows % ranks == 0)


def test_nothing_is_kept_for_each_row_of_a_large_corpus() -> None:
    """A corpus of 3 TB has 30,000 shards of 8,000 rows."""
    streams = order(0, [8000] * 30_000, 1, 64)
    assert sum(window.rows for stream in streams for window in stream) == 8000 * 30_000
    assert sum(len(stream) for stream in streams) <= 30_000 + 63
