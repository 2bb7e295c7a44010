"""The share of time in which ranks wait, with several rows per rank and step."""

from __future__ import annotations

import numpy as np

from packcorpus.tasks.packing.balance import idle_share


def idle_of_steps(squares: np.ndarray, ranks: int, rows_per_rank: int, linear: int) -> float:
    """Return the share for steps of `ranks` × `rows_per_rank` rows.

    `linear` is the cost of a row without attention.
    """
    steps = len(squares) // (ranks * rows_per_rank)
    work = squares[: steps * ranks * rows_per_rank].reshape(steps, rows_per_rank, ranks).sum(axis=1)
    return idle_share(work.reshape(-1), ranks, rows_per_rank * linear)
