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
from tasks.errors import DataError, InputMissing
from tasks.files import sha256_of
from tasks.manifest import Manifest


def check_copies(path: Path, folder: Path) -> None:
    """The manifest that was named and the one in the corpus folder must be the same bytes. Raises DataError."""
    copy = folder / "manifest.json"
    if not path.samefile(copy) and copy.read_bytes() != path.read_bytes():
        raise DataError(f"{path} and {copy} differ; they must be the same bytes")


def find_listed(folder: Path, name: str, size: int) -> Path:
    """The file of a corpus that is listed as `name`, of `size` bytes. Raises DataError or InputMissing."""
    where = folder / name
    if where.is_symlink() or not where.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"{where}: is a link; a corpus holds its files itself")
    if not os.path.isfile(where):
        raise InputMissing(f"{where}: is missing; run PackCorpus again to make it")
    found = where.stat().st_size
    if found != size:
        raise DataError(f"{where}: holds {found:,} bytes, {size:,} were written; delete it and run PackCorpus")
    return where


def check_digest(where: Path, found: str, recorded: str) -> None:
    """Raises DataError where the SHA-256 of a listed file is another than the manifest records."""
    if found != recorded:
        raise DataError(f"{where}: does not have the SHA-256 that was recorded; delete it and run PackCorpus again")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What goes wrong while `path` is read or taken apart is said of it."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path}: cannot be read as what it should be: {error}; make it again") from error


def find_tokenizer_files(manifest: Manifest, folder: Path) -> TokenizerFiles:
    """The corpus's own copy of its tokenizer, digests checked. Raises DataError or InputMissing, naming the file."""
    listed = [file for file in manifest.files if file.path.startswith("tokenizer/")]
    files = tuple(find_listed(folder, file.path, file.bytes) for file in listed)
    for file, path in zip(listed, files, strict=True):
        check_digest(path, sha256_of(path), file.sha256)
    main = folder / manifest.tokenizer.path
    if main not in files:
        raise DataError(f"{main}: the tokenizer is not among the files of the manifest")
    return TokenizerFiles(main, files)


def open_tokenizer(manifest: Manifest, folder: Path) -> Encoder:
    """Raises as find_tokenizer_files does."""
    files = find_tokenizer_files(manifest, folder)
    return open_encoder(files, manifest.config.get("eos_token"), manifest.config.get("pad_token"))
