"""Keep the digests of source files, so that later runs do not hash them again.

    data/digests/NAME.json   path, size, times, inode ─▶ SHA-256, ranges of parts, digests of blocks
                             URL, size, ETag of an object that is read in blocks (remote_blocks.py) ─▶ the same facts
                             URL, size, ETag, settings of its source ─▶ container, format, delimiter, encoding

An entry is valid only if all that the file system records about the file is unchanged, and if the file was at least
RACY_NS old when it was hashed. The times would not show a change within the clock tick in which the file was hashed.
All bytes that are read from a file later are compared with the digests of its blocks (readers/hashed_blocks.py), even
if these digests come from the cache. A cache that is damaged or cannot be written counts as missing.

If the root is in a bucket, the entries of objects are stored there, too, so the first machine that needs an object
identifies and hashes it. An object that changes has another ETag, and therefore another entry. If two machines process
the same object, they write the same bytes.

A large file that is too young for a valid entry has an entry, too, because steps refer to it (sent_digests.py).
"""

from __future__ import annotations

import os
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tasks.conversations.formats import FORMAT_NAMES
from tasks.core.errors import StorageError
from tasks.core.notes import noted
from tasks.readers.container import Range
from tasks.readers.containers import container_named
from tasks.readers.hashed_blocks import BlockDigests
from tasks.sources.digests.sent_digests import blocks_in, is_large
from tasks.sources.model import Source, SourceFile
from tasks.storage.files import read_receipt, write_receipt
from tasks.storage.keys import key_of
from tasks.stores.claims import make_once
from tasks.stores.mirror import LOCAL, Mirror, mirror_of
from tasks.stores.threads import run_all
from tasks.stores.urls import is_url

VERSION = 2  # of the hashing, of the split into ranges, and of the entries

FOUND = ("container", "format", "delimiter", "encoding")  # facts that the start of an object shows

FORMAT_VERSION = 1  # of the detection of FOUND; the key also contains the names of all formats

WORTH_A_CLAIM = 4 << 20  # bytes of an object; a smaller object takes one request, and so does a claim

Found = TypeVar("Found")

RACY_NS = 2_000_000_000  # the coarsest clock of a file system in use ticks every two seconds

YOUNG_NS = 60_000_000_000  # the largest difference between the clocks of two machines

AT_ONCE = 8  # entries that are looked up concurrently


class Hashed(NamedTuple):
    """The result of hashing a file.

    `record` is the name of the entry that holds the result, or "" if there is no entry.
    """

    sha256: str
    ranges: list[Range]
    blocks: BlockDigests
    record: str = ""


