"""Files of streamed shards, in the corpus folder or copied to a bounded cache.

    Local:       name ─fetch─▶ the file of the corpus                             drop: nothing
    ShardCache:  name ─fetch─▶ a complete copy in the cache, of `copy(name, to)`  drop: the copy is deleted

`copy` copies a shard from a folder; a function that downloads has the same signature. The reader checks the digest of
every file before it reads the first row. Files that are fetched and not yet dropped have at most `limit` bytes in
total.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tasks.core.errors import Busy, InputMissing, StorageError
from tasks.storage.files import acquire_lock
from tasks.storage.manifest import repair_hint
from tasks.stores.mirror import remote_with

LOCK = "cache.lock"


class ShardFiles(Protocol):
    """Source of shard files; several threads call it, each for a different shard."""

    @property
    def limit(self) -> int | None:
        """Return the most bytes that may be fetched at a time; None: no limit."""

    @property
    def copies(self) -> bool:
        """Return whether files are copies, so that a damaged file may be refetched."""

    def fetch(self, name: str) -> Path:
        """Fetch the complete file and return the folder that contains it."""

    def drop(self, name: str) -> None:
        """Delete the file if it is a copy."""


@dataclass(frozen=True, slots=True)
class Local:
    """Files in the corpus folder itself."""

    folder: Path
    limit: None = None
    copies: bool = False

    def fetch(self, name: str) -> Path:
        return self.folder

    def drop(self, name: str) -> None:
        pass


class ShardCache:
    """Cache of shard copies, in a folder that belongs to this process.

    Copies that a killed process left behind are deleted. Raises Busy if another process uses the folder, StorageError
    if a copy cannot be written.
    """

    copies = True

    def __init__(self, copy: Callable[[str, Path], None], folder: Path, limit: int):
        self._copy, self._folder, self.limit = copy, folder, limit
        if not acquire_lock(folder / LOCK):
            raise Busy("busy", f"{folder}: another run is using this cache; set another `cache`, or wait until it ends")
        for path in folder.iterdir():
            if path.name != LOCK:
                path.unlink()

    def fetch(self, name: str) -> Path:
        # Only a complete copy has the name without `.partial`.
        target = self._folder / name
        partial = target.with_name(f"{target.name}.partial")
        try:
            self._copy(name, partial)
            partial.rename(target)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise StorageError(
                "cannot_write",
                f"{target}: cannot be copied: {error.strerror or error}; free space there, or set another `cache`",
            ) from error
        return self._folder

    def drop(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)


def copy_from(folder: Path) -> Callable[[str, Path], None]:
    """Return a `copy` function for the shards of a folder.

    The folder may be on a network file system, or stand for a bucket.
    """

    def copy(name: str, to: Path) -> None:
        if remote := remote_with(folder / name):
            remote.copy(folder / name, to)
            return
        if not (folder / name).is_file():
            raise InputMissing("file_missing", f"{folder / name}: is missing; {repair_hint(folder)}")
        shutil.copyfile(folder / name, to)

    return copy
