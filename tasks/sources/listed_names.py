"""Rules for the files of a folder: extensions, and the order of a saved dataset.

The folder is local or remote.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import orjson

from tasks.core.errors import DataError, InputMissing
from tasks.core.printable import counted
from tasks.readers.arrow_ipc import count_rows
from tasks.readers.containers import COMPRESSIONS, EXTENSIONS, container_by_extension


class Saved(NamedTuple):
    """The files of a folder that save_to_disk wrote, in its order.

    `rows` is how many rows its dataset_info.json says, or 0. Messages call the folder `here`.
    """

    here: str
    files: list[str]
    rows: int

    def note(self, paths: Sequence[Path]) -> str:
        """Return a note if the files have fewer rows than dataset_info.json says, or "".

        `paths` are the files on this machine. Raises DataError if a file is damaged. The number does not prove a loss:
        save_to_disk writes that of the dataset that was loaded, also after filter, select, and train_test_split. The
        proof is the list of files in state.json, and the end marker of each file.
        """
        named = zip(paths, self.files, strict=True)
        count = sum(count_rows(path, f"{self.here}/{name}") for path, name in named) if self.rows else 0
        if count >= self.rows:
            return ""
        return (
            f"{self.here}: all {counted(count, 'row')} are read; its dataset_info.json says {self.rows:,}, which is "
            "the number before filter, select, or train_test_split"
        )


def saved_files(entries: Container[str], here: str, read: Callable[[str], bytes]) -> Saved | None:
    """Return the files of a folder that save_to_disk wrote.

    Returns None if the folder is not a saved dataset. `read` returns the content of a file in the folder. Raises
    DataError or InputMissing.
    """
    if "dataset_dict.json" in entries:
        name = f"{here}/dataset_dict.json"
        splits = _list_in(_object(read("dataset_dict.json"), name), name, "splits")
        one = f"{here}/{splits[0]}" if splits else here
        listed = ", ".join(map(str, splits)) or "none"
        raise DataError(
            "bad_saved_data", f"{here}: is a saved dataset with the splits {listed}; use one of them, such as {one}"
        )
    if "state.json" not in entries or "dataset_info.json" not in entries:
        return None
    state = _object(read("state.json"), f"{here}/state.json")
    files = []
    for entry in _list_in(state, f"{here}/state.json", "_data_files"):
        file = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(file, str) or PurePath(file).name != file:
            raise DataError("bad_saved_data", f"{here}/state.json: _data_files: expected names of files in this folder")
        if file not in entries:
            raise InputMissing("source_missing", f"{here}/{file}: is listed in state.json, but is missing")
        files.append(file)
    facts = _object(read("dataset_info.json"), f"{here}/dataset_info.json").get("splits")
    known = facts if isinstance(facts, dict) else {}
    name = state.get("_split") or (next(iter(known)) if len(known) == 1 else "")
    split = known.get(name) if isinstance(name, str) else None
    rows = split.get("num_examples") if isinstance(split, dict) else None
    return Saved(here, files, rows if isinstance(rows, int) else 0)


def _object(content: bytes, name: str) -> dict[str, Any]:
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise DataError("bad_saved_data", f"{name}: is not JSON: {error.msg}") from None
    return value if isinstance(value, dict) else {}


def _list_in(value: dict[str, Any], name: str, key: str) -> list[Any]:
    found = value.get(key)
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
