"""Receive what a remote store holds, and keep local copies of it.

    data/remote/<digest of URL, size, identity>/chats.jsonl.gz               the copy, under its own name
                                                chats.jsonl.gz.receipt.json  URL, size, identity, SHA-256; written last

Blocking calls run in threads, so that Ctrl-C ends a wait for a server at once. Each object is fetched once, as a whole,
also if several runs need it at the same time. An object that has changed has another identity, and therefore another
folder. Nothing is removed: delete data/remote/ to make room.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar

import xxhash

from packcorpus.tasks.core.errors import DataError, StorageError
from packcorpus.tasks.core.messages import noted
from packcorpus.tasks.core.printable import in_bytes
from packcorpus.tasks.storage.files import (
    atomic_file,
    has_artifact,
    locked,
    make_folder,
    read_receipt,
    to_json,
    write_receipt,
)

Progress = Callable[[int], None]
"""Called with the number of bytes of each block that arrives. An exception in it ends the transfer."""


class Facts(NamedTuple):
    """The identity of an object's content: size, and ETag, version, or checksum."""

    size: int
    identity: str


class Reading(Protocol):
    """A store to read from.

    `url_of` returns the URL that messages show, and `head` the facts of an object, or None if it does not exist. `get`
    returns the content of a small object. `fetch` writes an object to `target`, completely or not at all, and returns
    its SHA-256. `list` yields the objects below the folder `prefix`, in the byte order of their keys.

    The methods raise PackError, naming the URL. The reasons are store_denied, object_missing, store_busy, store_failed,
    object_cut, object_changed (the object is not the one that `expected` describes), and scratch_full.
    """

    def url_of(self, key: str) -> str: ...
    def head(self, key: str) -> Facts | None: ...
    def get(self, key: str) -> bytes: ...
    def fetch(self, key: str, target: Path, expected: Facts, progress: Progress | None = None) -> str: ...
    def list(self, prefix: str = "") -> Iterator[tuple[str, Facts]]: ...


Item = TypeVar("Item")

GRACE = 5.0  # seconds that the other threads have to end after an error or an interrupt


class Stop(threading.Event):
    """A request to all threads of some work to end it."""

    def check(self) -> None:
        """Raise CancelledError if the request was made."""
        if self.is_set():
            raise CancelledError


