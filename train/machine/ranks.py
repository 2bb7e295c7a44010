"""Coordinate several ranks: build something once, and fail together.

    rank 0 ─┐
    rank 1 ─┼─ together: each prepares ─ errors gathered ─▶ all continue, or all stop: the first that failed reports
    rank 2 ─┘

A rank that fails alone leaves the others waiting for it: on a GPU for half a minute, and then with a traceback.

While one rank prepares, the others may wait for a download of hours. They wait on the CPU, in a group of its own: NCCL
aborts a process that waits longer than a step should take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import PartialState

from tasks.core.errors import PackError

Result = TypeVar("Result")

# How long a rank waits for the others: in a step, and while they prepare.
STEP, PREPARATION = timedelta(minutes=30), timedelta(days=7)

_preparing: Any = None  # the group of ranks that prepare; None if `start` was not called, or there is one rank


def start(cpu: bool) -> PartialState:
    """Connect to the other ranks, if there are any."""
    global _preparing
    state = PartialState(cpu=cpu, timeout=STEP)
    if torch.distributed.is_initialized():
        _preparing = torch.distributed.new_group(backend="gloo", timeout=PREPARATION)
    return state


@contextmanager
def together() -> Iterator[None]:
    """Stop all ranks if one fails in this block.

    Within the block, no rank may wait for another. Raises the PackError of this rank, or one without a message if
    another rank failed first and reports for all.
    """
    failed: PackError | None = None
    try:
        yield
    except PackError as error:
        failed = error
    if not torch.distributed.is_initialized():
        if failed:
            raise failed
        return
    exit_codes: list[int | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(exit_codes, failed and failed.exit_code, group=_preparing)
    first = next((rank for rank, code in enumerate(exit_codes) if code is not None), None)
    if first is None:
        return
    if failed and first == torch.distributed.get_rank():
        raise failed
    silent = PackError("rank_failed", "")
    silent.exit_code = exit_codes[first] or silent.exit_code
    raise silent


def main_first(main: bool, work: Callable[[], Result]) -> Result:
    """Run `work` on the first rank, then on the others, which find what it made."""
    for turn in (True, False):
        with together():
            if main == turn:
                result = work()
    return result


def largest(figures: list[float], device: torch.device) -> list[float]:
    """Return the largest of each figure over all ranks, so that all decide by the same."""
    if not torch.distributed.is_initialized():
        return figures
    found = torch.tensor(figures, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found.tolist()


def leave(together: bool) -> None:
    """End the process group; `together` if all ranks get here.

    A rank that exits while it is open may be aborted.
    """
    global _preparing
    if torch.distributed.is_initialized():
        if together:
            torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    _preparing = None
