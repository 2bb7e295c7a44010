"""The files of a corpus as they lie: found, checked against the manifest, opened.

manifest ─find_listed─▶ a file of the corpus, of the size that is recorded ─check_digest─▶ with its content
manifest ─open_tokenizer─▶ Encoder, from the corpus's own copy
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from tasks.encoders import Encoder, TokenizerFiles, open_encoder
from tasks.errors import DataError, InputMissing, StorageError
from tasks.files import sha256_of
from tasks.manifest import FileFacts, Manifest, Shard, load_manifest, mend

# What lies in a corpus folder and is not listed with a digest: the manifest itself, and the record of one run.
UNLISTED = {"manifest.json", "run.json"}


def report_beside(folder: Path) -> Path:
    """Where the report of the corpus in `folder` goes: beside it, for a corpus folder holds its own files alone."""
    return folder.with_name(f"{folder.name}.html")


def check_copies(path: Path, folder: Path) -> None:
    """The manifest that was named and the one in the corpus folder must be the same bytes. Raises DataError."""
    copy = folder / "manifest.json"
    if copy.is_symlink():
        raise DataError("link_in_corpus", f"{copy}: is a link; a corpus holds its files itself; {mend(folder)}")
    if not path.samefile(copy) and copy.read_bytes() != path.read_bytes():
        load_manifest(copy)  # says so where this is the one that was damaged
        raise DataError("manifests_differ", f"{path} and {copy} differ; they must be the same bytes; {mend(path)}")


def find_listed(folder: Path, name: str, size: int) -> Path:
    """The file of a corpus that is listed as `name`, of `size` bytes. Raises DataError or InputMissing."""
    where = folder / name
    if where.is_symlink() or not where.resolve().is_relative_to(folder.resolve()):
        raise DataError("link_in_corpus", f"{where}: is a link; a corpus holds its files itself; {mend(folder)}")
    if not os.path.isfile(where):
        raise InputMissing("file_missing", f"{where}: is missing; {mend(folder)}")
    found = where.stat().st_size
    if found != size:
        raise DataError("wrong_size", f"{where}: holds {found:,} bytes, {size:,} were written; {mend(folder)}")
    return where


def check_digest(where: Path, found: str, recorded: str, folder: Path) -> None:
    """Raises DataError where the SHA-256 of a file that is listed in `folder` is another than the manifest records."""
    if found != recorded:
        raise DataError("wrong_digest", f"{where}: does not have the SHA-256 that was recorded; {mend(folder)}")


def check_listed(folder: Path, file: Shard | FileFacts) -> None:
    """Size and SHA-256 of one file. Raises DataError, InputMissing or StorageError, naming it."""
    where = find_listed(folder, file.path, file.bytes)
    try:
        found = sha256_of(where)
    except OSError as error:
        raise StorageError("cannot_read", f"{where}: cannot be read: {error.strerror}") from error
    check_digest(where, found, file.sha256, folder)


def check_nothing_besides(manifest: Manifest, folder: Path) -> None:
    """Raises DataError where the corpus folder holds what the manifest does not list."""
    known = {file.path for file in manifest.listed()} | UNLISTED
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}
    if found - known:
        raise DataError(
            "foreign_file", f"{folder / min(found - known)}: does not belong to this corpus; move it elsewhere"
        )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What goes wrong while `path` is read or taken apart is said of it."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(
            "unreadable_file", f"{path}: cannot be read as what it should be: {error}; make it again"
        ) from error


def find_tokenizer_files(manifest: Manifest, folder: Path) -> TokenizerFiles:
    """The corpus's own copy of its tokenizer, digests checked. Raises DataError or InputMissing, naming the file."""
    listed = [file for file in manifest.files if file.path.startswith("tokenizer/")]
    files = tuple(find_listed(folder, file.path, file.bytes) for file in listed)
    for file in listed:
        check_listed(folder, file)
    main = folder / manifest.tokenizer.path
    if main not in files:
        raise DataError("unreadable_file", f"{main}: the tokenizer is not among the files of the manifest")
    return TokenizerFiles(main, files)


def open_tokenizer(manifest: Manifest, folder: Path) -> Encoder:
    """Raises as find_tokenizer_files does."""
    files = find_tokenizer_files(manifest, folder)
    return open_encoder(files, manifest.config.get("eos_token"), manifest.config.get("pad_token"))
