"""Numbers that do not fit in 32 bits are refused, never wrapped around."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.errors import DataError
from tasks.core.int32 import MOST, as_int32
from tasks.core.seeded_order import shuffle
from tasks.packing.plan import select_pieces

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
