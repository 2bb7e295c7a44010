"""Find the files that a path in the config refers to.

A path refers to a file, a glob, a folder, or a folder written by save_to_disk, whose files keep its order::

    chats/*.jsonl     →  chats/a.jsonl, chats/b.jsonl
    chats             →  chats/a.jsonl, chats/b.jsonl, chats/old/a.csv.gz
    saved/train       →  saved/train/data-00000-of-00002.arrow, saved/train/data-00001-of-00002.arrow
    s3://bucket/*.csv →  s3://bucket/a.csv, s3://bucket/b.csv, with local copies (remote.py)
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path, PurePath

from tasks.core.errors import DataError, InputMissing, UsageError
from tasks.core.messages import noted
from tasks.core.printable import suggest
from tasks.readers.containers import container_by_extension
from tasks.sources.listed_names import check_extensions, saved_files
from tasks.sources.remote import Located, find_dataset, find_remote
from tasks.stores.urls import check_url, hub_name, is_url, local_path


def find_paths(pattern: str, folder: Path, copies: Path | None = None, revision: str = "") -> list[Located]:
    """Return the files that `pattern` matches.

    The pattern is a file, glob, or folder that is relative to `folder` or starts with `~`, a URL, or the name of a
    dataset on the Hub. The files of a glob or folder are in the byte order of their names. All files have a known
    extension.

    Remote files are copied below `copies`. Files on the Hub are copied at the commit `revision`, or at the current
    commit if `revision` is empty. Without `copies`, a URL of a remote file raises UsageError. Raises InputMissing or
    DataError with the name of the file that is missing or has an unknown extension, and the errors of stores.
    """
    if is_url(pattern):
        if check_url(pattern) == "file":
            found = find_paths(local_path(pattern), folder)
            return [each._replace(name=f"file://{each.name}") for each in found]
        if copies is None:
            raise UsageError("url_not_supported", f"{pattern}: only local files can be read here; download it")
        return find_remote(pattern, copies, revision)
    matches: list[str] = []
    advice = "if it takes too long, narrow the path"
    with noted(lambda: f"{pattern}: still searching, {len(matches):,} files found so far; {advice}"):
        try:
            found_here = _find_paths(os.path.expanduser(pattern), folder, matches)
        except InputMissing as error:
            # openai/gsm8k may name a dataset on the Hub; a path with a known extension does not.
            dataset = hub_name(pattern) if container_by_extension(pattern) is None else None
            if not copies or not dataset or error.reason != "source_missing":
                raise
            missing = error
        else:
            return found_here
    return find_dataset(dataset, missing, copies, revision)


def _find_paths(pattern: str, folder: Path, matches: list[str]) -> list[Located]:
    """Find the files of a local pattern.

    Files are added to `matches` as they are found.
    """
    path = (folder / pattern).absolute()
    name = PurePath(pattern).as_posix()
    if path.is_dir():
        return _in_folder(path, name, matches)
    if path.exists():
        if not path.is_file():
            raise DataError("not_a_file", f"{name}: is neither a file nor a folder")
        check_extensions([name], name)
        return [Located(path, name)]
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
    check_extensions(ordered, name)
    return [Located((folder / match).absolute(), match) for match in ordered]


def broken_link(path: Path) -> str:
    """Describe the symbolic link in a path that leads nowhere, or return "".

    The link is the path itself or a folder that the path is in.
    """
    for each in (*reversed(path.parents), path):
        if each.is_symlink() and not os.path.exists(each):
            return f"{'' if each == path else f'{each} '}is a symbolic link to {os.readlink(each)}, which leads nowhere"
    return ""


def _in_folder(folder: Path, name: str, found: list[str]) -> list[Located]:
    groups = []
    for group in _walk(folder, "", name, set()):
        groups.append(group)
        found += group[1]
    files = {name: note for _, names, note in sorted(groups) for name in names}
    if not files:
        raise InputMissing("empty_folder", f"{name}: the folder contains no files")
    check_extensions([*files], name)
    prefix = "" if name == "." else f"{name.rstrip('/')}/"
    return [Located(folder / relative, prefix + relative, note=note) for relative, note in files.items()]


def _walk(folder: Path, relative: str, name: str, seen: set[tuple[int, int]]) -> Iterator[tuple[bytes, list[str], str]]:
    """Yield (sort key, files, note) for each group of files in a folder.

    A saved dataset is one group that keeps its own order; any other file is a group of one. Links are followed, but
    each folder is visited once. Hidden names are skipped.
    """
    stat = folder.stat()
    if (stat.st_dev, stat.st_ino) in seen:
        return
    seen.add((stat.st_dev, stat.st_ino))
    entries = {entry.name: entry for entry in os.scandir(folder) if not entry.name.startswith(".")}
    here = f"{name}/{relative}".rstrip("/")
    saved = saved_files(entries, here, lambda name: (folder / name).read_bytes())
    if saved is not None:
        note = saved.note([folder / file for file in saved.files])
        yield os.fsencode(relative), [relative + file for file in saved.files], note
        return
    for entry in entries.values():
        if entry.is_dir():
            yield from _walk(folder / entry.name, f"{relative}{entry.name}/", name, seen)
        elif entry.is_file():
            yield os.fsencode(relative + entry.name), [relative + entry.name], ""
        else:
            problem = broken_link(folder / entry.name) or "is neither a file nor a folder"
            raise DataError("not_a_file", f"{here}/{entry.name}: {problem}")


def _suggestion(path: Path) -> str:
    folder = path.parent
    while not folder.is_dir():
        path, folder = folder, folder.parent
    return suggest(path.name, sorted(os.listdir(folder))) or f"; {folder} contains nothing similar"
