"""Find the files that a path in the config refers to.

A file, a glob, a folder, or a folder written by save_to_disk, whose files keep the order it gave them::

    chats/*.jsonl     →  chats/a.jsonl, chats/b.jsonl
    chats             →  chats/a.jsonl, chats/b.jsonl, chats/old/a.csv.gz
    saved/train       →  saved/train/data-00000-of-00002.arrow, saved/train/data-00001-of-00002.arrow
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

import orjson

from tasks.core.errors import DataError, InputMissing
from tasks.core.notes import noted
from tasks.core.suggest import suggest
from tasks.readers.containers import COMPRESSIONS, EXTENSIONS, container_by_extension


def find_paths(pattern: str, folder: Path) -> list[tuple[Path, str]]:
    """Return (absolute path, name) of each file that `pattern` matches.

    The pattern is a file, glob, or folder, relative to `folder`, or starts with `~`. The files of a glob or folder are
    in the byte order of their names. All have a known extension. Raises InputMissing or DataError with the name of the
    file that is missing or has an unknown extension.
    """
    found: list[str] = []
    advice = "if it takes too long, narrow the path"
    with noted(lambda: f"{pattern}: still searching, {len(found):,} files found so far; {advice}"):
        return _find_paths(os.path.expanduser(pattern), folder, found)


def _find_paths(pattern: str, folder: Path, matches: list[str]) -> list[tuple[Path, str]]:
    """Find the files of a pattern; `matches` grows as they are found."""
    path = (folder / pattern).absolute()
    name = PurePath(pattern).as_posix()
    if path.is_dir():
        return _in_folder(path, name, matches)
    if path.exists():
        if not path.is_file():
            raise DataError("not_a_file", f"{name}: is neither a file nor a folder")
        _check_extensions([name], name)
        return [(path, name)]
    if not glob.has_magic(pattern):
        if problem := broken_link(path):
            raise DataError("not_a_file", f"{name}: {problem}")
        raise InputMissing("source_missing", f"{name}: no such file or folder{_suggestion(path)}")
    matches += glob.iglob(pattern, root_dir=folder, recursive=True)
    for match in matches:
        if not (folder / match).is_file() and not (folder / match).is_dir():
            raise DataError("not_a_file", f"{match}: {broken_link(folder / match) or 'is neither a file nor a folder'}")
    names = {PurePath(match).as_posix() for match in matches if (folder / match).is_file()}
    if not names:
        found = "only folders; to read a folder, name it without a glob" if matches else f"no file in {folder}"
        raise InputMissing("no_match", f"{name}: the glob matches {found}")
    ordered = sorted(names, key=os.fsencode)
    _check_extensions(ordered, name)
    return [((folder / match).absolute(), match) for match in ordered]


def broken_link(path: Path) -> str:
    """Explain that a path, or a folder that it is in, is a symbolic link that leads nowhere; "" if none is."""
    for each in (*reversed(path.parents), path):
        if each.is_symlink() and not os.path.exists(each):
            return f"{'' if each == path else f'{each} '}is a symbolic link to {os.readlink(each)}, which leads nowhere"
    return ""


def _in_folder(folder: Path, name: str, found: list[str]) -> list[tuple[Path, str]]:
    groups = []
    for group in _walk(folder, "", name, set()):
        groups.append(group)
        found += group[1]
    files = [relative for _, relatives in sorted(groups) for relative in relatives]
    if not files:
        raise InputMissing("empty_folder", f"{name}: the folder contains no files")
    _check_extensions(files, name)
    prefix = "" if name == "." else f"{name.rstrip('/')}/"
    return [(folder / relative, prefix + relative) for relative in files]


def _walk(folder: Path, relative: str, name: str, seen: set[tuple[int, int]]) -> Iterator[tuple[bytes, list[str]]]:
    """Yield (sort key, files): one file each, but a saved dataset is one group that keeps its own order.

    Links are followed, each folder once; hidden names are skipped.
    """
    stat = folder.stat()
    if (stat.st_dev, stat.st_ino) in seen:
        return
    seen.add((stat.st_dev, stat.st_ino))
    entries = {entry.name: entry for entry in os.scandir(folder) if not entry.name.startswith(".")}
    here = f"{name}/{relative}".rstrip("/")
    if "dataset_dict.json" in entries:
        splits = _json_field(folder / "dataset_dict.json", f"{here}/dataset_dict.json", "splits")
        one = f"{here}/{splits[0]}" if splits else here
        listed = ", ".join(map(str, splits)) or "none"
        raise DataError(
            "bad_saved_data", f"{here}: is a saved dataset with the splits {listed}; use one of them, such as {one}"
        )
    if "state.json" in entries and "dataset_info.json" in entries:
        listed_files = []
        for entry in _json_field(folder / "state.json", f"{here}/state.json", "_data_files"):
            file = entry.get("filename") if isinstance(entry, dict) else None
            if not isinstance(file, str) or PurePath(file).name != file:
                raise DataError(
                    "bad_saved_data", f"{here}/state.json: _data_files: expected names of files in this folder"
                )
            if file not in entries:
                raise InputMissing("source_missing", f"{here}/{file}: is listed in state.json, but is missing")
            listed_files.append(relative + file)
        yield os.fsencode(relative), listed_files
        return
    for entry in entries.values():
        if entry.is_dir():
            yield from _walk(folder / entry.name, f"{relative}{entry.name}/", name, seen)
        elif entry.is_file():
            yield os.fsencode(relative + entry.name), [relative + entry.name]
        else:
            problem = broken_link(folder / entry.name) or "is neither a file nor a folder"
            raise DataError("not_a_file", f"{here}/{entry.name}: {problem}")


def _json_field(path: Path, name: str, key: str) -> list[object]:
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise DataError("bad_saved_data", f"{name}: is not JSON: {error.msg}") from None
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, list):
        raise DataError("bad_saved_data", f"{name}: {key}: expected a list")
    return found


def _check_extensions(names: Sequence[str], requested: str) -> None:
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


def _suggestion(path: Path) -> str:
    folder = path.parent
    while not folder.is_dir():
        path, folder = folder, folder.parent
    return suggest(path.name, sorted(os.listdir(folder))) or f"; {folder} contains nothing similar"
