"""Coordinate several ranks: build something once, agree on it, and fail together.

    rank 0 ─┐
    rank 1 ─┼─ together: each prepares ─ errors gathered ─▶ all continue, or all stop: one rank of each machine reports
    rank 2 ─┘

If a rank fails alone, the others wait for it: on a GPU for half a minute, and then they end with a traceback.

While one rank prepares, the others may wait hours for a download. They wait on the CPU, in a separate group, because
NCCL aborts a process that waits longer than a step should take.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import PartialState

from tasks.core.errors import Interrupted, PackError
from tasks.core.messages import to_pack_error
from train.machine.signals import reports

Result = TypeVar("Result")

# How long a rank waits for the others: in a step, and while they prepare.
STEP, PREPARATION = timedelta(minutes=30), timedelta(days=7)

_preparing: Any = None  # the group of ranks that prepare; None if `start` was not called, or there is one rank
_agreed: list[Exception] = []  # the error that all ranks stop for

# Seconds that gloo's thread has to free its last operation. The thread needs the interpreter's lock for this, and the
# call that destroys the group holds this lock while it waits for the thread. On a loaded machine, one of 25 runs never
# ended (torch 2.13).
SETTLING = 0.5

# Errors that torch raises on the other ranks when one has ended.
_LOST = re.compile(r"gloo/|NCCL|Connection (closed|reset|refused)")


def start(cpu: bool) -> PartialState:
    """Connect to the other ranks, if there are any."""
    global _preparing
    state = PartialState(cpu=cpu, timeout=STEP)
    if torch.distributed.is_initialized():
        _preparing = torch.distributed.new_group(backend="gloo", timeout=PREPARATION)
    return state


@dataclass(frozen=True, slots=True)
class Failure:
    """Error of a rank, as the other ranks report it."""

    reason: str
    message: str
    exit_code: int
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Process and machine of a rank.

    `node` is the number that torchrun gives to a node. Several nodes may be on one machine.
    """

    rank: int
    local_rank: int
    node: str
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


def place() -> Place:
    """Return the place of this process, as set by torchrun or our launcher."""
    host = socket.gethostname()
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    return Place(rank, local_rank, os.environ.get("GROUP_RANK", host), host)


def failure_of(error: Exception) -> Failure:
    failed = to_pack_error(error)
    return Failure(failed.reason, str(failed), failed.exit_code, failed.facts)


def raise_first(places: Sequence[Place], failures: Sequence[Failure | None], own: Exception | None) -> None:
    """Raise the error of the first rank that failed, if any.

    The failed rank raises its own error. On each other machine, the first rank raises the same error. All other ranks
    raise an error without a message.
    """
    first = next((rank for rank, failure in enumerate(failures) if failure is not None), None)
    if first is None:
        return
    here, failure = place(), failures[first]
    assert failure is not None
    raise agreed(own if own is not None and first == here.rank else seen_from(here, places[first], failure))


def seen_from(here: Place, there: Place, failure: Failure) -> PackError:
    """Return the error of rank `there` as rank `here` raises it.

    It has a message only on the first rank of each other machine.
    """
    error = PackError("rank_failed", "")
    if here.local_rank == 0 and here.node != there.node and failure.message:
        message = failure.message if failure.facts.get("rank") else f"{failure.message} (on {there.host})"
        error = PackError(failure.reason, message, **{"rank": there.rank} | failure.facts)
    error.exit_code = failure.exit_code
    return error


def agreed(error: Exception) -> Exception:
    """Record an error that all ranks stop for, and return it."""
    _agreed[:] = [error]
    return error


def is_agreed(error: Exception) -> bool:
    return error in _agreed


def gather(value: Result) -> list[Result]:
    """Return the value of every rank."""
    if not torch.distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value, group=_preparing)
    return values


@contextmanager
def together(waiting: bool = False) -> Iterator[None]:
    """Stop all ranks if one fails in this block.

    Within the block, no rank may wait for another. Raises the error of the first rank that failed, as in `raise_first`.
    If ranks are `waiting` for each other, they cannot meet after an error, and train.machine.alarm ends them instead.
    """
    if waiting:
        yield
        return
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    if not torch.distributed.is_initialized():
        if failed:
            raise failed
        return
    outcomes = gather((place(), failure_of(failed) if failed else None))
    raise_first([where for where, _ in outcomes], [failure for _, failure in outcomes], failed)


def main_first(main: bool, work: Callable[[], Result]) -> Result:
    """Run `work` on the ranks that are `main`, then on the others.

    The other ranks find the results of the main ranks, for example a download.
    """
    for turn in (True, False):
        with together():
            if main == turn:
                result = work()
    return result


def largest(figures: list[float], device: torch.device) -> list[float]:
    """Return the maximum of each figure over all ranks, so that all decide alike."""
    if not torch.distributed.is_initialized():
        return figures
    found = torch.tensor(figures, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found.tolist()


def of_lost_rank(error: Exception) -> Exception:
    """Return a readable error if torch failed because another rank has ended.

    Any other error is returned unchanged.
    """
    if isinstance(error, PackError) or not torch.distributed.is_initialized():
        return error
    if not isinstance(error, torch.distributed.DistError | RuntimeError) or not _LOST.search(str(error)):
        return error
    message = "another rank ended, so this one stopped; run the same command to resume from the newest checkpoint"
    lost = PackError("rank_failed", message if reports() else "")
    lost.exit_code = Interrupted.exit_code
    return lost


def leave(together: bool) -> None:
    """Close the process group; `together` is whether all ranks do so.

    A rank that exits while the group is open may be aborted.
    """
    global _preparing
    if torch.distributed.is_initialized():
        if together:
            torch.distributed.barrier()
        time.sleep(SETTLING)
        torch.distributed.destroy_process_group()
    _preparing = None
