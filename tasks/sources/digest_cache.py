"""Keep the digests of source files between runs, so that an unchanged file is not hashed again.

    data/digests/NAME.json   path, size, times, inode ─▶ SHA-256, ranges of parts, digests of blocks
                             URL, size, ETag, of an object that is read in blocks (remote_blocks.py)
                             the same, and what its source sets ─▶ container, format, delimiter, encoding

An entry is believed only if nothing that the file system records of the file differs, and if the file was at least
RACY_NS old when it was hashed: a change within the same tick of the clock as the hashing would leave the times as they
are. Whatever is read from a file later is compared with the digests of its blocks (readers/hashed_blocks.py), also if
these come from here. A cache that is damaged or cannot be written is as good as none.

With a root in a bucket, the entries of objects are there, too, so an object is identified and hashed by the first
machine that needs it. An object that changes has another ETag, and so another entry. What two machines find is the
same, and so are the bytes that they write.

A large file that is too young to be believed has an entry, too: steps refer to it (sent_digests.py).
"""

from __future__ import annotations

import os
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tasks.conversations.formats import FORMAT_NAMES
from tasks.core.errors import StorageError
from tasks.readers.container import Range
from tasks.readers.containers import container_named
from tasks.readers.hashed_blocks import BlockDigests
from tasks.sources.model import Source, SourceFile
from tasks.sources.sent_digests import blocks_in, is_large
from tasks.storage.files import read_receipt, write_receipt
from tasks.storage.keys import key_of
from tasks.stores.claims import make_once
from tasks.stores.mirror import LOCAL, Mirror, mirror_of
from tasks.stores.urls import is_url

VERSION = 2  # of how files are hashed and split into ranges, and of the entries

FOUND = ("container", "format", "delimiter", "encoding")  # what the start of an object shows

FORMAT_VERSION = 1  # of how this is found; the names of all formats are in the key as well

WORTH_A_CLAIM = 4 << 20  # bytes of an object: a smaller one is a single request, as is a claim

Found = TypeVar("Found")

RACY_NS = 2_000_000_000  # the coarsest clock of a file system in use ticks every two seconds


class Hashed(NamedTuple):
    """What hashing a file found, and the name of the entry that has it, if there is one."""

    sha256: str
    ranges: list[Range]
    blocks: BlockDigests
    record: str = ""


class DigestCache:
    """The digests of files in a folder. With `fresh`, none is believed, and all are written again.

    A cache that is `only_read` keeps nothing: commands that look do not write to a bucket.
    """

    def __init__(self, folder: Path, fresh: bool = False, only_read: bool = False):
        self._folder, self._fresh, self._only_read = folder, fresh, only_read
        self._written: set[str] = set()

    def find(self, file: SourceFile, part_size: int) -> Hashed | None:
        """Return what is known of a file that has not changed since it was hashed. Raises what a store raises."""
        with suppress(TypeError):  # the path is not UTF-8
            path = self._entry(file, part_size)
            found = self._find(path, file, partial(_hashed, path.name))
            if found and is_large(found.blocks) and not self._mirror.adopt(path):
                self._mirror.push([path])  # steps refer to it
            return found
        return None

    def find_once(
        self, file: SourceFile, part_size: int, hashed: Callable[[], Hashed], wait: bool, check: Callable[[], None]
    ) -> Hashed | None:
        """Return what is known of an object, or hash it, unless another machine does: then wait for that machine.

        Without `wait`, the result is None while another machine hashes it. `check` may end the wait.
        """
        if self._fresh or file.bytes < WORTH_A_CLAIM or self._mirror is LOCAL:
            return self.find(file, part_size) or hashed()
        path, find = self._entry(file, part_size), partial(self.find, file, part_size)
        return make_once(self._mirror, path, find, hashed, wait=wait, check=check)

    def find_format(self, file: SourceFile, source: Source) -> SourceFile | None:
        """Return an object with the container and the format that were found in it. Raises what a store raises."""
        return self._find(self._format_entry(file, source), file, partial(_identified, file))

    def keep_format(self, file: SourceFile, source: Source, found: SourceFile) -> None:
        """Write what was found in the start of an object."""
        values = {"path": file.name, "state": _state_of(file)}
        values |= {name: getattr(found, name) for name in FOUND}
        self._write(self._format_entry(file, source), values, shared=True)

    def _find(self, path: Path, file: SourceFile, read: Callable[[dict[str, Any]], Found]) -> Found | None:
        found = None if self._fresh else _read(path, file, read)
        if not (found or self._fresh) and file.identity and self._mirror.adopt(path):
            found = _read(path, file, read)
        return found

    def start(self, file: SourceFile) -> list[Any]:
        """Return the state of a file that is to be hashed, for `keep`."""
        return [time.time_ns(), *_state_of(file)]

    def keep(self, file: SourceFile, part_size: int, started: list[Any], found: Hashed) -> Hashed:
        """Write what hashing a file found, and return it with its entry.

        The entry is never believed if the file may have changed meanwhile.
        """
        began, *state = started
        values: dict[str, Any] = {"path": _name_of(file), "state": state, "sha256": found.sha256}
        values |= {"ranges": [list(part) for part in found.ranges], "block": found.blocks.size}
        values["blocks"] = b64encode(found.blocks.joined).decode()
        large = is_large(found.blocks)
        with suppress(OSError, TypeError):  # TypeError: the path is not UTF-8
            if not file.identity and (state != _state_of(file) or max(state[1:3]) > began - RACY_NS):
                if not large:
                    return found
                values["state"] = None
            path = self._entry(file, part_size)
            if self._write(path, values, large or bool(file.identity)):
                return found._replace(record=path.name)
        return found

    def _write(self, path: Path, values: dict[str, Any], shared: bool) -> bool:
        if self._only_read:
            return False
        try:
            write_receipt(path, values)
        except (OSError, StorageError):
            return False
        self._written.add(path.name)
        if shared:
            self._mirror.push([path])
        return True

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

    def _format_entry(self, file: SourceFile, source: Source) -> Path:
        """Return the entry of an object whose format is not known yet. A version with other formats has its own."""
        set_here = [source.format, source.columns, source.delimiter, source.encoding]
        read = {"path": file.name, "state": _state_of(file), "source": set_here, "formats": FORMAT_NAMES}
        return self._folder / f"{key_of('format', read, FORMAT_VERSION)}.json"

    @property
    def _mirror(self) -> Mirror:
        return mirror_of(self._folder.parents[1])


def _read(path: Path, file: SourceFile, read: Callable[[dict[str, Any]], Found]) -> Found | None:
    """Return what an entry says about a file as it is now."""
    with suppress(OSError, StorageError, LookupError, TypeError, ValueError):
        entry = read_receipt(path)
        if entry["path"] == _name_of(file) and entry["state"] == _state_of(file):
            return read(entry)
    return None


def _hashed(record: str, entry: dict[str, Any]) -> Hashed:
    return Hashed(entry["sha256"], [Range(*values) for values in entry["ranges"]], blocks_in(entry), record)


def _identified(file: SourceFile, entry: dict[str, Any]) -> SourceFile:
    container, format, delimiter, encoding = (str(entry[name]) for name in FOUND)
    container_named(container)  # raises LookupError
    return replace(file, container=container, format=format, delimiter=delimiter, encoding=encoding)


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
