"""Run steps in worker processes that live until the last step.

    steps ─▶ a pipe to each worker, one step at a time ─▶ outcomes
                └ if a worker dies, a new worker retries its step

The encoder caches the words of the corpus. A lasting process fills this cache once; a fork for each step would fill it
again and again. Each worker has its own pipe, which shows the step of a lost worker.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, Self

from pipeline.engines.engine import ATTEMPTS, PATIENCE, lost
from tasks.core.errors import PackError
from tasks.core.process import of_memory
from tasks.steps import Outcome, Step, attempt
from tasks.stores.bucket import has_threads

# Seconds that an interrupted worker has to remove its partial files. The task that waits for it has more time in
# run_guard.
LEAVING = 3.0


def start_method() -> BaseContext:
    """Return how to start workers.

    On Linux, they are forked and share the open encoder. Elsewhere, a fork is not safe, and neither is it after this
    process has used a bucket, whose threads a fork does not have.
    """
    if has_threads():
        return multiprocessing.get_context("spawn")
    if sys.platform == "linux":
        return multiprocessing.get_context("fork")
    has_server = "forkserver" in multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("forkserver" if has_server else "spawn")


class Workers:
    """Engine with `count` worker processes.

    Leaving the block ends them. After an interrupt, it does not wait for their steps.
    """

    def __init__(self, count: int, context: BaseContext | None = None):
        self._count, self._context = count, context or start_method()
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        interrupted = kind is not None and not issubclass(kind, Exception)
        for worker in self._workers:
            with suppress(OSError):
                worker.process.terminate() if interrupted else worker.connection.send(None)
        deadline = time.monotonic() + LEAVING
        for worker in self._workers:
            worker.end(deadline)
        self._workers = []

    def map(self, steps: Sequence[Step]) -> Iterator[tuple[int, Outcome]]:
        waiting, attempts = deque(range(len(steps))), [0] * len(steps)
        while len(self._workers) < min(self._count, len(steps)):
            self._workers.append(_Worker(self._context))
        free, running = list(self._workers), dict[Any, tuple[_Worker, int]]()  # by connection
        try:
            while waiting or running:
                while waiting and free:
                    worker, index = free.pop(), waiting.popleft()
                    attempts[index] += 1
                    worker.send(steps[index])
                    running[worker.connection] = worker, index
                for connection in wait(list(running)):
                    worker, index = running.pop(connection)
                    outcome = worker.receive()
                    if outcome is None:
                        if attempts[index] == ATTEMPTS:
                            raise lost(steps[index], worker.describe_end())
                        waiting.appendleft(index)
                        free.append(self._replace(worker))
                        continue
                    free.append(worker)
                    if outcome.error:
                        raise outcome.error
                    yield index, outcome
        except PackError:
            # A later run does not repeat the steps that still end in time.
            deadline, left = time.monotonic() + PATIENCE, set(running)
            while left and (ready := wait(left, max(0.0, deadline - time.monotonic()))):
                left.difference_update(ready)
            raise

    def _replace(self, worker: _Worker) -> _Worker:
        worker.end(deadline=0)
        self._workers[self._workers.index(worker)] = new = _Worker(self._context)
        return new


class _Worker:
    """A process, and the pipe to it."""

    def __init__(self, context: BaseContext) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.connection), daemon=True)  # type: ignore[attr-defined]
        self.process.start()
        theirs.close()

    def send(self, step: Step) -> None:
        with suppress(OSError):  # the worker is gone, and `receive` will return None
            self.connection.send(step)

    def receive(self) -> Outcome | None:
        """Return the outcome of the step, or None if the worker is gone."""
        try:
            found: Outcome = self.connection.recv()
            return found
        except (EOFError, OSError):
            return None

    def describe_end(self) -> str:
        self.process.join(LEAVING)
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"it ended with exit code {code}"
        return f"it was killed by signal {-code}; if memory ran out{of_memory()}, run again with fewer workers"

    def end(self, deadline: float) -> None:
        """Wait for the process until the deadline, then kill it."""
        self.process.join(max(0.0, deadline - time.monotonic()))
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(connection: Connection, of_parent: Connection) -> None:
    """Run steps until there are no more, or until the parent is gone."""
    of_parent.close()  # if a fork kept the inherited end open, it would not notice that the parent is gone
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while (step := connection.recv()) is not None:
            connection.send(attempt(step))
