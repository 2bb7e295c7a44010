"""Find the samples of a row, also if it stores shared tokens once.

position_ids ──▶ where the samples of a row begin
end ───────────▶ the path of a sample: the places of its tokens, also of those that a sample before it stores
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from packcorpus.tasks.storage.schemas import END
from packcorpus.tasks.storage.shards import path_before


class SamplePath(NamedTuple):
    """Places of a sample's tokens, ascending, of which the first ones may be shared."""

    places: np.ndarray  # int64[tokens]
    shared: int  # tokens of other samples and a copy; 0 if none is shared


def paths_of(row: Mapping[str, np.ndarray]) -> Iterator[SamplePath]:
    """Yield the path of each sample of a row, and the places of its padding."""
    length = len(row["input_ids"])
    positions = row.get("position_ids", np.arange(length))
    starts = np.flatnonzero(np.diff(positions, prepend=-2) != 1).tolist()
    for start, stop in pairwise([*starts, length]):
        places = np.arange(start, stop)
        before = path_before(row[END], start) if END in row else places[:0]
        yield SamplePath(np.concatenate([before, places]), len(before) + bool(positions[start]))
