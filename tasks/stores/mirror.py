"""Keep a root in a bucket and its scratch folder alike: steps use local files.

    bucket ─refresh─▶ receipts, manifests ─▶ scratch folder ─fetch─▶ the files that a step reads, checked
    step ─▶ its files in the scratch folder ─push─▶ bucket: the data, then the receipt
    corpus ─commit─▶ its files, then the manifest, which never replaces a different manifest

The key of an object is its path below the root. After `refresh`, a receipt in the scratch folder means that the bucket
has the files that the receipt describes. A step whose files do not reach the bucket ends the run, and the next run
starts with a refresh. A local root is its own scratch folder: nothing has to be fetched or sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from packcorpus.tasks.core.errors import Busy, InputMissing, PackError, StorageError
from packcorpus.tasks.core.printable import show_as
from packcorpus.tasks.storage import corpus_folder
from packcorpus.tasks.storage.files import (
    digest_of,
    has_artifact,
    has_listed,
    is_refused,
    locked,
    read_receipt,
    write_bytes,
)
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.stores.bucket import Bucket, open_store
from packcorpus.tasks.stores.store import Facts, run_all
from packcorpus.tasks.stores.urls import scratch_with, url_of

REQUESTS = 16  # small objects that are fetched at the same time

Artifact = tuple[Path, Path]
"""A file and its receipt, which records the size and the digest of the file."""


class Mirror:
    """A local root, without `url`, or one in a bucket, with its scratch as `root`."""

    def __init__(self, root: Path, url: str):
        self.root, self.url = root, url
        self._listed: dict[str, Facts] = {}  # objects that the last `refresh` found, and objects that were put since
        if url:
            show_as(str(root), url)

    @property
    def store(self) -> Bucket:
        return open_store(self.url)

    def key(self, path: Path) -> str:
        return path.absolute().relative_to(self.root).as_posix()

    # Existing files

    def refresh(self, artifacts: Sequence[Artifact], plan: Path, manifests: Artifact) -> None:
        """Find out which artifacts, plan, and manifests of a corpus the bucket has."""
        commit = plan / "plan.json"
        facts = self.store.head(self.key(manifests[1]))
        self._listed = {self.key(manifests[1]): facts} if facts else {}
        for folder in (*(self.root / "data" / name for name in ("tokens", "tokenizers")), plan, manifests[0].parent):
            self._listed |= self.store.list(self.key(folder))
        self._pull(list(dict.fromkeys([*(receipt for _, receipt in artifacts), commit])), again=False)
        self._pull(manifests, again=True)
        for file, receipt in artifacts:
            if receipt.is_file() and not self.has_size(file, _values(receipt).get("bytes")):
                receipt.unlink()
        if commit.is_file():
            sizes = _values(commit).get("files") or {"": None}
            if not all(self.has_size(plan / name, size) for name, size in sizes.items()):
                commit.unlink()

    def _pull(self, paths: Sequence[Path], again: bool) -> None:
        """Fetch small objects that differ in size, or all `again`; remove the others."""
        wanted = []
        for path in paths:
            facts = self._listed.get(self.key(path))
            if facts is None:
                path.unlink(missing_ok=True)
            elif again or not (path.is_file() and path.stat().st_size == facts.size):
                wanted.append(path)
        run_all(lambda path: self._take(path, is_new=not again), wanted, REQUESTS, lambda: None)

    def _take(self, path: Path, is_new: bool = True) -> None:
        """Fetch a small object. Data beside a receipt that `is_new` may be damaged."""
        if is_new:
            # Hidden files stay: they are locks, or are being written by threads that fetch the receipts of shards.
            beside = path.parent.glob("[!.]*") if path.name == "plan.json" else [path.with_suffix(".arrow")]
            for data in beside:
                if data.suffix != ".json":
                    data.unlink(missing_ok=True)
        write_bytes(path, self.store.get(self.key(path)))

    def has(self, file: Path, receipt: Path, *, checksum: str = "", refused: Collection[str] = ()) -> bool:
        """Return whether the root has a file as its receipt says; see `has_artifact`."""
        if not self.url or file.is_file():
            return has_artifact(file, receipt, checksum=checksum, refused=refused)
        return receipt.is_file() and bool(values := _values(receipt)) and not is_refused(values, refused)

    def is_stored(self, file: Path, receipt: Path, *, refused: Collection[str] = ()) -> bool:
        """Return whether the root has a file as its receipt describes it at this moment.

        Unlike `has`, this asks the bucket: other processes may have written the file since the last refresh.
        """
        if not self.url:
            return self.has(file, receipt, refused=refused)
        if not self.adopt(receipt):
            return False
        values, data = _values(receipt), self.store.head(self.key(file))
        if not (data and data.size == values.get("bytes")):
            receipt.unlink(missing_ok=True)  # like `refresh`
            return False
        return not is_refused(values, refused)

    def has_listed(self, receipt: Path) -> bool:
        """Return whether the root has a receipt and the `files` that it lists."""
        return receipt.is_file() if self.url else has_listed(receipt)

    def has_size(self, file: Path, size: int | None) -> bool:
        """Return whether the root has a file of this size. Raises OSError without one."""
        facts = self._listed.get(self.key(file)) if self.url else Facts(file.stat().st_size, "")
        return facts is not None and facts.size == size

    def adopt(self, file: Path) -> bool:
        """Return whether the root has a small file, and make it readable locally."""
        if not self.url:
            return file.is_file()
        if (facts := self.store.head(self.key(file))) is None:
            return False
        if not (file.is_file() and file.stat().st_size == facts.size):
            self._take(file)
        return True

    def names(self, folder: Path) -> set[str]:
        """Return the names of the objects below a folder, relative to it."""
        prefix = self.key(folder)
        return {key[len(prefix) :].lstrip("/") for key, _ in self.store.list(prefix)}

    # Writing

    def push(self, files: Iterable[Path]) -> None:
        """Send files to the bucket, in their order."""
        for path in files if self.url else ():
            size = path.stat().st_size
            self.store.put(self.key(path), path)
            self._listed[self.key(path)] = Facts(size, "")

    def drop(self, file: Path) -> None:
        """Remove a file that was sent to the bucket and that no step reads."""
        if self.url:
            file.unlink()

    def commit(self, files: Iterable[Path], manifests: Artifact) -> None:
        """Send a corpus, then its manifest. Raises Busy if there is a different one."""
        contents = {path: path.read_bytes() for path in manifests if self.url}
        try:
            for path, content in contents.items():  # before any file is replaced
                if self.store.head(self.key(path)):
                    self._check_same(path, content)
            self.push(files)
            for path, content in contents.items():
                if not self.store.put(self.key(path), content, absent=True):
                    self._check_same(path, content)
                self._listed[self.key(path)] = Facts(len(content), "")
        except PackError:
            for path in contents:  # do not show an unpublished corpus as published
                path.unlink(missing_ok=True)
            raise

    def _check_same(self, path: Path, content: bytes) -> None:
        if self.store.get(self.key(path)) != content:
            raise Busy(
                "busy",
                f"{self.url}/{self.key(path)}: another run has published a different manifest for this corpus, and it "
                "was kept; inspect it, then delete it to publish this one",
            )

    # Reading

    def fetch(self, *artifacts: Artifact) -> None:
        """Make sure that files and their receipts can be read locally. Raises PackError."""
        for file, receipt in artifacts if self.url else ():
            if not receipt.is_file():
                self.fetch_file(receipt)
            values = read_receipt(receipt)
            try:
                self.fetch_file(file, values["bytes"], values.get("sha256", ""), values.get("xxh3", ""))
            except StorageError as error:
                # Like `dropped` of packing/plan.py for local files: the next run rebuilds the file.
                if error.reason == "damaged_artefact":
                    self.store.delete(self.key(receipt))
                    receipt.unlink(missing_ok=True)
                raise

    def fetch_file(self, file: Path, size: int = -1, sha256: str = "", xxh3: str = "") -> None:
        """Make sure that a file without a receipt can be read locally. Raises PackError."""

        def is_here() -> bool:
            return file.is_file() and size in (-1, file.stat().st_size)

        if not self.url or is_here():
            return
        with locked(file.with_name(f".{file.name}.lock")):  # several workers of this machine need the same files
            if is_here():
                return
            facts = self.store.head(self.key(file))
            if facts is None:
                raise self._missing(file)
            digest = self.store.fetch(self.key(file), file, facts)
            differs = size not in (-1, facts.size) or sha256 not in ("", digest)
            if differs or (xxh3 and digest_of(file, "xxh3") != xxh3):
                file.unlink()
                problem = "is damaged: it differs from its receipt; pack the corpus again to rebuild it"
                raise StorageError("damaged_artefact", f"{self.url}/{self.key(file)}: {problem}")

    def fetch_listed(self, folder: Path, name: str, size: int) -> None:
        """Fetch a file that the local manifest lists. Raises PackError, also if damaged."""
        recorded = {file.path: file.sha256 for file in load_manifest(folder / "manifest.json").listed()}
        self.fetch_file(folder / name, size, recorded.get(name, ""))

    def fetch_manifest(self, path: Path) -> None:
        """Fetch both copies of a manifest, and the record of its run.

        Local files that the bucket does not have are removed. Raises InputMissing if the manifest does not exist, or
        the errors of the store.
        """
        name, corpora = "", self.root / "data" / "corpora"
        if path.parent == self.root / "manifests":
            name = path.stem
        elif path.name == "manifest.json" and path.parent.parent == corpora:
            name = path.parent.name
        corpus = corpora / name if name else path.parent
        published = self.root / "manifests" / f"{name}.json"
        files = [corpus / "manifest.json", corpus / "run.json", *[published] * bool(name)]
        for file in files:
            if facts := self.store.head(self.key(file)):
                self._listed[self.key(file)] = facts
        self._pull(files, again=True)
        if not path.is_file():
            raise self._missing(path)

    def fetch_manifests(self) -> None:
        """Fetch all manifests of the bucket, and remove all other local manifests."""
        folder = self.root / "manifests"
        names = [key for key, _ in self.store.list(self.key(folder)) if key.count("/") == 1 and key.endswith(".json")]
        for path in folder.glob("*.json"):
            if self.key(path) not in names:
                path.unlink()
        run_all(lambda key: self.fetch_manifest(self.root / key), names, REQUESTS, lambda: None)

    def _missing(self, file: Path) -> InputMissing:
        return InputMissing("object_missing", f"{self.url}/{self.key(file)}: does not exist")


_remote = lru_cache(maxsize=16)(Mirror)  # it knows what the bucket listed


def mirror_of(root: Path) -> Mirror:
    """Return the mirror of a root."""
    url = url_of(root)
    return _remote(root, url) if url else Mirror(root, "")


def remote_with(path: Path) -> Mirror | None:
    """Return the mirror of the scratch folder that contains a path, or None."""
    root = scratch_with(path)
    return mirror_of(root) if root and url_of(root) else None


corpus_folder.find_remotes_with(remote_with)


def _values(receipt: Path) -> dict[str, Any]:
    """Return the values of a receipt, or {} if it is damaged."""
    try:
        return read_receipt(receipt)
    except StorageError:
        return {}
