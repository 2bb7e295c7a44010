"""A dataset or a model on the Hugging Face Hub.

    open_hub     Hub: the files of a dataset at one commit, read-only
    find_branch  Branch: the files of a branch, and a series of commits to it
    fetch_model  some files of a model at one commit, in the cache that all libraries share (HF_HOME)

A revision such as `main` moves. For reading, it is resolved to a commit once per process, and everything is read at
that commit. For writing, each commit names its parent, so that the commits of two writers never mix. This is the only
module of tasks that imports huggingface_hub.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from packcorpus.tasks.core.errors import Busy, InputMissing, PackError, PartMissing, StorageError, UsageError
from packcorpus.tasks.core.messages import noted
from packcorpus.tasks.stores.store import CHUNK, Facts, Progress, interruptible, receive
from packcorpus.tasks.stores.urls import Dataset, Model

MAIN = "main"


class Hub:
    """The files of a dataset at a commit. URLs contain the user's revision, if any."""

    def __init__(self, dataset: Dataset, commit: str, endpoint: str | None = None):
        self.dataset, self.commit = dataset, commit
        self._endpoint = endpoint

    def url_of(self, key: str) -> str:
        return f"{self.dataset.url}/{key}".rstrip("/")

    def head(self, key: str) -> Facts | None:
        with _errors(self.url_of(key)) as hub:
            api, where = hub.HfApi(self._endpoint), {"revision": self.commit, "repo_type": "dataset"}
            files = api.get_paths_info(self.dataset.name, [key], **where)
        return next((_facts(file) for file in files if file.path == key and hasattr(file, "blob_id")), None)

    def get(self, key: str) -> bytes:
        with _errors(self.url_of(key)), self._open(key) as file:
            return bytes(file.read())

    def fetch(self, key: str, target: Path, expected: Facts, progress: Progress | None = None) -> str:
        url = self.url_of(key)
        with _errors(url), self._open(key) as file:
            digest = receive(iter(lambda: file.read(CHUNK), b""), target, expected, url, progress)
        if len(expected.identity) == len(digest) and expected.identity != digest:  # a large file has its SHA-256
            target.unlink()
            problem = "arrived damaged: its SHA-256 differs from the recorded one; run again"
            raise StorageError("object_cut", f"{url}: {problem}")
        return digest

    def list(self, prefix: str = "") -> Iterator[tuple[str, Facts]]:
        files: list[tuple[str, Facts]] = []
        with _errors(self.url_of(prefix)) as hub, suppress(hub.errors.EntryNotFoundError):
            api, where = hub.HfApi(self._endpoint), {"revision": self.commit, "repo_type": "dataset"}
            entries = api.list_repo_tree(self.dataset.name, prefix or None, recursive=True, **where)
            files += [(file.path, _facts(file)) for file in entries if hasattr(file, "blob_id")]
        yield from sorted(files, key=lambda item: item[0].encode())

    def _open(self, key: str) -> Any:
        return self._system.open(f"datasets/{self.dataset.name}@{self.commit}/{key}", "rb", block_size=0)

    @cached_property
    def _system(self) -> Any:
        from huggingface_hub import HfFileSystem

        return HfFileSystem(endpoint=self._endpoint, skip_instance_cache=True)


def open_hub(dataset: Dataset, commit: str = "") -> Hub:
    """Open a dataset at `commit`, by default the current commit of its revision.

    Raises InputMissing if it does not exist, StorageError if it cannot be read, or PartMissing without the library.
    """
    endpoint = os.environ.get("HF_ENDPOINT")
    return Hub(dataset, commit or _commit(dataset.name, dataset.revision or MAIN, dataset.url, endpoint), endpoint)


@lru_cache(maxsize=1024)
def _commit(name: str, revision: str, url: str, endpoint: str | None) -> str:
    with _errors(url) as hub:
        return str(hub.HfApi(endpoint).dataset_info(name, revision=revision, timeout=30).sha)


