"""Receive an object into a file, with errors for a full disk and a cut body."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path

from tasks.core.errors import DataError, StorageError
from tasks.core.printable import in_bytes
from tasks.storage.files import atomic_file
from tasks.stores.store import Facts, Progress

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
    """Return the error for a disk without room for `size` bytes.

    `url` is the object to fetch, or the first of several objects.
    """
    return StorageError(
        "scratch_full",
        f"{url}: the disk of {folder} has no room for {in_bytes(size)}; make room, or use another --root (or, for a "
        "root in a bucket, another PACKCORPUS_SCRATCH)",
    )
