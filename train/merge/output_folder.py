"""Folder of a merged model, which is complete or does not exist.

.NAME.merging/   locked while the model is written and checked; the next merge of the same run clears it
NAME/            renamed from it at the end; merge.json names the run, and every file with its size and SHA-256
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.core.errors import Busy, StorageError, UsageError
from tasks.storage.files import acquire_lock, make_folder, read_json, sha256_of, sync_folder, to_json, write_bytes

RECORD = "merge.json"
LOCK = "merge.lock"


def is_merged(folder: Path, identity: dict[str, Any]) -> bool:
    """Return whether `folder` contains this merge and is complete.

    It is False if the folder does not exist or is empty. Raises UsageError if the folder contains anything else.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    found = _record(folder)
    if found is None:
        raise UsageError(
            "merge_folder_taken", f"{folder}: exists and is not a merged model; choose another --output, or delete it"
        )
    if changed := [name for name, value in identity.items() if found.get(name) != value]:
        wanted = ", ".join(f"{name} {_short(found.get(name))}, now {_short(identity[name])}" for name in changed)
        raise UsageError(
            "merge_folder_taken",
            f"{folder}: contains a different merge ({wanted}); choose another --output, or delete it",
        )
    for name, facts in found["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != facts["bytes"]:
            raise UsageError(
                "merge_folder_taken",
                f"{path}: is missing or truncated; delete {folder}, then merge again",
            )
    return True


def _record(folder: Path) -> dict[str, Any] | None:
    try:
        found = read_json(folder / RECORD)
    except StorageError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("files"), dict) else None


def _short(value: Any) -> str:
    return str(value)[:12]


@contextmanager
def being_written(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `folder` if the block succeeds.

    If the block fails, the new folder is removed. Raises Busy if another process writes the same model.
    """
    folder = folder.absolute()
    temporary = folder.with_name(f".{folder.name}.merging")
    make_folder(temporary)
    if not acquire_lock(temporary / LOCK):
        raise Busy("busy", f"{temporary}: another merge is writing this model; wait until it ends, then retry")
    for path in temporary.iterdir():  # of an interrupted merge
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
    try:
        yield temporary
        sync_folder(temporary)
        try:
            os.rename(temporary, folder)  # the lock moves along, so no process takes the folder for abandoned
        except OSError as error:
            raise StorageError("cannot_write", f"{folder}: cannot be written: {error.strerror}") from error
        (folder / LOCK).unlink(missing_ok=True)
        sync_folder(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_record(folder: Path, identity: dict[str, Any]) -> None:
    """Write merge.json with the identity of the merge and a list of all other files.

    Each file is on disk when this returns.
    """
    files = {}
    for path in sorted(path for path in folder.iterdir() if path.is_file() and path.name not in (LOCK, RECORD)):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    write_bytes(folder / RECORD, to_json(identity | {"files": files}))
