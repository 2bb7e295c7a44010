"""Write files atomically: temporary file → fsync → rename → fsync of the folder.

    with atomic_file(path) as out:      .name.XXXX.tmp, locked while it is written
        out.write(…)                    out.digest(), out.size: hashed while the bytes are in memory
                                        → renamed to `path` when the block ends, removed if it fails

A reader therefore sees a complete file or none. New folders are synced, too. The temporary file of a killed run is not
locked; the next writer of the same file removes it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

import orjson
import xxhash

from packcorpus.tasks.core.errors import StorageError
from packcorpus.tasks.core.printable import in_bytes
from packcorpus.tasks.core.process import free_disk

CHUNK = 1 << 20
# Start writeback after this many bytes, so that the disk writes during computation and fsync has little left to do.
WRITEBACK_BYTES = 8 << 20
LOCK_PAUSE = 0.05  # seconds between attempts to lock a file that another holder has locked
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")  # names of the files that `atomic_file` writes
# SHA-256 is for files that may leave the machine. XXH3 is for local files: it also detects damage, ten times as fast.
ALGORITHMS: dict[str, Any] = {"sha256": hashlib.sha256, "xxh3": xxhash.xxh3_128}


class HashingWriter:
    """A binary file that counts and hashes its bytes; pyarrow can write to it."""

    def __init__(self, file: IO[bytes], algorithm: str):
        self._file = file
        self._digest = ALGORITHMS[algorithm]()
        self.size = 0
        self._started = 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._file.write(view)
        self._digest.update(view)
        self.size += view.nbytes
        if self.size - self._started >= WRITEBACK_BYTES:
            # This starts to write dirty pages, and keeps them in memory. Not every system supports it.
            with suppress(AttributeError, OSError):
                os.posix_fadvise(self._file.fileno(), self._started, self.size - self._started, os.POSIX_FADV_DONTNEED)
            self._started = self.size
        return view.nbytes

    def flush(self) -> None:
        self._file.flush()

    def digest(self) -> str:
        return str(self._digest.hexdigest())


@contextmanager
def atomic_file(path: Path, algorithm: str = "sha256") -> Iterator[HashingWriter]:
    """Write `path` completely, or raise StorageError and write nothing."""
    with scratch_file(path, sync=True) as file:
        writer, handle = HashingWriter(file, algorithm), file.fileno()
        yield writer
        file.flush()
        arrived = os.fstat(handle).st_size
        if arrived != writer.size:
            raise OSError(f"{writer.size:,} bytes were written, but the file has {arrived:,}")


@contextmanager
def scratch_file(path: Path, sync: bool = False) -> Iterator[IO[bytes]]:
    """Write `path` completely or not at all.

    Without `sync`, a power failure may cut it.
    """
    with _writing(path):
        make_folder(path.parent)
        remove_abandoned(path)
        # Choose the name before the file exists, so that the file is removed even if an interrupt follows at once.
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            with _open_locked(temporary, "xb") as file:
                yield file
                file.flush()
                if sync:
                    _sync(file.fileno())
                os.rename(temporary, path)
            if sync:
                sync_folder(path.parent)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"{path}: cannot be written: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and (free := free_disk(path.parent)) is not None:
            problem += f"; {in_bytes(free)} are free there; packcorpus check says how much a run needs"
        raise StorageError("cannot_write", problem) from error


def make_folder(folder: Path) -> None:
    """Create a folder and its parents so that they survive a power failure."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def _open_locked(path: Path, mode: Literal["xb", "ab"], waiting: Callable[[], None] = lambda: None) -> IO[bytes]:
    """Open and lock a file, calling `waiting` while another holder has locked it.

    Opens a new file if another process removes the file before it is locked.
    """
    while True:
        file = path.open(mode)
        try:
            while not _is_locked(file):
                waiting()
                time.sleep(LOCK_PAUSE)
            if os.fstat(file.fileno()).st_nlink:
                return file
        except BaseException:
            file.close()
            raise
        file.close()


_locks: dict[Path, IO[bytes]] = {}


def acquire_lock(path: Path) -> bool:
    """Lock `path` until this process and all children forked from it have ended.

    Returns False if another process holds the lock, and True if this process already does. Raises StorageError if the
    file cannot be created.
    """
    path = path.absolute()
    if path in _locks:
        return True
    with _writing(path):
        make_folder(path.parent)
        file = path.open("ab")
        try:
            if _is_locked(file):
                _locks[path] = file
                return True
        finally:
            if path not in _locks:
                file.close()
        return False


def hold_shared(path: Path) -> None:
    """Share the lock `path` until this process and all children forked from it end.

    Waits while another holds it `alone`. Raises StorageError if the file cannot be created.
    """
    path = path.absolute()
    if path in _locks:
        return
    with _writing(path):
        make_folder(path.parent)
        file = path.open("ab")
        while not _is_locked(file, fcntl.LOCK_SH):
            time.sleep(LOCK_PAUSE)
        _locks[path] = file


@contextmanager
def alone(path: Path) -> Iterator[bool]:
    """Lock `path` for the block unless others share it; yield whether it is locked."""
    with _writing(path):
        make_folder(path.parent)
        file = path.open("ab")
    with file:
        yield _is_locked(file)


@contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock while the block runs; other threads and processes wait.

    The lock file exists only while the lock is held. A caller that has to wait calls `waiting` repeatedly; an exception
    in it ends the wait. Raises StorageError if the lock file cannot be created.
    """
    with _writing(path):
        make_folder(path.parent)
        file = _open_locked(path, "ab", waiting)
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(path)
        file.close()


def _is_locked(file: IO[bytes], kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a file unless another holder has; return whether it is locked now."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_abandoned(path: Path) -> bool:
    """Remove abandoned temporary files of `path`; return whether others are in use."""
    others, start = False, f".{path.name}."
    try:
        names = os.listdir(path.parent)  # `glob` would compile a pattern for every file that is written
    except OSError:  # the folder does not exist or cannot be read
        return False
    for name in names:
        if not (name.startswith(start) and name.endswith(".tmp", len(start))):
            continue
        old = path.with_name(name)
        # Open for writing, because NFS does not lock other files.
        with suppress(OSError), old.open("r+b") as file:
            if not _is_locked(file):
                others = True
            elif os.fstat(file.fileno()).st_nlink:  # another process may have removed it, and a writer created it again
                old.unlink()
    return others


def is_abandoned(path: Path) -> bool:
    """Return whether no process is writing a temporary file."""
    with suppress(OSError), path.open("r+b") as file:
        return _is_locked(file)
    return False


def sync_folder(folder: Path) -> None:
    with _writing(folder):
        handle = os.open(folder, os.O_RDONLY)
        try:
            _sync(handle)
        finally:
            os.close(handle)


def _sync(handle: int) -> None:
    """Wait until a file or folder is on disk; on macOS, fsync is not enough."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        with suppress(OSError):  # not every file system supports it
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
            return
    os.fsync(handle)


def give_usual_mode(path: Path) -> None:
    """Give a file that a library made for its owner alone the mode of other files."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        example = Path(folder) / "example"  # os.umask could only be read by changing it, also for other threads
        example.touch()
        path.chmod(example.stat().st_mode & 0o777)


def write_bytes(path: Path, data: bytes) -> dict[str, Any]:
    """Write `path` completely or not at all, and return its `bytes` and `sha256`."""
    with atomic_file(path) as out:
        out.write(data)
    return {"bytes": out.size, "sha256": out.digest()}


def copy_file(source: Path, path: Path) -> dict[str, Any]:
    """Copy a file in chunks, and return the `bytes` and `sha256` that were written."""
    with source.open("rb") as stream, atomic_file(path) as out:
        while chunk := stream.read(CHUNK):
            out.write(chunk)
    return {"bytes": out.size, "sha256": out.digest()}


def to_json(value: Any) -> bytes:
    """Return published JSON: indented, keys in the given order, a final newline."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises StorageError if it cannot be read or is not JSON."""
    try:
        return orjson.loads(path.read_bytes())
    except OSError as error:
        raise StorageError("cannot_read", f"{path}: cannot be read: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise StorageError(
            "damaged_artefact", f"{path}:{error.lineno}:{error.colno}: is not JSON: {error.msg}"
        ) from error


def digest_of(path: Path, algorithm: str) -> str:
    """Return the hexadecimal digest of a file; `algorithm` is one of ALGORITHMS."""
    with path.open("rb") as file:
        return str(hashlib.file_digest(file, ALGORITHMS[algorithm]).hexdigest())


def sha256_of(path: Path) -> str:
    return digest_of(path, "sha256")


def write_receipt(path: Path, values: dict[str, Any]) -> None:
    """Write a receipt: a record of the outputs of a task, and its own checksum.

    A receipt is written last, so it also marks the task as done.
    """
    write_bytes(path, to_json(values | {"seal": _seal_of(values, path)}))


def read_receipt(path: Path) -> dict[str, Any]:
    """Return the values of a receipt; raise StorageError if damaged or misplaced."""
    values = read_json(path)
    seal = values.pop("seal", None) if isinstance(values, dict) else None
    if seal is None or seal != _seal_of(values, path):
        raise StorageError("damaged_artefact", f"{path}: damaged or edited; delete it, then run again")
    return dict(values)


def _seal_of(values: dict[str, Any], path: Path) -> str:
    # The receipt of another part, shard, or corpus must not match.
    return str(xxhash.xxh3_128_hexdigest(to_json([path.parent.name, path.name, values])))


def has_artifact(file: Path, receipt: Path, *, checksum: str = "", refused: Collection[str] = ()) -> bool:
    """Return whether `file` exists as its receipt describes it.

    This compares the size and, if `checksum` names an algorithm (sha256, xxh3), the checksum. The result is False if
    one of the engines in `refused` made the file.
    """
    try:
        found = read_receipt(receipt)
        return bool(
            found["bytes"] == file.stat().st_size
            and not is_refused(found, refused)
            and not (checksum and found[checksum] != digest_of(file, checksum))
        )
    except (StorageError, KeyError, TypeError, OSError):
        return False


def is_refused(receipt: dict[str, Any], refused: Collection[str]) -> bool:
    """Return whether one of the engines in `refused` made a token file."""
    return receipt.get("engine") in refused or receipt.get("rendering") in refused


def has_listed(receipt: Path) -> bool:
    """Return whether a receipt and the `files` that it lists exist, as recorded."""
    try:
        sizes = read_receipt(receipt)["files"]
        return all((receipt.parent / name).stat().st_size == size for name, size in sizes.items())
    except (StorageError, KeyError, TypeError, AttributeError, OSError):
        return False