class Branch(Hub):
    """A branch. `commit` is its head, or that of `main`, or "" without a dataset."""

    def __init__(self, dataset: Dataset, endpoint: str | None, commit: str, private: bool, is_new: bool):
        super().__init__(dataset, commit, endpoint)
        self.private, self.is_new = private, is_new
        self.name = dataset.revision or MAIN

    @property
    def url(self) -> str:
        return self.dataset.url

    def files(self, folder: str) -> dict[str, Facts]:
        """Return the facts of the files below a folder, by their paths in it."""
        files = self.list(folder) if self.commit else ()
        return {path.removeprefix(f"{folder}/"): facts for path, facts in files}

    def create(self, private: bool) -> None:
        """Create the dataset and the branch unless they exist. Raises PackError."""
        with _errors(self.url, WRITE) as hub:
            api = hub.HfApi(self._endpoint)
            if not self.commit:
                # Without --private, the visibility is the default of the owner.
                api.create_repo(self.dataset.name, repo_type="dataset", private=True if private else None)
                self.commit = str(api.dataset_info(self.dataset.name).sha)
            if self.is_new and self.name != MAIN:
                api.create_branch(self.dataset.name, branch=self.name, revision=self.commit, repo_type="dataset")
            self.is_new = False

    def add(self, files: Mapping[str, Path], delete: Sequence[str], message: str) -> None:
        """Commit files and deletions, all or nothing.

        `files` maps paths in the dataset to local files. Large files are sent first. Files that the Hub has are not
        sent again, also after an interruption. Raises Busy if another commit came in between, or PackError.
        """
        with _errors(self.url, WRITE) as hub:
            if not sys.stderr.isatty():
                hub.utils.disable_progress_bars()
            operations = [hub.CommitOperationDelete(path, is_folder=False) for path in delete]
            operations += [hub.CommitOperationAdd(path, file) for path, file in files.items()]
            where = {"repo_type": "dataset", "revision": self.name, "parent_commit": self.commit}
            api = hub.HfApi(self._endpoint)
            self.commit = str(api.create_commit(self.dataset.name, operations, commit_message=message, **where).oid)


def find_branch(dataset: Dataset) -> Branch:
    """Find the branch that a URL names, by default `main`.

    Neither the branch nor the dataset has to exist. Raises UsageError if the revision is a tag or a commit,
    StorageError without a token, or PackError.
    """
    endpoint, url, name = os.environ.get("HF_ENDPOINT"), dataset.url, dataset.revision or MAIN
    with _errors(url, WRITE) as hub:
        if not hub.get_token():
            raise StorageError("store_denied", f"{url}: no token; set HF_TOKEN, or run: hf auth login")
        api = hub.HfApi(endpoint)
        try:
            facts = api.dataset_info(dataset.name, timeout=30)
        except hub.errors.GatedRepoError:
            raise
        except hub.errors.RepositoryNotFoundError:
            if name.startswith("refs/"):
                raise
            return Branch(dataset, endpoint, "", False, True)
        if name.startswith("refs/pr/"):
            head = str(api.dataset_info(dataset.name, revision=name, timeout=30).sha)
            return Branch(dataset, endpoint, head, bool(facts.private), False)
        refs = api.list_repo_refs(dataset.name, repo_type="dataset")
        heads = {branch.name: branch.target_commit for branch in refs.branches}
        if name not in heads and (name in {tag.name for tag in refs.tags} or re.fullmatch("[0-9a-f]{40}", name)):
            problem = f"{name} is not a branch; name a branch, which is created if it is new"
            raise UsageError("push_refused", f"{url}: {problem}")
        return Branch(dataset, endpoint, heads.get(name, str(facts.sha)), bool(facts.private), name not in heads)


REPLY = 10.0  # seconds in which the Hub must answer; without network, the cache is used


