"""Recognize, check, and split URLs.

s3://bucket/chats/*.jsonl  →  Url("s3", "bucket", "chats/*.jsonl")
hf://datasets/owner/name@revision/data/*.parquet  →  Dataset("owner/name", "revision", "data/*.parquet")

A URL never contains credentials; they come from the platform.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote

from tasks.core.errors import UsageError
from tasks.core.printable import suggest

BUCKETS = ("s3", "gs", "az")
SCHEMES = (*BUCKETS, "hf", "file")

_HUB = "hf://datasets/"

_OWNER_AND_NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"


class Url(NamedTuple):
    """A URL of a bucket. `key` has no leading slash; it may be empty."""

    scheme: str
    bucket: str
    key: str


class Dataset(NamedTuple):
    """A dataset on the Hugging Face Hub, and a path in it; `revision` may be empty."""

    name: str
    revision: str
    key: str

    @property
    def url(self) -> str:
        """Return the URL of the dataset itself."""
        return f"{_HUB}{self.name}{'@' * bool(self.revision)}{self.revision.replace('/', '%2F')}"


def is_url(text: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text) is not None


def refuse_url(path: Path, fix: str = "download it", does: str = "reads") -> None:
    """Raise UsageError if a path was made from a URL, but must be a local file.

    Such a path has lost a slash of the URL.
    """
    if re.match(rf"({'|'.join(SCHEMES)}|https?):/", str(path)):
        url = without_secrets(str(path).replace(":/", "://", 1))
        raise UsageError("url_not_supported", f"{url}: this command {does} local files only; {fix}")


def without_secrets(url: str) -> str:
    """Return the URL without user info and query, which may be credentials."""
    return re.sub(r"\?[^/]*=.*", "?…", re.sub(r"://[^/]*@", "://…@", url))


def check_url(url: str) -> str:
    """Return the scheme of a URL.

    Raises UsageError if the scheme is unknown, or if the URL contains credentials.
    """
    shown = without_secrets(url)
    if shown != url:
        raise UsageError("url_with_secret", f"{shown}: a URL must contain no user info and no query; remove them")
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        hint = suggest(scheme, SCHEMES)
        raise UsageError(
            "url_not_supported", f"{url}: {scheme}:// is not supported{hint}; use one of {known}, or download it"
        )
    return scheme


def split_url(url: str) -> Url:
    """Split the URL of a bucket.

    Raises UsageError if it does not name a bucket, or if it has a key that no store reads.
    """
    scheme = check_url(url)
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket or re.search(r"[*?\[\]]", bucket):
        raise UsageError("url_not_supported", f"{url}: does not name a bucket; expected {scheme}://BUCKET/KEY")
    if key and not {"", ".", ".."}.isdisjoint(key.removesuffix("/").split("/")):
        raise UsageError(
            "url_not_supported",
            f"{url}: a part of the key is empty, . or ..; remove that part, or rename the object if its key has it",
        )
    return Url(scheme, bucket, key)


def split_dataset(url: str) -> Dataset:
    """Split a dataset's URL like huggingface_hub. Raises UsageError if it is invalid."""
    check_url(url)
    found = re.fullmatch(
        rf"{_HUB}({_OWNER_AND_NAME})(?:@(refs/(?:convert/\w+|pr/\d+)|[^/]+))?(?:/(.*))?", url, re.DOTALL
    )
    if not found:
        raise UsageError("url_not_supported", f"{url}: expected hf://datasets/OWNER/NAME@REVISION/PATH")
    name, revision, key = found.groups(default="")
    return Dataset(name, unquote(revision), key.strip("/"))


def hub_name(path: str) -> Dataset | None:
    """Return the dataset that a path, such as openai/gsm8k, could name, or None."""
    return Dataset(path, "", "") if re.fullmatch(_OWNER_AND_NAME, path) else None


def local_path(url: str) -> str:
    """Return the path of a file:// URL. Raises UsageError unless it is absolute."""
    check_url(url)
    path = url.removeprefix("file://")
    if not PurePosixPath(path).is_absolute():
        raise UsageError("url_not_supported", f"{url}: expected file:///ABSOLUTE/PATH")
    return unquote(path)
