"""Hash source files and their parts once, for all runs and processes.

    data/digests/NAME.json   path, size, times, inode ─▶ SHA-256, ranges of parts, digests of blocks
                             URL, size, ETag of an object that is read in blocks ─▶ the same facts
                             URL, size, ETag, settings of its source ─▶ container, format, delimiter, encoding

An entry is valid only if all that the file system records about the file is unchanged, and if the file was at least
RACY_NS old when it was hashed. The times would not show a change within the clock tick in which the file was hashed.
All bytes that are read from a file later are compared with the digests of its blocks (blocks.py), even if these
digests come from the cache. A cache that is damaged or cannot be written counts as missing.

If the root is in a bucket, the entries of objects are stored there, too, so other machines neither identify nor hash an
object that is known. An object that changes has another ETag, and therefore another entry. If two machines process
the same object, they write the same bytes.
"""

from __future__ import annotations

import os
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from packcorpus.tasks.conversations.formats import FORMAT_NAMES
from packcorpus.tasks.core.errors import StorageError
from packcorpus.tasks.readers.containers import container_named
from packcorpus.tasks.readers.lines import HASH_CHUNK, Range, read_ahead
from packcorpus.tasks.sources.blocks import BLOCK, BlockDigests, HashedBlocks, fetch_all
from packcorpus.tasks.sources.model import Source, SourceFile
from packcorpus.tasks.storage.files import read_receipt, write_receipt
from packcorpus.tasks.storage.keys import key_of
from packcorpus.tasks.stores.mirror import mirror_of
from packcorpus.tasks.stores.urls import is_url

VERSION = 2  # of the hashing, of the split into ranges, and of the entries
FOUND = ("container", "format", "delimiter", "encoding")  # facts that the start of an object shows
FORMAT_VERSION = 1  # of the detection of FOUND; the key also contains the names of all formats

Found = TypeVar("Found")

RACY_NS = 2_000_000_000  # the coarsest clock of a file system in use ticks every two seconds


class Hashed(NamedTuple):
    """The result of hashing a file."""

    sha256: str
    ranges: list[Range]
    blocks: BlockDigests


