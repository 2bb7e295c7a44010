"""Columns of token files, read once or again each time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.small_corpus import token_file

from packcorpus.tasks.storage import token_files
from packcorpus.tasks.storage.token_files import TokenColumns

ROWS = [[([~1, 2], True)], [([~1, 2, 3], True)] * 7, [([~4, ~5, 6], False), ([~1, 2], True)]]
BASES = [0, 10, 30]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / f"{part}.arrow" for part in range(len(ROWS))]
    for path, rows in zip(found, ROWS, strict=True):
        count = len(rows)
        token_file(path, rows, records=[3 * row for row in range(count)], digests=[9 * row for row in range(count)])
    return found


@pytest.mark.parametrize("name", TokenColumns.TYPES)
def test_a_column_is_the_same_whether_it_is_kept_or_not(
    name: str, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = TokenColumns(paths, BASES)
    again = TokenColumns(paths, BASES)
    total = sum(map(len, ROWS))
    for first in range(total + 1):
        for last in (*range(first, total + 1), None):
            column = kept.column(name, first, last)
            with monkeypatch.context() as patched:
                patched.setattr(token_files, "KEPT", total - 1)
                other = again.column(name, first, last)
            assert column.dtype == other.dtype == TokenColumns.TYPES[name]
            assert column.tolist() == other.tolist()
    assert kept.column("record").tolist() == [0, 10, 13, 16, 19, 22, 25, 28, 30, 33]
    assert kept.column("length").tolist() == [2, *[3] * 7, 3, 2]


def test_a_column_can_be_changed_and_files_are_opened_twice(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    class Counting(pa.RecordBatchFileReader):
        def __init__(self, source: object) -> None:
            opened.append(1)
            super().__init__(source)

    monkeypatch.setattr(pa.ipc, "open_file", Counting)
    columns = TokenColumns(paths, BASES)
    for name in TokenColumns.TYPES:
        before = columns.column(name)
        columns.column(name)[:] = np.zeros(1, before.dtype)
        assert columns.column(name).tolist() == before.tolist()
    assert len(opened) == 2 * len(paths), "once to count the conversations, and once for all columns"
