"""Coordinate several ranks: start together, prepare in turn, and fail together.

    before the process group    each rank's facts or error, in torch's store ─meet──────▶ all start, or none
    while each prepares         each rank's error, gathered ────────────────────together─▶ all continue, or none
    while others wait for it    one rank's error, in the store ─────────────────ring─────▶ all end within seconds

A rank without a GPU or without the corpus could not join the process group, and the others would wait for it, so the
ranks meet before. While one rank prepares, the others may wait hours for a download. They wait on the CPU, in a
separate group, because NCCL aborts a process that waits longer than a step should take.

If a rank fails in a step, or in a pass of a model whose weights are divided among the ranks, the others are in a
collective operation that returns only after half an hour. A thread of each rank therefore looks for errors.

All stop with the exit code of the first rank that failed, and one rank of each machine reports its error.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import PartialState
from torch.distributed import DistError

from packcorpus.tasks.core.errors import DataError, Interrupted, PackError
from packcorpus.tasks.core.messages import format_error, to_pack_error
from packcorpus.train.machine.process import is_one_of_several, reports

Result = TypeVar("Result")

# How long a rank waits for the others: in a step, and while they prepare.
STEP, PREPARATION = timedelta(minutes=30), timedelta(days=7)
# Seconds that a rank waits for the others to start; they may have to load torch from a slow disk. After NOTICE seconds,
# it reports that it is waiting.
PATIENCE, NOTICE = 600, 15
# Seconds that a rank waits until the others have read its text, because the store may end with its process.
READ_WITHIN = 30
SHOWN = 3  # differences and ranks that are named

LOOK_EVERY = 0.5  # seconds between two looks for an error
# Seconds that the main thread of a rank with the same error has to end the process itself.
GRACE = 1.0
# Seconds that the first failed rank waits for the others to end. If it ended first, the launcher would signal them.
FAREWELL = 5.0
# Seconds within which all ranks fail if they fail for the same reason.
ALIKE = 20.0

# Seconds that gloo's thread has to free its last operation. The thread needs the interpreter's lock for this, and the
# call that destroys the group holds this lock while it waits for the thread. On a loaded machine, one of 25 runs never
# ended (torch 2.13).
SETTLING = 0.5

# Errors that torch raises on the other ranks when one has ended.
_LOST = re.compile(r"gloo/|NCCL|Connection (closed|reset|refused)")
_FAILED = "failed"  # key of the first error in the store


class Failure(NamedTuple):
    """Error of a rank, as the other ranks report it."""

    reason: str
    message: str
    exit_code: int
    facts: dict[str, Any]


class Place(NamedTuple):
    """Process and machine of a rank; `node` is torchrun's number of the node."""

    rank: int
    local_rank: int
    node: str
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


@dataclass
class _Process:
    """State of this process as one of several ranks."""

    store: Any = None  # of the ranks that have met; its server ends with the last reference
    preparing: Any = None  # the group of ranks that prepare
    agreed: Exception | None = None  # the error that all ranks stop for
    alike: int = 0  # number of errors that this rank had in passes of a sharded model
    is_ending: bool = False  # the main thread is reporting an error and then ends this process
    done: threading.Event = field(default_factory=threading.Event)


_own = _Process()


def place() -> Place:
    """Return the place of this process, as set by torchrun or our launcher."""
    host = socket.gethostname()
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    return Place(rank, local_rank, os.environ.get("GROUP_RANK", host), host)


def _failure_of(error: Exception | None) -> Failure | None:
    failed = to_pack_error(error) if error else None
    return Failure(failed.reason, str(failed), failed.exit_code, failed.facts) if failed else None


def _seen_from(here: Place, there: Place, failure: Failure) -> PackError:
    """Return the error of rank `there`, with a message once per machine."""
    error = PackError("rank_failed", "")
    if here.local_rank == 0 and here.node != there.node and failure.message:
        message = failure.message if failure.facts.get("rank") else f"{failure.message} (on {there.host})"
        error = PackError(failure.reason, message, **{"rank": there.rank} | failure.facts)
    error.exit_code = failure.exit_code
    return error


def _raise_first(outcomes: Iterable[tuple[Place, Failure | None]], own: Exception | None) -> None:
    """Raise the error of the first rank that failed, if any; that rank raises its own."""
    here = place()
    for there, failure in outcomes:
        if failure is not None:
            is_own = own is not None and there.rank == here.rank
            _own.agreed = own if is_own else _seen_from(here, there, failure)
            assert _own.agreed
            raise _own.agreed


# -- before the process group ------------------------------------------------------------------------------------------


