"""Find the files of a corpus and check them against the manifest.

manifest ─find_listed─▶ path of a file with the recorded size ─check_digest─▶ with the recorded content
manifest ─changed_files, foreign_files─▶ an error per file that differs ─raise_all─▶ one error that names them all
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Protocol

import pyarrow as pa

from packcorpus.tasks.core.errors import DataError, InputMissing, PackError, StorageError
from packcorpus.tasks.core.process import cores
from packcorpus.tasks.storage.facts import FileFacts, Shard
from packcorpus.tasks.storage.files import sha256_of, write_bytes
from packcorpus.tasks.storage.manifest import Manifest, load_manifest, repair_hint, without_repair_hint

# Files of a corpus folder that the manifest does not list: the manifest itself, and the record of a run.
UNLISTED = {"manifest.json", "run.json"}
# Files that a download of a dataset from the Hub adds: git attributes, and the notes of huggingface_hub.
FROM_HUB, NOTES_OF_HUB = {".gitattributes"}, ".cache/huggingface/"
LAST = ".last"  # in manifests/: the name of the manifest that the latest run published or found complete
SHOWN = 20  # files named in one error
THREADS = 8  # files hashed at a time; hashing releases the GIL
FEW_BYTES = 1 << 20


class Remote(Protocol):
    """The store that a corpus folder is a local copy of; see stores/mirror.py."""

    def fetch_listed(self, folder: Path, name: str, size: int) -> None: ...
    def names(self, folder: Path) -> set[str]: ...


_remote_with: Callable[[Path], Remote | None] = lambda path: None  # noqa: E731 - replaced below


def find_remotes_with(find: Callable[[Path], Remote | None]) -> None:
    """Set the function that finds the store of a path: this package knows no stores."""
    global _remote_with
    _remote_with = find


def corpus_folder(manifest: Manifest, path: Path) -> Path:
    """Return the corpus folder of a manifest.

    `path` is <corpus>/manifest.json or <root>/manifests/<name>.json. The result is the folder of the manifest, or the
    folder that the manifest names below the project root. Raises InputMissing if the corpus folder is missing, and
    DataError if a published manifest belongs to another corpus.
    """
    folder = path.resolve().parent
    root = folder.parent if folder.name == "manifests" else folder
    named = PurePosixPath(manifest.corpus).name
    if folder.name == "manifests" and path.stem != named and (root / "data" / "corpora" / path.stem).is_dir():
        raise DataError(
            "foreign_shard", f"{path}: is the manifest of another corpus, {manifest.corpus}; {repair_hint(path)}"
        )
    beside = [folder] * (path.name == "manifest.json")
    for candidate in (*beside, root / manifest.corpus, folder, Path.cwd() / manifest.corpus):
        if os.path.isfile(candidate / "manifest.json"):
            return candidate
        if candidate.is_dir() and candidate.name == named:
            raise InputMissing("file_missing", f"{candidate / 'manifest.json'}: is missing; {repair_hint(path)}")
    raise InputMissing(
        "corpus_missing", f"{path}: its corpus folder {root / manifest.corpus} is missing; pack the corpus again"
    )


def checked_folder(manifest: Manifest, path: Path) -> Path:
    """Call `corpus_folder`, then `check_copies`, and return the corpus folder."""
    folder = corpus_folder(manifest, path)
    check_copies(path, folder)
    return folder


def published_copy(folder: Path, manifest: Manifest | None = None) -> Path | None:
    """Return the path of the published manifest of a corpus, or None.

    It is <root>/manifests/<name>.json for the corpus folder <root>/data/corpora/<name>, even if it is missing. The
    result is None for a folder elsewhere, and if the file is missing for a good reason: there is no folder manifests/,
    or `manifest`, from the corpus folder, names another folder, so that the corpus is a copy.
    """
    home = folder.resolve()
    if home.parts[-3:-1] != ("data", "corpora"):
        return None
    copy = home.parents[2] / "manifests" / f"{home.name}.json"
    is_copied = manifest is not None and PurePosixPath(manifest.corpus).name != home.name
    return copy if copy.exists() or (copy.parent.is_dir() and not is_copied) else None


def remember_manifest(root: Path, name: str) -> None:
    """Record `name`, a file of <root>/manifests, as the manifest of the latest run."""
    path, content = root / "manifests" / LAST, f"{name}\n".encode()
    with suppress(StorageError, OSError):  # the record is only a convenience
        if not (path.is_file() and path.read_bytes() == content):
            write_bytes(path, content)


def last_manifest(root: Path) -> Path | None:
    """Return the latest run's manifest below `root`, or None if unknown or gone."""
    try:
        name = (root / "manifests" / LAST).read_text(encoding="utf-8").strip()
        path = root / "manifests" / name
        return path if name == path.name and path.is_file() else None
    except (OSError, ValueError):
        return None


def default_report_path(folder: Path) -> Path:
    """Return a path next to a corpus, or in the working directory for a bucket."""
    return Path(f"{folder.name}.html") if _remote_with(folder) else folder.with_name(f"{folder.name}.html")


def check_copies(path: Path, folder: Path) -> None:
    """Raise DataError unless the copy in the corpus folder has the bytes of `path`."""
    copy = folder / "manifest.json"
    if copy.is_symlink():
        raise _is_link(copy, folder)
    if not path.samefile(copy):
        _check_same(path, copy)


