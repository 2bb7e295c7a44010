"""Where streamed shards are read: in the folder of the corpus, or as copies in a cache of bounded size.

    Local:       name ─fetch─▶ the file of the corpus                             drop: nothing
    ShardCache:  name ─fetch─▶ a complete copy in the cache, of `copy(name, to)`  drop: the copy is deleted

`copy` copies from a folder; one that downloads has the same signature. The reader checks the digest of every file
before its first row, and keeps the sum of the files that it has fetched and not dropped below `limit`.
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
    """What the reader of shards needs; several threads call it, each for another shard."""

    @property
    def limit(self) -> int | None:
        """Return how many bytes may be fetched at a time; None: any."""

    @property
    def copies(self) -> bool:
        """Return whether files are copies: a damaged one may be fetched again."""

    def fetch(self, name: str) -> Path:
        """Return the folder that contains the complete file."""

    def drop(self, name: str) -> None:
        """Delete the file if it is a copy."""


@dataclass(frozen=True, slots=True)
class Local:
    """The files of the corpus itself."""

    folder: Path
    limit: None = None
    copies: bool = False

    def fetch(self, name: str) -> Path:
        return self.folder

    def drop(self, name: str) -> None:
        pass


class ShardCache:
    """Copies of shards in a folder that belongs to this process; copies of a killed one are deleted.

    Raises Busy if another process uses the folder, StorageError if it cannot be written.
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
        # The name without its end is complete: a partial copy never has it.
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
    """Return a `copy` for shards of a folder, for example of a network file system, or of a bucket it stands for."""

    def copy(name: str, to: Path) -> None:
        if remote := remote_with(folder / name):
            remote.copy(folder / name, to)
            return
        if not (folder / name).is_file():
            raise InputMissing("file_missing", f"{folder / name}: is missing; {repair_hint(folder)}")
        shutil.copyfile(folder / name, to)

    return copy
