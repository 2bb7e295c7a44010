"""A dataset on the Hugging Face Hub at one commit, read-only. The only module of tasks that imports huggingface_hub.

A revision such as `main` moves. It is resolved to a commit once in a process, and everything is read at that commit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tasks.core.errors import InputMissing, PackError, PartMissing, StorageError
from tasks.stores.receive import CHUNK, receive
from tasks.stores.store import Facts, Progress
from tasks.stores.urls import Dataset

MAIN = "main"


class Hub:
    """The files of a dataset at a commit. URLs have the revision that the user named, if any."""

    def __init__(self, dataset: Dataset, commit: str, endpoint: str | None = None):
        self.dataset, self.commit = dataset, commit
        self._endpoint = endpoint

    def url_of(self, key: str) -> str:
        return f"{self.dataset.url}/{key}".rstrip("/")

    def head(self, key: str) -> Facts | None:
        with _errors(self.url_of(key)) as hub:
            found = hub.HfApi(self._endpoint).get_paths_info(
                self.dataset.name, [key], revision=self.commit, repo_type="dataset"
            )
        return next((_facts(file) for file in found if file.path == key and hasattr(file, "blob_id")), None)

    def get(self, key: str) -> bytes:
        with _errors(self.url_of(key)), self._open(key) as file:
            return bytes(file.read())

    def fetch(self, key: str, target: Path, expected: Facts, progress: Progress | None = None) -> str:
        url = self.url_of(key)
        with _errors(url), self._open(key) as file:
            digest = receive(iter(lambda: file.read(CHUNK), b""), target, expected, url, progress)
        if len(expected.identity) == len(digest) and expected.identity != digest:  # a large file has its SHA-256
            target.unlink()
            raise StorageError("object_cut", f"{url}: arrived damaged, with another SHA-256 than recorded; run again")
        return digest

    def list(self, prefix: str = "") -> Iterator[tuple[str, Facts]]:
        with _errors(self.url_of(prefix)) as hub:
            try:
                found = hub.HfApi(self._endpoint).list_repo_tree(
                    self.dataset.name, prefix or None, recursive=True, revision=self.commit, repo_type="dataset"
                )
                files = [(file.path, _facts(file)) for file in found if hasattr(file, "blob_id")]
            except hub.errors.EntryNotFoundError:
                files = []
        yield from sorted(files, key=lambda item: item[0].encode())

    def _open(self, key: str) -> Any:
        return self._system.open(f"datasets/{self.dataset.name}@{self.commit}/{key}", "rb", block_size=0)

    @cached_property
    def _system(self) -> Any:
        from huggingface_hub import HfFileSystem

        return HfFileSystem(endpoint=self._endpoint, skip_instance_cache=True)


def open_hub(dataset: Dataset, commit: str = "") -> Hub:
    """Open a dataset at `commit`, else at the commit that its revision has now.

    Raises InputMissing if it does not exist, StorageError if it cannot be read, or PartMissing without the library.
    """
    endpoint = os.environ.get("HF_ENDPOINT")
    return Hub(dataset, commit or _commit(dataset.name, dataset.revision or MAIN, dataset.url, endpoint), endpoint)


@lru_cache(maxsize=1024)
def _commit(name: str, revision: str, url: str, endpoint: str | None) -> str:
    with _errors(url) as hub:
        return str(hub.HfApi(endpoint).dataset_info(name, revision=revision, timeout=30).sha)


def forget_commits() -> None:
    """Resolve revisions again: for a test, or a process that serves several runs."""
    _commit.cache_clear()


@contextmanager
def _errors(url: str) -> Iterator[Any]:
    """Give huggingface_hub, and convert its errors to PackErrors, without their text, which may hold signed URLs."""
    try:
        import huggingface_hub as hub
        import huggingface_hub.errors
    except ImportError:
        raise PartMissing(
            "library_missing",
            "huggingface-hub is not installed, which reads hf://: pip install 'packcorpus[remote]'",
        ) from None
    errors: Any = huggingface_hub.errors
    try:
        yield hub
    except PackError:
        raise
    except (errors.GatedRepoError, errors.DisabledRepoError):
        raise StorageError(
            "store_denied", f"{url}: access must be granted on the page of the dataset; then set HF_TOKEN"
        ) from None
    except (errors.RevisionNotFoundError, errors.EntryNotFoundError):
        raise InputMissing("object_missing", f"{url}: no such file or revision in the dataset") from None
    except (errors.RepositoryNotFoundError, FileNotFoundError):
        raise InputMissing(
            "object_missing", f"{url}: no such dataset on the Hub, or a private one; for that, set HF_TOKEN"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise StorageError("store_failed", f"{url}: HF_HUB_OFFLINE is set; unset it") from None
    except (errors.HTTPError, OSError, ValueError) as error:
        raise _explained(url, getattr(getattr(error, "response", None), "status_code", None)) from None


def _explained(url: str, status: int | None) -> StorageError:
    if status in (401, 403):
        return StorageError("store_denied", f"{url}: access denied (HTTP {status}); set HF_TOKEN")
    if status in (429, 503):
        return StorageError("store_busy", f"{url}: too many requests (HTTP {status}); run again later, with HF_TOKEN")
    answer = f"HTTP {status}" if status else "the Hub cannot be reached, or its answer cannot be read"
    return StorageError("store_failed", f"{url}: {answer}; run again")


def _facts(file: Any) -> Facts:
    return Facts(file.size, file.lfs.sha256 if file.lfs else file.blob_id)
