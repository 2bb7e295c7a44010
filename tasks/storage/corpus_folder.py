"""The files of a corpus as they lie: found, checked against the manifest, opened.

manifest ─find_listed─▶ a file of the corpus, of the size that is recorded ─check_digest─▶ with its content
manifest ─wrong_files, foreign_files─▶ all that is not as recorded ─refuse─▶ one error that names it
manifest ─open_tokenizer─▶ Encoder, from the corpus's own copy
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath

import pyarrow as pa

from tasks.core.errors import DataError, InputMissing, PackError, StorageError
from tasks.storage.files import sha256_of, write_bytes
from tasks.storage.manifest import FileFacts, Manifest, Shard, load_manifest, repair_hint


def corpus_folder(manifest: Manifest, path: Path) -> Path:
    """The corpus that a manifest belongs to: its own folder, or the one it names below the project's root.

    `path` is <corpus>/manifest.json or <root>/manifests/<name>.json. Raises InputMissing where the folder is gone.
    """
    folder = path.resolve().parent
    root = folder.parent if folder.name == "manifests" else folder
    candidates = [root / manifest.corpus, folder, Path.cwd() / manifest.corpus]
    if path.name == "manifest.json":
        candidates.insert(0, folder)
    for candidate in candidates:
        if os.path.isfile(candidate / "manifest.json"):
            return candidate
        if candidate.is_dir() and candidate.name == PurePosixPath(manifest.corpus).name:
            raise InputMissing("file_missing", f"{candidate / 'manifest.json'}: is missing; {repair_hint(path)}")
    raise InputMissing(
        "corpus_missing", f"{path}: its corpus folder {root / manifest.corpus} is gone; make the corpus again"
    )


# What lies in a corpus folder and is not listed with a digest: the manifest itself, and the record of one run.
UNLISTED = {"manifest.json", "run.json"}


SHOWN = 20  # files that one error names


THREADS = 8  # files that are digested at a time, outside of Python's lock


LAST = ".last"  # in manifests/: the name of the manifest that the latest run published or found complete


def remember_manifest(root: Path, name: str) -> None:
    """Record `name`, a file of <root>/manifests, as the manifest of the latest run.

    A run that changes nothing writes nothing. A folder that cannot be written to is not an error: the record is a
    convenience.
    """
    path, content = root / "manifests" / LAST, f"{name}\n".encode()
    with suppress(StorageError, OSError):
        if not (path.is_file() and path.read_bytes() == content):
            write_bytes(path, content)


def last_manifest(root: Path) -> Path | None:
    """Return the manifest of the latest run below `root`, or None if there is no record or the file is gone."""
    try:
        name = (root / "manifests" / LAST).read_text(encoding="utf-8").strip()
        path = root / "manifests" / name
        return path if name == path.name and path.is_file() else None
    except (OSError, ValueError):
        return None


def report_beside(folder: Path) -> Path:
    """Where the report of the corpus in `folder` goes: beside it, for a corpus folder holds its own files alone."""
    return folder.with_name(f"{folder.name}.html")


def check_copies(path: Path, folder: Path) -> None:
    """The manifest that was named and the one in the corpus folder must be the same bytes. Raises DataError."""
    copy = folder / "manifest.json"
    if copy.is_symlink():
        raise DataError("link_in_corpus", f"{copy}: is a link; a corpus holds its files itself; {repair_hint(folder)}")
    if not path.samefile(copy) and copy.read_bytes() != path.read_bytes():
        load_manifest(copy)  # says so where this is the one that was damaged
        raise DataError(
            "manifests_differ", f"{path} and {copy} differ; they must be the same bytes; {repair_hint(path)}"
        )


def find_listed(folder: Path, name: str, size: int) -> Path:
    """The file of a corpus that is listed as `name`, of `size` bytes. Raises DataError or InputMissing."""
    where = folder / name
    if where.is_symlink() or not where.resolve().is_relative_to(folder.resolve()):
        raise DataError("link_in_corpus", f"{where}: is a link; a corpus holds its files itself; {repair_hint(folder)}")
    if not os.path.isfile(where):
        raise InputMissing("file_missing", f"{where}: is missing; {repair_hint(folder)}")
    found = where.stat().st_size
    if found != size:
        raise DataError("wrong_size", f"{where}: holds {found:,} bytes, {size:,} were written; {repair_hint(folder)}")
    return where


def listed_file(manifest: Manifest, folder: Path, name: str) -> FileFacts:
    """Return what the manifest records of a file next to the shards. Raises DataError if it does not list it."""
    for file in manifest.files:
        if file.path == name:
            return file
    raise DataError("bad_manifest", f"{folder / 'manifest.json'}: does not list {name}; {repair_hint(folder)}")


def check_digest(where: Path, found: str, recorded: str, folder: Path) -> None:
    """Raises DataError where the SHA-256 of a file that is listed in `folder` is another than the manifest records."""
    if found != recorded:
        raise DataError("wrong_digest", f"{where}: does not have the SHA-256 that was recorded; {repair_hint(folder)}")


def check_listed(folder: Path, file: Shard | FileFacts) -> None:
    """Size and SHA-256 of one file. Raises DataError, InputMissing or StorageError, naming it."""
    where = find_listed(folder, file.path, file.bytes)
    try:
        found = sha256_of(where)
    except OSError as error:
        raise StorageError("cannot_read", f"{where}: cannot be read: {error.strerror}") from error
    check_digest(where, found, file.sha256, folder)


def check_unchanged(folder: Path, file: Shard | FileFacts) -> None:
    """As check_listed, but read again only where the file was changed since: for those that are asked for often."""
    where = find_listed(folder, file.path, file.bytes)
    facts = where.stat()
    check_digest(where, _digest(where, facts.st_ino, facts.st_mtime_ns), file.sha256, folder)


@cache
def _digest(where: Path, _inode: int, _changed: int) -> str:
    with reading(where):
        return sha256_of(where)


def wrong_files(folder: Path, files: Sequence[Shard | FileFacts]) -> list[PackError]:
    """What `check_listed` says of each file that is not as recorded, in their order. Several are read at a time."""

    def wrong(file: Shard | FileFacts) -> PackError | None:
        try:
            check_listed(folder, file)
        except PackError as error:
            return error
        return None

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
        return [error for error in threads.map(wrong, files) if error]


def foreign_files(manifest: Manifest, folder: Path) -> list[PackError]:
    """An error for each file in the corpus folder that the manifest does not list, by name."""
    listed = [Path(file.path) for file in manifest.listed()]
    # A folder of listed files that is a link is said of these.
    known = {path.as_posix() for file in listed for path in (file, *file.parents)} | UNLISTED
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}
    return [
        DataError("foreign_file", f"{folder / name}: does not belong to this corpus; move it elsewhere")
        for name in sorted(found - known)
    ]


def refuse(wrong: Sequence[PackError], folder: Path) -> None:
    """Raises the error, where there is one; of several the first, which names them all."""
    if len(wrong) < 2:
        for error in wrong:
            raise error
        return
    first, advice = wrong[0], repair_hint(folder)
    shown = [f"  {str(error).partition('; run: packcorpus repair')[0]}" for error in wrong[:SHOWN]]
    shown += [f"  … and {len(wrong) - SHOWN:,} more"] * (len(wrong) > SHOWN)
    mendable = any(error.reason != "foreign_file" for error in wrong)
    head = f"{folder}: {len(wrong):,} files are not as they should be{f'; {advice}' * mendable}"
    told = [{"code": error.code, "reason": error.reason, "message": str(error)} for error in wrong[:SHOWN]]
    raise type(first)(first.reason, "\n".join([head, *shown]), files=told)


@contextmanager
def reading(path: Path, folder: Path | None = None) -> Iterator[None]:
    """Turn whatever goes wrong while `path` is read or parsed into a DataError that names it.

    `folder` is that of its corpus, if it has a manifest to repair it by.
    """
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        fix = repair_hint(folder) if folder else "copy the file again, or rebuild it"
        raise DataError("unreadable_file", f"{path}: cannot be read: {error}; {fix}") from error
