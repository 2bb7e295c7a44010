"""Sample files that can only be read from the start, such as compressed ones."""

from __future__ import annotations

import random

import numpy as np

from tasks.readers.container import RecordReader, Run
from tasks.readers.containers import container_named
from tasks.readers.lines import CHUNK
from tasks.sources.model import SourceFile
from tasks.sources.sampling.sample import Sample, draw_of

STREAM = 128 << 20  # bytes of one file that are decompressed at most, in half a second

_ALMOST = 0.99  # maximum share of a file that counts as read if its end is not reached


class _Runs:
    """Keep one of every n runs within a budget, plus the first and the last run."""

    def __init__(self, budget: int, draw: random.Random):
        self.budget = budget
        self.draw = draw
        self.every = 1
        self.count = 0
        self.chosen = 0  # number of the chosen run among the current n
        self.size = 0
        self.kept: list[tuple[int, Run]] = []
        self.ends: list[tuple[int, Run]] = []

    def add(self, run: Run) -> None:
        one = (self.count, run)
        self.ends = [*self.ends[:1], one]
        if self.count % self.every == 0:
            self.chosen = self.count + int(self.draw.random() * self.every)
        if self.count == self.chosen:
            self.kept.append(one)
            self.size += run.size
        self.count += 1
        while len(self.kept) > 3 and self.size > self.budget:
            self.every *= 2
            pairs = [self.kept[at : at + 2] for at in range(0, len(self.kept), 2)]
            self.kept = [pair[int(self.draw.random() * len(pair))] for pair in pairs]
            self.size = sum(run.size for _, run in self.kept)
            self.chosen = -1 if self.count % self.every else self.chosen

    def all(self) -> list[tuple[Run, float]]:
        """Return the kept runs in order, each with the number of runs it represents."""
        runs = {number: (run, 1.0) for number, run in self.ends}
        runs |= {number: (run, float(self.every)) for number, run in self.kept}
        return [runs[number] for number in sorted(runs)]


def stream_sample(file: SourceFile, budget: int, max_record_bytes: int, stream: int = STREAM) -> Sample:
    """Read a file from its start, up to the cost of `stream` bytes.

    All records of a file within the budget are kept.
    """
    runs = _Runs(budget, draw_of(file))
    count = cost = 0
    reach = 1.0
    container = container_named(file.container)
    reader = RecordReader(container, file, max_record_bytes=max_record_bytes)
    for run in container.runs(reader):
        if cost > stream:
            # The last chunk that was read may not be decompressed yet.
            reach = min(_ALMOST, max(reader.position() - CHUNK, CHUNK / 2) / file.bytes)
            break
        runs.add(run)
        count += run.number
        cost += run.cost
    drawn = [(record, weight) for run, weight in runs.all() for record in run.records()]
    weights = np.array([weight for _, weight in drawn])
    return Sample(file, [record for record, _ in drawn], weights, count / reach, counted=reach == 1, reach=reach)
