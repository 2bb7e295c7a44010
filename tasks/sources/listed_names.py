"""Rules for file names in a folder: extensions, and the order of a saved dataset.

The folder is local or remote.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from pathlib import PurePath

import orjson

from tasks.core.errors import DataError, InputMissing
from tasks.readers.containers import COMPRESSIONS, EXTENSIONS, container_by_extension


def saved_files(entries: Container[str], here: str, read: Callable[[str], bytes]) -> list[str] | None:
    """Return the files of a folder that save_to_disk wrote, in its order.

    Returns None if the folder is not a saved dataset. `read` returns the content of a file in the folder. Messages call
    the folder `here`. Raises DataError or InputMissing.
    """
    if "dataset_dict.json" in entries:
        splits = _list_in(read("dataset_dict.json"), f"{here}/dataset_dict.json", "splits")
        one = f"{here}/{splits[0]}" if splits else here
        listed = ", ".join(map(str, splits)) or "none"
        raise DataError(
            "bad_saved_data", f"{here}: is a saved dataset with the splits {listed}; use one of them, such as {one}"
        )
    if "state.json" not in entries or "dataset_info.json" not in entries:
        return None
    files = []
    for entry in _list_in(read("state.json"), f"{here}/state.json", "_data_files"):
        file = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(file, str) or PurePath(file).name != file:
            raise DataError("bad_saved_data", f"{here}/state.json: _data_files: expected names of files in this folder")
        if file not in entries:
            raise InputMissing("source_missing", f"{here}/{file}: is listed in state.json, but is missing")
        files.append(file)
    return files


def _list_in(content: bytes, name: str, key: str) -> list[object]:
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise DataError("bad_saved_data", f"{name}: is not JSON: {error.msg}") from None
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, list):
        raise DataError("bad_saved_data", f"{name}: {key}: expected a list")
    return found


def check_extensions(names: Sequence[str], requested: str) -> None:
    """Raise DataError if a name has an unknown extension.

    `requested` is the path or URL that the names were found with.
    """
    unknown = [name for name in names if container_by_extension(name) is None]
    if unknown:
        known = f"known are {' '.join(EXTENSIONS)}, text files also with {' or '.join(COMPRESSIONS)}"
        if len(names) == 1 and unknown[0] == requested:
            raise DataError("unknown_container", f"{requested}: unknown extension; {known}")
        listed = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        raise DataError(
            "unknown_container",
            f"{requested}: {len(unknown)} of {len(names)} files have an unknown extension: {listed}; "
            f"use a glob that excludes them, such as *.jsonl; {known}",
        )
