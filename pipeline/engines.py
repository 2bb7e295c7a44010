"""Engines: run work in this process, in worker processes, or on a Ray cluster.

    --on here                 one after another, in this process
    --on workers:N            N processes that stay for all work
    --on ray://auto           the Ray cluster of this machine
    --on ray://HOST:PORT      a Ray cluster elsewhere

    work ─▶ a pipe to each worker, one at a time ─▶ outcomes
               └ if a worker dies, a new worker retries its work

The encoder caches the words of the corpus. A lasting process fills this cache once; a fork for each part would fill it
again and again. Each worker has its own pipe, which shows what a lost worker was doing.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, Protocol, Self

from packcorpus.pipeline.signals import signals
from packcorpus.tasks.core.errors import Busy, InputMissing, PackError, PartMissing, UsageError
from packcorpus.tasks.core.printable import suggest
from packcorpus.tasks.core.process import of_memory
from packcorpus.tasks.core.reading import Reading, reported_to
from packcorpus.tasks.storage.files import remove_abandoned
from packcorpus.tasks.stores.bucket import has_threads
from packcorpus.tasks.work import Outcome, Work, attempt, load_modules

# Attempts at work whose worker is lost, before the run gives up.
ATTEMPTS = 4
# Seconds that running work may still take after other work has failed.
PATIENCE = 30.0
# Seconds that an interrupted worker has to remove its partial files.
LEAVING = 3.0

# Steps to submit per CPU, so that the next step starts without waiting for the driver.
IN_FLIGHT = 4
# Seconds between two queries for the number of CPUs, because nodes come and go.
REFRESH = 2.0
# Seconds for short steps to end by themselves. If a task completes in the moment in which it is canceled, Ray ends this
# process with a native stack trace (the race of ray-project/ray#54798).
FINISHING = 0.5
# Seconds for canceled steps to end, and then for Ray to kill the steps of a disconnected driver, unless the nodes are
# busy.
CANCELING = 2.0

FORMS = ("here", "workers", "workers:N", "ray://auto", "ray://HOST:PORT")


Take = Callable[[int, Reading], None]
"""Takes the index of work, and how much of its part was read."""


def ignore(index: int, reading: Reading) -> None:
    """Do nothing."""


class Engine(AbstractContextManager["Engine"], Protocol):
    """Run work in a `with` block; leaving the block releases the workers."""

    def map(self, steps: Sequence[Work], take: Take = ignore) -> Iterator[tuple[int, Outcome]]:
        """Run work in this order, and yield (index, outcome) of each as it ends.

        Meanwhile, call `take` with the index and the Reading of a part that is being read; not on Ray.
        Raises the PackError of the first that fails, or Busy if the worker of one was lost ATTEMPTS times. Nothing
        further is started then.
        """
        ...


def workers_of(on: str, workers: int) -> int:
    """Return how much work an engine runs at once.

    `workers` is the number on the command line. Raises UsageError if no engine has this name.
    """
    form = re.fullmatch(r"(here)|workers(?::([1-9]\d{0,3}))?|ray://(?:auto|[^/:\s]+:\d+)", on)
    if not form:
        hint = suggest(on, ("here", "workers"))
        raise UsageError("bad_command_line", f"--on {on}: expected one of {', '.join(FORMS)}{hint}")
    return 1 if form[1] else int(form[2] or workers)


def open_engine(on: str, workers: int) -> Engine:
    """Open the engine that `on` names.

    "workers" means `workers` processes; if that is 1, work runs in this process. Raises UsageError if no engine has
    this name.
    """
    count = workers_of(on, workers)
    if on == "here" or (on == "workers" and count == 1):
        return Here()
    if is_remote(on):
        return OnRay(on)
    return Workers(count)


def is_remote(on: str) -> bool:
    """Return whether an engine runs work elsewhere, over a connection of the run."""
    return on.startswith("ray://")


def lost(work: Work, why: str) -> Busy:
    """Return the error for work whose worker was lost in every attempt."""
    return Busy("worker_lost", f"{work.place}: lost its worker {ATTEMPTS} times: {why}")


class Here:
    """Engine without workers: takes the least memory and CPU time."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: nothing is running."""

    def map(self, steps: Sequence[Work], take: Take = ignore) -> Iterator[tuple[int, Outcome]]:
        for index, step in enumerate(steps):
            with reported_to(partial(take, index)):
                outcome = attempt(step)
            if outcome.error:
                raise outcome.error
            yield index, outcome


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
    """Engine with `count` worker processes."""

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

    def map(self, steps: Sequence[Work], take: Take = ignore) -> Iterator[tuple[int, Outcome]]:
        load_modules()  # once, before the workers are forked
        waiting, attempts = deque(range(len(steps))), [0] * len(steps)
        while len(self._workers) < min(self._count, len(steps)):
            self._workers.append(_Worker(self._context))
        free, running = list(self._workers), dict[Any, tuple[_Worker, int]]()  # by connection
        try:
            while waiting or running:
                while waiting and free:
                    worker, index = free.pop(), waiting.popleft()
                    attempts[index] += 1
                    with suppress(OSError):  # the worker is gone, and `receive` will return None
                        worker.connection.send(steps[index])
                    running[worker.connection] = worker, index
                for connection in wait(list(running)):
                    worker, index = running[connection]
                    outcome = worker.receive()
                    if isinstance(outcome, Reading):
                        take(index, outcome)
                        continue
                    del running[connection]
                    if outcome is None:
                        if attempts[index] == ATTEMPTS:
                            raise lost(steps[index], worker.describe_end())
                        waiting.appendleft(index)
                        worker.end(deadline=0)
                        self._workers[self._workers.index(worker)] = worker = _Worker(self._context)
                        free.append(worker)
                        continue
                    free.append(worker)
                    if outcome.error:
                        raise outcome.error
                    yield index, outcome
        except PackError:
            # A later run does not repeat the work that still ends in time.
            deadline, left = time.monotonic() + PATIENCE, dict(running)
            while left and (ready := wait(list(left), max(0.0, deadline - time.monotonic()))):
                for connection in ready:
                    if not isinstance(left[connection][0].receive(), Reading):
                        del left[connection]
            raise