class DigestCache:
    """A folder with the digests of files.

    With `fresh`, existing entries are ignored and written again. With `only_read`, no entry is written, so commands
    that only read do not write to a bucket.
    """

    def __init__(self, folder: Path, fresh: bool = False, only_read: bool = False):
        self._folder, self._fresh, self._only_read = folder, fresh, only_read
        self._written: set[str] = set()
        self._others_write = False  # other machines write entries for this run

    def find(self, file: SourceFile, part_size: int) -> Hashed | None:
        """Return the digests of a file that has not changed since it was hashed.

        Returns None if the cache has no valid entry. Raises the errors of stores.
        """
        with suppress(TypeError):  # the path is not UTF-8
            path = self.entry_of(file, part_size)
            found = self._find(path, file, partial(_hashed, path.name))
            if found and is_large(found.blocks) and not self._mirror.adopt(path):
                self._mirror.push([path])  # steps refer to it
            return found
        return None

    def missing(self, files: Sequence[SourceFile], part_size: int) -> list[SourceFile]:
        """Return the files without a valid entry for which any machine can write one.

        If the root is in a bucket, these are only objects, because entries of files are not sent there. Files are left
        out if they are so young that another machine may not trust their times. With `fresh`, there are none, because a
        new entry would be ignored. Raises the errors of stores.
        """
        if self._fresh:
            return []
        # Only names that exist are looked up: NFS would remember for a minute that a file does not exist.
        names = {path.name for path in self._folder.glob("*.json")}
        missing = set[int]()

        def look(number: int) -> None:
            file = files[number]
            if not file.identity and (self._mirror is not LOCAL or _is_young(file)):
                return
            with suppress(TypeError):  # the path is not UTF-8
                entry = self.entry_of(file, part_size)
                is_known = (file.identity or entry.name in names) and self.find(file, part_size)
                if not is_known:
                    missing.add(number)

        with noted(lambda: f"looking for the digests of {len(files):,} files"):
            run_all(look, range(len(files)), AT_ONCE, lambda: None)
        self._others_write = bool(missing)
        return [files[number] for number in sorted(missing)]

    def find_once(
        self,
        file: SourceFile,
        part_size: int,
        hashed: Callable[[], Hashed],
        wait: bool,
        check: Callable[[], None] = lambda: None,
    ) -> Hashed | None:
        """Return the known digests of an object, or hash it unless another machine does.

        If another machine hashes the object, this machine waits for the result; without `wait`, it returns None
        instead. `check` is called before each pause and can end the wait.
        """
        if self._fresh or file.bytes < WORTH_A_CLAIM or self._mirror is LOCAL:
            return self.find(file, part_size) or hashed()
        path, find = self.entry_of(file, part_size), partial(self.find, file, part_size)
        return make_once(self._mirror, path, find, hashed, wait=wait, check=check)

    def find_format(self, file: SourceFile, source: Source) -> SourceFile | None:
        """Return an object with the container and format in its entry, or None.

        Raises the errors of stores.
        """
        return self._find(self._format_entry(file, source), file, partial(_identified, file))

    def keep_format(self, file: SourceFile, source: Source, found: SourceFile) -> None:
        """Write an entry with the facts that the start of an object shows."""
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
        """Write the result of hashing a file, and return it with the name of its entry.

        The entry is never valid if the file may have changed while it was hashed.
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
            path = self.entry_of(file, part_size)
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
        """Remove damaged entries and entries of files that no longer exist.

        Reads nothing if no entry was written for this run.
        """
        for path in self._folder.glob("*.json") if self._written or self._others_write else ():
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

    def entry_of(self, file: SourceFile, part_size: int) -> Path:
        """Return the path of the entry of a file.

        Raises TypeError if the path of the file is not UTF-8.
        """
        read: dict[str, Any] = {"path": _name_of(file), "container": file.container, "compression": file.compression}
        read |= {"part_size": part_size} | ({"state": _state_of(file)} if file.identity else {})
        return self._folder / f"{key_of('digests', read, VERSION)}.json"

    def _format_entry(self, file: SourceFile, source: Source) -> Path:
        """Return the entry of an object whose format is not known yet.

        A version of packcorpus with other formats uses a separate entry.
        """
        set_here = [source.format, source.columns, source.delimiter, source.encoding]
        read = {"path": file.name, "state": _state_of(file), "source": set_here, "formats": FORMAT_NAMES}
        return self._folder / f"{key_of('format', read, FORMAT_VERSION)}.json"

    @property
    def _mirror(self) -> Mirror:
        return mirror_of(self._folder.parents[1])


def _read(path: Path, file: SourceFile, read: Callable[[dict[str, Any]], Found]) -> Found | None:
    """Return the facts in an entry if it is valid for the file, or None."""
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
    """Return the size, times, and inode of a file, or the size and ETag of an object.

    The times include the time of the last status change, because programs can set the modification time but not this
    one. The device is left out, because each machine that mounts a shared file system has another number for it.
    """
    if file.identity:
        return list(file.facts)
    stat = file.path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _is_young(file: SourceFile) -> bool:
    with suppress(OSError):
        return max(_state_of(file)[1:3]) > time.time_ns() - YOUNG_NS
    return True
