"""Find all places where one of many strings occurs in a text, in one pass.

    Needles([b"<s>", b"</s>", b"[INST]", …]).places(b"so <s>")  →  3

A tokenizer has hundreds of control strings. A regular expression for them searches 5 to 60 MB/s; this module searches
800 MB/s of chats. Positions are filtered by their first byte, and then by their first two bytes. Only the few remaining
positions are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

# Bytes searched at a time: small enough that temporary arrays stay in the cache.
_WINDOW = 1 << 17


class Needles:
    """Strings to search for; empty strings are ignored."""

    def __init__(self, needles: Iterable[bytes]):
        self._needles = tuple(filter(None, needles))
        self._first = sorted({needle[0] for needle in self._needles})
        # By the first byte and 256 times the second.
        self._starting: dict[int, tuple[bytes, ...]] = {}
        for needle in self._needles:
            for second in range(256) if len(needle) == 1 else needle[1:2]:
                pair = needle[0] | second << 8
                self._starting[pair] = (*self._starting.get(pair, ()), needle)
        self._pairs = np.zeros(1 << 16, bool)
        self._pairs[[*self._starting]] = True

    def occur(self, text: bytes) -> bool:
        """Return whether `text` contains any of the strings."""
        return next(self.places(text), None) is not None

    def places(self, text: bytes) -> Iterator[int]:
        """Iterate over the offsets at which one of the strings starts, in order."""
        # An additional byte at the end, so that every byte has a successor.
        whole = np.frombuffer(text + b"\0", np.uint8)
        for start in range(0, len(text) if self._needles else 0, _WINDOW):
            window = whole[start : min(start + _WINDOW, len(text))]
            is_first = window == self._first[0]
            for first in self._first[1:]:
                is_first |= window == first
            places = np.flatnonzero(is_first) + start
            pairs = whole[places].astype(np.uint16) | whole[places + 1].astype(np.uint16) << np.uint16(8)
            is_likely = self._pairs[pairs]
            for place, pair in zip(places[is_likely].tolist(), pairs[is_likely].tolist(), strict=True):
                if text.startswith(self._starting[pair], place):
                    yield place
