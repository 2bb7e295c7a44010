"""Find the files and objects that a path in the config refers to.

chats/*.jsonl                   →  chats/a.jsonl, chats/b.jsonl
chats                           →  chats/a.jsonl, chats/b.jsonl, chats/old/a.csv.gz
saved/train                     →  the files of a saved dataset, in its own order
s3://bucket/chats/*.jsonl.gz    →  s3://bucket/chats/a.jsonl.gz, …, each with a copy below data/remote/
s3://bucket/chats               →  the objects below it, unless an object has this key
hf://datasets/owner/name@v1/x   →  the files of a dataset, at the commit that v1 has now
owner/name                      →  hf://datasets/owner/name, if no such path exists
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from glob import has_magic
from itertools import takewhile
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple

import orjson

from packcorpus.tasks.core.errors import DataError, InputMissing, PackError, UsageError
from packcorpus.tasks.core.messages import noted
from packcorpus.tasks.core.printable import counted, suggest
from packcorpus.tasks.readers.arrow_ipc import count_rows
from packcorpus.tasks.readers.containers import COMPRESSIONS, EXTENSIONS, container_by_extension
from packcorpus.tasks.sources.blocks import open_holes
from packcorpus.tasks.sources.model import Part
from packcorpus.tasks.stores.bucket import open_store
from packcorpus.tasks.stores.store import Facts, Object, Reading, changed, fetch_copies, place_of_copy
from packcorpus.tasks.stores.urls import (
    Dataset,
    check_url,
    hub_name,
    is_url,
    local_path,
    split_dataset,
    split_url,
    url_of,
)

SHOWN = 8  # maximum number of groups of files that a message lists


class Located(NamedTuple):
    """A file that a source names, with its absolute path.

    `name` is the URL of a remote file, or else the path as in the config. `revision` is the commit of a dataset on the
    Hub. `sha256` is the digest of a copy when it arrived. `identity` is the ETag of an object that is read in blocks;
    the file at `path` then holds only the blocks that were read. `note` is what a user may want to know of the folder.
    """

    path: Path
    name: str
    revision: str = ""
    sha256: str = ""
    identity: str = ""
    note: str = ""


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
            return [file._replace(name=f"file://{file.name}") for file in find_paths(local_path(pattern), folder)]
        if copies is None:
            raise UsageError("url_not_supported", f"{pattern}: only local files can be read here; download it")
        return _find_remote(pattern, copies, revision)
    matches: list[str] = []
    advice = "if it takes too long, narrow the path"
    try:
        with noted(lambda: f"{pattern}: still searching, {len(matches):,} files found so far; {advice}"):
            return _find_local(os.path.expanduser(pattern), folder, matches)
    except InputMissing as error:
        # openai/gsm8k may name a dataset on the Hub; a path with a known extension does not.
        dataset = hub_name(pattern) if container_by_extension(pattern) is None else None
        if not copies or not dataset or error.reason != "source_missing":
            raise
        missing = error
    try:
        return _find_in_dataset(dataset, copies, revision)
    except PackError as error:
        if error.reason not in ("object_missing", "library_missing", "store_denied", "store_failed"):
            raise
        problem = f"as the name of a dataset on the Hub: {str(error).removeprefix(f'{dataset.url}: ')}"
        raise InputMissing("source_missing", f"{missing}; {problem}") from None


def check_extensions(names: Sequence[str], requested: str) -> None:
    """Raise DataError if a name that `requested` matches has an unknown extension."""
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


# -- datasets that save_to_disk wrote, local or remote -----------------------------------------------------------------


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
    """Return the files of a folder that save_to_disk wrote, or None for another.

    `read` returns the content of a file in the folder. Raises DataError or InputMissing.
    """

    def facts_in(file: str) -> dict[str, Any]:
        try:
            value = orjson.loads(read(file))
        except orjson.JSONDecodeError as error:
            raise DataError("bad_saved_data", f"{here}/{file}: is not JSON: {error.msg}") from None
        return value if isinstance(value, dict) else {}

    def listed_in(facts: dict[str, Any], file: str, key: str) -> list[Any]:
        if not isinstance(values := facts.get(key), list):
            raise DataError("bad_saved_data", f"{here}/{file}: {key}: expected a list")
        return values

    if "dataset_dict.json" in entries:
        splits = listed_in(facts_in("dataset_dict.json"), "dataset_dict.json", "splits")
        first = f"{here}/{splits[0]}" if splits else here
        listed = ", ".join(map(str, splits)) or "none"
        raise DataError(
            "bad_saved_data", f"{here}: is a saved dataset with the splits {listed}; use one of them, such as {first}"
        )
    if "state.json" not in entries or "dataset_info.json" not in entries:
        return None
    state = facts_in("state.json")
    files = []
    for entry in listed_in(state, "state.json", "_data_files"):
        file = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(file, str) or PurePath(file).name != file:
            raise DataError("bad_saved_data", f"{here}/state.json: _data_files: expected names of files in this folder")
        if file not in entries:
            raise InputMissing("source_missing", f"{here}/{file}: is listed in state.json, but is missing")
        files.append(file)
    known = facts_in("dataset_info.json").get("splits")
    known = known if isinstance(known, dict) else {}
    name = state.get("_split") or (next(iter(known)) if len(known) == 1 else "")
    split = known.get(name) if isinstance(name, str) else None
    rows = split.get("num_examples") if isinstance(split, dict) else None
    return Saved(here, files, rows if isinstance(rows, int) else 0)


# -- local files -------------------------------------------------------------------------------------------------------


def _find_local(pattern: str, folder: Path, matches: list[str]) -> list[Located]:
    """Return the local files that a pattern matches; `matches` grows meanwhile."""
    name, path = PurePath(pattern).as_posix(), (folder / pattern).absolute()
    if path.is_dir():
        groups = []
        for group in _walk(path, "", name, set()):
            groups.append(group)
            matches += group[1]
        files = {file: note for _, names, note in sorted(groups) for file in names}
        if not files:
            raise InputMissing("empty_folder", f"{name}: the folder contains no files")
        check_extensions([*files], name)
        prefix = "" if name == "." else f"{name.rstrip('/')}/"
        return [Located(path / relative, prefix + relative, note=note) for relative, note in files.items()]
    if path.exists():
        if not path.is_file():
            raise DataError("not_a_file", f"{name}: is neither a file nor a folder")
        check_extensions([name], name)
        return [Located(path, name)]
    if not has_magic(pattern):
        if problem := _broken_link(path):
            raise DataError("not_a_file", f"{name}: {problem}")
        above = path.parent
        while not above.is_dir():
            path, above = above, above.parent
        hint = suggest(path.name, sorted(os.listdir(above))) or f"; {above} contains nothing similar"
        raise InputMissing("source_missing", f"{name}: no such file or folder{hint}")
    matches += glob.iglob(pattern, root_dir=folder, recursive=True)
    for match in matches:
        if not (folder / match).is_file() and not (folder / match).is_dir():
            problem = _broken_link(folder / match) or "is neither a file nor a folder"
            raise DataError("not_a_file", f"{match}: {problem}")
    names = {PurePath(match).as_posix() for match in matches if (folder / match).is_file()}
    if not names:
        what = "only folders; to read a folder, name it without a glob" if matches else f"no file in {folder}"
        raise InputMissing("no_match", f"{name}: the glob matches {what}")
    ordered = sorted(names, key=os.fsencode)
    check_extensions(ordered, name)
    return [Located((folder / match).absolute(), match) for match in ordered]


def _broken_link(path: Path) -> str:
    """Describe the symbolic link in a path that leads nowhere, or return ""."""
    for place in (*reversed(path.parents), path):
        if place.is_symlink() and not os.path.exists(place):
            which = "" if place == path else f"{place} "
            return f"{which}is a symbolic link to {os.readlink(place)}, which leads nowhere"
    return ""


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
    if saved := saved_files(entries, here, lambda name: (folder / name).read_bytes()):
        note = saved.note([folder / file for file in saved.files])
        yield os.fsencode(relative), [relative + file for file in saved.files], note
        return
    for entry in entries.values():
        if entry.is_dir():
            yield from _walk(folder / entry.name, f"{relative}{entry.name}/", name, seen)
        elif entry.is_file():
            yield os.fsencode(relative + entry.name), [relative + entry.name], ""
        else:
            problem = _broken_link(folder / entry.name) or "is neither a file nor a folder"
            raise DataError("not_a_file", f"{here}/{entry.name}: {problem}")


# -- objects -----------------------------------------------------------------------------------------------------------


class _Listing:
    """The objects that a URL names: one, those of a glob, or those below a folder."""

    def __init__(self, store: Reading, key: str):
        self.store, self.key = store, key.strip("/")
        self.url = store.url_of(self.key)
        self.saved: dict[str, Saved] = {}  # by the start of their keys

    @cached_property
    def listed(self) -> dict[str, Facts]:
        """The objects that are not hidden, below the longest path without a glob."""
        literal = list(takewhile(lambda part: not has_magic(part), PurePosixPath(self.key).parts))
        listed = dict[str, Facts]()
        with noted(lambda: f"{self.url}: still listing objects; if it takes too long, narrow the URL"):
            for key, facts in self.store.list("/".join(literal)):
                below = PurePosixPath(key).parts[len(literal) :]
                hidden = any(part.startswith(".") for part in below)
                # An empty object without an extension stands for a folder, in tools that show buckets as folders.
                if not hidden and (facts.size or container_by_extension(key)):
                    listed[key] = facts
        return listed

    def find(self) -> dict[str, Facts]:
        """Return the objects that the URL names, in order. Raises PackError."""
        if self.key and (facts := self.store.head(self.key)):  # like a path, a key may look like a glob
            check_extensions([self.url], self.url)
            return {self.key: facts}
        if has_magic(self.key):
            keys = [key for key in self.listed if _matches(key.split("/"), self.key.split("/"))]
            if not keys:
                raise InputMissing("no_match", f"{self.url}: the glob matches no object")
        else:
            keys = self._of_folder()
            if not keys:
                raise InputMissing("object_missing", f"{self.url}: no such object, and none below it")
        check_extensions([self.store.url_of(key) for key in keys], self.url)
        return {key: self.listed[key] for key in keys}

    def _of_folder(self) -> list[str]:
        """Return the keys below a folder; a saved dataset keeps its own order."""
        folders: dict[str, list[str]] = {}
        for key in self.listed:
            folder, _, name = key.rpartition("/")
            folders.setdefault(folder, []).append(name)
        groups: list[tuple[bytes, list[str]]] = []
        for folder, names in sorted(folders.items()):
            prefix = f"{folder}/" if folder else ""
            if any(prefix.startswith(above) for above in self.saved):
                continue
            saved = saved_files(names, self.store.url_of(folder), partial(self._get_in, prefix))
            if saved:
                self.saved[prefix] = saved
                groups.append((prefix.encode(), [prefix + file for file in saved.files]))
            else:
                groups += [((prefix + name).encode(), [prefix + name]) for name in names]
        return [key for _, keys in sorted(groups) for key in keys]

    def _get_in(self, prefix: str, name: str) -> bytes:
        return self.store.get(prefix + name)


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """Return whether a key matches a glob, in which ** is any number of folders."""
    if not pattern:
        return not parts
    if pattern == ["**"]:
        return bool(parts)
    if pattern[0] == "**":
        return any(_matches(parts[skipped:], pattern[1:]) for skipped in range(len(parts)))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def with_copy(part: Part, copies: Path) -> Part:
    """Return a part whose file has the path of its copy here, fetched if missing.

    Raises DataError if the object has changed, and the errors of stores.
    """
    file = part.file
    if file.identity:
        return replace(part, file=replace(file, path=_with_holes(file.name, file.facts, copies)))
    if not file.arrived or file.path.is_file():
        return part
    [copy] = _find_remote(file.name, copies, file.revision)
    if copy.sha256 != file.arrived:
        raise changed(file.name)
    return replace(part, file=replace(file, path=copy.path, mtime_ns=copy.path.stat().st_mtime_ns))


def _find_remote(url: str, copies: Path, revision: str) -> list[Located]:
    """Return the objects that a URL names, with copies. Raises PackError."""
    if url.startswith("hf://"):
        return _find_in_dataset(split_dataset(url), copies, revision)
    where = split_url(url)
    return _copied(_Listing(open_store(f"{where.scheme}://{where.bucket}"), where.key), copies)


def _find_in_dataset(dataset: Dataset, copies: Path, revision: str) -> list[Located]:
    from packcorpus.tasks.stores.hub import open_hub

    hub = open_hub(dataset, revision)
    listing = _Listing(hub, dataset.key)
    if not listing.key:
        # Besides its data, a dataset has a README.md, a license, and metadata.
        for key in list(listing.listed):
            if container_by_extension(key) is None or PurePosixPath(key).name == "dataset_infos.json":
                del listing.listed[key]
        # A whole dataset must have one group of files; train and test are two, for example.
        groups = sorted({re.sub(r"\d{3,}(-of-\d{3,}(-[0-9a-f]{16})?)?", "*", key) for key in listing.listed})
        if len(groups) > 1:
            listed = ", ".join(groups[:SHOWN]) + f" and {len(groups) - SHOWN} more" * (len(groups) > SHOWN)
            choice = next((group for group in groups if "train" in group), groups[0])
            raise DataError(
                "several_groups",
                f"{dataset.url}: has {len(groups)} groups of files: {listed}; name the group to pack, such as "
                f"{dataset.url}/{choice}",
            )
    return [file._replace(revision=hub.commit) for file in _copied(listing, copies)]


def _copied(listing: _Listing, copies: Path) -> list[Located]:
    """Return copies of the objects of a listing.

    If the root is in a bucket, several machines may share the work, so text files in buckets are read in blocks
    instead. A table is read in any order, and files of a dataset have no ETags.
    """
    objects = [Object(listing.store, key, facts) for key, facts in listing.find().items()]
    located, whole = dict[str, Located](), list[Object]()
    for item in objects:
        known = container_by_extension(item.key)
        if known and known[0].is_text and hasattr(item.store, "read") and url_of(copies.parents[1]):
            path = _with_holes(item.url, item.facts, copies)
            located[item.key] = Located(path, item.url, identity=item.facts.identity)
        else:
            whole.append(item)
    for item, copy in zip(whole, fetch_copies(whole, copies), strict=True):
        located[item.key] = Located(copy.path, item.url, "", copy.sha256)
    for prefix, saved in listing.saved.items():
        keys = [prefix + file for file in saved.files]
        note = saved.note([located[key].path for key in keys])
        located |= {key: located[key]._replace(note=note) for key in keys}
    return [located[item.key] for item in objects]


def _with_holes(url: str, facts: Facts, copies: Path) -> Path:
    """Create the file that holds the blocks of an object, and return its path."""
    path = place_of_copy(url, facts, copies.absolute(), with_holes=True)
    open_holes(path, facts.size).close()
    return path