def check_published(path: Path, manifest: Manifest, folder: Path) -> None:
    """Raise a PackError unless the `published_copy` has the bytes of `path`."""
    if (copy := published_copy(folder, manifest)) is not None:
        if not copy.is_file():
            raise InputMissing("file_missing", f"{copy}: is missing; {repair_hint(folder)}")
        with reading(copy, folder):
            _check_same(path, copy)


def _check_same(path: Path, copy: Path) -> None:
    if copy.read_bytes() != path.read_bytes():
        load_manifest(copy)  # raises if the copy is the damaged one
        raise DataError(
            "manifests_differ", f"{path} and {copy} differ, but must be the same bytes; {repair_hint(path)}"
        )


def _is_link(path: Path, folder: Path) -> DataError:
    what = "is a symbolic link, but the files of a corpus must not be links"
    return DataError("link_in_corpus", f"{path}: {what}; {repair_hint(folder)}")


def find_listed(folder: Path, name: str, size: int) -> Path:
    """Return the path of the file listed as `name`, fetched if it is in a bucket.

    Raises DataError or InputMissing unless the file has `size` bytes.
    """
    where = folder / name
    # A file directly in the folder cannot be behind another link.
    if where.is_symlink() or not (where.parent == folder or where.resolve().is_relative_to(folder.resolve())):
        raise _is_link(where, folder)
    if remote := _remote_with(where):
        remote.fetch_listed(folder, name, size)
    if not os.path.isfile(where):
        raise InputMissing("file_missing", f"{where}: is missing; {repair_hint(folder)}")
    found = where.stat().st_size
    if found != size:
        raise DataError("wrong_size", f"{where}: has {found:,} bytes, but {size:,} are recorded; {repair_hint(folder)}")
    return where


def listed_file(manifest: Manifest, folder: Path, name: str) -> FileFacts:
    """Return the entry of a file next to the shards. Raises DataError without one."""
    if file := next((file for file in manifest.files if file.path == name), None):
        return file
    raise DataError("bad_manifest", f"{folder / 'manifest.json'}: does not list {name}; {repair_hint(folder)}")


def check_digest(where: Path, found: str, recorded: str, folder: Path) -> None:
    if found != recorded:
        raise DataError("wrong_digest", f"{where}: does not have the recorded SHA-256; {repair_hint(folder)}")


def check_listed(folder: Path, file: Shard | FileFacts) -> None:
    """Check the size and SHA-256 of one file, or raise a PackError."""
    where = find_listed(folder, file.path, file.bytes)
    try:
        found = sha256_of(where)
    except OSError as error:
        raise StorageError("cannot_read", f"{where}: cannot be read: {error.strerror}") from error
    check_digest(where, found, file.sha256, folder)


def check_unchanged(folder: Path, file: Shard | FileFacts) -> None:
    """Check the size and SHA-256 of a file; hash it only if inode or time changed."""
    where = find_listed(folder, file.path, file.bytes)
    facts = where.stat()
    with reading(where):
        digest = _digest(where, facts.st_ino, facts.st_mtime_ns)
    check_digest(where, digest, file.sha256, folder)


_digest = cache(lambda where, inode, changed: sha256_of(where))


def changed_files(folder: Path, files: Sequence[Shard | FileFacts]) -> list[PackError]:
    """Return the errors of `check_listed` in order; read several files at a time."""

    def error_of(file: Shard | FileFacts) -> PackError | None:
        try:
            check_listed(folder, file)
        except PackError as error:
            return error
        return None

    # Few bytes are hashed before threads have started.
    few = sum(file.bytes for file in files) < FEW_BYTES and not _remote_with(folder)
    with ThreadPoolExecutor(min(THREADS, cores())) as threads:
        return [error for error in (map if few else threads.map)(error_of, files) if error]


def foreign_files(manifest: Manifest, folder: Path) -> list[PackError]:
    """Return an error for each file that the manifest does not list, sorted."""
    listed = [Path(file.path) for file in manifest.listed()]
    # A link to a folder of listed files is known here, because `find_listed` reports it for these files.
    known = {path.as_posix() for file in listed for path in (file, *file.parents)} | UNLISTED | FROM_HUB
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}
    if remote := _remote_with(folder):
        found = remote.names(folder)
    return [
        DataError("foreign_file", f"{folder / name}: does not belong to this corpus; move it elsewhere")
        for name in sorted(found - known)
        if not name.startswith(NOTES_OF_HUB)
    ]


def raise_all(wrong: Sequence[PackError], folder: Path) -> None:
    """Raise the only error, or one error that names them all; without errors, return.

    The combined error has the type and the reason of the first error.
    """
    if not wrong:
        return
    first, fix = wrong[0], repair_hint(folder)
    if len(wrong) == 1:
        raise first
    shown = [f"  {without_repair_hint(error)}" for error in wrong[:SHOWN]]
    shown += [f"  … and {len(wrong) - SHOWN:,} more"] * (len(wrong) > SHOWN)
    repairable = any(error.reason != "foreign_file" for error in wrong)
    summary = f"{folder}: {len(wrong):,} files do not match the manifest{f'; {fix}' * repairable}"
    files = [{"code": error.code, "reason": error.reason, "message": str(error)} for error in wrong[:SHOWN]]
    raise type(first)(first.reason, [summary, *shown], files=files)


@contextmanager
def reading(path: Path, folder: Path | None = None) -> Iterator[None]:
    """Convert errors in reading `path`, a file of a corpus `folder`, to a DataError."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        fix = repair_hint(folder) if folder else "copy the file again, or rebuild it"
        raise DataError("unreadable_file", f"{path}: cannot be read: {error}; {fix}") from error
