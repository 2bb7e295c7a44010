"""Report how much of a part was read while it is tokenized.

tokenize_part ─report─▶ Reading(share 0.37, 11.2 s, 10.9 s of CPU) ─▶ the engine ─▶ the display
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

EVERY = 0.25  # seconds between two reports of a part


class Reading(NamedTuple):
    """The share of a part that was read, and the seconds and CPU seconds it took."""

    share: float
    seconds: float
    cpu: float


_take: Callable[[Reading], None] | None = None


@contextmanager
def reported_to(take: Callable[[Reading], None]) -> Iterator[None]:
    """Pass the reports of this process to `take` while the block runs."""
    global _take
    before, _take = _take, take
    try:
        yield
    finally:
        _take = before


class Reporter:
    """Report the share of one part, at most every EVERY seconds."""

    def __init__(self) -> None:
        self._started, self._cpu = time.monotonic(), time.process_time()
        self._next = self._started + EVERY

    def report(self, share: Callable[[], float]) -> None:
        """Report the share that `share` returns, unless the last report was just now."""
        now = time.monotonic()
        if _take and now >= self._next:
            self._next = now + EVERY
            if (read := share()) > 0:
                _take(Reading(min(read, 1.0), now - self._started, time.process_time() - self._cpu))
