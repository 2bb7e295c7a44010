"""Group the samples of a conversation, which are adjacent rows of a token file.

    record   7   7   7   8   9 …
    turn     1   3   5  -1   1        three samples of one conversation, a whole conversation as one sample, …
    first    ✓           ✓   ✓

Arrays have one entry per sample, and a conversation is represented by its first sample. If every conversation is one
sample, samples and conversations are the same, and nothing is computed or stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasks.core.int32 import as_int32
from tasks.storage.tokens.token_files import TokenColumns

_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class Samples:
    """The grouping of samples by conversation.

    `firsts` (int32[conversations]) is the first sample of each conversation, or None if every conversation is one
    sample.
    """

    firsts: np.ndarray | None = None

    @property
    def several(self) -> bool:
        """Return whether a conversation may have several samples."""
        return self.firsts is not None

    def only_first(self, flags: np.ndarray) -> np.ndarray:
        """Return the flags of first samples, and False at all others: bool[samples]."""
        return flags if self.firsts is None else self._at_firsts(flags[self.firsts], len(flags))

    def most(self, values: np.ndarray) -> np.ndarray:
        """Return, at each first sample, the maximum over its conversation's samples.

        All other samples get 0 or False.
        """
        if self.firsts is None or not len(values):
            return values
        return self._at_firsts(np.maximum.reduceat(values, self.firsts), len(values))

    def total(self, values: np.ndarray) -> np.ndarray:
        """Return, at each first sample, the sum over its conversation's samples.

        The result is integers[samples]; all other samples get 0.
        """
        if self.firsts is None or not len(values):
            return values
        return self._at_firsts(np.add.reduceat(values, self.firsts, dtype=np.int64), len(values))

    def of_each(self, values: np.ndarray) -> np.ndarray:
        """Return, for every sample, the value of its conversation's first sample."""
        if self.firsts is None:
            return values
        return np.repeat(values[self.firsts], np.diff(self.firsts, append=len(values)))

    def first_of(self, chosen: np.ndarray) -> np.ndarray:
        """Return the first sample of the conversation of each chosen sample."""
        if self.firsts is None:
            return chosen
        return self.firsts[np.searchsorted(self.firsts, chosen, side="right") - 1]

    def _at_firsts(self, values: np.ndarray, count: int) -> np.ndarray:
        found = np.zeros(count, values.dtype)
        found[self.firsts] = values
        return found


def samples_of(tokens: TokenColumns) -> Samples:
    """Read which samples of the token files belong to the same conversation."""
    count = tokens.edges[-1]
    tops = range(0, count, _CHUNK)
    if not any((tokens.column("turn", top, min(top + _CHUNK, count)) >= 0).any() for top in tops):
        return Samples()
    record = tokens.column("record")
    is_first = np.append(True, record[1:] != record[:-1])
    is_first[[edge for edge in tokens.edges if edge < count]] = True
    return Samples(as_int32(np.flatnonzero(is_first), "samples"))
