"""Run blocking calls in threads, so that Ctrl-C ends a wait for a server at once.

obstore waits without handling signals, and Python joins the threads of a pool before it exits. The threads of this
module are daemons.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

Item = TypeVar("Item")

GRACE = 5.0  # seconds that the other threads have to end after an error or an interrupt


class Stop(threading.Event):
    """A request to all threads of some work to end it."""

    def check(self) -> None:
        """Raise CancelledError if the request was made."""
        if self.is_set():
            raise CancelledError


def interruptible(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the result of a call. In the main thread, signals interrupt the wait."""
    if threading.current_thread() is not threading.main_thread():
        return call(*arguments, **options)
    found: list[Any] = []
    run_all(lambda _: found.append(call(*arguments, **options)), [None], 1, lambda: None, grace=0)
    return found[0]


def run_all(
    work: Callable[[Item], None], items: Sequence[Item], count: int, stop: Callable[[], None], grace: float = GRACE
) -> None:
    """Do the work for every item in up to `count` threads.

    Work is started in the order of the items. Raises the first error. Before that, or if this thread is interrupted,
    calls `stop`, which should end the other threads.
    """
    waiting, done = SimpleQueue[Item](), SimpleQueue[BaseException | None]()
    for item in items:
        waiting.put(item)

    def run() -> None:
        while True:
            try:
                item = waiting.get_nowait()
            except Empty:
                return
            try:
                work(item)
                done.put(None)
            except BaseException as error:
                done.put(error)
                return

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(count, len(items)))]
    for thread in threads:
        thread.start()
    try:
        for _ in items:
            if error := done.get():
                raise error
    except BaseException:
        stop()
        end = time.monotonic() + grace
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        raise
    for thread in threads:
        thread.join()
