"""Scratch folders: the local folders that stand for roots in buckets.

s3://bucket/prefix  ─scratch_of─▶  ~/.cache/packcorpus/<digest of the URL>/     with the URL in the file .url
PATH of a command   ─local_path_of─▶  the same path, or the path in a scratch folder at which the object will be

A URL is never used as a path.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import xxhash

from tasks.core.errors import UsageError
from tasks.storage.files import write_bytes
from tasks.stores.urls import BUCKETS, check_url, is_url, local_path, split_url

SCRATCH = "PACKCORPUS_SCRATCH"  # the environment variable that names the folder of all scratch folders

MARK = ".url"

# The root and the key in the URL of a manifest or a corpus folder.
_BELOW_ROOT = re.compile(r"(?P<root>.*?)/(?P<key>manifests/[^/]+\.json|data/corpora/[^/]+(/.*)?)")


def home() -> Path:
    """Return the folder of all scratch folders."""
    return _home(*map(os.environ.get, (SCRATCH, "XDG_CACHE_HOME", "HOME")))


@lru_cache(maxsize=4)
def _home(scratch: str | None, cache: str | None, user: str | None) -> Path:
    """Return the folder for these environment variables; every step asks for it."""
    return Path(scratch or Path(cache or "~/.cache").expanduser() / "packcorpus").resolve()


def scratch_of(url: str) -> Path:
    """Create and return the scratch folder of a root in a bucket. Raises PackError."""
    if check_url(url) not in BUCKETS:
        raise UsageError(
            "url_not_supported", f"{url}: cannot be a root; use a bucket (s3://, gs://, az://) or a folder"
        )
    split_url(url)
    url = url.rstrip("/")
    folder = home() / str(xxhash.xxh3_128_hexdigest(url.encode()))
    if not (folder / MARK).is_file():
        write_bytes(folder / MARK, url.encode())
    return folder


def root_of(text: str | Path) -> Path:
    """Return the folder that --root names: a path, or the scratch folder of a URL.

    A default of the command line arrives as a Path. Raises UsageError or StorageError.
    """
    if isinstance(text, Path) or not is_url(text):
        return Path(text)
    return Path(local_path(text)) if check_url(text) == "file" else scratch_of(text)


def sent_root(root: Path) -> str:
    """Return what `root_of` reads on another machine: an absolute path, or a URL."""
    return url_of(root) or str(root.absolute())


def local_path_of(text: str | Path) -> Path:
    """Return the local path that an argument of a command names.

    The path is in a scratch folder if the argument is the URL of an object. Nothing is fetched. Raises UsageError or
    StorageError.
    """
    if isinstance(text, Path) or not is_url(text):
        return Path(text)
    if check_url(text) not in BUCKETS:
        return root_of(text)
    if found := _BELOW_ROOT.fullmatch(text.rstrip("/")):
        return scratch_of(found["root"]) / found["key"]
    folder, _, name = text.rpartition("/")
    return scratch_of(folder) / name if name.endswith(".json") else scratch_of(text)


def url_of(root: Path) -> str:
    """Return the URL that a folder stands for, or "" if it is not a scratch folder."""
    if root.parent == home():
        with suppress(OSError):
            return (root / MARK).read_text(encoding="utf-8")
    return ""


def scratch_with(path: Path) -> Path | None:
    """Return the scratch folder that contains a path, or None."""
    parts = path.parts
    above = home().parts
    if len(parts) > len(above) and parts[: len(above)] == above:
        return home() / parts[len(above)]
    return None