class _Worker:
    """A process, and the pipe to it."""

    def __init__(self, context: BaseContext) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.connection), daemon=True)  # type: ignore[attr-defined]
        with signals.held():
            self.process.start()
        theirs.close()

    def receive(self) -> Outcome | Reading | None:
        """Return the outcome of the work, or its progress, or None if the worker is gone."""
        try:
            outcome: Outcome | Reading = self.connection.recv()
            return outcome
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
    signals.begin(is_worker=True)
    of_parent.close()  # if a fork kept the inherited end open, it would not notice that the parent is gone

    def report(reading: Reading) -> None:
        with suppress(OSError):  # the parent is gone
            connection.send(reading)

    with suppress(EOFError, OSError), reported_to(report):
        while (work := connection.recv()) is not None:
            connection.send(attempt(work))


# -- Ray: a cluster whose nodes see the same files under the same paths -----------------------------------------------

# The cluster that this process has joined.
_joined = ""
# References to the tasks that load our modules there.
_loading: list[Any] = []


def join(on: str) -> Any:
    """Join a cluster, unless this process has joined it, and return the ray library.

    The cluster gets a task for each CPU that loads our modules, so workers start while this process continues. That
    takes seconds. Raises PartMissing if Ray is not installed, and InputMissing if no cluster answers.
    """
    global _joined
    # Otherwise, Ray would print a native stack trace at every SIGTERM, before our message.
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise PartMissing(
            "library_missing", f"--on {on}: Ray is not installed; run: pip install 'packcorpus[ray]'"
        ) from None
    if _joined == on:
        return ray
    leave()
    try:
        with _our_signals():
            address = "auto" if on == "ray://auto" else on
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except (ConnectionError, TimeoutError, OSError, ValueError, RuntimeError) as error:
        raise InputMissing("no_cluster", f"--on {on}: no Ray cluster answers: {_first_line(error)}") from None
    _joined = on
    load = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(load_modules)
    _loading[:] = [load.remote() for _ in range(_cpus_of(ray))]
    return ray


def leave(running: Sequence[Any] = ()) -> list[Any]:
    """Leave the cluster that this process has joined, if any.

    Tasks that do not end soon are canceled first: the references in `running`, and those that load our modules.
    Canceled steps remove their partial files. If Ray killed the tasks, it would also print a line for each on stderr,
    from its native code. Returns the tasks that did not end in time. Ray kills these, and stops its workers of this
    run, and no others.
    """
    global _joined
    if not _joined:
        return []
    import ray

    _joined = ""
    unfinished = [*_loading, *running]
    _loading.clear()
    try:
        with suppress(Exception):  # the cluster may be gone
            unfinished = _unfinished(ray, unfinished, FINISHING)
            for reference in unfinished:
                ray.cancel(reference)
            unfinished = _unfinished(ray, unfinished, CANCELING)
    finally:
        ray.shutdown()
    return unfinished


def _unfinished(ray: Any, references: list[Any], seconds: float) -> list[Any]:
    return list(ray.wait(references, num_returns=len(references), timeout=seconds)[1]) if references else []


class OnRay:
    """Engine that runs steps on a Ray cluster."""

    def __init__(self, on: str):
        self._on = on
        self._cpus, self._asked = 1, -REFRESH
        self._running: dict[Any, int] = {}  # numbers in `_steps`
        self._steps: Sequence[Work] = ()

    def __enter__(self) -> Self:
        self._ray = join(self._on)
        self._attempt = self._ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1, scheduling_strategy="SPREAD")(attempt)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            return
        killed = set(leave(list(self._running)))
        # Steps that Ray kills cannot remove their partial files.
        start = time.monotonic()
        steps = [self._steps[index] for reference, index in self._running.items() if reference in killed]
        outputs = [path for step in steps for path in step.outputs()]
        while True:
            are_written = [remove_abandoned(path) for path in outputs]
            limit = PATIENCE if any(are_written) else CANCELING if outputs else 0.0
            if time.monotonic() - start >= limit:
                return
            time.sleep(0.1)

    def map(self, steps: Sequence[Work], take: Take = ignore) -> Iterator[tuple[int, Outcome]]:
        ray, waiting = self._ray, deque(range(len(steps)))
        self._steps, self._running = steps, {}
        running = self._running
        try:
            while waiting or running:
                while waiting and len(running) < IN_FLIGHT * self._cpus_now():
                    index = waiting.popleft()
                    running[self._attempt.remote(steps[index])] = index
                for reference in ray.wait(list(running), num_returns=1)[0]:
                    index = running.pop(reference)
                    try:
                        outcome: Outcome = ray.get(reference)
                    except ray.exceptions.RayError as error:
                        raise lost(steps[index], _first_line(error)) from None
                    if outcome.error:
                        raise outcome.error
                    yield index, outcome
        except PackError:
            with suppress(Exception):
                _unfinished(ray, list(running), PATIENCE)
            raise

    def _cpus_now(self) -> int:
        if time.monotonic() - self._asked >= REFRESH:
            self._cpus = _cpus_of(self._ray)
            self._asked = time.monotonic()
        return self._cpus


def _cpus_of(ray: Any) -> int:
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


@contextmanager
def _our_signals() -> Iterator[None]:
    """Keep our handler of SIGTERM: Ray's ends the process without a message."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
