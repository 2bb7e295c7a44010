"""Define a sample of a source file: records, weights, and the estimated total."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np

from tasks.readers.container import Record
from tasks.sources.model import SourceFile

PASSED = 64 << 20  # bytes of one file that may be read to find record starts or, in a table, to reach rows


@dataclass(frozen=True, slots=True)
class Sample:
    """Records of a file, each with the number of records that it represents.

    `total` is the number of records in the file. It is exact if `counted` is set, or else estimated from bytes. `reach`
    is the share of the file that records could be drawn from; it is below 1 if a stream is too long. `stands_for` is 1,
    or more if the file represents other files that were not read; it is computed from the bytes of these files.
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
        """Return whether the records are all the records that the sample represents."""
        return self.counted and self.stands_for == 1 and len(self.records) == self.total

    @property
    def expected(self) -> float:
        """Return the number of records that the sample represents."""
        return self.total * self.stands_for

    def thinned(self, every: int) -> Sample:
        """Return a sample of every n-th record.

        Together, its records represent as many records as before.
        """
        return weighed(replace(self, records=self.records[::every], weights=self.weights[::every]))


def weighed(sample: Sample) -> Sample:
    """Scale the weights of a sample so that their sum is `expected`."""
    return replace(sample, weights=sample.weights * (sample.expected / max(sample.weights.sum(), 1e-9)))


def draw_of(file: SourceFile) -> random.Random:
    """Return a random generator that does not depend on the file's location.

    Use only its .random(): other methods may return different numbers in other releases of Python.
    """
    return random.Random(f"{file.path.name} {file.bytes}")
