"""Numbers that do not fit in 32 bits are refused, never wrapped around."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.core.numbers import MOST, as_int32, draws, order_of_contents, shuffle
from packcorpus.tasks.packing.plan import select_pieces

NUMBERS = st.integers(-(2**40), 2**40) | st.integers(MOST - 2, MOST + 2) | st.integers(-MOST - 2, -MOST + 2)


@given(st.lists(NUMBERS, max_size=5))
def test_a_cast_keeps_every_number_or_is_refused(numbers: list[int]) -> None:
    values = np.array(numbers, np.int64)
    if all(-MOST <= number <= MOST for number in numbers):
        found = as_int32(values, "rows")
        assert found.dtype == np.int32
        assert found.tolist() == numbers
    else:
        with pytest.raises(DataError, match=r"rows: -?[\d,]+ exceeds the limit of a plan \(2,147,483,647\)"):
            as_int32(values, "rows")


def test_a_number_is_checked_before_anything_of_that_size_is_allocated() -> None:
    tokens: Any = SimpleNamespace(edges=[0, 2**31])
    recipe: Any = SimpleNamespace(config=SimpleNamespace(name="small"))
    with pytest.raises(
        DataError, match=r"small: has 2,147,483,648 conversations, but a corpus can have at most 100,000,000"
    ):
        select_pieces(tokens, recipe)
    with pytest.raises(DataError, match=r"rows and pieces: 2,147,483,648 exceeds"):
        shuffle(2**31, 1, 0)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 500), st.integers(0, (1 << 63) - 1), st.integers(0, 1))
def test_a_shuffle_is_a_permutation(count: int, seed: int, stream: int) -> None:
    order = shuffle(count, seed, stream)
    assert order.dtype == np.int32
    assert sorted(order.tolist()) == list(range(count))
    assert (order == shuffle(count, seed, stream)).all()


def test_a_shuffle_is_the_same_for_ever() -> None:
    why = "the order of rows changed: raise VERSIONS['corpus'] in tasks/storage/keys.py, then this test"
    assert shuffle(12, 42, 0).tolist() == [10, 2, 11, 1, 0, 3, 8, 9, 4, 7, 5, 6], why
    assert shuffle(12, 42, 1).tolist() == [3, 11, 10, 7, 5, 9, 2, 8, 4, 1, 0, 6], why
    assert shuffle(8, (1 << 63) - 1, 0).tolist() == [5, 7, 4, 2, 6, 1, 3, 0], why


def test_numbers_whose_draws_begin_alike_are_sorted_by_the_rest() -> None:
    count, seed = 2_000_000, 6
    drawn = draws(count, seed, 0)
    begins = np.sort(drawn >> np.uint64(count.bit_length()))
    assert (begins[1:] == begins[:-1]).any(), "no two begin alike"
    expected = np.empty(count, np.int32)
    expected[np.argsort(drawn)] = np.arange(count, dtype=np.int32)
    assert (shuffle(count, seed, 0) == expected).all()


def test_each_seed_and_stream_has_an_order_of_its_own() -> None:
    orders = {tuple(shuffle(50, seed, stream).tolist()) for seed in (0, 1, 2, 42, 1 << 40) for stream in (0, 1)}
    assert len(orders) == 10


@pytest.mark.parametrize("seed", [0, 42])
def test_a_shuffle_moves_every_region_everywhere(seed: int) -> None:
    """A shuffle spreads each tenth of the old order over all tenths.

    A shard is a contiguous part of the new order.
    """
    tenths = np.histogram2d(np.arange(10_000) // 1000, shuffle(10_000, seed, 0) // 1000, bins=10)[0]
    assert tenths.min() > 60
    assert tenths.max() < 140


contents = st.lists(st.integers(0, (1 << 64) - 1), max_size=30)


@settings(max_examples=examples(100), deadline=None)
@given(contents, st.data(), st.integers(0, 9))
def test_an_order_of_contents_does_not_depend_on_where_they_stand(
    digests: list[int], data: st.DataObject, seed: int
) -> None:
    def ordered(values: list[int]) -> list[int]:
        return [values[place] for place in order_of_contents(np.array(values, np.uint64), seed)]

    assert ordered(digests) == ordered(data.draw(st.permutations(digests)))
    # Added values do not reorder the others.
    rest = [digest for digest in digests if digest % 2]
    assert ordered(rest) == [digest for digest in ordered(digests) if digest % 2]


def test_equal_contents_stay_in_their_order() -> None:
    order = order_of_contents(np.array([7, 5, 7, 5, 7], np.uint64), 42).tolist()
    assert [place for place in order if place % 2 == 0] == [0, 2, 4]
    assert [place for place in order if place % 2] == [1, 3]


def test_an_order_of_contents_is_the_same_for_ever() -> None:
    why = "the choice by weights and limits changed: raise VERSIONS['corpus'] in tasks/storage/keys.py, then this test"
    assert order_of_contents(np.arange(10, dtype=np.uint64), 42).tolist() == [7, 5, 6, 0, 3, 2, 9, 8, 1, 4], why
