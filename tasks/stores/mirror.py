"""Keep a root in a bucket and its scratch folder alike: steps use local files.

    bucket ─refresh─▶ receipts, manifests ─▶ scratch folder ─fetch─▶ the files that a step reads, checked
    step ─▶ its files in the scratch folder ─push─▶ bucket: the data, then the receipt
    corpus ─commit─▶ its files, then the manifest, which never replaces a different manifest

The key of an object is its path below the root. After `refresh`, a receipt in the scratch folder means that the bucket
has the files that the receipt describes. A step whose files do not reach the bucket ends the run, and the next run
starts with a refresh. A local root is its own scratch folder: most methods have nothing to do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tasks.core.errors import Busy, InputMissing, PackError, StorageError
from tasks.core.printable import show_as
from tasks.storage import corpus_folder
from tasks.storage.files import digest_of, has_artifact, has_listed, is_refused, locked, read_receipt, write_bytes
from tasks.storage.manifest import load_manifest
from tasks.stores.bucket import Bucket, open_store
from tasks.stores.store import Facts, run_all
from tasks.stores.urls import scratch_with, url_of

REQUESTS = 16  # small objects that are fetched at the same time

Artifact = tuple[Path, Path]
"""A file and its receipt, which records the size and the digest of the file."""


class Mirror:
    """A local root: nothing has to be fetched or sent."""

    def has(self, file: Path, receipt: Path, *, checksum: str = "", refused: Collection[str] = ()) -> bool:
        """Return whether the root has a file as its receipt says; see `has_artifact`."""
        return has_artifact(file, receipt, checksum=checksum, refused=refused)

    def is_stored(self, file: Path, receipt: Path, *, refused: Collection[str] = ()) -> bool:
        """Return whether the root has a file as its receipt describes it at this moment.

        Unlike `has`, this asks the bucket: other processes may have written the file since the last refresh.
        """
        return self.has(file, receipt, refused=refused)

    def has_listed(self, receipt: Path) -> bool:
        """Return whether the root has a receipt and the `files` that it lists."""
        return has_listed(receipt)

    def has_size(self, file: Path, size: int) -> bool:
        """Return whether the root has a file of this size.

        Raises OSError if a local file is missing.
        """
        return file.stat().st_size == size

    def push(self, files: Iterable[Path]) -> None:
        """Send files to the bucket, in their order."""

    def drop(self, file: Path) -> None:
        """Remove a file that was sent to the bucket and that no step reads."""

    def commit(self, files: Iterable[Path], manifests: Artifact) -> None:
        """Send the files of a corpus to the bucket, then its manifest.

        Raises Busy if the bucket has a different manifest.
        """

    def fetch(self, *artifacts: Artifact) -> None:
        """Make sure that files and their receipts can be read locally. Raises PackError."""

    def fetch_file(self, file: Path, size: int = -1, sha256: str = "", xxh3: str = "") -> None:
        """Make sure that a file without a receipt can be read locally. Raises PackError."""

    def adopt(self, file: Path) -> bool:
        """Return whether the root has a small file, and make it readable locally."""
        return file.is_file()


class Remote(Mirror):
    """A root in a bucket; `root` is its scratch folder on this machine."""

    def __init__(self, root: Path, url: str):
        self.root, self.url = root, url
        show_as(str(root), url)
        self._listed: dict[str, Facts] = {}  # objects that the last `refresh` found, and objects that were put since

    @property
    def store(self) -> Bucket:
        return open_store(self.url)

    def key(self, path: Path) -> str:
        return path.absolute().relative_to(self.root).as_posix()

    def shown(self, path: Path) -> str:
        return f"{self.url}/{self.key(path)}"

    # Existing objects

    def refresh(self, artifacts: Sequence[Artifact], plan: Path, manifests: Artifact) -> None:
        """Find out which artifacts, plan, and manifests of a corpus the root has.

        `manifests` are the two copies of its manifest.
        """
        commit = plan / "plan.json"
        facts = self.store.head(self.key(manifests[1]))
        self._listed = {self.key(manifests[1]): facts} if facts else {}
        for folder in (*(self.root / "data" / name for name in ("tokens", "tokenizers")), plan, manifests[0].parent):
            self._listed |= self.store.list(self.key(folder))
        receipts = [receipt for _, receipt in artifacts]
        self._pull([*dict.fromkeys([*receipts, commit])], again=False)
        self._pull(manifests, again=True)
        for file, receipt in artifacts:
            if receipt.is_file() and not self._is_whole({file: _values(receipt).get("bytes")}):
                receipt.unlink()
        if commit.is_file():
            sizes = _values(commit).get("files") or {"": None}
            if not self._is_whole({plan / name: size for name, size in sizes.items()}):
                commit.unlink()

    def _pull(self, paths: Sequence[Path], again: bool) -> None:
        """Fetch small objects that are listed, and remove local files that are not.

        Local files with the listed size are only fetched with `again`.
        """
        wanted = []
        for path in paths:
            facts = self._listed.get(self.key(path))
            if facts is None:
                path.unlink(missing_ok=True)
            elif again or not (path.is_file() and path.stat().st_size == facts.size):
                wanted.append(path)

        run_all(lambda path: self._take(path, is_new=not again), wanted, REQUESTS, lambda: None)

    def _take(self, path: Path, is_new: bool = True) -> None:
        """Fetch a small object.

        If it is a receipt that is not here yet (`is_new`), its local data may be damaged, and is removed.
        """
        if is_new:
            # Hidden files stay: they are locks, or are being written by threads that fetch the receipts of shards.
            beside = path.parent.glob("[!.]*") if path.name == "plan.json" else [path.with_suffix(".arrow")]
            for data in beside:
                if data.suffix != ".json":
                    data.unlink(missing_ok=True)
        write_bytes(path, self.store.get(self.key(path)))

    def _is_whole(self, sizes: dict[Path, Any]) -> bool:
        return all(self._listed.get(self.key(path), Facts(-1, "")).size == size for path, size in sizes.items())

    def has(self, file: Path, receipt: Path, *, checksum: str = "", refused: Collection[str] = ()) -> bool:
        if file.is_file():
            return has_artifact(file, receipt, checksum=checksum, refused=refused)
        return receipt.is_file() and bool(found := _values(receipt)) and not is_refused(found, refused)

    def is_stored(self, file: Path, receipt: Path, *, refused: Collection[str] = ()) -> bool:
        if not self.adopt(receipt):
            return False
        found, data = _values(receipt), self.store.head(self.key(file))
        if not (data and data.size == found.get("bytes")):
            receipt.unlink(missing_ok=True)  # like `refresh`
            return False
        return not is_refused(found, refused)

    def has_listed(self, receipt: Path) -> bool:
        return receipt.is_file()

    def has_size(self, file: Path, size: int) -> bool:
        return self._is_whole({file: size})

    # Writing

    def push(self, files: Iterable[Path]) -> None:
        for path in files:
            size = path.stat().st_size
            self.store.put(self.key(path), path)
            self._listed[self.key(path)] = Facts(size, "")

    def drop(self, file: Path) -> None:
        file.unlink()

    def commit(self, files: Iterable[Path], manifests: Artifact) -> None:
        contents = [path.read_bytes() for path in manifests]
        try:
            for path, content in zip(manifests, contents, strict=True):  # before any file is replaced
                if self.store.head(self.key(path)) and self.store.get(self.key(path)) != content:
                    raise self._other(path)
            self.push(files)
            for path, content in zip(manifests, contents, strict=True):
                if not self.store.put(self.key(path), content, absent=True) and (
                    self.store.get(self.key(path)) != content
                ):
                    raise self._other(path)
                self._listed[self.key(path)] = Facts(len(content), "")
        except PackError:
            for path in manifests:  # do not show an unpublished corpus as published
                path.unlink(missing_ok=True)
            raise

    def _other(self, path: Path) -> Busy:
        return Busy(
            "busy",
            f"{self.shown(path)}: another run has published a different manifest for this corpus, and it was kept; "
            "inspect it, then delete it to publish this one",
        )

    # Reading

    def fetch(self, *artifacts: Artifact) -> None:
        for file, receipt in artifacts:
            if not receipt.is_file():
                self.fetch_file(receipt)
            found = read_receipt(receipt)
            try:
                self.fetch_file(file, found["bytes"], found.get("sha256", ""), found.get("xxh3", ""))
            except _Damaged:
                # Like `dropped` of packing/plan.py for local files: the next run rebuilds the file.
                self.store.delete(self.key(receipt))
                receipt.unlink(missing_ok=True)
                raise

    def fetch_file(self, file: Path, size: int = -1, sha256: str = "", xxh3: str = "") -> None:
        if file.is_file() and size in (-1, file.stat().st_size):
            return
        with locked(file.with_name(f".{file.name}.lock")):  # several workers of this machine need the same files
            if file.is_file() and size in (-1, file.stat().st_size):
                return
            facts = self.store.head(self.key(file))
            if facts is None:
                raise self._missing(file)
            found = self.store.fetch(self.key(file), file, facts)
            differs = size not in (-1, facts.size) or sha256 not in ("", found)
            if differs or (xxh3 and digest_of(file, "xxh3") != xxh3):
                file.unlink()
                raise _Damaged(
                    "damaged_artefact",
                    f"{self.shown(file)}: is damaged: it differs from its receipt; pack the corpus again to rebuild it",
                )

    def fetch_manifest(self, path: Path) -> None:
        """Fetch both copies of a manifest, and the record of its run.

        Local files that the bucket does not have are removed. Raises InputMissing if the manifest does not exist, or
        the errors of the store.
        """
        name = path.stem if path.parent == self.root / "manifests" else ""
        if path.name == "manifest.json" and path.parent.parent == self.root / "data" / "corpora":
            name = path.parent.name
        corpus = self.root / "data" / "corpora" / name if name else path.parent
        own, published = corpus / "manifest.json", self.root / "manifests" / f"{name}.json"
        files = [own, corpus / "run.json", *[published] * bool(name)]
        for each in files:
            if facts := self.store.head(self.key(each)):
                self._listed[self.key(each)] = facts
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

    def fetch_listed(self, folder: Path, name: str, size: int) -> None:
        """Fetch a file that the local manifest lists. Raises PackError, also if damaged."""
        recorded = {file.path: file.sha256 for file in load_manifest(folder / "manifest.json").listed()}
        self.fetch_file(folder / name, size, recorded.get(name, ""))

    def adopt(self, file: Path) -> bool:
        """Return whether the bucket has a small file, and fetch it unless it is here."""
        if (facts := self.store.head(self.key(file))) is None:
            return False
        if not (file.is_file() and file.stat().st_size == facts.size):
            self._take(file)
        return True

    def _missing(self, file: Path) -> InputMissing:
        return InputMissing("object_missing", f"{self.shown(file)}: does not exist")

    def names(self, folder: Path) -> set[str]:
        """Return the names of the objects below a folder, relative to it."""
        prefix = self.key(folder)
        return {key[len(prefix) :].lstrip("/") for key, _ in self.store.list(prefix)}


class _Damaged(StorageError):
    """An object differs from its receipt."""


LOCAL = Mirror()

corpus_folder.find_remotes_with(lambda path: remote_with(path))


@lru_cache(maxsize=16)
def _remote(root: Path, url: str) -> Remote:
    return Remote(root, url)


def mirror_of(root: Path) -> Mirror:
    """Return the mirror of a root: LOCAL for a local root."""
    url = url_of(root)
    return _remote(root, url) if url else LOCAL


def remote_with(path: Path) -> Remote | None:
    """Return the mirror of the scratch folder that contains a path, or None."""
    root = scratch_with(path)
    url = url_of(root) if root else ""
    return _remote(root, url) if root and url else None


def _values(receipt: Path) -> dict[str, Any]:
    """Return the values of a receipt, or {} if it is damaged."""
    try:
        return read_receipt(receipt)
    except StorageError:
        return {}
