"""Deal streamed rows to the ranks of the Trainer, which asks for rows by number.

numbers of a batch, in order ─its rank, the place among the rank's rows─▶ the next rows of StreamedRows
after the rank's last row ─filler─▶ a row without a trained token, until all ranks have the same number of batches
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from itertools import islice

import torch

from tasks.storage.schemas import LOSS_WEIGHT
from train.data.corpus import Corpus
from train.data.shard_reader import Place
from train.data.stream import Row, StreamedRows


class DealtRows(torch.utils.data.Dataset):
    """Streamed rows for a DataLoader that deals batches to the ranks in turn.

    The DataLoader of the Trainer does this. Row p belongs to batch p // micro_batch, and batch b to rank b % ranks. A
    rank asks for its own rows in order and may start at any step. All ranks have the same number of full batches,
    filled up with `filler`.
    """

    def __init__(self, rows: StreamedRows, micro_batch: int, filler: Row):
        self._rows, self._micro_batch, self.filler = rows, micro_batch, filler
        most = math.ceil(rows.rows / rows.ranks)
        self._length = math.ceil(most / micro_batch) * micro_batch * rows.ranks
        self._places: Generator[Place] | None = None
        self._epoch, self._next = 0, -1

    def start_pass(self, number: int) -> None:
        """Switch to an epoch, counted from 0."""
        self.close()
        self._epoch = number

    def close(self) -> None:
        """End the threads that read ahead, and empty the cache."""
        places, self._places, self._next = self._places, None, -1
        if places is not None:
            places.close()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Row:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Row]:
        batch, first = divmod(numbers[0], self._micro_batch)
        start = batch // self._rows.ranks * self._micro_batch + first
        if start != self._next:
            self._seek(start)
        self._next = start + len(numbers)
        assert self._places is not None
        found = list(islice(self._places, len(numbers)))
        fillers = [{name: values.clone() for name, values in self.filler.items()} for _ in numbers[len(found) :]]
        return [*self._rows.copy(found), *fillers] if found else fillers

    def _seek(self, start: int) -> None:
        self.close()
        step, skipped = divmod(start, self._rows.rows_per_step // self._rows.ranks)
        self._places = self._rows.places(self._epoch, step)
        for _ in islice(self._places, skipped):
            pass


def empty_row(corpus: Corpus, split: str = "train") -> Row:
    """Return a row as long as the rows of a split, but without a trained token.

    Such a row does not change the loss.
    """
    length = corpus.length_of(split)
    ids, labels = torch.zeros(length, dtype=torch.int32), torch.full((length,), -100, dtype=torch.int64)
    positions = {"position_ids": torch.arange(length, dtype=torch.int32)} if corpus.isolated else {}
    weights = {LOSS_WEIGHT: torch.zeros(length)} if corpus.weighted else {}
    return {"input_ids": ids, "labels": labels, **positions, **weights}
