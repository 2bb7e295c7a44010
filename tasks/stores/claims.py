"""Let one machine do what several need: the first one claims it, and the others wait for what it makes.

    nothing found ─put if absent─▶ NAME.claim, renewed while the work is done, then deleted ─▶ what was made
                      └ it is there: another machine works; wait, and look again

A claim decides who works, and never what is right: what is made twice is the same. So if a claim is not renewed for
EXPIRY seconds, by the clock of the one who waits, its machine is taken for lost, and the work is done without it.
Machines that share the files of a local root have a lock instead, which ends with its process.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import TypeVar

from tasks.core.errors import InputMissing, PackError
from tasks.storage.files import locked
from tasks.stores.mirror import Mirror, Remote
from tasks.stores.store import Store

Made = TypeVar("Made")

RENEWAL = 5.0  # seconds after which a claim is renewed

EXPIRY = 30.0  # seconds without renewal after which a machine is taken for lost

SHORTEST, LONGEST = 0.1, 2.0  # seconds between two looks; each pause is twice as long as the one before


def make_once(
    mirror: Mirror,
    file: Path,
    find: Callable[[], Made | None],
    make: Callable[[], Made],
    *,
    wait: bool = True,
    check: Callable[[], None] = lambda: None,
) -> Made | None:
    """Return what `find` finds, or make it, unless another machine does: then wait for it.

    `file` is what is made, in the mirror's root: the claim or lock is next to it. `find` asks the root itself: what it
    finds may have been made since the last refresh. Without `wait`, the result is None while another machine works.
    `check` is called before each pause, and may end the wait. Raises what `find`, `make`, and stores raise.
    """
    if (found := find()) is not None:
        return found
    if not isinstance(mirror, Remote):
        return _make_locked(file, find, make, wait, check)
    store, key = mirror.store, mirror.key(file.with_suffix(".claim"))
    seen, since, pause = None, time.monotonic(), SHORTEST
    while found is None:
        claim = store.head(key)
        if claim != seen:
            seen, since = claim, time.monotonic()
        is_lost = claim is not None and time.monotonic() - since >= EXPIRY
        if (claim is None or is_lost) and _put_claim(store, key, absent=not is_lost):
            with _renewed(store, key):
                found = find()  # who had the claim before may have ended since
                return make() if found is None else found
        if not wait:
            return None
        check()
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)
        found = find()
    return found


def _make_locked(
    file: Path, find: Callable[[], Made | None], make: Callable[[], Made], wait: bool, check: Callable[[], None]
) -> Made | None:
    def waiting() -> None:
        if not wait:
            raise _MadeElsewhere
        check()

    try:
        with locked(file.with_name(f".{file.name}.lock"), waiting):
            found = find()
            return make() if found is None else found
    except _MadeElsewhere:
        return None


class _MadeElsewhere(Exception):
    """Another process has the lock, and this one does not wait."""


def _put_claim(store: Store, key: str, absent: bool) -> bool:
    mark = _mark()
    if store.put(key, mark, absent=absent):
        return True
    # A store that writes an object and answers with an error is asked again, and then refuses what it has written.
    with suppress(InputMissing):
        return store.get(key) == mark
    return False


def _mark() -> bytes:
    """Return the content of a claim, another one each time: it thus has another ETag."""
    return secrets.token_bytes(16)


@contextmanager
def _renewed(store: Store, key: str) -> Iterator[None]:
    """Renew a claim while the block runs, then delete it."""
    ended = Event()

    def renew() -> None:
        while not ended.wait(RENEWAL):
            with suppress(PackError):
                store.put(key, _mark())

    thread = Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(PackError):
            store.delete(key)
