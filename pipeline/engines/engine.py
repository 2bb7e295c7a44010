"""Engines by name, and the interface that all engines implement.

--on luigi                a Luigi task for each step, in a separate process; not an engine of this folder
--on here                 one step after another, in this process
--on workers:N            N processes that stay for all steps
--on ray://auto           the Ray cluster of this machine
--on ray://HOST:PORT      a Ray cluster elsewhere
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from tasks.core.errors import Busy, UsageError
from tasks.core.printable import suggest
from tasks.steps import Outcome, Step

# Attempts at a step whose worker is lost, before the run gives up.
ATTEMPTS = 4
# Seconds that running steps may still take after a step has failed.
PATIENCE = 30.0

FORMS = ("luigi", "here", "workers", "workers:N", "ray://auto", "ray://HOST:PORT")


class Engine(AbstractContextManager["Engine"], Protocol):
    """Run steps in a `with` block.

    Leaving the block ends running steps and releases the workers.
    """

    def map(self, steps: Sequence[Step]) -> Iterator[tuple[int, Outcome]]:
        """Run steps in their order, and yield (index, outcome) of each step as it ends.

        Raises the PackError of the first step that fails, or `Busy` if a step's worker was lost ATTEMPTS times. No
        further step is started then.
        """
        ...


def workers_of(on: str, workers: int) -> int:
    """Return how many steps an engine runs at once.

    `workers` is the number on the command line. Raises UsageError if no engine has this name.
    """
    found = re.fullmatch(r"(here)|(luigi|workers)|workers:([1-9]\d{0,3})|ray://(auto|[^/:\s]+:\d+)", on)
    if not found:
        hint = suggest(on, ("here", "workers", "luigi"))
        raise UsageError("bad_command_line", f"--on {on}: expected one of {', '.join(FORMS)}{hint}")
    return 1 if found[1] else int(found[3] or workers)


def open_engine(on: str, workers: int) -> Engine:
    """Open the engine that `on` names.

    "workers" means `workers` processes; if that is 1, steps run in this process. Raises UsageError if no engine has
    this name.
    """
    count = workers_of(on, workers)
    if on == "here" or (on == "workers" and count == 1):
        from pipeline.engines.here import Here

        return Here()
    if is_remote(on):
        from pipeline.engines.on_ray import OnRay

        return OnRay(on)
    from pipeline.engines.workers import Workers

    return Workers(count)


def is_remote(on: str) -> bool:
    """Return whether an engine runs steps elsewhere, over a connection of the run."""
    return on.startswith("ray://")


def lost(step: Step, why: str) -> Busy:
    """Return the error for a step whose worker was lost in every attempt."""
    return Busy("worker_lost", f"{step.place}: lost its worker {ATTEMPTS} times: {why}")
