"""Find the files of a config's sources, and identify each of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from tasks.conversations.formats import COLUMNS
from tasks.conversations.names import MESSAGE_KEYS
from tasks.core.errors import DataError, StorageError, UsageError
from tasks.core.messages import noted
from tasks.core.printable import shown, suggest
from tasks.readers.containers import EXTENSIONS, container_by_extension
from tasks.sources.digests import DigestCache
from tasks.sources.identify import as_yaml, identify
from tasks.sources.locate import find_paths
from tasks.sources.model import Source, SourceFile
from tasks.sources.remote import Located
from tasks.storage.layout import Layout
from tasks.stores.store import run_all

AT_ONCE = 8  # objects whose starts are read concurrently


def find_files(
    sources: Sequence[Source],
    folder: Path,
    layout: Layout | None = None,
    revisions: Mapping[int, str] | None = None,
    cache: DigestCache | None = None,
) -> list[SourceFile]:
    """Return the files of `sources`, identified but not yet hashed.

    The files are in the order of `sources`, and within a glob or folder in the order of their names. A file that
    several entries match is read once. `folder` is the folder of the config. A file that is an output in `layout` is
    refused. Copies of remote files are written to `layout`; without `layout`, only local files are found. `revisions`
    maps the index of an entry to the commit of its dataset on the Hub. Objects that `cache` knows are not
    read. Raises UsageError, InputMissing, DataError, StorageError, or PartMissing with the name of the file in the
    message.
    """
    outputs, copies = (layout.outputs(), layout.remote()) if layout else ([], None)
    revisions = revisions or {}
    located: list[list[Located]] = []
    for entry, source in enumerate(sources):
        _check_source(source)
        with _reading(source):
            located.append(find_paths(source.path, folder, copies, revisions.get(entry, "")))
    objects = _identify_objects(sources, located, cache)
    found: dict[tuple[int, int], SourceFile] = {}
    for entry, source in enumerate(sources):
        with _reading(source):
            for path, name, revision, arrived, identity, note in located[entry]:
                if not (arrived or identity) and any(map(path.resolve().is_relative_to, outputs)):
                    raise UsageError(
                        "own_output", f"{name}: is an output of packcorpus, not a source; narrow the path {source.path}"
                    )
                stat = path.stat()
                file = objects.get((entry, name)) or identify(path, name, source, stat, identity)
                file = replace(file, entry=entry, revision=revision, arrived=arrived, note=note)
                first = found.setdefault((stat.st_dev, stat.st_ino), file)
                ways = _how(first, sources[first.entry]), _how(file, source)
                if ways[0] != ways[1]:
                    raise UsageError(
                        "source_twice",
                        f"{name} is the same file as {first.name}, but two entries of sources read it differently: as "
                        f"{ways[0]} and as {ways[1]}; remove one of these entries",
                    )
    return list(found.values())


@contextmanager
def _reading(source: Source) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            "cannot_read", f"{error.filename or source.path}: cannot be read: {error.strerror or error}"
        ) from None


def _identify_objects(
    sources: Sequence[Source], located: Sequence[Sequence[Located]], cache: DigestCache | None
) -> dict[tuple[int, str], SourceFile]:
    """Return the objects that are read in blocks, by entry and name.

    An object that cannot be identified is left out: its error is raised when the object is needed, in the order of the
    config.
    """
    objects: list[tuple[int, Located, os.stat_result]] = []
    for entry, source in enumerate(sources):
        with _reading(source):
            objects += [(entry, each, each.path.stat()) for each in located[entry] if each.identity]
    found = dict[tuple[int, str], SourceFile]()
    if not objects:
        return found

    def find(number: int) -> None:
        entry, each, stat = objects[number]
        with suppress(DataError, UsageError, OSError):
            found[entry, each.name] = identify(each.path, each.name, sources[entry], stat, each.identity, cache)

    with noted(lambda: f"reading the start of each object: {len(found):,} of {len(objects):,} done"):
        run_all(find, range(len(objects)), AT_ONCE, lambda: None)
    return found


def identify_file(
    path: Path,
    name: str = "",
    source: Source | None = None,
    identity: str = "",
    cache: DigestCache | None = None,
) -> SourceFile:
    """Identify one file, like `find_files`.

    Raises UsageError, InputMissing, DataError, or StorageError with the name of the file in the message.
    """
    name = name or str(path)
    if container_by_extension(name) is None:
        raise UsageError("bad_setting", f"{name}: unknown extension; known are {' '.join(EXTENSIONS)}")
    try:
        return identify(path, name, source or Source(path=name), path.stat(), identity, cache)
    except OSError as error:
        raise StorageError("cannot_read", f"{name}: cannot be read: {error.strerror or error}") from None


def _check_source(source: Source) -> None:
    known = (*COLUMNS, *MESSAGE_KEYS)
    for ours, theirs in source.columns.items():
        if ours not in known:
            swapped = (
                f"; packcorpus names go on the left: columns: {{{theirs}: {as_yaml(ours)}}}" if theirs in known else ""
            )
            hint = swapped or suggest(ours, known) or f"; known are {', '.join(known)}"
            raise UsageError(
                "bad_setting", f"{source.path}: columns: {shown(ours)} is not a column of packcorpus{hint}"
            )


def _how(file: SourceFile, source: Source) -> str:
    columns = ", ".join(f"{ours}: {theirs}" for ours, theirs in file.columns)
    further = [f"columns {{{columns}}}"] * bool(columns) + [f"weight {source.weight:g}"] * (source.weight != 1)
    further += [f"limit {source.limit}"] * (source.limit is not None)
    if source.roles:
        roles = ", ".join(f"{role}: [{', '.join(names)}]" for role, names in source.roles.items())
        further.append(f"roles {{{roles}}}")
    further += [f"{name} {value}" for name in ("delimiter", "encoding") if (value := getattr(file, name))]
    further += [f"ignore [{', '.join(file.ignore)}]"] * bool(file.ignore)
    return f"{file.format} with {', '.join(further)}" if further else file.format