def fetch_model(model: Model, patterns: Sequence[str], commit: str = "") -> Path:
    """Return the folder of a model in the cache, with the files that match `patterns`.

    All files are of one commit, the name of the folder: `commit`, or else the current commit of the revision. If the
    Hub cannot be reached or denies access, this is the last commit that the cache knows, and files that were never
    downloaded are missing. Raises the errors of `open_hub`.
    """
    revision = commit or model.revision or MAIN
    with _errors(model.name, "run: hf auth login", "model") as hub:
        endpoint = os.environ.get("HF_ENDPOINT")
        wanted: dict[str, Any] = {"revision": revision, "allow_patterns": [*patterns], "endpoint": endpoint}

        def cached() -> Path | None:
            try:
                return Path(hub.snapshot_download(model.name, local_files_only=True, **wanted))
            except FileNotFoundError:
                return None

        hub.utils.disable_progress_bars()
        try:
            # snapshot_download itself would wait for an answer for minutes.
            interruptible(hub.HfApi(endpoint).model_info, model.name, revision=revision, timeout=REPLY)
            with noted(lambda: f"{model.name}: still downloading; what has arrived is kept"):
                return Path(interruptible(hub.snapshot_download, model.name, **wanted))
        except (hub.errors.HTTPError, OSError, ValueError, RuntimeError) as error:
            if folder := cached():
                return folder
            if isinstance(error, hub.errors.LocalEntryNotFoundError):  # neither here nor there: the reason is its cause
                raise (error.__cause__ or ConnectionError()) from None
            if isinstance(error, OSError) and error.filename:
                raise StorageError("disk_failed", f"{error.filename}: {error.strerror}") from None
            raise


def has_content(facts: Facts | None, file: Path, sha256: str) -> bool:
    """Return whether a file on the Hub equals a local file, by SHA-256 or git hash."""
    if facts is None or facts.size != file.stat().st_size:
        return False
    if len(facts.identity) == len(sha256):
        return facts.identity == sha256
    content = file.read_bytes()
    return facts.identity == hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


READ, WRITE = "set HF_TOKEN", "set HF_TOKEN, or run hf auth login, with a token that may write there"


@contextmanager
def _errors(url: str, token_hint: str = READ, what: str = "dataset") -> Iterator[Any]:
    """Yield huggingface_hub, and convert its errors to PackErrors.

    The text of the errors is left out, because it may contain signed URLs.
    """
    try:
        import huggingface_hub as hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        problem = f"{url}: requires huggingface-hub, which is not installed; run: pip install huggingface-hub"
        raise PartMissing("library_missing", problem) from None
    errors: Any = huggingface_hub.errors
    try:
        yield hub
    except PackError:
        raise
    except (errors.GatedRepoError, errors.DisabledRepoError):
        advice = f"access must be granted on the page of the {what}; then {token_hint}"
        raise StorageError("store_denied", f"{url}: {advice}") from None
    except (errors.RevisionNotFoundError, errors.EntryNotFoundError):
        raise InputMissing("object_missing", f"{url}: no such file or revision in the {what}") from None
    except (errors.RepositoryNotFoundError, FileNotFoundError):
        problem = f"no such {what} on the Hub, or a private one; for that, {token_hint}"
        raise InputMissing("object_missing", f"{url}: {problem}") from None
    except errors.OfflineModeIsEnabled:
        raise StorageError("store_failed", f"{url}: HF_HUB_OFFLINE is set; unset it") from None
    except (errors.HTTPError, OSError, ValueError, RuntimeError) as error:  # an upload wraps them in a RuntimeError
        response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
        raise _explained(url, getattr(response, "status_code", None), token_hint) from None


def _explained(url: str, status: int | None, token_hint: str) -> PackError:
    if status in (401, 403):
        return StorageError("store_denied", f"{url}: access denied (HTTP {status}); {token_hint}")
    if status == 404:
        return InputMissing("object_missing", f"{url}: no such dataset, file, or revision on the Hub (HTTP 404)")
    if status in (409, 412):
        return Busy("busy", f"{url}: another client has committed meanwhile (HTTP {status}); run again")
    if status in (429, 503):
        return StorageError("store_busy", f"{url}: too many requests (HTTP {status}); run again later, with HF_TOKEN")
    answer = f"HTTP {status}" if status else "the Hub cannot be reached, or its answer cannot be read"
    return StorageError("store_failed", f"{url}: {answer}; run again")


def _facts(file: Any) -> Facts:
    return Facts(file.size, file.lfs.sha256 if file.lfs else file.blob_id)
