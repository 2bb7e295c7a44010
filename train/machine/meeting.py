"""Start the ranks of a run only if all of them can start.

Their corpus, settings, and libraries must be the same.

    rank 0 ─facts or error─┐
    rank 1 ─facts or error─┼─torch's store─▶ all continue, or all stop: each machine reports the same error
    rank 2 ─facts or error─┘

The ranks meet before they form a process group. A rank without a GPU or without the corpus could not join the group,
and the others would wait for it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from tasks.core.errors import DataError, PackError
from train.machine.signals import reports

# Seconds that a rank waits for the others, which may have to load torch from a slow disk.
PATIENCE = 600
# Seconds after which a rank reports that it is waiting.
NOTICE = 15
# Seconds that a rank waits until the others have read its text, because the store may end with its process.
FAREWELL = 30
SHOWN = 3

_stores: list[Any] = []  # kept here, because the server of a store ends with its last reference


def is_one_of_several() -> bool:
    """Return whether this process is one of several ranks."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def store() -> Any:
    """Return the store of the ranks that have met; None if there is one rank."""
    return _stores[-1] if _stores else None


@contextmanager
def or_stop_all() -> Iterator[None]:
    """Stop the other ranks if this block fails, because they would wait for this rank."""
    try:
        yield
    except Exception as error:
        if is_one_of_several():
            meet({}, error)
        raise


def meet(facts: Mapping[str, str], error: Exception | None = None, finished: bool = False) -> bool:
    """Meet the other ranks, and return whether all have `finished`.

    `facts` must be the same on all ranks. `error` is the reason why this rank cannot start. Raises the error of the
    first rank that has one; DataError if facts differ; PackError if a rank does not start.
    """
    from train.machine.ranks import Failure, Place, failure_of, place, raise_first

    here = place()
    mine = {"place": asdict(here), "facts": dict(facts), "finished": finished}
    mine["failure"] = asdict(failure_of(error)) if error else None
    all_ = [json.loads(text) for text in _exchange(here.rank, json.dumps(mine, default=str))]
    places = [Place(**one["place"]) for one in all_]
    raise_first(places, [Failure(**one["failure"]) if one["failure"] else None for one in all_], error)
    _require_same(places, [one["facts"] for one in all_])
    return all(one["finished"] for one in all_)


def require_same(name: str, value: str) -> None:
    """Raise DataError on all ranks unless they have the same value.

    The ranks must be in a process group.
    """
    from train.machine.ranks import gather, place

    all_ = gather((place(), value))
    _require_same([where for where, _ in all_], [{name: own} for _, own in all_])


def _require_same(places: Sequence[Any], facts: Sequence[Mapping[str, str]]) -> None:
    if lines := differences(places, facts):
        more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        message = f"the ranks of this run differ: {'; '.join(lines[:SHOWN])}{more}"
        from train.machine.ranks import agreed

        raise agreed(DataError("ranks_differ", message if os.environ.get("LOCAL_RANK", "0") == "0" else ""))


def differences(places: Sequence[Any], facts: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a text for each fact that differs, with the values and their ranks."""
    found = []
    for name in dict.fromkeys(name for own in facts for name in own):
        values: dict[str, list[Any]] = {}
        for where, own in zip(places, facts, strict=True):
            values.setdefault(own.get(name, "absent"), []).append(where)
        if len(values) > 1:
            found.append(f"{name} is " + ", ".join(f"{value} on {_ranks(who)}" for value, who in values.items()))
    return found


def _ranks(places: Sequence[Any]) -> str:
    numbers = ", ".join(str(where.rank) for where in places[:SHOWN])
    more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    hosts = ", ".join(dict.fromkeys(where.host for where in places))
    return f"rank{'s' * (len(places) > 1)} {numbers}{more} ({hosts})"


def _exchange(rank: int, text: str) -> list[str]:
    """Send a text to the other ranks, and return the texts of all ranks.

    Raises PackError if a rank does not start, or if the ranks cannot reach each other.
    """
    import torch

    try:
        store, _, world = next(torch.distributed.rendezvous("env://", timeout=timedelta(seconds=PATIENCE)))
        _stores.append(torch.distributed.PrefixStore("packcorpus", store))
        store = _stores[-1]
        names = [f"text/{one}" for one in range(world)]
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
        _wait(store, [f"read/{one}" for one in range(world)], FAREWELL)
    except torch.distributed.DistError as error:
        reason = str(error).strip().splitlines()[0][:200].rstrip(".")
        raise PackError(
            "rank_failed",
            f"the ranks cannot reach each other at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} "
            f"({reason}); check the address and the firewall",
        ) from None
    return texts


def _wait(store: Any, names: list[str], seconds: float) -> list[str]:
    """Wait until the store has all names, and return the names that are missing.

    It waits in slices, because a signal is handled only between two calls.
    """
    end, step = time.monotonic() + seconds, 0.01
    while missing := [name for name in names if not store.check([name])]:
        if time.monotonic() > end:
            return missing
        time.sleep(step)
        names, step = missing, min(1.0, 2 * step)
    return []