def interruptible(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the result of a call. In the main thread, signals interrupt the wait."""
    if threading.current_thread() is not threading.main_thread():
        return call(*arguments, **options)
    found: list[Any] = []
    run_all(lambda _: found.append(call(*arguments, **options)), [None], 1, lambda: None, grace=0)
    return found[0]


def run_all(
    work: Callable[[Item], None], items: Sequence[Item], count: int, stop: Callable[[], None], grace: float = GRACE
) -> None:
    """Do the work for every item in up to `count` threads.

    Work is started in the order of the items. Raises the first error. Before that, or if this thread is interrupted,
    calls `stop`, which should end the other threads.
    """
    waiting, done = SimpleQueue[Item](), SimpleQueue[BaseException | None]()
    for item in items:
        waiting.put(item)

    def run() -> None:
        with suppress(Empty):
            while True:
                item = waiting.get_nowait()
                try:
                    work(item)
                    done.put(None)
                except BaseException as error:
                    done.put(error)
                    return

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(count, len(items)))]
    for thread in threads:
        thread.start()
    try:
        for _ in items:
            if error := done.get():
                raise error
    except BaseException:
        stop()
        end = time.monotonic() + grace
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        raise
    for thread in threads:
        thread.join()


CHUNK = 1 << 20  # bytes of an object that are held in memory


def receive(chunks: Iterable[bytes], target: Path, expected: Facts, url: str, progress: Progress | None) -> str:
    """Write an object to `target`, completely or not at all; return its SHA-256.

    Raises StorageError if the chunks have more or fewer bytes than expected, or if the disk is full.
    """
    try:
        with atomic_file(target) as out:
            for chunk in chunks:
                out.write(chunk)
                if progress:
                    progress(len(chunk))
            if out.size != expected.size:
                raise cut_off(url, out.size, expected.size)
        return out.digest()
    except StorageError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT):
            raise scratch_full(url, target.parent, expected.size) from None
        raise


def cut_off(url: str, received: int, size: int) -> StorageError:
    return StorageError("object_cut", f"{url}: ended after {received:,} of {size:,} bytes; run again")


def changed(url: str) -> DataError:
    return DataError("object_changed", f"{url}: changed since it was listed; run again")


def scratch_full(url: str, folder: Path, size: int) -> StorageError:
    """Return the error for a disk without room for the object, or for several."""
    advice = "make room, or use another --root (or, for a root in a bucket, another PACKCORPUS_SCRATCH)"
    return StorageError("scratch_full", f"{url}: the disk of {folder} has no room for {in_bytes(size)}; {advice}")


DOWNLOADS = 8  # objects that are fetched at the same time; each takes a few MB of memory


class Object(NamedTuple):
    """An object of a store, with the facts of its listing."""

    store: Reading
    key: str
    facts: Facts

    @property
    def url(self) -> str:
        return self.store.url_of(self.key)


class Copy(NamedTuple):
    """The local copy of an object, and the SHA-256 that it had on arrival."""

    path: Path
    sha256: str


class _Progress(Stop):
    """Count the objects and bytes that arrive in all threads, and stop the threads."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = self.size = 0
        self._lock = threading.Lock()

    def add(self, size: int, objects: int = 0) -> None:
        self.check()
        with self._lock:
            self.size += size
            self.objects += objects


def fetch_copies(objects: Sequence[Object], folder: Path) -> list[Copy]:
    """Return a copy of each object below `folder`, fetching the missing ones.

    Raises the errors of a store's `fetch`. If the disk has no room, raises scratch_full before anything is fetched.
    """
    folder = folder.absolute()
    places = [place_of_copy(item.url, item.facts, folder) for item in objects]
    wanted = dict(zip(places, objects, strict=True))
    missing = {path: item for path, item in wanted.items() if not has_artifact(path, _receipt(path))}
    progress, size = _Progress(), sum(item.facts.size for item in missing.values())
    if missing:
        make_folder(folder)
        if shutil.disk_usage(folder).free < size:
            raise scratch_full(next(iter(missing.values())).url, folder, size)

    def fetch(path: Path) -> None:
        progress.check()
        item = missing[path]
        with locked(path.parent.with_suffix(".lock"), progress.check):
            if not has_artifact(path, _receipt(path)):  # another run may have fetched it while this one waited
                digest = item.store.fetch(item.key, path, item.facts, progress.add)
                facts = {"url": item.url, "bytes": item.facts.size, "identity": item.facts.identity}
                write_receipt(_receipt(path), {**facts, "sha256": digest})
        progress.add(0, objects=1)

    def note() -> str:
        done = f"{progress.objects:,} of {len(missing):,} files, {in_bytes(progress.size)} of {in_bytes(size)}"
        return f"downloading the sources: {done} done"

    # Fetch the largest object first, so that no thread is still busy with it after the others have ended.
    order = sorted(missing, key=lambda path: -missing[path].facts.size)
    with noted(note):
        run_all(fetch, order, DOWNLOADS, progress.set)
    return [Copy(place, str(read_receipt(_receipt(place))["sha256"])) for place in places]


def place_of_copy(url: str, facts: Facts, folder: Path, *, with_holes: bool = False) -> Path:
    """Return the path of an object's copy. Incomplete copies have separate folders."""
    content = to_json([url, facts.size, facts.identity, *["holes"] * with_holes])
    # The name is for people who look into the folder; the folder identifies the object.
    name = re.sub(r"[^\w.+-]", "_", os.path.basename(url))[-100:].lstrip(".") or "object"
    return folder / str(xxhash.xxh3_128_hexdigest(content)) / name


def _receipt(path: Path) -> Path:
    return path.with_name(f"{path.name}.receipt.json")


def damaged_copy(url: str, path: Path) -> StorageError:
    """Return the error for a copy that has changed since it arrived."""
    problem = f"its local copy {path} was changed or is damaged; delete it, then run again"
    return StorageError("copy_damaged", f"{url}: {problem}")
