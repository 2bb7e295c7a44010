"""Decide whether a token could cross the start or the end of a trained turn.

A turn is encoded alone, as the model writes it. Later prompts are encoded as a whole. Both have the same tokens only if
no token crosses from the text before the turn into the turn, or from the turn into the text after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np

from tasks.encoders.encoder import Encoder

# Numbers of characters before and after a boundary that matter, if there is no control token among them.
_TAIL, _HEAD = 32, 32

# The maximum number of boundaries that are remembered.
_MOST_KNOWN = 1 << 14


class TokenBoundary:
    """Check for boundaries of an encoder's tokens between two texts."""

    def __init__(self, encoder: Encoder):
        self._encoder = encoder
        self._known: dict[tuple[str, str], bool] = {}

    def tail(self, before: str) -> str:
        """Return the last characters of a text after its last control token."""
        ends = self._encoder.control_pattern.finditer(before, max(0, len(before) - 64))
        return before[max((match.end() for match in ends), default=0) :][-_TAIL:]

    def splits(self, tail: str, after: str) -> bool:
        """Return whether no token crosses from `tail`, the end of a text, into `after`."""
        return self.splits_all([(tail, after)])

    def splits_all(self, pairs: Iterable[tuple[str, str]]) -> bool:
        """Return whether no token crosses from a tail into the text after it, in any pair."""
        keys = [key for tail, after in pairs for key in self._keys(tail, after)]
        if new := [key for key in dict.fromkeys(keys) if key not in self._known]:
            if len(self._known) + len(new) > _MOST_KNOWN:
                new = list(dict.fromkeys(keys))
                self._known = {}
            encoded = self._encoder.encode(
                [text for tail, head in new for text in (tail + head, tail, self._alone(tail, head))]
            )
            for number, key in enumerate(new):
                start, middle, _, end = encoded.offsets[3 * number : 3 * number + 4]
                self._known[key] = np.array_equal(encoded.ids[start:middle], encoded.ids[middle:end])
        return all(self._known[key] for key in keys)

    def _alone(self, tail: str, head: str) -> str:
        """Return the text after a tail as it is encoded alone."""
        return self._encoder.with_leading_space(head) if tail.endswith(self._encoder.space_follows) else head

    def _keys(self, tail: str, after: str) -> list[tuple[str, str]]:
        """Return the tail and the relevant start of the text after it.

        The list is empty if no token can cross the boundary. A short tail may be encoded with a leading space.
        """
        if not tail or not after:
            return []
        match = self._encoder.control_pattern.search(after, 0, 64)
        head = after[: match.start() if match else _HEAD]
        if not head:
            return []
        if tail.endswith("\n") and not head[0].isspace() and self._newlines_end_tokens:
            head = head[0]
        may_lead = self._encoder.leading_space != "none" and len(tail) < _TAIL
        return [(tail, head), (self._encoder.with_leading_space(tail), head)] if may_lead else [(tail, head)]

    def is_complete(self, after: str) -> bool:
        """Return whether further text after this text cannot change the result."""
        return len(after) >= 64 or self._encoder.control_pattern.search(after, 0, 64) is not None

    @cached_property
    def _newlines_end_tokens(self) -> bool:
        """Return whether only white space follows a line end within a token.

        In this case, no token crosses from a line end into the word after it. A content token that absorbs the white
        space before it does.
        """
        if not self._encoder.strips_left.isdisjoint(self._encoder.content_tokens):
            return False
        pieces = map(self._encoder.token_bytes, range(self._encoder.vocab_size))
        return not any(piece.rpartition(b"\n")[2].strip() for piece in pieces if b"\n" in piece)
