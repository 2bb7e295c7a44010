"""Run steps on a Ray cluster whose nodes see the same files under the same paths.

The stages of a run share one connection (see `RunGuard.keep_tasks_here`), because Ray's workers take seconds to start
and end when the process disconnects.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import TracebackType
from typing import Any, Self

from pipeline.engines.engine import ATTEMPTS, PATIENCE, lost
from tasks.core.errors import InputMissing, PackError, PartMissing
from tasks.steps import Outcome, Step, attempt, load_modules
from tasks.storage.files import remove_abandoned

# Steps to submit per CPU, so that the next step starts without waiting for the driver.
IN_FLIGHT = 4
# Seconds between two queries for the number of CPUs, because nodes come and go.
REFRESH = 2.0
# Seconds for short steps to end by themselves. If a task completes in the moment in which it is canceled, Ray ends this
# process with a native stack trace (the race of ray-project/ray#54798).
FINISHING = 0.5
# Seconds for canceled steps to end, and then for Ray to kill the steps of a disconnected driver, unless the nodes are
# busy.
LEAVING = 2.0


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
            unfinished = _unfinished(ray, unfinished, LEAVING)
    finally:
        ray.shutdown()
    return unfinished


def _unfinished(ray: Any, references: list[Any], seconds: float) -> list[Any]:
    return list(ray.wait(references, num_returns=len(references), timeout=seconds)[1]) if references else []


class OnRay:
    """Engine that runs steps on a Ray cluster.

    An error within the block cancels all steps that the run has started on the cluster, and closes the connection.
    """

    def __init__(self, on: str):
        self._on = on
        self._cpus, self._asked = 1, -REFRESH
        self._running: dict[Any, int] = {}  # numbers in `_steps`
        self._steps: Sequence[Step] = ()

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
            limit = PATIENCE if any(are_written) else LEAVING if outputs else 0.0
            if time.monotonic() - start >= limit:
                return
            time.sleep(0.1)

    def map(self, steps: Sequence[Step]) -> Iterator[tuple[int, Outcome]]:
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
    """Return the number of CPUs of the cluster, at least one."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


@contextmanager
def _our_signals() -> Iterator[None]:
    """Keep our handler of SIGTERM.

    Ray's handler would end the process with 15 and without a message.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _first_line(error: Exception) -> str:
    """Return the first line of Ray's message; stack traces follow it."""
    return str(error).partition("\n")[0]