def meet(facts: Mapping[str, str], error: Exception | None = None, finished: bool = False) -> bool:
    """Meet the other ranks, and return whether all have `finished`.

    `facts` must be the same on all ranks. `error` is the reason why this rank cannot start. Raises the error of the
    first rank that has one; DataError if facts differ; PackError if a rank does not start.
    """
    here = place()
    texts = _exchange(here.rank, json.dumps([here, _failure_of(error), dict(facts), finished], default=str))
    sent = [json.loads(text) for text in texts]
    places = [Place(*where) for where, *_ in sent]
    failures = (Failure(*failure) if failure else None for _, failure, *_ in sent)
    _raise_first(zip(places, failures, strict=True), error)
    _require_same(places, [theirs for _, _, theirs, _ in sent])
    return all(is_finished for *_, is_finished in sent)


def require_same(name: str, value: str) -> None:
    """Raise DataError on all ranks unless they have the same value."""
    pairs = gather((place(), value))
    _require_same([where for where, _ in pairs], [{name: theirs} for _, theirs in pairs])


def _require_same(places: Sequence[Place], facts: Sequence[Mapping[str, str]]) -> None:
    if lines := differences(places, facts):
        more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        message = f"the ranks of this run differ: {'; '.join(lines[:SHOWN])}{more}"
        _own.agreed = DataError("ranks_differ", message if place().local_rank == 0 else "")
        raise _own.agreed


