"""Forecast, for a corpus, how long the ranks of a step wait for the slowest one."""

from __future__ import annotations

from pathlib import Path

from tasks.packing.balance.waiting import MOST_ROWS, Waiting, forecast
from tasks.row_settings import Balance
from tasks.storage.manifest import Manifest
from tasks.storage.row_statistics import statistics_of_split


def waiting_of(manifest: Manifest, folder: Path, hidden_size: int) -> list[Waiting]:
    """Return a forecast for the training split, from its first rows; empty if the corpus has no statistics of rows.

    Raises DataError or InputMissing if rows.arrow is missing or damaged.
    """
    found = statistics_of_split(manifest, folder, "train", MOST_ROWS)
    if found is None:
        return []
    settings = manifest.config.get("balance")
    balance = Balance(**settings) if settings else None
    return forecast(found.squares, found.trained, manifest.sequence_length, balance, hidden_size)
