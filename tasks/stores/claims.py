"""Let one machine do work that several need, while the others wait for the result.

    nothing found ─put if absent─▶ NAME.claim, renewed while the work is done, then deleted ─▶ the result
                      └ a claim exists: another machine works; wait, and look again

A claim only decides which machine works. It does not affect the result: if the work is done twice, the results are
equal. Therefore, if a claim is not renewed for EXPIRY seconds, by the clock of a machine that waits, the machine that
holds it is considered lost. One of the waiting machines replaces the claim that it has seen with its own claim, and
does the work. Machines that share the files of a local root use a lock instead, which ends with its process. Claims and
locks record their holder, for the note that waiting machines show.
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

RENEWAL = 5.0  # seconds between two renewals of a claim

EXPIRY = 30.0  # seconds without renewal after which a machine is considered lost

NOTED_AFTER = 5.0  # seconds of waiting after which a note shows the holder

SHORTEST, LONGEST = 0.1, 2.0  # seconds between two checks; each pause is twice as long as the previous pause


def make_once(
    mirror: Mirror,
    file: Path,
    find: Callable[[], Made | None],
    make: Callable[[], Made],
    *,
    wait: bool = True,
    check: Callable[[], None] = lambda: None,
) -> Made | None:
    """Return the result of `find` or `make`, but let only one machine make it.

    While another machine makes it, this one waits or, without `wait`, returns None. `file` is the file that is made, in
    the mirror's root; the claim or lock is next to it. `find` asks the root itself, because the result may be newer
    than the last refresh. `check` is called before each pause, and may end the wait with an exception. Raises the
    errors of `find`, `make`, and stores.
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
                found = find()  # the previous holder of the claim may have finished since
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
    """Another process holds the lock, and this process does not wait."""


# Holders of claims and locks


class _Holder:
    """This process, as a claim records it.

    The content differs each time, so that each renewal has another ETag.
    """

    def __init__(self) -> None:
        self.id, self._since = secrets.token_hex(8), datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

    def content(self) -> bytes:
        who = {"host": socket.gethostname(), "process": os.getpid(), "since": self._since}
        return orjson.dumps({"id": self.id, **who, "renewal": secrets.token_hex(8)})

    def holds(self, store: Store, key: str) -> bool:
        """Return whether this process holds a claim. Raises PackError."""
        return bool(_held(store, key).get("id") == self.id)


def _held(store: Store, key: str) -> dict[str, Any]:
    """Return the values of a claim, or {} if there is none. Raises PackError."""
    try:
        return _values(store.get(key))
    except InputMissing:
        return {}


def _values(content: bytes) -> dict[str, Any]:
    """Return the values of a claim or lock, or {} if another version wrote it."""
    with suppress(ValueError):
        if isinstance(found := orjson.loads(content), dict):
            return found
    return {}


class _Note:
    """Show once, after some time, which process makes a file."""

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
    """Put a claim if there is none, or replace the claim of a lost machine.

    Only one process succeeds: the result is True for that process.
    """
    if store.put(key, content, absent=lost is None, expected=lost):
        return True
    # A store may write the claim, but answer with an error. It then refuses the retry, because the claim exists.
    with suppress(InputMissing):
        return store.get(key) == content
    return False


@contextmanager
def _renewed(store: Store, key: str, own: _Holder) -> Iterator[None]:
    """Renew a claim while the block runs, then delete it.

    A claim that another machine has replaced is left alone.
    """
    ended = Event()

    def renew() -> None:
        while not ended.wait(RENEWAL):
            with suppress(PackError):
                claim = store.head(key)
                if claim and own.holds(store, key):
                    store.put(key, own.content(), expected=claim)  # not if it was replaced in between

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
