"""What several ranks must do as one: build something once, and fail together.

    rank 0 ─┐
    rank 1 ─┼─ together: each prepares ─ errors gathered ─▶ all go on, or all stop: the first that failed says why
    rank 2 ─┘

A rank that fails by itself leaves the others waiting for it, on a GPU for half a minute, and then with a traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from tasks.core.errors import PackError

Result = TypeVar("Result")


@contextmanager
def together() -> Iterator[None]:
    """Within it no rank may wait for another. Raises the PackError of this rank, or one without a message if another
    failed that speaks for all."""
    failed: PackError | None = None
    try:
        yield
    except PackError as error:
        failed = error
    if not torch.distributed.is_initialized():
        if failed:
            raise failed
        return
    found: list[int | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, failed and failed.exit_code)
    first = next((rank for rank, code in enumerate(found) if code is not None), None)
    if first is None:
        return
    if failed and first == torch.distributed.get_rank():
        raise failed
    silent = PackError("rank_failed", "")
    silent.exit_code = found[first] or silent.exit_code
    raise silent


def main_first(main: bool, work: Callable[[], Result]) -> Result:
    """`work` on the first rank, then on the others: what the first has made, fetched or removed, they find so."""
    for turn in (True, False):
        with together():
            if main == turn:
                found = work()
    return found


def leave(together: bool) -> None:
    """End the process group, `together` when all ranks are here: a rank that exits with it may be aborted."""
    if torch.distributed.is_initialized():
        if together:
            torch.distributed.barrier()
        torch.distributed.destroy_process_group()
