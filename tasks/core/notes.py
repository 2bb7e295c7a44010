"""Show notes about a long operation while it runs.

with noted(lambda: f"{count} files found so far"): …   a note after 3 seconds, and every 10 seconds from then on
show_note("waiting for another machine")               a note at once
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from tasks.core.printable import printable

FIRST_AFTER, EVERY = 3.0, 10.0  # seconds


def _print(note: str) -> None:
    print(printable(note), file=sys.stderr, flush=True)


_show: Callable[[str], None] = _print


def show_notes_with(show: Callable[[str], None]) -> None:
    """Pass the notes of this process to `show` instead of printing them to stderr."""
    global _show
    _show = show


def show_note(text: str) -> None:
    """Show a note at once, like a note about a long operation."""
    _show(f"note: {text}")


@contextmanager
def noted(describe: Callable[[], str]) -> Iterator[None]:
    """Show `describe()` from time to time while the block runs."""
    done = Event()

    def run() -> None:
        pause = FIRST_AFTER
        while not done.wait(pause):
            show_note(describe())
            pause = EVERY

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
