"""Keep the digests of source files between runs, so that an unchanged file is not hashed again.

    data/digests/NAME.json   path, size, times, inode ─▶ SHA-256, ranges of parts, digests of blocks
                             URL, size, ETag, of an object that is read in blocks (remote_blocks.py)

An entry is believed only if nothing that the file system records of the file differs, and if the file was at least
RACY_NS old when it was hashed: a change within the same tick of the clock as the hashing would leave the times as they
are. Whatever is read from a file later is compared with the digests of its blocks (readers/hashed_blocks.py), also if
these come from here. A cache that is damaged or cannot be written is as good as none.

With a root in a bucket, the entries of objects are there, too, so an object is hashed by the first machine that needs
it. An object that changes has another ETag, and so another entry. Machines that start at the same moment may hash the
same object; they write the same bytes.
"""

from __future__ import annotations

import os
import time
from base64 import b64decode, b64encode
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tasks.core.errors import StorageError
from tasks.readers.container import Range
from tasks.readers.hashed_blocks import BlockDigests
from tasks.sources.model import SourceFile
from tasks.storage.files import read_receipt, write_receipt
from tasks.storage.keys import key_of
from tasks.stores.mirror import Mirror, mirror_of
from tasks.stores.urls import is_url

VERSION = 2  # of how files are hashed and split into ranges, and of the entries

RACY_NS = 2_000_000_000  # the coarsest clock of a file system in use ticks every two seconds


class Hashed(NamedTuple):
    """What hashing a file found."""

    sha256: str
    ranges: list[Range]
    blocks: BlockDigests


class DigestCache:
    """The digests of files in a folder. With `fresh`, none is believed, and all are written again."""

    def __init__(self, folder: Path, fresh: bool = False):
        self._folder, self._fresh = folder, fresh
        self._written: set[str] = set()

    def find(self, file: SourceFile, part_size: int) -> Hashed | None:
        """Return what is known of a file that has not changed since it was hashed. Raises what a store raises."""
        if self._fresh:
            return None
        with suppress(TypeError):  # the path is not UTF-8
            path = self._entry(file, part_size)
            found = _read(path, file)
            if not found and file.identity and self._mirror.adopt(path):
                found = _read(path, file)
            return found
        return None

    def start(self, file: SourceFile) -> list[Any]:
        """Return the state of a file that is to be hashed, for `keep`."""
        return [time.time_ns(), *_state_of(file)]

    def keep(self, file: SourceFile, part_size: int, started: list[Any], found: Hashed) -> None:
        """Write what hashing a file found, unless the file may have changed meanwhile."""
        began, *state = started
        values: dict[str, Any] = {"path": _name_of(file), "state": state, "sha256": found.sha256}
        values |= {"ranges": [list(part) for part in found.ranges], "block": found.blocks.size}
        values["blocks"] = b64encode(found.blocks.joined).decode()
        written: Path | None = None
        with suppress(OSError, StorageError, TypeError):  # TypeError: the path is not UTF-8
            if not file.identity and (state != _state_of(file) or max(state[1:3]) > began - RACY_NS):
                return
            path = self._entry(file, part_size)
            write_receipt(path, values)
            self._written.add(path.name)
            written = path
        if written and file.identity:
            self._mirror.push([written])

    def prune(self) -> None:
        """Remove entries of files that do not exist anymore, and damaged ones. Reads nothing if none was written."""
        for path in self._folder.glob("*.json") if self._written else ():
            if path.name in self._written:
                continue
            with suppress(OSError):
                try:
                    name = read_receipt(path)["path"]
                    lost = not is_url(name) and not os.path.lexists(name)
                except (StorageError, LookupError, TypeError, ValueError):
                    lost = True
                if lost:
                    path.unlink(missing_ok=True)

    def _entry(self, file: SourceFile, part_size: int) -> Path:
        read: dict[str, Any] = {"path": _name_of(file), "container": file.container, "compression": file.compression}
        read |= {"part_size": part_size} | ({"state": _state_of(file)} if file.identity else {})
        return self._folder / f"{key_of('digests', read, VERSION)}.json"

    @property
    def _mirror(self) -> Mirror:
        return mirror_of(self._folder.parents[1])


def _read(path: Path, file: SourceFile) -> Hashed | None:
    """Return what an entry says about a file as it is now."""
    with suppress(OSError, StorageError, LookupError, TypeError, ValueError):
        entry = read_receipt(path)
        if entry["path"] == _name_of(file) and entry["state"] == _state_of(file):
            blocks = BlockDigests(entry["block"], b64decode(entry["blocks"], validate=True))
            return Hashed(entry["sha256"], [Range(*values) for values in entry["ranges"]], blocks)
    return None


def _name_of(file: SourceFile) -> str:
    return file.name if file.identity else str(file.path)


def _state_of(file: SourceFile) -> list[Any]:
    """Return size, times, and inode, or the size and the ETag of an object.

    The time of the last change cannot be set, as that of writing can. Not the device: every machine that mounts a
    shared file system gives it another number.
    """
    if file.identity:
        return list(file.facts)
    stat = file.path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
