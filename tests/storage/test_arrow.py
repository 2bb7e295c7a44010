"""Columns equal those of pyarrow for the same values, including slices and nulls.

pandas is not imported.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packcorpus.tasks.storage.schemas import strings, to_arrow, to_numpy

TYPES = (np.int8, np.int32, np.int64, np.uint64, np.bool_)


@settings(deadline=None)
@given(st.sampled_from(TYPES), st.lists(st.integers(0, 100), max_size=40), st.integers(0, 40), st.integers(0, 40))
def test_round_trip_through_arrow(kind: type, numbers: list[int], start: int, count: int) -> None:
    values = np.array(numbers).astype(kind)
    column = to_arrow(values)
    column.validate(full=True)
    assert column.equals(pa.array(values))
    part = column.slice(min(start, len(values)), count)
    found = to_numpy(part)
    assert found.dtype == values.dtype
    assert found.tolist() == part.to_pylist()


@settings(deadline=None)
@given(st.sampled_from(TYPES), st.lists(st.tuples(st.integers(0, 100), st.booleans()), max_size=40))
def test_nulls(kind: type, cells: list[tuple[int, bool]]) -> None:
    values, null = np.array([c for c, _ in cells]).astype(kind), np.array([n for _, n in cells], bool)
    column = to_arrow(values, null)
    column.validate(full=True)
    assert column.equals(pa.array(values, mask=null))
    if null.any():
        with pytest.raises(AssertionError, match="null"):
            to_numpy(column)


def test_strings() -> None:
    assert strings(["", "é", "train"]).equals(pa.array(["", "é", "train"]))


def test_pandas_is_not_imported() -> None:
    script = "import sys, numpy; from packcorpus.tasks.storage.schemas import strings, to_arrow, to_numpy; "
    script += "to_numpy(to_arrow(numpy.ones(3), numpy.zeros(3, bool)))"
    words = [sys.executable, "-c", f"{script}; strings(['a']); print('pandas' in sys.modules)"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "False\n"
