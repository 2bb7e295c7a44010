"""The balanced order of steps keeps the rows and gives ranks equal work.

This holds for every divisor of the ranks.
"""

from __future__ import annotations

import hashlib
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.training.waiting import idle_of_steps

from packcorpus.tasks.packing.balance import LINEAR, balanced_order, forecast, idle_share

LENGTH = 4096


def long_tailed(rows: int, length: int = LENGTH, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return Σn² and the trained tokens of rows with a long tail.

    Rows range from many short conversations to one that fills the row.
    """
    random = np.random.default_rng(seed)
    share = np.exp(random.normal(-1.5, 1.0, rows)).clip(0.01, 1.0)
    return (share * length * length).astype(np.int64), random.integers(1, length, rows).astype(np.int32)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 1 << 24), st.integers(1, LENGTH)), max_size=120),
    st.integers(2, 12),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_every_row_is_in_one_group_of_neighbors_in_cost(
    rows: list[tuple[int, int]], ranks: int, rows_per_rank: int, seed: int
) -> None:
    squares, trained = (
        (np.array(column, np.int64) for column in zip(*rows, strict=True)) if rows else (np.zeros(0),) * 2
    )
    order = balanced_order(squares, trained, ranks, rows_per_rank, LENGTH, seed)
    assert order.dtype == np.int32
    assert sorted(order.tolist()) == list(range(len(rows)))
    assert (order == balanced_order(squares, trained, ranks, rows_per_rank, LENGTH, seed)).all()
    size = ranks * rows_per_rank
    groups = len(rows) // size
    level = squares // (LINEAR * LENGTH // 1000)
    found = level[order[: groups * size]].reshape(groups, size)
    found = found[np.lexsort((found.max(axis=1), found.min(axis=1)))] if groups else found
    # Sorted by cost, groups do not overlap.
    assert (found.max(axis=1)[:-1] <= found.min(axis=1)[1:]).all()
    # LPT: two ranks differ by at most the heaviest row of the group.
    work = squares[order[: groups * size]].reshape(groups, rows_per_rank, ranks)
    apart = work.sum(axis=1).max(axis=1) - work.sum(axis=1).min(axis=1) if groups else np.zeros(0)
    assert (apart <= work.max(axis=(1, 2), initial=0)).all()


@pytest.mark.parametrize(("ranks", "rows_per_rank"), [(8, 1), (12, 1), (8, 4), (6, 5), (7, 3)])
def test_the_order_serves_every_divisor_of_the_ranks(ranks: int, rows_per_rank: int) -> None:
    squares, trained = long_tailed(3000)
    order = balanced_order(squares, trained, ranks, rows_per_rank, LENGTH, 42)
    size = ranks * rows_per_rank
    for fewer in range(2, ranks + 1):
        if ranks % fewer:
            continue
        for rows in {1, rows_per_rank, size // fewer, 2 * size // fewer}:
            before, after = (idle_of_steps(s, fewer, rows, LINEAR * LENGTH) for s in (squares, squares[order]))
            assert after < 0.1 * before, (fewer, rows, before, after)


def test_ranks_are_paired_so_that_half_of_them_have_equal_work() -> None:
    """The heaviest of four ranks is paired with the lightest.

    With half the ranks, each pair is the work of one rank.
    """
    squares = np.array([1, 2, 3, 10], np.int64)
    order = balanced_order(squares, np.ones(4, np.int32), 4, 1, LENGTH, 0)
    halves = squares[order].reshape(2, 2).sum(axis=0)
    assert sorted(halves.tolist()) == [5, 11]
    order = balanced_order(np.array([1, 2, 3, 4], np.int64), np.ones(4, np.int32), 2, 2, LENGTH, 0)
    assert [1 + order[0] + 1 + order[2], 1 + order[1] + 1 + order[3]] == [5, 5]


def test_rows_of_equal_cost_are_grouped_by_trained_tokens() -> None:
    random = np.random.default_rng(0)
    squares, trained = np.full(800, 1 << 20), random.integers(1, LENGTH, 800).astype(np.int32)
    order = balanced_order(squares, trained, 8, 1, LENGTH, 42)
    spread = np.ptp(trained[order].reshape(100, 8), axis=1)
    assert spread.mean() < 0.02 * np.ptp(trained.reshape(100, 8), axis=1).mean()
    # Rows of different costs are grouped by trained tokens, too, as far as costs allow.
    squares, trained = long_tailed(8000, 1024)
    order = balanced_order(squares, trained, 8, 1, 1024, 42)
    before, after = (np.ptp(values.reshape(1000, 8), axis=1).mean() for values in (trained, trained[order]))
    assert after < 0.2 * before


def test_groups_are_shuffled_and_the_rest_is_of_middling_cost() -> None:
    squares, trained = long_tailed(8005)
    order = balanced_order(squares, trained, 8, 1, LENGTH, 42)
    cost = squares[order[:8000]].reshape(1000, 8).mean(axis=1)
    assert abs(np.corrcoef(cost[1:], cost[:-1])[0, 1]) < 0.1, "neighboring steps are of like cost"
    last = squares[order[8000:]]
    assert (abs(last - np.median(squares)) < 0.01 * np.median(squares)).all()
    orders = [balanced_order(squares, trained, 8, 1, LENGTH, *given) for given in ((42, 0), (43, 0), (42, 1))]
    assert (orders[0] == order).all()
    assert all((other != order).mean() > 0.9 for other in orders[1:])


def test_the_order_is_the_same_for_ever() -> None:
    squares, trained = np.array([(37 * i * i + 11 * i) % 9973 * 999 for i in range(100)]), np.arange(100) * 7 % 31
    order = balanced_order(squares, trained, 6, 2, 512, 42, 3)
    assert hashlib.sha256(order.astype("<i4").tobytes()).hexdigest()[:16] == "0d0c2518df803088", (
        "the order changed: raise VERSIONS['corpus'] and VERSIONS['groups'] in tasks/storage/keys.py, then this digest"
    )


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_the_idle_share_of_a_step() -> None:
    """The idle share is 2 of 2 × 25.

    The ranks have work of 1 and 3 in one step, and 2 and 2 in the next, plus 10 for the linear part. The steps take
    13 and 12.
    """
    squares, linear = np.array([1, 3, 2, 2, 99]), 10
    assert idle_share(squares, 2, linear) == pytest.approx(2 / 50)
    assert idle_of_steps(squares, 2, 2, linear) == pytest.approx(1 - (23 + 25) / (2 * 25))


@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_the_forecast_of_a_random_order_is_its_expectation(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forecast is near the exact expectation of the heaviest row.

    Counting gives the exact value: the number of ways in which row i of the sorted rows is the largest of `ranks`
    rows.
    """
    squares, trained = long_tailed(600)
    cost = np.sort(squares) + LINEAR * LENGTH
    ways = [comb(i, ranks - 1) / comb(600, ranks) for i in range(600)]
    expected = 1 - cost.mean() / float(cost @ np.array(ways))
    monkeypatch.setattr("packcorpus.tasks.packing.balance.RANKS", (ranks,))
    [one] = forecast(squares, trained, LENGTH)
    assert one.ranks == ranks
    assert one.random == pytest.approx(100 * expected, rel=0.03)
    assert one.balanced < one.random


def test_the_forecast_leaves_out_what_the_rows_do_not_fill() -> None:
    squares, trained = long_tailed(500)
    assert [one.ranks for one in forecast(squares, trained, LENGTH)] == [8, 64]
    assert forecast(squares[:7], trained[:7], LENGTH) == []
