"""Check that all embeddings of a corpus have equally many numbers.

    sketches of a batch ─note_embeddings─▶ receipt: {"embeddings": {"384": 0}, "without_embedding": 2}
    receipts of all parts ─check_embeddings─▶ DataError, naming two records that differ

At least one record must have an embedding. Each size is noted with its first record, so the result does not depend on
where a part starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from tasks.conversations.keys.embeddings import EMBEDDING, Sketch
from tasks.core.errors import DataError
from tasks.recipe import Recipe

HINT = "map its key with columns: {embedding: KEY}, or remove company_by"


def note_embeddings(receipt: dict[str, Any], sketches: Sequence[Sketch], records: np.ndarray) -> None:
    """Add the sizes of embeddings to a receipt.

    Also add the number of conversations without an embedding.
    """
    sizes = np.array([sketch.numbers for sketch in sketches])
    missing = len(np.unique(records[sizes == 0]))
    receipt["without_embedding"] = receipt.get("without_embedding", 0) + missing
    noted = receipt.setdefault("embeddings", {})
    for size, sample in zip(*np.unique(sizes, return_index=True), strict=True):
        if size:
            noted.setdefault(str(size), int(records[sample]))


class EmbeddingSizes:
    """The sizes of embeddings, each with the place where it was found first."""

    def __init__(self) -> None:
        self._found: dict[str, Callable[[], str]] = {}

    def add(self, receipt: Mapping[str, Any], place_of: Callable[[int], str]) -> None:
        """Add the sizes in a receipt.

        `place_of` returns the place of a record of the receipt. Raises DataError if there are several sizes.
        """
        for size, record in sorted(receipt.get("embeddings", {}).items(), key=itemgetter(1)):
            self._found.setdefault(size, partial(place_of, record))
        if len(self._found) > 1:
            (size, place), (other, there), *_ = self._found.items()
            raise DataError(
                "embedding_sizes",
                f"{there()}: the {EMBEDDING} has {int(other):,} numbers, but the {EMBEDDING} of {place()} has "
                f"{int(size):,}; compute all with one model",
            )

    def require(self, name: str) -> None:
        """Raise DataError if the corpus `name` has no embeddings."""
        if not self._found:
            raise DataError("no_embeddings", f"{name}: no conversation has an {EMBEDDING}; {HINT}")


def check_embeddings(recipe: Recipe, receipts: Sequence[Mapping[str, Any]], bases: Sequence[int]) -> None:
    """Check the embeddings of all parts.

    `bases` has the number of records that precede each part in its file. Raises DataError.
    """
    if not recipe.config.reads_embeddings:
        return
    sizes = EmbeddingSizes()
    for part, receipt, base in zip(recipe.parts, receipts, bases, strict=True):
        sizes.add(receipt, partial(_place, part.file.name, base))
    if any("embeddings" in receipt for receipt in receipts):
        sizes.require(recipe.config.name)


def _place(file: str, base: int, record: int) -> str:
    return f"{file}:{base + record + 1}"
