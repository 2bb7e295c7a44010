"""Find prompts and their expected answers in the first validation conversations.

    row of format 3.0 ─position_ids restart─▶ conversations ─labels─▶ Prompt(before the first trained turn, the turn)
    row of format 2.0, one conversation ──────────────────────┘

A conversation that was split over rows counts once per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np

from tasks.storage.schemas import IGNORED


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of a conversation before its first trained turn, and of that turn."""

    ids: list[int]
    expected: list[int]


def find_prompts(rows: Any, count: int) -> list[Prompt]:
    """Return the prompts of at most the first `count` conversations of a split."""
    return list(islice(_prompts(rows), count))


def _prompts(rows: Any) -> Iterator[Prompt]:
    for number in range(len(rows)):
        row = {name: np.asarray(values) for name, values in rows[number].items()}
        ids, is_trained = row["input_ids"], row["labels"] != IGNORED
        starts = np.flatnonzero(row["position_ids"] == 0).tolist() if "position_ids" in row else [0]
        for start, stop in pairwise([*starts, len(ids)]):
            first = start + 1  # nothing predicts the first token
            trained = np.flatnonzero(is_trained[first:stop]) + first
            if len(trained):  # otherwise padding
                gaps = np.flatnonzero(np.diff(trained) > 1)
                end = trained[gaps[0]] if len(gaps) else trained[-1]
                yield Prompt(ids[start : trained[0]].tolist(), ids[trained[0] : end + 1].tolist())