def differences(places: Sequence[Place], facts: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a text for each fact that differs, with the values and their ranks."""
    lines = []
    for name in dict.fromkeys(name for theirs in facts for name in theirs):
        ranks_of: dict[str, list[Place]] = {}
        for where, theirs in zip(places, facts, strict=True):
            ranks_of.setdefault(theirs.get(name, "absent"), []).append(where)
        texts = []
        for value, ranks in ranks_of.items():
            numbers = ", ".join(str(where.rank) for where in ranks[:SHOWN])
            more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
            hosts = ", ".join(dict.fromkeys(where.host for where in ranks))
            texts.append(f"{value} on rank{'s' * (len(ranks) > 1)} {numbers}{more} ({hosts})")
        if len(texts) > 1:
            lines.append(f"{name} is {', '.join(texts)}")
    return lines


def _exchange(rank: int, text: str) -> list[str]:
    try:
        store, _, world = next(torch.distributed.rendezvous("env://", timeout=timedelta(seconds=PATIENCE)))
        _own.store = store = torch.distributed.PrefixStore("packcorpus", store)
        names = [f"text/{number}" for number in range(world)]
        store.set(names[rank], text)
        missing = _wait(store, names, NOTICE)
        if missing and reports():
            print(f"waiting for {len(missing)} of {world} ranks", file=sys.stderr, flush=True)
        if missing := _wait(store, missing, PATIENCE):
            raise PackError(
                "rank_failed",
                f"{len(missing)} of {world} ranks did not start within {PATIENCE // 60} minutes, such as rank "
                f"{missing[0].rpartition('/')[2]}; see its own message, then start the same command on every machine",
            )
        texts = [store.get(name).decode() for name in names]
        store.set(f"read/{rank}", "")
        _wait(store, [f"read/{number}" for number in range(world)], READ_WITHIN)
    except DistError as error:
        reason = str(error).strip().splitlines()[0][:200].rstrip(".")
        raise PackError(
            "rank_failed",
            f"the ranks cannot reach each other at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} "
            f"({reason}); check the address and the firewall",
        ) from None
    return texts


def _wait(store: Any, names: list[str], seconds: float) -> list[str]:
    # In slices, because a signal is handled only between two calls.
    end, step = time.monotonic() + seconds, 0.01
    while missing := [name for name in names if not store.check([name])]:
        if time.monotonic() > end:
            return missing
        time.sleep(step)
        names, step = missing, min(1.0, 2 * step)
    return []


# -- in a process group ------------------------------------------------------------------------------------------------


def start(cpu: bool) -> PartialState:
    """Connect to the other ranks, if there are any, and look for their errors."""
    state = PartialState(cpu=cpu, timeout=STEP)
    if torch.distributed.is_initialized():
        _own.preparing = torch.distributed.new_group(backend="gloo", timeout=PREPARATION)
    if is_one_of_several() and _own.store is not None:
        _own.done.clear()
        threading.Thread(target=_look, daemon=True).start()
    return state


def leave(together: bool) -> None:
    """Close the process group; `together` is whether all ranks do so."""
    # A rank that exits while the group is open may be aborted.
    if torch.distributed.is_initialized():
        if together:
            torch.distributed.barrier()
        time.sleep(SETTLING)
        torch.distributed.destroy_process_group()
    _own.preparing = None
    _own.done.set()


def gather(value: Result) -> list[Result]:
    """Return the value of every rank."""
    if not torch.distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value, group=_own.preparing)
    return values


@contextmanager
def together(waiting: bool = False) -> Iterator[None]:
    """Stop all ranks if one fails in this block.

    Within the block, no rank may wait for another. Raises the error of the first rank that failed. If ranks are
    `waiting` for each other, they cannot meet after an error, and `ring` ends them instead.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        if waiting or not torch.distributed.is_initialized():
            raise
        failed = error
    if not waiting:
        _raise_first(gather((place(), _failure_of(failed))), failed)


def main_first(main: bool, work: Callable[[], Result]) -> Result:
    """Run `work` on the ranks that are `main`, then on the others."""
    # The other ranks find the results of the main ranks, for example a download.
    for turn in (True, False):
        with together():
            if main == turn:
                result = work()
    return result


def largest(figures: list[float], device: torch.device) -> list[float]:
    """Return the maximum of each figure over all ranks, so that all decide alike."""
    if not torch.distributed.is_initialized():
        return figures
    maxima = torch.tensor(figures, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(maxima, torch.distributed.ReduceOp.MAX)
    return maxima.tolist()


# -- while others wait -------------------------------------------------------------------------------------------------


def ring(error: Exception) -> Exception:
    """End all other ranks because of an error, and return the error to report here."""
    # It is the same error if this rank failed first or if all ranks have agreed on the error.
    if _own.store is None or error is _own.agreed:
        return error
    _own.is_ending = True
    lost, first = of_lost_rank(error), None
    with suppress(DistError):
        if lost is error:
            _own.store.compare_set(_FAILED, "", json.dumps([place(), _failure_of(error)], default=str))
        first = _first_failure()
    if first is None or first[0].rank == place().rank:
        return lost
    return _seen_from(place(), *first)


def of_lost_rank(error: Exception) -> Exception:
    """Return a readable error if torch failed because another rank has ended."""
    of_torch = isinstance(error, DistError | RuntimeError) and not isinstance(error, PackError)
    if not (of_torch and torch.distributed.is_initialized() and _LOST.search(str(error))):
        return error
    message = "another rank ended, so this one stopped; run the same command to resume from the newest checkpoint"
    lost = PackError("rank_failed", message if reports() else "")
    lost.exit_code = Interrupted.exit_code
    return lost


def fail_alike(model: Any, error: Exception) -> None:
    """Raise the error of a pass unless all ranks have an error in the same pass.

    If all ranks fail, all of them can continue without the feature that failed. A rank with whole weights can continue
    alone, so nothing is raised. If weights are divided among the ranks, the others would wait in the pass.
    """
    if _own.store is None or not getattr(model, "shards_frozen_weights", False):
        return
    _own.alike += 1
    name, end = f"alike/{_own.alike}", time.monotonic() + ALIKE
    _own.store.add(name, 1)
    while _own.store.add(name, 0) < int(os.environ["WORLD_SIZE"]):
        if time.monotonic() > end:
            raise error
        time.sleep(0.05)


def end_if_rung(exit_code: int) -> None:
    """End this process at once if `ring` was called."""
    # Other ranks may wait for this process, and an orderly exit would wait for them.
    if _own.store is None or not _own.is_ending:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(DistError):
        first, end, rank = _first_failure(), time.monotonic() + FAREWELL, place().rank
        if first and first[0].rank == rank:
            others = [f"ended/{other}" for other in range(int(os.environ["WORLD_SIZE"])) if other != rank]
            while not _own.store.check(others) and time.monotonic() < end:
                time.sleep(0.05)
        else:
            _own.store.set(f"ended/{rank}", "")
    os._exit(exit_code)


def _look() -> None:
    """Wait until another rank has failed, then end this process."""
    first = None
    with suppress(DistError):  # the rank that holds the store has ended; the process group reports that to the others
        while first is None and not _own.done.wait(LOOK_EVERY):
            first = _first_failure()
    if first is None or first[0].rank == place().rank:
        return
    time.sleep(GRACE)
    error = _seen_from(place(), *first)
    if not _own.is_ending and str(error):
        print(format_error(error), file=sys.stderr, flush=True)
    with suppress(DistError):
        _own.store.set(f"ended/{place().rank}", "")
    os._exit(error.exit_code)


def _first_failure() -> tuple[Place, Failure] | None:
    """Return the first rank that failed and its error; None if no rank failed."""
    if not _own.store.check([_FAILED]):
        return None
    where, failure = json.loads(_own.store.get(_FAILED))
    return Place(*where), Failure(*failure)
