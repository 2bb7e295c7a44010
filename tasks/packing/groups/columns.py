"""Read the columns of a group's conversations from the token files into memory.

    runs of a group ─whole conversations─▶ record, digest, turns, turn, trained, separator, length

Columns are read once. Only the record batches that hold a run are read from a token file. A group of a million
conversations takes 33 MB. The tokens of single conversations are read later; one token file stays open for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa

from tasks.packing.groups.deal import Run
from tasks.storage.arrow import to_numpy
from tasks.storage.tokens.token_files import TokenColumns, TokenFile


class GroupColumns(TokenColumns):
    """Columns of the conversations of a group, by their number within the group.

    A run has all conversations that begin in it, so the samples of a conversation stay together. A part of TokenColumns
    is a run here.
    """

    def __init__(self, paths: Sequence[Path], bases: Sequence[int], runs: Sequence[Run]):
        """Read `runs` of token files.

        `bases` has the number of the first record of each part within its source.
        """
        self._paths = paths
        self._columns: dict[str, np.ndarray] = {}
        self.runs: list[Run] = []
        found: dict[str, list[np.ndarray]] = {name: [np.empty(0, kind)] for name, kind in self.TYPES.items()}
        with ExitStack() as opened:
            part, file = -1, None
            for run in runs:
                if run.part != part:
                    opened.close()
                    part, file = run.part, opened.enter_context(TokenFile(paths[run.part]))
                assert file is not None
                own = Run(part, _begin(file, run.first), _begin(file, run.last))
                if own.first == own.last:
                    continue
                self.runs.append(own)
                for batch in file.batches(own.first, own.last):
                    for name, kind in self.TYPES.items():
                        values: np.ndarray = _column(batch, name).astype(kind)  # a copy
                        found[name].append(values + bases[part] if name == "record" else values)
        for name in self.TYPES:
            self._columns[name] = np.concatenate(found.pop(name))
        self.edges = [0, *accumulate(run.last - run.first for run in self.runs)]
        self._run_edges = np.array(self.edges)
        self._run_places = np.array(self.runs, np.int64).reshape(-1, 3)  # part, first, last
        self._opened: tuple[int, TokenFile] | None = None

    def column(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        return self._columns[name][first:last].copy()

    def tokens(self, conversation: int) -> np.ndarray:
        [part], [row] = self.rows_of(np.array([conversation]))
        [batch] = self._open_file(int(part)).batches(int(row), int(row) + 1)
        return to_numpy(batch.column("tokens")[0].values).copy()

    def _open_file(self, part: int) -> TokenFile:
        """Open the token file of a part, unless it is the last one that was opened."""
        if self._opened is None or self._opened[0] != part:
            if self._opened:
                self._opened[1].close()
                self._opened = None
            self._opened = part, TokenFile(self._paths[part]).open()
        return self._opened[1]

    def chunks(self, name: str) -> Iterator[tuple[int, pa.Array]]:
        first = 0
        for run in self.runs:
            with TokenFile(self._paths[run.part]) as file:
                for batch in file.batches(run.first, run.last):
                    yield first, batch.column(name)
                    first += batch.num_rows

    def rows_of(self, conversations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        number = np.searchsorted(self._run_edges, conversations, side="right") - 1
        places = self._run_places[number]
        return places[:, 0], places[:, 1] + conversations - self._run_edges[number]


def _column(batch: pa.RecordBatch, name: str) -> np.ndarray:
    if name == "length":
        return np.diff(to_numpy(batch.column("tokens").offsets))
    return to_numpy(batch.column(name))


def _begin(file: TokenFile, row: int) -> int:
    """Return the first row, from `row` on, that begins a conversation.

    All samples of a conversation have the same record.
    """
    if 0 < row < file.rows:
        before = file.record(row - 1)
        while row < file.rows and file.record(row) == before:
            row += 1
    return row
