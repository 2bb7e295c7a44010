"""End all ranks within seconds if one fails while the others wait for it.

    rank 1 fails ─ring─▶ its error, in torch's store ◀─twice a second─ rank 0, rank 2: end with its exit code

`ranks.together` stops ranks in an orderly way while each works alone. But a rank may fail in a step, or in a pass of a
model whose weights are divided among the ranks. The other ranks are then in a collective operation that returns only
after half an hour, and the exit of the failed rank may wait for operations that it has queued. A thread of each rank
therefore checks for an error and ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from torch.distributed import DistError

from tasks.core.messages import format_error
from train.machine import meeting
from train.machine.ranks import Failure, Place, failure_of, is_agreed, of_lost_rank, place, seen_from

LOOK_EVERY = 0.5  # seconds
# Seconds that the main thread of a rank with the same error has to end the process itself.
GRACE = 1.0
# Seconds that the first failed rank waits for the others to end. If it ended first, the launcher would signal them.
FAREWELL = 5.0
# Seconds within which all ranks fail if they fail for the same reason.
ALIKE = 20.0

_FAILED = "failed"

_done = threading.Event()
_alike = 0  # number of errors that this rank had in passes of a sharded model
_is_ending = False  # the main thread is reporting an error and then ends this process


def watch() -> None:
    """Start a thread that checks for errors of the other ranks, if any."""
    if meeting.is_one_of_several() and meeting.store() is not None:
        _done.clear()
        threading.Thread(target=_look, daemon=True).start()


def stop() -> None:
    """Stop the check, because all ranks have finished."""
    _done.set()


def ring(error: Exception) -> Exception:
    """End all other ranks because of an error, and return the error to report here.

    The result is the same error if this rank failed first or if all ranks have agreed on the error.
    """
    global _is_ending
    store = meeting.store()
    if store is None or is_agreed(error):
        return error
    _is_ending = True
    lost, found = of_lost_rank(error), None
    with suppress(DistError):
        if lost is error:
            mine = json.dumps({"place": asdict(place()), "failure": asdict(failure_of(error))}, default=str)
            store.compare_set(_FAILED, "", mine)
        found = _read(store)
    if found is None or found[0].rank == place().rank:
        return lost
    return seen_from(place(), *found)


def fail_alike(model: Any, error: Exception) -> None:
    """Raise the error of a pass unless all ranks have an error in the same pass.

    If all ranks fail, all of them can continue without the feature that failed. A rank with whole weights can continue
    alone, so nothing is raised. If weights are divided among the ranks, the others would wait in the pass.
    """
    global _alike
    store = meeting.store()
    if store is None or not getattr(model, "shards_frozen_weights", False):
        return
    _alike += 1
    name, end = f"alike/{_alike}", time.monotonic() + ALIKE
    store.add(name, 1)
    while store.add(name, 0) < int(os.environ["WORLD_SIZE"]):
        if time.monotonic() > end:
            raise error
        time.sleep(0.05)


def end_if_rung(exit_code: int) -> None:
    """End this process at once if `ring` was called.

    Other ranks may wait for this process, and an orderly exit would wait for them.
    """
    store = meeting.store()
    if store is None or not _is_ending:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(DistError):
        found, end = _read(store), time.monotonic() + FAREWELL
        others = [f"ended/{rank}" for rank in range(int(os.environ["WORLD_SIZE"])) if rank != place().rank]
        if found and found[0].rank == place().rank:
            while not store.check(others) and time.monotonic() < end:
                time.sleep(0.05)
        else:
            store.set(f"ended/{place().rank}", "")
    os._exit(exit_code)


def _look() -> None:
    """Wait until another rank has failed, then end this process."""
    store, found = meeting.store(), None
    while found is None:
        if _done.wait(LOOK_EVERY):
            return
        try:
            found = _read(store)
        except DistError:
            return  # the rank that holds the store has ended; the process group reports that to the others
    if found[0].rank == place().rank:
        return
    time.sleep(GRACE)
    if not _is_ending:
        error = seen_from(place(), *found)
        if str(error):
            print(format_error(error), file=sys.stderr, flush=True)
    with suppress(DistError):
        store.set(f"ended/{place().rank}", "")
    os._exit(found[1].exit_code)


def _read(store: Any) -> tuple[Place, Failure] | None:
    """Return the first rank that failed and its error; None if no rank failed."""
    if not store.check([_FAILED]):
        return None
    found = json.loads(store.get(_FAILED))
    return Place(**found["place"]), Failure(**found["failure"])
