"""Recompute every invariant of a corpus from its files.

manifest ─ its digest, its two copies
   ├ every file ─ size and SHA-256, nothing missing, no unlisted file
   ├ every shard ─ schema, and for each row: mask, labels, positions, ids, at least one trained token
   ├ index ─ its pieces tile every row without gap or overlap, start where positions restart, end with EOS
   └ ledger ─ conversations, tokens, and figures counted a second time

None of the code that made the corpus is trusted or called. Memory is bounded, because the index is distributed over
temporary files (partitions.py) and checked one partition at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tasks.core.errors import DataError, PackError
from tasks.core.printable import counted
from tasks.storage.corpus_folder import (
    changed_files,
    check_copies,
    check_published,
    corpus_folder,
    foreign_files,
    raise_all,
)
from tasks.storage.manifest import Manifest, load_manifest
from tasks.verification.check_ledger import check_beside, check_recorded_ledger
from tasks.verification.check_rows import check_packed_rows, check_unpacked_rows
from tasks.verification.read_index import read_index


@dataclass(frozen=True)
class Check:
    """A check that passed, and its result."""

    name: str
    found: str


def verify(path: Path) -> list[Check]:
    """Check the corpus of a manifest, and return the checks, which all passed.

    Raises DataError, InputMissing, or StorageError at the first invariant that does not hold. If files are missing or
    damaged, the error names all of them, and their content is not checked.
    """
    manifest = load_manifest(path)
    folder, listed = corpus_folder(manifest, path), manifest.listed()
    _check_files(path, manifest, folder)
    is_packed = manifest.packing_metadata.enabled
    with read_index(manifest, folder) as index:
        tokens = (check_packed_rows if is_packed else check_unpacked_rows)(manifest, folder, index)
        index.by_shard.close()
        if not tokens.rows:
            raise DataError("wrong_count", f"{path}: the corpus has no rows")
        if tokens.pieces != index.placed:
            raise DataError("bad_index", f"{folder / 'index.arrow'}: refers to shards or rows that do not exist")
        check_beside(manifest, folder)
        check_recorded_ledger(manifest, folder, index, tokens)
    size = sum(file.bytes for file in listed)
    rows = f"{counted(tokens.rows, 'row')}, {counted(tokens.packed, 'token')}, {tokens.trained:,} trained"
    held = "every invariant holds" if is_packed else "the counts match the index"
    return [
        Check("manifest", f"unedited, key {manifest.key[:12]}"),
        Check(
            "files",
            f"{counted(len(listed), 'file')}, {size:,} bytes: sizes and SHA-256 as recorded, no unlisted files",
        ),
        Check("rows", f"{rows}: {held}"),
        Check("index", f"{counted(tokens.pieces, 'piece')} in the rows, without gap or overlap"),
        Check("ledger", "conversations, tokens, and figures agree with a second count"),
    ]


def _check_files(path: Path, manifest: Manifest, folder: Path) -> None:
    """Check the size and SHA-256 of every file."""
    wrong: list[PackError] = []
    try:
        check_copies(path, folder)
        check_published(path, manifest, folder)
    except PackError as error:
        if error.reason == "manifests_differ":  # it is unknown which of the two copies describes the files
            raise
        wrong.append(error)
    wrong += changed_files(folder, manifest.listed()) + foreign_files(manifest, folder)
    raise_all(wrong, folder)
