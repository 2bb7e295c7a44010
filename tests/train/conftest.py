"""One thread per process, and the signal handlers from before a run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _one_process_of_several() -> Iterator[None]:
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
