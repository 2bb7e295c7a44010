"""Estimate how long the ranks of a step wait for the slowest rank, for a corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.packing.balance import MOST_ROWS, Waiting, forecast
from tasks.storage.manifest import Manifest
from tasks.storage.row_statistics import statistics_of_split


def waiting_of(manifest: Manifest, folder: Path) -> list[Waiting]:
    """Estimate the waiting for the training split from its first rows.

    The result is empty if the corpus has no statistics of rows, or rows of several lengths or without padding. Raises
    DataError or InputMissing if rows.arrow is missing or damaged.
    """
    if len(manifest.row_lengths) > 1 or manifest.row_layout.padding != "row":
        return []
    found = statistics_of_split(manifest, folder, "train", MOST_ROWS)
    return [] if found is None else forecast(found.squares, found.trained, manifest.length_of_split("train"))


def waiting_line(waiting: Sequence[Waiting], balance: Mapping[str, Any] | None) -> str:
    """Return the estimates as a sentence, or "" if there are none.

    `balance` is the setting of the corpus.
    """
    if not waiting:
        return ""
    first, *others = waiting
    shares = [f"{first.ranks:,} ranks {first.random:.2f} % of the time (with balance {first.balanced:.2f} %)"]
    shares += [f"{one.ranks:,} ranks {one.random:.2f} % ({one.balanced:.2f} %)" for one in others]
    ordered = f"; the rows are ordered for {balance['ranks']:,} ranks, or any divisor of it" if balance else ""
    return f"On several GPUs, ranks wait for the slowest rank of each step: {', '.join(shares)}{ordered}."