class DigestCache:
    """A folder with the digests of files.

    With `fresh`, existing entries are ignored and written again. With `only_read`, no entry is written, so commands
    that only read do not write to a bucket.
    """

    def __init__(self, folder: Path, fresh: bool = False, only_read: bool = False):
        self._folder, self._fresh, self._only_read = folder, fresh, only_read
        self._written: set[str] = set()

    def find(self, file: SourceFile, part_size: int) -> Hashed | None:
        """Return the digests of a file that has not changed since, or None."""

        def hashed(entry: dict[str, Any]) -> Hashed:
            blocks = BlockDigests(entry["block"], b64decode(entry["blocks"], validate=True))
            return Hashed(entry["sha256"], [Range(*values) for values in entry["ranges"]], blocks)

        with suppress(TypeError):  # the path is not UTF-8
            return self._find(self._entry_of(file, part_size), file, hashed)
        return None

    def identified(self, file: SourceFile, source: Source, identify: Callable[[], SourceFile]) -> SourceFile:
        """Return an object with its container and format, from its entry if possible.

        A version of packcorpus with other formats uses a separate entry. Raises the errors of stores and `identify`.
        """

        def with_facts(entry: dict[str, Any]) -> SourceFile:
            container, format, delimiter, encoding = (str(entry[name]) for name in FOUND)
            container_named(container)  # raises LookupError
            return replace(file, container=container, format=format, delimiter=delimiter, encoding=encoding)

        facts = {"path": file.name, "state": _state_of(file)}
        settings = [source.format, source.columns, source.delimiter, source.encoding]
        key = key_of("format", facts | {"source": settings, "formats": FORMAT_NAMES}, FORMAT_VERSION)
        path = self._folder / f"{key}.json"
        if (known := self._find(path, file, with_facts)) is not None:
            return known
        known = identify()
        self._write(path, facts | {name: getattr(known, name) for name in FOUND}, file)
        return known

    def _find(self, path: Path, file: SourceFile, read: Callable[[dict[str, Any]], Found]) -> Found | None:
        """Return the facts in an entry if it is valid for the file, or None."""
        for arrived in (False, True) if not self._fresh else ():
            if arrived and not (file.identity and mirror_of(self._folder.parents[1]).adopt(path)):
                break
            with suppress(OSError, StorageError, LookupError, TypeError, ValueError):
                entry = read_receipt(path)
                if entry["path"] == _name_of(file) and entry["state"] == _state_of(file):
                    return read(entry)
        return None

    def start(self, file: SourceFile) -> list[Any]:
        """Return the state of a file that is to be hashed, for `keep`."""
        return [time.time_ns(), *_state_of(file)]

    def keep(self, file: SourceFile, part_size: int, started: list[Any], hashed: Hashed) -> None:
        """Write the result of hashing a file, unless the file may have changed meanwhile."""
        began, *state = started
        values: dict[str, Any] = {"path": _name_of(file), "state": state, "sha256": hashed.sha256}
        values |= {"ranges": [list(part) for part in hashed.ranges], "block": hashed.blocks.size}
        values["blocks"] = b64encode(hashed.blocks.joined).decode()
        with suppress(OSError, TypeError):  # TypeError: the path is not UTF-8
            if file.identity or (state == _state_of(file) and max(state[1:3]) <= began - RACY_NS):
                self._write(self._entry_of(file, part_size), values, file)

    def _write(self, path: Path, values: dict[str, Any], file: SourceFile) -> None:
        if self._only_read:
            return
        try:
            write_receipt(path, values)
        except (OSError, StorageError):
            return
        self._written.add(path.name)
        if file.identity:
            mirror_of(self._folder.parents[1]).push([path])

    def prune(self) -> None:
        """Remove damaged entries and those of lost files, if an entry was written."""
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

    def _entry_of(self, file: SourceFile, part_size: int) -> Path:
        """Return the path of an entry. Raises TypeError if a path is not UTF-8."""
        read: dict[str, Any] = {"path": _name_of(file), "container": file.container, "compression": file.compression}
        read |= {"part_size": part_size} | ({"state": _state_of(file)} if file.identity else {})
        return self._folder / f"{key_of('digests', read, VERSION)}.json"


def _name_of(file: SourceFile) -> str:
    return file.name if file.identity else str(file.path)


def _state_of(file: SourceFile) -> list[Any]:
    """Return the size, times, and inode of a file, or the size and ETag of an object.

    The times include the time of the last status change, because programs can set the modification time but not this
    one. The device is left out, because each machine that mounts a shared file system has another number for it.
    """
    if file.identity:
        return list(file.facts)
    stat = file.path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def hash_file(
    file: SourceFile,
    part_size: int,
    cache: DigestCache | None = None,
    check: Callable[[], None] = lambda: None,
) -> Hashed:
    """Hash a file and its parts, and write an entry of `cache`.

    `part_size` is in bytes. The blocks of an object in a bucket are kept at its path. `check` is called before each
    read and can end the work by raising an error. Raises DataError if the file changes meanwhile or cannot be split,
    OSError if it cannot be read, and the errors of stores.
    """
    started = cache.start(file) if cache else []
    blocks = HashedBlocks(min(BLOCK, HASH_CHUNK))
    read = fetch_all(file.path, file.name, file.facts, check) if file.identity else _chunks(file.path, check)
    ranges = container_named(file.container).split(file, part_size, read_ahead(blocks.passing(read)))
    hashed = Hashed(*ranges, blocks.digests)
    file.check_unchanged()
    if cache:
        cache.keep(file, part_size, started, hashed)
    return hashed


def _chunks(path: Path, check: Callable[[], None]) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(HASH_CHUNK):
            check()
            yield data
