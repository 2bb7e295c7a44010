"""Sample text files in windows spread over the file."""

from __future__ import annotations

import random

import numpy as np

from tasks.readers.container import Record, Window
from tasks.readers.lines import WINDOW
from tasks.sources.model import SourceFile
from tasks.sources.sampling.sample import PASSED, Sample, draw_of


def window_sample(file: SourceFile, budget: int, window: Window) -> Sample:
    """Read about `budget` bytes of records in windows."""
    records: list[Record] = []
    weights: list[float] = []
    read, passed = 0.0, 0
    with file.open() as source:
        for start, stop, weight in places(file.bytes, budget, draw_of(file)):
            found, size = window(source, start, stop)
            records += found
            weights += [weight] * len(found)
            read += weight * size
            passed += source.tell() - stop
            if passed > PASSED:
                break
    return Sample(file, records, np.array(weights), sum(weights) * file.bytes / max(read, 1), counted=False)


def places(size: int, budget: int, draw: random.Random) -> list[tuple[int, int, float]]:
    """Return (start, stop, weight) of each window, in order.

    The weight is the number of windows that the window represents. The first window begins at the start of the file,
    and the last window ends at its end. Between them, there is one window for each stretch.
    """
    window = min(WINDOW, budget // 3)
    count = max(1, budget // window - 2)
    inner = max(0, size - 2 * window)
    found = [(0, min(window, size), 1.0)]
    for number in range(count):
        top, bottom = window + inner * number // count, window + inner * (number + 1) // count
        start = top + int(draw.random() * max(0, bottom - top - window))
        if bottom > top:
            found.append((start, min(start + window, bottom), max(1.0, (bottom - top) / window)))
    if size > window:
        found.append((max(window, size - window), size, 1.0))
    return found
