"""A store in a folder of the local file system, which behaves like a bucket."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from tasks.core.errors import InputMissing, StorageError, UsageError
from tasks.storage.files import atomic_file, locked
from tasks.stores.receive import CHUNK, changed, cut_off, receive
from tasks.stores.store import Facts, Progress


class Folder:
    """The files below `root`.

    Hidden files are not objects: they are temporary files of writers, some of which may have been killed.
    """

    def __init__(self, root: Path):
        self.root = root

    def url_of(self, key: str) -> str:
        return str(self._path(key))

    def head(self, key: str) -> Facts | None:
        path = self._path(key)
        with self._reading(key):
            return _facts(path.stat()) if path.is_file() else None

    def get(self, key: str) -> bytes:
        with self._reading(key):
            return self._path(key).read_bytes()

    def fetch(self, key: str, target: Path, expected: Facts, progress: Progress | None = None) -> str:
        with self._reading(key), self._path(key).open("rb") as file:
            if _facts(os.fstat(file.fileno())) != expected:
                raise changed(self.url_of(key))
            digest = receive(iter(lambda: file.read(CHUNK), b""), target, expected, self.url_of(key), progress)
            if _facts(os.fstat(file.fileno())) != expected:
                target.unlink()
                raise changed(self.url_of(key))
            return digest

    def ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        if not any(length for _, length in ranges):  # like a bucket, which sends no request
            return [b""] * len(ranges)
        found = []
        with self._reading(key), self._path(key).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for start, length in ranges:
                if length and start + length > size:
                    raise cut_off(self.url_of(key), size, start + length)
                file.seek(start)
                found.append(file.read(length))
        return found

    def read(self, key: str, expected: Facts, start: int, length: int) -> bytes:
        if self.head(key) != expected:
            raise changed(self.url_of(key))
        return self.ranges(key, [(start, length)])[0]

    def put(self, key: str, source: Path | bytes, absent: bool = False, expected: Facts | None = None) -> bool:
        path = self._path(key)
        if expected:
            with locked(path.with_name(f".{path.name}.lock")):
                return self.head(key) == expected and self.put(key, source)
        try:
            with atomic_file(path, absent=absent) as out:
                if isinstance(source, bytes):
                    out.write(source)
                else:
                    with source.open("rb") as file:
                        while chunk := file.read(CHUNK):
                            out.write(chunk)
        except StorageError as error:
            if absent and isinstance(error.__cause__, FileExistsError) and path.exists():
                return False
            raise
        return True

    def list(self, prefix: str = "") -> Iterator[tuple[str, Facts]]:
        top = self._path(prefix) if prefix else self.root
        found = []
        with self._reading(prefix):
            for where, folders, files in os.walk(top):
                folders[:] = [name for name in folders if not name.startswith(".")]
                found += [Path(where, name) for name in files if not name.startswith(".")]
        keys = {path.relative_to(self.root).as_posix(): path for path in found}
        for key in sorted(keys, key=os.fsencode):
            with suppress(FileNotFoundError):  # deleted since
                yield key, _facts(keys[key].stat())

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError("cannot_write", f"{path}: cannot be deleted: {error.strerror}") from error

    def _path(self, key: str) -> Path:
        pure = PurePosixPath(key)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise UsageError("url_not_supported", f"{key!r}: is not a key below {self.root}")
        return self.root / pure

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise InputMissing("object_missing", f"{self.url_of(key)}: does not exist") from None
        except PermissionError:
            raise StorageError("store_denied", f"{self.url_of(key)}: its permissions deny access") from None
        except OSError as error:
            raise StorageError(
                "cannot_read", f"{self.url_of(key)}: cannot be read: {error.strerror or error}"
            ) from None


def _facts(stat: os.stat_result) -> Facts:
    return Facts(stat.st_size, f"{stat.st_mtime_ns}-{stat.st_ino}")
