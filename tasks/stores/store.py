"""Define what can be read from a remote store.

    open_store("s3://bucket/prefix")   Bucket: S3, Google Cloud Storage, Azure, through obstore (bucket.py)
    open_hub("hf://datasets/o/n")      Hub: a dataset at one commit, read-only, through huggingface_hub (hub.py)

Keys are relative to the root, with /. An object is read whole into a local file. A reader thus never sees a part of an
object, and no step depends on the behavior of a remote stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

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
