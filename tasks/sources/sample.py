"""Define a sample of a source file: records, weights, and the estimated total."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import BinaryIO, NamedTuple

import numpy as np

from tasks.conversations.formats import COLUMNS
from tasks.readers.lines import Read
from tasks.readers.record_reader import RecordReader
from tasks.sources.model import SourceFile

WINDOW = 1 << 14  # bytes; many short ones: neighbours are alike


STREAM = 128 << 20  # bytes that are unpacked of one file: half a second


PASSED = 64 << 20  # bytes that are read of one file to find where records begin, and of a table to reach its rows


ALMOST = 0.99  # the share of a file that is read, where it did not come to its end


class Record(NamedTuple):
    """A record, or the Reject that it is, and where it stands: "chats.jsonl:17", as rejects.jsonl has it."""

    place: str
    value: object


@dataclass(frozen=True, slots=True)
class Sample:
    """Records of a file and the weight of each: how many records of the sources it stands for.

    `total` is how many records the file holds, `counted` or estimated from its bytes. `reach` is the share of the file
    that records could be drawn from, below 1 where a stream is too long. `stands_for` is 1, and more where the file
    speaks for others that were not read, by their bytes.
    """

    file: SourceFile
    records: list[Record]
    weights: np.ndarray  # float64[records], with a sum of total × stands_for
    total: float
    counted: bool
    reach: float = 1.0
    stands_for: float = 1.0

    @property
    def whole(self) -> bool:
        """Whether the records are all that there are."""
        return self.counted and self.stands_for == 1 and len(self.records) == self.total

    @property
    def expected(self) -> float:
        """Records that the sample stands for."""
        return self.total * self.stands_for

    def thinned(self, every: int) -> Sample:
        """With every n-th of its records, which stand for the same."""
        return weighed(replace(self, records=self.records[::every], weights=self.weights[::every]))


def weighed(sample: Sample) -> Sample:
    """With weights in the same proportion and of the right sum."""
    return replace(sample, weights=sample.weights * (sample.expected / max(sample.weights.sum(), 1e-9)))


def open_reader(file: SourceFile, start: int, stop: int, limit: int) -> _Reader:
    wanted = {*COLUMNS, *(theirs for _, theirs in file.columns)}
    return _Reader(file.path, file.name, file.container, file.compression, start, stop, limit, wanted)


class _Reader(RecordReader):
    """Knows how far into the file it is."""

    opened: BinaryIO

    def _read(self, file: BinaryIO) -> Read:
        self.opened = file
        return super()._read(file)


def whole_file(file: SourceFile, limit: int) -> Sample:
    records = [Record(f"{file.name}:{number + 1}", value) for number, value in open_reader(file, 0, file.bytes, limit)]
    return Sample(file, records, np.ones(len(records)), len(records), counted=True)


def draw_of(file: SourceFile) -> random.Random:
    """The same wherever the file lies. Of its numbers only .random() is the same in every release."""
    return random.Random(f"{file.path.name} {file.bytes}")
