"""Numbers that do not fit in 32 bits are refused, never wrapped around."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.small_corpus import conversations, make_recipe, pack_corpus

from tasks.core import int32
from tasks.core.errors import DataError
from tasks.core.int32 import MOST, as_int32
from tasks.core.seeded_order import shuffle
from tasks.packing.plan import read_columns

NUMBERS = st.integers(-(2**40), 2**40) | st.integers(MOST - 2, MOST + 2) | st.integers(-MOST - 2, -MOST + 2)


@given(st.lists(NUMBERS, max_size=5))
def test_a_cast_keeps_every_number_or_is_refused(numbers: list[int]) -> None:
    values = np.array(numbers, np.int64)
    if all(-MOST <= number <= MOST for number in numbers):
        found = as_int32(values, "rows")
        assert found.dtype == np.int32
        assert found.tolist() == numbers
    else:
        with pytest.raises(DataError, match=r"rows: -?[\d,]+ is more than a plan can number \(2,147,483,647\)"):
            as_int32(values, "rows")


def test_a_number_of_conversations_is_checked_before_anything_is_read() -> None:
    """Nothing of that size is allocated."""
    tokens: Any = SimpleNamespace(edges=[0, 2**31])
    with pytest.raises(DataError, match=r"conversations: 2,147,483,648 is more than a plan can number"):
        read_columns(tokens, 0.0)
    with pytest.raises(DataError, match=r"rows and pieces: 2,147,483,648 is more"):
        shuffle(2**31, 1, 0)


@pytest.mark.parametrize(
    ("most", "counted", "overlong"),
    [(99, "conversations: 100 ", "drop"), (140, "conversations and pieces of split ones: ", "split")],
)
def test_planning_stops_with_what_there_is_too_much_of(
    most: int, counted: str, overlong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, conversations(100), sequence_length=32, overlong=overlong)
    monkeypatch.setattr(int32, "MOST", most)
    with pytest.raises(DataError, match=counted) as caught:
        pack_corpus(recipe)
    assert caught.value.reason == "too_many"
    assert not (recipe.plan_folder / "plan.json").exists()
