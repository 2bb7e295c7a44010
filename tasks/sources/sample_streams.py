"""Sample compressed files, which can only be read from the start."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any, BinaryIO

import numpy as np

from tasks.core.errors import Reject
from tasks.readers.compression import unpacked
from tasks.readers.lines import CHUNK, TOO_LONG, line_blocks
from tasks.readers.strict_json import parse_record
from tasks.sources.model import SourceFile
from tasks.sources.sample import ALMOST, STREAM, WINDOW, Record, Sample, draw_of, open_reader


class _Runs:
    """Of what is added, one of every n, drawn, as many as the budget allows; and the first and the last."""

    def __init__(self, budget: int, draw: random.Random):
        self.budget = budget
        self.draw = draw
        self.every = 1
        self.count = 0
        self.chosen = 0  # of the n at hand
        self.size = 0
        self.kept: list[tuple[int, int, Any]] = []  # number, size, run
        self.ends: list[tuple[int, int, Any]] = []

    def add(self, size: int, run: Any) -> None:
        one = (self.count, size, run)
        self.ends = [*self.ends[:1], one]
        if self.count % self.every == 0:
            self.chosen = self.count + int(self.draw.random() * self.every)
        if self.count == self.chosen:
            self.kept.append(one)
            self.size += size
        self.count += 1
        while len(self.kept) > 3 and self.size > self.budget:
            self.every *= 2
            pairs = [self.kept[at : at + 2] for at in range(0, len(self.kept), 2)]
            self.kept = [pair[int(self.draw.random() * len(pair))] for pair in pairs]
            self.size = sum(size for _, size, _ in self.kept)
            self.chosen = -1 if self.count % self.every else self.chosen

    def all(self) -> list[tuple[Any, float]]:
        """Each run that was kept, in order, and how many it stands for."""
        runs = {number: (run, 1.0) for number, _, run in self.ends}
        runs |= {number: (run, float(self.every)) for number, _, run in self.kept}
        return [runs[number] for number in sorted(runs)]


def line_stream_sample(file: SourceFile, budget: int, limit: int) -> Sample:
    """Of packed JSONL: lines are counted, and parsed where they are kept."""
    runs = _Runs(budget, draw_of(file))
    number = filled = size = 0
    open_end = False
    with file.path.open("rb") as source:
        for lines, unterminated in line_blocks(unpacked(source, file.compression, file.name), limit):
            open_end = unterminated
            step = max(1, len(lines) * WINDOW // CHUNK)
            for first in range(0, len(lines), step):
                run = lines[first : first + step]
                runs.add(sum(map(len, run)), (number + first, run))
                size += sum(map(len, run)) + len(run)
            number += len(lines)
            filled += sum(line == TOO_LONG or not (line == b"" or line.isspace()) for line in lines)
            if size > STREAM:
                break
        ended = size <= STREAM
        reach = 1.0 if ended else _reach(source, file)
    too_long = Reject("too_long_record", f"the line is longer than max_record_bytes, {limit:,} bytes")
    records, weights = list[Record](), list[float]()
    for (first, run), weight in runs.all():
        for at, line in enumerate(run, first + 1):
            if line == TOO_LONG or (line and not line.isspace()):
                value = too_long if line == TOO_LONG else parse_record(line, open_end and at == number)
                records.append(Record(f"{file.name}:{at}", value))
                weights.append(weight)
    return Sample(file, records, np.array(weights), filled / reach, counted=ended, reach=reach)


def stream_sample(file: SourceFile, budget: int, limit: int) -> Sample:
    """Of other packed text, and of text in which no record can be found from the middle: all is parsed."""
    runs = _Runs(budget, draw_of(file))
    count = size = 0
    reader = open_reader(file, 0, file.bytes, limit)
    numbered = iter(reader)
    while size <= STREAM // 4 and (run := list(islice(numbered, 100))):
        length = sum(len(value) if isinstance(value, str) else 100 for _, r in run for value in _values(r))
        runs.add(length, run)
        size += length
        count += len(run)
    ended = next(numbered, None) is None
    reach = 1.0 if ended else _reach(reader.opened, file)
    drawn = [(number, value, weight) for run, weight in runs.all() for number, value in run]
    records = [Record(f"{file.name}:{number + 1}", value) for number, value, _ in drawn]
    weights = np.array([weight for _, _, weight in drawn])
    return Sample(file, records, weights, count / reach, counted=ended, reach=reach)


def _reach(source: BinaryIO, file: SourceFile) -> float:
    """How much of a packed file is unpacked: a chunk less than was taken in."""
    return min(ALMOST, max(source.tell() - CHUNK, CHUNK / 2) / file.bytes)


def _values(record: object) -> Iterator[object]:
    """The strings of a record, at any depth."""
    if isinstance(record, dict):
        for value in record.values():
            yield from _values(value)
    elif isinstance(record, list):
        for value in record:
            yield from _values(value)
    else:
        yield record
