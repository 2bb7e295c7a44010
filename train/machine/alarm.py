"""End all ranks within seconds if one fails while the others wait for it.

    rank 1 fails ─ring─▶ its error, in torch's store ◀─twice a second─ rank 0, rank 2: end with its exit code

`ranks.together` lets ranks stop in an orderly way where each works on its own. But a rank that fails in a step, or in a
pass of a model whose weights are divided among the ranks, leaves the others in a collective operation that returns only
after half an hour, and its own exit may wait for what it has queued there. So a thread of each rank looks for an error,
and ends the process.
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

from tasks.core.error_messages import format_error
from train.machine import meeting
from train.machine.ranks import Failure, Place, failure_of, is_agreed, of_lost_rank, place, seen_from

LOOK_EVERY = 0.5  # seconds
# Seconds in which the main thread of a rank that has the same error may end by itself.
GRACE = 1.0
# Seconds that the first rank that failed waits until the others have ended: the launcher would stop them with a signal.
FAREWELL = 5.0
# Seconds in which ranks that fail alike have all failed.
ALIKE = 20.0

_FAILED = "failed"

_done = threading.Event()
_alike = 0  # errors that this rank had in passes of a sharded model
_is_ending = False  # the main thread reports an error, and ends this process


def watch() -> None:
    """Start to look for errors of other ranks, if there are any."""
    if meeting.is_one_of_several() and meeting.store() is not None:
        _done.clear()
        threading.Thread(target=_look, daemon=True).start()


def stop() -> None:
    """Stop to look: all ranks have finished."""
    _done.set()


def ring(error: Exception) -> Exception:
    """Make all other ranks end because of an error of this one. Returns the error to report here.

    It is the same if this rank is the first that failed, or if all ranks have agreed on the error.
    """
    global _is_ending
    store = meeting.store()
    if store is None or is_agreed(error):
        return error
    _is_ending = True
    lost, found = of_lost_rank(error), None
    with suppress(_lost_store()):
        if lost is error:
            mine = json.dumps({"place": asdict(place()), "failure": asdict(failure_of(error))}, default=str)
            store.compare_set(_FAILED, "", mine)
        found = _read(store)
    if found is None or found[0].rank == place().rank:
        return lost
    return seen_from(place(), *found)


def fail_alike(model: Any, error: Exception) -> None:
    """Raise the error of a pass unless all ranks have one, so that they can go on without what failed.

    With whole weights a rank can go on alone. If they are divided among the ranks, the others wait in the same pass.
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
    """End this process at once if other ranks may wait for it; an orderly exit would wait for them."""
    store = meeting.store()
    if store is None or not _is_ending:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(_lost_store()):
        found, end = _read(store), time.monotonic() + FAREWELL
        others = [f"ended/{rank}" for rank in range(int(os.environ["WORLD_SIZE"])) if rank != place().rank]
        if found and found[0].rank == place().rank:
            while not store.check(others) and time.monotonic() < end:
                time.sleep(0.05)
        else:
            store.set(f"ended/{place().rank}", "")
    os._exit(exit_code)


def _look() -> None:
    """End this process if another rank has failed."""
    store, found = meeting.store(), None
    while found is None:
        if _done.wait(LOOK_EVERY):
            return
        try:
            found = _read(store)
        except _lost_store():
            return  # the rank that has it has ended, which the others learn from the process group
    if found[0].rank == place().rank:
        return
    time.sleep(GRACE)
    if not _is_ending:
        error = seen_from(place(), *found)
        if str(error):
            print(format_error(error), file=sys.stderr, flush=True)
    with suppress(_lost_store()):
        store.set(f"ended/{place().rank}", "")
    os._exit(found[1].exit_code)


def _read(store: Any) -> tuple[Place, Failure] | None:
    """Return the first rank that failed, and its error; None if there is none."""
    if not store.check([_FAILED]):
        return None
    found = json.loads(store.get(_FAILED))
    return Place(**found["place"]), Failure(**found["failure"])


def _lost_store() -> type[Exception]:
    """Return what torch raises if the process with the store has ended."""
    from torch.distributed import DistError

    return DistError
