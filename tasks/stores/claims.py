"""Let one machine do what several need: the first one claims it, and the others wait for what it makes.

    nothing found ─put if absent─▶ NAME.claim, renewed while the work is done, then deleted ─▶ what was made
                      └ it is there: another machine works; wait, and look again

A claim decides who works, and never what is right: what is made twice is the same. So if a claim is not renewed for
EXPIRY seconds, by the clock of the one who waits, its machine is taken for lost, and one of those who wait replaces the
claim that it has seen by its own, and does the work. Machines that share the files of a local root have a lock instead,
which ends with its process. Claims and locks say who holds them, for a note to those who wait.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

import orjson

from tasks.core.errors import InputMissing, PackError
from tasks.core.notes import show_note
from tasks.core.printable import printable
from tasks.storage.files import locked
from tasks.stores.mirror import Mirror, Remote
from tasks.stores.store import Facts, Store

Made = TypeVar("Made")

RENEWAL = 5.0  # seconds after which a claim is renewed

EXPIRY = 30.0  # seconds without renewal after which a machine is taken for lost

NOTED_AFTER = 5.0  # seconds after which those who wait see for whom

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
    seen, since, pause, note = None, time.monotonic(), SHORTEST, _Note(mirror.shown(file))
    while found is None:
        claim, own = store.head(key), _Holder()
        if claim != seen:
            seen, since = claim, time.monotonic()
        is_lost = claim is not None and time.monotonic() - since >= EXPIRY
        if (claim is None or is_lost) and _put_claim(store, key, own.content(), claim):
            with _renewed(store, key, own):
                found = find()  # who had the claim before may have ended since
                return make() if found is None else found
        if not wait:
            return None
        check()
        if claim and note.is_due():
            passed = f"of which {time.monotonic() - since:.0f} have passed"
            note.show(_held(store, key), f"its claim is replaced after {EXPIRY:.0f} s without renewal, {passed}")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)
        found = find()
    return found


def _make_locked(
    file: Path, find: Callable[[], Made | None], make: Callable[[], Made], wait: bool, check: Callable[[], None]
) -> Made | None:
    lock, note = file.with_name(f".{file.name}.lock"), _Note(str(file))

    def waiting() -> None:
        if not wait:
            raise _MadeElsewhere
        check()
        if note.is_due():
            with suppress(OSError):
                note.show(_values(lock.read_bytes()), "its lock ends with its process")

    try:
        with locked(lock, waiting):
            with suppress(OSError):  # only the note needs it
                lock.write_bytes(_Holder().content())
            found = find()
            return make() if found is None else found
    except _MadeElsewhere:
        return None


class _MadeElsewhere(Exception):
    """Another process has the lock, and this one does not wait."""


# Who holds a claim or a lock


class _Holder:
    """This process, as a claim records it. Its content is another one each time: it thus has another ETag."""

    def __init__(self) -> None:
        self.id, self._since = secrets.token_hex(8), datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

    def content(self) -> bytes:
        who = {"host": socket.gethostname(), "process": os.getpid(), "since": self._since}
        return orjson.dumps({"id": self.id, **who, "renewal": secrets.token_hex(8)})

    def holds(self, store: Store, key: str) -> bool:
        """Return whether a claim is that of this process. Raises PackError."""
        return bool(_held(store, key).get("id") == self.id)


def _held(store: Store, key: str) -> dict[str, Any]:
    """Return what a claim records; nothing if it does not exist anymore. Raises what the store raises."""
    try:
        return _values(store.get(key))
    except InputMissing:
        return {}


def _values(content: bytes) -> dict[str, Any]:
    """Return what a claim or a lock records; nothing of one that another version has written."""
    with suppress(ValueError):
        if isinstance(found := orjson.loads(content), dict):
            return found
    return {}


class _Note:
    """Say once who makes a file, after some time."""

    def __init__(self, file: str):
        self._file, self._start, self._is_shown = file, time.monotonic(), False

    def is_due(self) -> bool:
        return not self._is_shown and time.monotonic() - self._start >= NOTED_AFTER

    def show(self, held: dict[str, Any], end: str) -> None:
        self._is_shown = True
        who = "another process is making"
        if held.keys() >= {"host", "process", "since"}:
            host, process, since = (printable(str(held[name]))[:100] for name in ("host", "process", "since"))
            who = f"{host}, process {process}, has been making since {since}"
        show_note(f"waiting for {self._file}, which {who}; {end}")


# Claims


def _put_claim(store: Store, key: str, content: bytes, lost: Facts | None) -> bool:
    """Put a claim where there is none, or replace that of a machine that is lost. Only one process succeeds."""
    if store.put(key, content, absent=lost is None, expected=lost):
        return True
    # A store that writes an object and answers with an error is asked again, and then refuses what it has written.
    with suppress(InputMissing):
        return store.get(key) == content
    return False


@contextmanager
def _renewed(store: Store, key: str, own: _Holder) -> Iterator[None]:
    """Renew a claim while the block runs, then delete it, unless another machine has replaced it."""
    ended = Event()

    def renew() -> None:
        while not ended.wait(RENEWAL):
            with suppress(PackError):
                if own.holds(store, key):
                    store.put(key, own.content())

    thread = Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(PackError):
            if own.holds(store, key):
                store.delete(key)
