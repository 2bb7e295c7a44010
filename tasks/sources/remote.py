"""Find the objects that a URL refers to, and fetch copies of them.

s3://bucket/chats/*.jsonl.gz    →  s3://bucket/chats/a.jsonl.gz, …, each with a copy below data/remote/
s3://bucket/chats               →  the objects below it, unless an object has this key
hf://datasets/owner/name@v1/x   →  the files of a dataset, at the commit that v1 has now
owner/name                      →  hf://datasets/owner/name, if no such path exists
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from glob import has_magic
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tasks.core.errors import DataError, InputMissing, PackError
from tasks.core.messages import noted
from tasks.readers.containers import container_by_extension
from tasks.sources.listed_names import Saved, check_extensions, saved_files
from tasks.sources.model import Part
from tasks.sources.remote_blocks import open_holes
from tasks.stores.bucket import open_store
from tasks.stores.copies import Object, fetch_copies, place_of_copy
from tasks.stores.scratch import url_of
from tasks.stores.store import Facts, Reading, changed
from tasks.stores.urls import Dataset, split_dataset, split_url

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


class _Listing:
    """The objects in a store that a URL names.

    A URL names one object, the objects that match a glob, or the objects below a folder.
    """

    def __init__(self, store: Reading, key: str):
        self.store, self.key = store, key.strip("/")
        self.url = store.url_of(self.key)
        self.saved: dict[str, Saved] = {}  # by the start of their keys

    @cached_property
    def listed(self) -> dict[str, Facts]:
        """Return the objects below the longest folder path without a glob.

        Hidden objects are left out.
        """
        literal = list(takewhile(lambda part: not has_magic(part), PurePosixPath(self.key).parts))
        found = dict[str, Facts]()
        with noted(lambda: f"{self.url}: still listing objects; if it takes too long, narrow the URL"):
            for key, facts in self.store.list("/".join(literal)):
                below = PurePosixPath(key).parts[len(literal) :]
                hidden = any(part.startswith(".") for part in below)
                # An empty object without an extension stands for a folder, in tools that show buckets as folders.
                if not hidden and (facts.size or container_by_extension(key)):
                    found[key] = facts
        return found

    def find(self) -> dict[str, Facts]:
        """Return the objects that the URL names, in order.

        Raises InputMissing or DataError.
        """
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
        """Return the keys below a folder.

        A saved dataset is one group that keeps its own order.
        """
        folders: dict[str, list[str]] = {}
        for key in self.listed:
            folder, _, name = key.rpartition("/")
            folders.setdefault(folder, []).append(name)
        groups: list[tuple[bytes, list[str]]] = []
        for folder, names in sorted(folders.items()):
            prefix = f"{folder}/" if folder else ""
            if any(prefix.startswith(above) for above in self.saved):
                continue
            read = partial(self._get_in, prefix)
            saved = saved_files(names, self.store.url_of(folder), read)
            if saved is not None:
                self.saved[prefix] = saved
                groups.append((prefix.encode(), [prefix + file for file in saved.files]))
            else:
                groups += [((prefix + name).encode(), [prefix + name]) for name in names]
        return [key for _, keys in sorted(groups) for key in keys]

    def _get_in(self, prefix: str, name: str) -> bytes:
        return self.store.get(prefix + name)


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """Return whether a key matches a glob by the rules for paths.

    ** matches any number of folders.
    """
    if not pattern:
        return not parts
    if pattern == ["**"]:
        return bool(parts)
    if pattern[0] == "**":
        return any(_matches(parts[skipped:], pattern[1:]) for skipped in range(len(parts)))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def find_remote(url: str, copies: Path, revision: str = "") -> list[Located]:
    """Return the objects that a URL names, with copies below `copies`.

    Raises PackError with the URL in its message.
    """
    if url.startswith("hf://"):
        return _find_in_dataset(split_dataset(url), copies, revision)
    where = split_url(url)
    listing = _Listing(open_store(f"{where.scheme}://{where.bucket}"), where.key)
    return _copied(listing, copies)


def with_copy(part: Part, copies: Path) -> Part:
    """Return a part whose file has the path of its copy on this machine.

    A missing copy is fetched. Raises DataError if the object has changed, and the errors of stores.
    """
    file = part.file
    if file.identity:
        return replace(part, file=replace(file, path=_with_holes(file.name, file.facts, copies)))
    if not file.arrived or file.path.is_file():
        return part
    [found] = find_remote(file.name, copies, file.revision)
    if found.sha256 != file.arrived:
        raise changed(file.name)
    return replace(part, file=replace(file, path=found.path, mtime_ns=found.path.stat().st_mtime_ns))


def find_dataset(dataset: Dataset, missing: InputMissing, copies: Path, revision: str = "") -> list[Located]:
    """Return the files of a dataset whose name is not a local path.

    If the dataset cannot be read, raises InputMissing with the message of `missing` and the reason.
    """
    try:
        return _find_in_dataset(dataset, copies, revision)
    except PackError as error:
        if error.reason not in ("object_missing", "library_missing", "store_denied", "store_failed"):
            raise
        problem = f"as the name of a dataset on the Hub: {str(error).removeprefix(f'{dataset.url}: ')}"
        raise InputMissing("source_missing", f"{missing}; {problem}") from None


def _find_in_dataset(dataset: Dataset, copies: Path, revision: str) -> list[Located]:
    from tasks.stores.hub import open_hub

    hub = open_hub(dataset, revision)
    listing = _Listing(hub, dataset.key)
    if not listing.key:
        # Besides its data, a dataset has a README.md, a license, and metadata.
        for key in list(listing.listed):
            if container_by_extension(key) is None or PurePosixPath(key).name == "dataset_infos.json":
                del listing.listed[key]
        _check_one_group(dataset, list(listing.listed))
    found = _copied(listing, copies)
    return [each._replace(revision=hub.commit) for each in found]


def _check_one_group(dataset: Dataset, keys: Sequence[str]) -> None:
    """Raise DataError if a whole dataset was named that has several groups of files.

    For example, train and test are two groups.
    """
    groups = sorted({re.sub(r"\d{3,}(-of-\d{3,}(-[0-9a-f]{16})?)?", "*", key) for key in keys})
    if len(groups) > 1:
        listed = ", ".join(groups[:SHOWN]) + f" and {len(groups) - SHOWN} more" * (len(groups) > SHOWN)
        choice = next((group for group in groups if "train" in group), groups[0])
        raise DataError(
            "several_groups",
            f"{dataset.url}: has {len(groups)} groups of files: {listed}; name the group to pack, such as "
            f"{dataset.url}/{choice}",
        )


def _copied(listing: _Listing, copies: Path) -> list[Located]:
    """Return copies of the objects of a listing.

    If the root is in a bucket, several machines may share the work, so text files are read in blocks instead.
    """
    objects = [Object(listing.store, key, facts) for key, facts in listing.find().items()]
    in_blocks = [each for each in objects if url_of(copies.parents[1]) and _is_text(each)]
    whole = [each for each in objects if each not in in_blocks]
    located = {
        each.key: Located(_with_holes(each.url, each.facts, copies), each.url, identity=each.facts.identity)
        for each in in_blocks
    }
    for each, copy in zip(whole, fetch_copies(whole, copies), strict=True):
        located[each.key] = Located(copy.path, each.url, "", copy.sha256)
    for prefix, saved in listing.saved.items():
        keys = [prefix + file for file in saved.files]
        note = saved.note([located[key].path for key in keys])
        located |= {key: located[key]._replace(note=note) for key in keys}
    return [located[each.key] for each in objects]


def _is_text(wanted: Object) -> bool:
    """Return whether an object is a text file in a bucket.

    Only these objects can be read in blocks: a table is read in any order, and files of a dataset have no ETags.
    """
    known = container_by_extension(wanted.key)
    return bool(known and known[0].is_text and hasattr(wanted.store, "read"))


def _with_holes(url: str, facts: Facts, copies: Path) -> Path:
    """Create the file that holds the blocks of an object, and return its path."""
    path = place_of_copy(url, facts, copies.absolute(), with_holes=True)
    open_holes(path, facts.size).close()
    return path
