"""Decide whether a token could reach over the place where a trained turn begins.

A turn is encoded from its own start, as the model writes it; later prompts are encoded as a whole. Both are the same
only if no token reaches from the text before the turn into the turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np

from tasks.encoders.encoder import Encoder

# Characters that are looked at after a boundary, if no control token comes before.
_HEAD = 32

# The maximum number of boundaries that are remembered.
_MOST_KNOWN = 1 << 14


class TokenBoundary:
    """The boundaries of an encoder's tokens between two texts."""

    def __init__(self, encoder: Encoder):
        self._encoder = encoder
        self._known: dict[tuple[str, str], bool] = {}

    def tail(self, before: str) -> str:
        """Return the end of a text, from its last control token on."""
        ends = self._encoder.control_pattern.finditer(before, max(0, len(before) - 64))
        return before[max((match.end() for match in ends), default=0) :][-32:]

    def splits(self, tail: str, after: str) -> bool:
        """Return whether no token would reach from the end of one text, its `tail`, into the text after it."""
        return self.splits_all([(tail, after)])

    def splits_all(self, pairs: Iterable[tuple[str, str]]) -> bool:
        """Return what `splits` returns for all pairs of a tail and the text after it."""
        keys = [key for tail, after in pairs if (key := self._key(tail, after))]
        if new := [key for key in dict.fromkeys(keys) if key not in self._known]:
            if len(self._known) + len(new) > _MOST_KNOWN:
                new = list(dict.fromkeys(keys))
                self._known = {}
            encoded = self._encoder.encode([text for tail, head in new for text in (tail + head, tail, head)])
            for number, key in enumerate(new):
                start, middle, _, end = encoded.offsets[3 * number : 3 * number + 4]
                self._known[key] = np.array_equal(encoded.ids[start:middle], encoded.ids[middle:end])
        return all(self._known[key] for key in keys)

    def _key(self, tail: str, after: str) -> tuple[str, str] | None:
        """Return the tail and what matters of the text after it; None if no token can reach into it."""
        if not tail or not after or self._encoder.leading_space != "none":
            return None
        match = self._encoder.control_pattern.search(after, 0, 64)
        head = after[: match.start() if match else _HEAD]
        if not head:
            return None
        if tail.endswith("\n") and not head[0].isspace() and self._newlines_end_tokens:
            head = head[0]
        return tail, head

    def is_complete(self, after: str) -> bool:
        """Return whether more text after this one changes nothing."""
        return len(after) >= 64 or self._encoder.control_pattern.search(after, 0, 64) is not None

    @cached_property
    def _newlines_end_tokens(self) -> bool:
        """Return whether only white space follows a line end within a token: then none reaches into a word after it."""
        pieces = map(self._encoder.token_bytes, range(self._encoder.vocab_size))
        return not any(piece.rpartition(b"\n")[2].strip() for piece in pieces if b"\n" in piece)
