"""Check and split URLs, and find the folders that stand for roots in buckets.

    s3://bucket/chats/*.jsonl  →  Url("s3", "bucket", "chats/*.jsonl")
    hf://datasets/owner/name@revision/data/*.parquet  →  Dataset("owner/name", "revision", "data/*.parquet")
    s3://bucket/prefix  ─scratch_of─▶  ~/.cache/packcorpus/<digest of the URL>/     with the URL in the file .url
    PATH of a command   ─local_path_of─▶  the same path, or the path in a scratch folder at which the object will be

A URL never contains credentials, which come from the platform, and is never used as a path.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote

import xxhash

from packcorpus.tasks.core.errors import UsageError
from packcorpus.tasks.core.printable import suggest
from packcorpus.tasks.storage.files import write_bytes

BUCKETS = ("s3", "gs", "az")
SCHEMES = (*BUCKETS, "hf", "file")

_HUB = "hf://datasets/"

_HUB_MODEL = "hf://(?!datasets/)"

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
    """Raise UsageError if a path that must be a local file was made from a URL."""
    if re.match(rf"({'|'.join(SCHEMES)}|https?):/", str(path)):
        url = without_secrets(str(path).replace(":/", "://", 1))
        raise UsageError("url_not_supported", f"{url}: this command {does} local files only; {fix}")


def without_secrets(url: str) -> str:
    """Return the URL without user info and query, which may be credentials."""
    return re.sub(r"\?[^/]*=.*", "?…", re.sub(r"://[^/]*@", "://…@", url))


def check_url(url: str) -> str:
    """Return the scheme of a URL. Raises UsageError if unknown, or with a secret."""
    shown = without_secrets(url)
    if shown != url:
        raise UsageError("url_with_secret", f"{shown}: a URL must contain no user info and no query; remove them")
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        hint = suggest(scheme, SCHEMES)
        problem = f"{scheme}:// is not supported{hint}; use one of {known}, or download it"
        raise UsageError("url_not_supported", f"{url}: {problem}")
    return scheme


def split_url(url: str) -> Url:
    """Split the URL of a bucket. Raises UsageError if no store can read it."""
    scheme = check_url(url)
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket or re.search(r"[*?\[\]]", bucket):
        raise UsageError("url_not_supported", f"{url}: does not name a bucket; expected {scheme}://BUCKET/KEY")
    if key and not {"", ".", ".."}.isdisjoint(key.removesuffix("/").split("/")):
        problem = "a part of the key is empty, . or ..; remove that part, or rename the object if its key has it"
        raise UsageError("url_not_supported", f"{url}: {problem}")
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


class Model(NamedTuple):
    """A model on the Hugging Face Hub; `revision` may be empty."""

    name: str
    revision: str

    def download_command(self, patterns: Sequence[str]) -> str:
        """Return the command that downloads the files that match."""
        options = [("--revision", self.revision)] * bool(self.revision) + [("--include", each) for each in patterns]
        return shlex.join(["hf", "download", self.name, *chain.from_iterable(options)])


def model_named(text: str) -> Model | None:
    """Return the model that a text, such as Qwen/Qwen3-8B@main, could name, or None."""
    found = re.fullmatch(rf"({_HUB_MODEL})?({_OWNER_AND_NAME}|[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?", text)
    return Model(found[2], found[3] or "") if found and not found[2].endswith((".json", ".model")) else None


def local_path(url: str) -> str:
    """Return the path of a file:// URL. Raises UsageError unless it is absolute."""
    check_url(url)
    path = url.removeprefix("file://")
    if not PurePosixPath(path).is_absolute():
        raise UsageError("url_not_supported", f"{url}: expected file:///ABSOLUTE/PATH")
    return unquote(path)


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
        problem = "cannot be a root; use a bucket (s3://, gs://, az://) or a folder"
        raise UsageError("url_not_supported", f"{url}: {problem}")
    split_url(url)
    url = url.rstrip("/")
    folder = home() / str(xxhash.xxh3_128_hexdigest(url.encode()))
    if not (folder / MARK).is_file():
        write_bytes(folder / MARK, url.encode())
    return folder


def root_of(text: str | Path) -> Path:
    """Return the folder of --root: a path, or the scratch folder of a URL."""
    if isinstance(text, Path) or not is_url(text):
        return Path(text)
    return Path(local_path(text)) if check_url(text) == "file" else scratch_of(text)


def sent_root(root: Path) -> str:
    """Return what `root_of` reads on another machine: an absolute path, or a URL."""
    return url_of(root) or str(root.absolute())


def local_path_of(text: str | Path) -> Path:
    """Return the local path that an argument names. Nothing is fetched."""
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
    above = len(home().parts)
    return home() / path.parts[above] if path.parts[:above] == home().parts and len(path.parts) > above else None
