"""Keep local copies of remote objects.

    data/remote/<digest of URL, size, identity>/chats.jsonl.gz               the copy, under its own name
                                                chats.jsonl.gz.receipt.json  URL, size, identity, SHA-256; written last

Each object is fetched once, as a whole, also if several runs need it at the same time. An object that has changed has
another identity, and therefore another folder. This module removes nothing: delete data/remote/ to make room.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import xxhash

from tasks.core.errors import StorageError
from tasks.core.messages import noted
from tasks.core.printable import in_bytes
from tasks.storage.files import has_artifact, locked, make_folder, read_receipt, to_json, write_receipt
from tasks.stores.store import Facts, Reading, Stop, run_all, scratch_full

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
        self._lock = Lock()

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
    places = [place_of_copy(each.url, each.facts, folder) for each in objects]
    wanted = dict(zip(places, objects, strict=True))
    missing = {path: each for path, each in wanted.items() if not _has_copy(path)}
    progress, size = _Progress(), sum(each.facts.size for each in missing.values())
    if missing:
        make_folder(folder)
        if shutil.disk_usage(folder).free < size:
            raise scratch_full(next(iter(missing.values())).url, folder, size)

    def note() -> str:
        done = f"{progress.objects:,} of {len(missing):,} files, {in_bytes(progress.size)} of {in_bytes(size)}"
        return f"downloading the sources: {done} done"

    # Fetch the largest object first, so that no thread is still busy with it after the others have ended.
    order = sorted(missing, key=lambda path: -missing[path].facts.size)
    with noted(note):
        run_all(lambda path: _fetch(missing[path], path, progress), order, DOWNLOADS, progress.set)
    return [Copy(place, str(read_receipt(_receipt(place))["sha256"])) for place in places]


def _fetch(wanted: Object, path: Path, progress: _Progress) -> None:
    progress.check()
    with locked(path.parent.with_suffix(".lock"), progress.check):
        if not _has_copy(path):  # another run may have fetched it while this one waited
            digest = wanted.store.fetch(wanted.key, path, wanted.facts, progress.add)
            facts = {"url": wanted.url, "bytes": wanted.facts.size, "identity": wanted.facts.identity}
            write_receipt(_receipt(path), {**facts, "sha256": digest})
    progress.add(0, objects=1)


def place_of_copy(url: str, facts: Facts, folder: Path, *, with_holes: bool = False) -> Path:
    """Return the path of an object's copy. Incomplete copies have separate folders."""
    content = to_json([url, facts.size, facts.identity, *["holes"] * with_holes])
    # The name is for people who look into the folder; the folder identifies the object.
    name = re.sub(r"[^\w.+-]", "_", os.path.basename(url))[-100:].lstrip(".") or "object"
    return folder / str(xxhash.xxh3_128_hexdigest(content)) / name


def _receipt(path: Path) -> Path:
    return path.with_name(f"{path.name}.receipt.json")


def _has_copy(path: Path) -> bool:
    return has_artifact(path, _receipt(path))


def damaged_copy(url: str, path: Path) -> StorageError:
    """Return the error for a copy that has changed since it arrived."""
    return StorageError(
        "copy_damaged", f"{url}: its local copy {path} was changed or is damaged; delete it, then run again"
    )
