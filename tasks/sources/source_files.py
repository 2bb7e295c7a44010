"""The sources of a config → files → parts → records.

    sources:                       chats/a.jsonl    200 MB ─→  Part(bytes 0..67,108,990) Part(67,108,990..134,218,001) …
      - path: chats/*.jsonl   ─→   chats/b.jsonl.gz  40 MB ─→  Part(0..40,000,000)
      - path: wiki.parquet         wiki.parquet     300 MB ─→  Part(row groups 0..3) Part(3..6) …
                                                                 │
                                                                 └ read_part ─→ (0, {"messages": …}), (1, …) …

A part is what one task reads. Where it begins and ends follows from the bytes and the part size alone, and its digest
from what it holds, so that a line at the end of a file changes the last part and no other. A file is hashed once, and
its parts in the same pass.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tasks.conversations.formats import COLUMNS, FORMAT_NAMES
from tasks.core.errors import StorageError, UsageError
from tasks.core.printable import shown
from tasks.core.suggest import suggest
from tasks.readers.containers import container_of
from tasks.sources.identify import as_yaml, resolve
from tasks.sources.locate import locate
from tasks.sources.model import SourceFile, SourceSpec


def find_files(specs: Sequence[SourceSpec], folder: Path, outputs: Sequence[Path] = ()) -> list[SourceFile]:
    """The files of `specs`, in their order, and within a glob or folder by name; `sha256` is still empty.

    `folder` is the config's. A file that is reached twice is taken once; one below `outputs` is refused.
    Raises UsageError, InputMissing, DataError or StorageError, whose message names the file.
    """
    found: dict[tuple[int, int], SourceFile] = {}
    for entry, spec in enumerate(specs):
        _check_spec(spec)
        try:
            for path, name in locate(spec.path, folder):
                if any(path.resolve().is_relative_to(output) for output in outputs):
                    raise UsageError(
                        "own_output", f"{name}: is an output of packcorpus, not a source; narrow the path {spec.path}"
                    )
                stat = path.stat()
                source = replace(resolve(path, name, spec, stat), entry=entry)
                first = found.setdefault((stat.st_dev, stat.st_ino), source)
                ways = _how(first, specs[first.entry]), _how(source, spec)
                if ways[0] != ways[1]:
                    raise UsageError(
                        "source_twice",
                        f"{name} is the same file as {first.name}, which an earlier entry of sources reads as "
                        f"{ways[0]}, this one as {ways[1]}; leave one of the two out",
                    )
        except OSError as error:
            raise StorageError(
                "cannot_read", f"{error.filename or spec.path}: cannot be read: {error.strerror or error}"
            ) from None
    return list(found.values())


def look(path: Path, name: str = "", spec: SourceSpec | None = None) -> SourceFile:
    """One file with its container and format told, as `find_parts` does, but not hashed: its `sha256` is "".

    Raises UsageError, InputMissing, DataError or StorageError, whose message names the file.
    """
    name = name or str(path)
    if container_of(name) is None:
        raise UsageError("bad_setting", f"{name}: its extension says nothing of what it holds")
    try:
        return resolve(path, name, spec or SourceSpec(name), path.stat())
    except OSError as error:
        raise StorageError("cannot_read", f"{name}: cannot be read: {error.strerror or error}") from None


def _check_spec(spec: SourceSpec) -> None:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", spec.path):
        raise UsageError("bad_setting", f"{spec.path}: only local files can be read; download it and name the file")
    if spec.format != "auto" and spec.format not in FORMAT_NAMES:
        raise UsageError(
            "bad_setting", f"{spec.path}: format {shown(spec.format)} is not known{_nearest(spec.format, FORMAT_NAMES)}"
        )
    for ours, theirs in spec.columns:
        if ours not in COLUMNS:
            turned = f"; ours stands on the left: columns: {{{theirs}: {as_yaml(ours)}}}" if theirs in COLUMNS else ""
            raise UsageError(
                "bad_setting",
                f"{spec.path}: columns: {shown(ours)} is not a name of ours{turned or _nearest(ours, COLUMNS)}",
            )


def _nearest(name: str, known: Sequence[str]) -> str:
    return suggest(name, known) or f"; known are {', '.join(known)}"


def _how(file: SourceFile, spec: SourceSpec) -> str:
    columns = ", ".join(f"{ours}: {theirs}" for ours, theirs in file.columns)
    further = [f"columns {{{columns}}}"] * bool(columns) + [f"weight {spec.weight:g}"] * (spec.weight != 1)
    further += [f"limit {spec.limit}"] * (spec.limit is not None)
    return f"{file.format} with {', '.join(further)}" if further else file.format
