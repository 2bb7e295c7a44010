"""Open the store of a URL or folder.

    open_store("s3://bucket/prefix")   Bucket: S3, Google Cloud Storage, Azure, through obstore
    open_store("file:///folder")       Folder: the local file system
    open_hub("hf://datasets/o/n")      Hub: a dataset at one commit, read-only, through huggingface_hub

All stores behave alike: tests run the same table against each. Keys are relative to the root, with /. An object is
written whole from a finished local file, and read whole into a local file. A reader thus never sees a part of an
object, and no step depends on the behavior of a remote stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from tasks.core.errors import UsageError
from tasks.stores.urls import check_url, is_url, local_path

Progress = Callable[[int], None]
"""Called with the number of bytes of each block that arrives. An exception in it ends the transfer."""


class Facts(NamedTuple):
    """The identity of an object's content: size, and ETag, version, or checksum."""

    size: int
    identity: str


class Reading(Protocol):
    """A store to read from.

    Its methods raise PackError, naming the URL. The reasons are store_denied, object_missing, store_busy, store_failed,
    object_cut, object_changed, and scratch_full.
    """

    def url_of(self, key: str) -> str:
        """Return the URL of an object, as messages show it."""

    def head(self, key: str) -> Facts | None:
        """Return the facts of an object, or None if it does not exist."""

    def get(self, key: str) -> bytes:
        """Return the content of a small object."""

    def fetch(self, key: str, target: Path, expected: Facts, progress: Progress | None = None) -> str:
        """Write an object to `target`, completely or not at all; return its SHA-256.

        Raises object_changed if it is not the object that `expected` describes.
        """

    def list(self, prefix: str = "") -> Iterator[tuple[str, Facts]]:
        """Yield the objects below the folder `prefix`, in the byte order of their keys."""


class Store(Reading, Protocol):
    """A store to read from and write to."""

    def ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the (start, length) ranges of an object.

        Raises object_cut if the object ends before a range does. A range of length 0 is empty, whatever its start.
        """

    def read(self, key: str, expected: Facts, start: int, length: int) -> bytes:
        """Return bytes of an object. Raises object_changed if it is not as `expected`."""

    def put(self, key: str, source: Path | bytes, absent: bool = False, expected: Facts | None = None) -> bool:
        """Write an object from a finished file, completely or not at all.

        With `expected`, return False and write nothing unless the object is the one that `expected` describes, also if
        another writer is just faster. A store that cannot compare at the moment of writing compares shortly before.
        With `absent`, return False and write nothing if the object exists, also if another writer is just faster. The
        content is then held in memory, so `absent` is for receipts and manifests. False after an error of the server
        may mean that the first attempt has written the object: compare the content.
        """

    def delete(self, key: str) -> None:
        """Delete an object, if it exists."""


def open_store(where: str | Path) -> Store:
    """Open a bucket (s3://, gs://, az://) or a folder (a path or file://).

    Raises UsageError or PartMissing.
    """
    from tasks.stores.folder import Folder

    if isinstance(where, Path) or not is_url(where):
        return Folder(Path(where))
    scheme = check_url(where)
    if scheme == "file":
        return Folder(Path(local_path(where)))
    if scheme == "hf":
        raise UsageError(
            "url_not_supported", f"{where}: is read-only and can only be a source; use a bucket or a folder"
        )
    from tasks.stores.bucket import is_forked, open_bucket

    if is_forked():
        from tasks.stores.forked import open_forked

        return open_forked(where)
    return open_bucket(where)
