"""Sample tables by groups of rows."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import numpy as np

from tasks.readers.container import Record, Table
from tasks.readers.lines import WINDOW
from tasks.readers.tables import rows_of
from tasks.sources.model import SourceFile
from tasks.sources.sampling.sample import PASSED, Sample, draw_of


def table_sample(file: SourceFile, table: Table, budget: int) -> Sample:
    """Read about `budget` bytes of rows.

    The rows come from every group of rows, or from groups that are spread over the table.
    """
    records, weights = list[Record](), list[float]()
    draw = draw_of(file)
    rows = table.rows
    share = min(1.0, budget / max(table.row_bytes * sum(rows), 1))
    # Draw one group of rows from each stretch of the table. It stands for all groups of its stretch.
    most = len(rows) if share == 1 else min(len(rows), max(8, budget // (4 * WINDOW)))
    edges = [len(rows) * number // most for number in range(most + 1)]
    chosen = [(top + int(draw.random() * (bottom - top)), float(bottom - top)) for top, bottom in pairwise(edges)]
    for group, stands_for in chosen:
        first = number = sum(rows[:group])
        batches: list[tuple[int, Any]] = []
        for batch in table.batches(group, math.inf if share == 1 else PASSED / len(chosen)):
            batches.append((number, batch))
            number += batch.num_rows
        own = _slices(file, batches, share * stands_for * rows[group] / max(number - first, 1), draw)
        records += own
        weights += [stands_for * rows[group] / max(len(own), 1)] * len(own)
    total = sum(rows) / table.reach
    return Sample(file, records, np.array(weights), total, counted=table.reach == 1, reach=table.reach)


def _slices(file: SourceFile, batches: list[tuple[int, Any]], share: float, draw: random.Random) -> list[Record]:
    """Return a share of the rows of each batch, from a random place.

    A share of 1 or more is all rows.
    """
    found = []
    for number, batch in batches:
        count = min(batch.num_rows, math.ceil(batch.num_rows * share))
        start = int(draw.random() * (batch.num_rows - count + 1))
        for place, value in enumerate(rows_of(batch.slice(start, count)), number + start + 1):
            found.append(Record(f"{file.name}:{place}", value))
    return found
