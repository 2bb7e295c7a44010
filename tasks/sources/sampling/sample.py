"""Define a sample of a source file: records, weights, and the estimated total."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np

from tasks.readers.container import Record
from tasks.sources.model import SourceFile

PASSED = 64 << 20  # bytes of one file that are read to find where records start, and of a table to reach its rows


@dataclass(frozen=True, slots=True)
class Sample:
    """Records of a file and the weight of each: the number of records of the sources it represents.

    `total` is the number of records in the file, `counted` or estimated from its bytes. `reach` is the share of the
    file that records could be drawn from, below 1 if a stream is too long. `stands_for` is 1, or more if the file
    represents others that were not read, by their bytes.
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
        """Whether the records are all records."""
        return self.counted and self.stands_for == 1 and len(self.records) == self.total

    @property
    def expected(self) -> float:
        """Number of records that the sample represents."""
        return self.total * self.stands_for

    def thinned(self, every: int) -> Sample:
        """Return every n-th record; together they represent the same."""
        return weighed(replace(self, records=self.records[::every], weights=self.weights[::every]))


def weighed(sample: Sample) -> Sample:
    """Scale the weights so that their sum is right."""
    return replace(sample, weights=sample.weights * (sample.expected / max(sample.weights.sum(), 1e-9)))


def draw_of(file: SourceFile) -> random.Random:
    """Return a generator that does not depend on the file's location.

    Only its .random() returns the same numbers in every release of Python.
    """
    return random.Random(f"{file.path.name} {file.bytes}")
