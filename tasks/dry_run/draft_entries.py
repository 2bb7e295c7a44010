"""Find the files of a draft, settings to read them, and a tokenizer near them.

paths ─▶ files ─sample─▶ Entry: format, columns, number of records that can be used
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks.conversations.formats import guess_roles
from tasks.core.errors import DataError, PackError, Reject, UsageError
from tasks.core.printable import printable_lines
from tasks.dry_run.sample_tokens import count_unused_keys
from tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
from tasks.inspection.sources import guess_columns_of
from tasks.readers.container import Record
from tasks.readers.containers import container_by_extension
from tasks.sources.locate import find_paths
from tasks.sources.model import Source, SourceFile
from tasks.sources.sample_files import sample_files
from tasks.sources.source_files import find_files
from tasks.storage.layout import Layout

BUDGET = 2 << 20  # bytes of the sources that are sampled

# Limits of the search for a tokenizer: levels below a start folder, folders per start folder, and bytes of a file.
DEPTH, MOST_FOLDERS, LARGEST = 2, 500, 64 << 20
OTHERS = 4  # further tokenizers to mention


@dataclass
class Entry:
    """One entry of `sources`.

    `fitting` of `looked_at` sampled records can be used. An entry with a `problem` is left out of the config.
    """

    path: Path
    files: list[SourceFile]
    format: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    roles: dict[str, list[str]] = field(default_factory=dict)  # guessed from their names
    guessed: bool = False  # whether the columns were guessed from their names
    fitting: int = 0
    looked_at: int = 0
    total: float = 0.0  # records, estimated unless `counted`
    counted: bool = True
    problem: str = ""
    error: PackError | None = None  # the error behind `problem`, if it is about the kind of data


@dataclass
class Search:
    """The settings that the user gave for all sources, and the findings so far."""

    given: dict[str, Any] = field(default_factory=dict)  # format, columns, roles, ignore
    left_out: list[str] = field(default_factory=list)  # files with an unknown extension
    skipped: list[str] = field(default_factory=list)  # folders with outputs of packcorpus
    seen: set[Path] = field(default_factory=set)


def find_entries(path: Path, search: Search) -> Iterator[Entry]:
    """Yield one entry for all files of a path, or one per file.

    There is one entry if all files can be read and have the same format and columns. Files that were found before are
    skipped. Raises UsageError if the columns are invalid, or if a file is an output of packcorpus.
    """
    outputs = Layout(Path()).outputs()
    for part in _known(path, search.left_out, search.skipped):
        entries, is_whole = [], True
        for file, *_ in find_paths(str(part), Path()):
            if any(file.resolve().is_relative_to(output) for output in outputs):
                raise UsageError("own_output", f"{part}: is an output of packcorpus, not a source")
            if file.resolve() in search.seen:
                is_whole = False
                continue
            search.seen.add(file.resolve())
            entries.append(_entry(file, search.given))
        first = entries[0] if entries else Entry(part, [])
        if (
            is_whole
            and len(entries) > 1
            and all(
                not entry.problem and (entry.format, entry.columns) == (first.format, first.columns)
                for entry in entries
            )
        ):
            files = [file for entry in entries for file in entry.files]
            fitting, looked_at, total = (
                sum(getattr(entry, name) for entry in entries) for name in ("fitting", "looked_at", "total")
            )
            exact = all(entry.counted for entry in entries)
            roles: dict[str, list[str]] = {}
            for role, names in ((role, names) for entry in entries for role, names in entry.roles.items()):
                known = roles.setdefault(role, [])
                known += [name for name in names if name not in known]
            guessed = any(entry.guessed for entry in entries)
            yield Entry(part, files, first.format, first.columns, roles, guessed, fitting, looked_at, total, exact)
        else:
            yield from entries


def _known(path: Path, left_out: list[str], skipped: list[str]) -> Iterator[Path]:
    """Yield the path itself, or a glob per known extension.

    The globs are for a folder that also contains other files. If a folder contains outputs of packcorpus, yield paths
    next to these outputs instead, because a glob would include the outputs.
    """
    if not path.is_dir():
        yield path
        return
    here, outputs = path.resolve(), Layout(Path()).outputs()
    if any(output.is_dir() and here in output.parents for output in outputs):
        children = sorted(child for child in path.iterdir() if not child.name.startswith("."))
        yield from _globs(path, [child.name for child in children if child.is_file()], left_out)
        for child in children:
            if child.resolve() in outputs:
                skipped.append(f"{child}/")
            elif child.is_dir() and _names(child):
                yield from _known(child, left_out, skipped)
        return
    names = _names(path)
    saved = any(os.path.basename(name) in ("state.json", "dataset_dict.json") for name in names)
    if saved or all(map(container_by_extension, names)):
        yield path
    else:
        yield from _globs(path, names, left_out)


def _names(path: Path) -> list[str]:
    """Return the files below a folder, without hidden files, as in a run."""
    found = []
    for where, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.relpath(os.path.join(where, name), path) for name in files if not name.startswith(".")]
    return sorted(found)


def _globs(path: Path, names: list[str], left_out: list[str]) -> Iterator[Path]:
    known = [name for name in names if container_by_extension(name)]
    left_out += [name for name in names if not container_by_extension(name)]
    deep = "**/" if any(os.sep in name for name in known) else ""
    for extension in sorted({re.sub(r"^.*?(\.[^.]+(\.(gz|zst))?)$", r"\1", name) for name in known}):
        yield Path(f"{glob.escape(str(path))}/{deep}*{extension}")


def _entry(path: Path, given: dict[str, Any]) -> Entry:
    """Sample one file and return its entry.

    `problem` is the reason why the file cannot be read.
    """
    guessed, columns = False, given.get("columns", {})
    try:
        [file] = find_files([Source(**{"path": str(path), **given})], Path())
    except DataError as error:
        guessed = error.reason == "unknown_format" and not columns
        columns = guess_columns_of(path) if guessed else columns
        try:
            [file] = find_files([Source(**{"path": str(path), **given, "columns": columns})], Path())
        except DataError as again:
            return _left_out(path, [], again)
    try:
        [sample] = sample_files([file], BUDGET // 4, 1 << 24)
        count_unused_keys(sample)
    except PackError as error:
        return _left_out(path, [file], error)
    fitting, first = _count_fitting(sample.records, file)
    looked_at, roles = len(sample.records), dict[str, list[str]]()
    guesses = fitting < looked_at and "roles" not in given
    if guesses and (guess := guess_roles((record for _, record in sample.records), columns)):
        names = Source.model_validate({"path": str(path), "roles": guess}).role_names
        more, other = _count_fitting(sample.records, replace(file, roles=tuple(names.items())))
        if more > fitting:
            fitting, first, roles = more, other, guess
    problem = (
        "" if fitting else one_line(f"none of its first {looked_at:,} records can be used; the first problem: {first}")
    )
    counts = fitting, looked_at, sample.total, sample.counted
    return Entry(path, [file], file.format, columns, roles, guessed, *counts, problem)


def _left_out(path: Path, files: list[SourceFile], error: PackError) -> Entry:
    kind = error if error.reason in ("media_data", "preference_data") else None
    return Entry(path, files, problem=one_line(str(error).removeprefix(f"{path}: ")), error=kind)


def _count_fitting(records: Sequence[Record], file: SourceFile) -> tuple[int, str]:
    """Count the records of a file that are conversations.

    Returns the count, and the problem of the first record that is not a conversation.
    """
    fitting, first = 0, ""
    for _, record in records:
        try:
            file.conversation(record)
            fitting += 1
        except Reject as reject:
            first = first or reject.message
    return fitting, first


def one_line(text: str, strip: bool = True) -> str:
    """Make `text` safe for a comment by replacing everything that ends a line."""
    line = printable_lines(text).replace("\n", " ")
    return line.strip() if strip else line


def tokenizer_near(folders: Sequence[Path]) -> tuple[Path | None, list[Path]]:
    """Return the nearest tokenizer that loads, and the next candidates.

    Searches the folders of the sources, the working directory, and the folders below them. Does not search the folders
    above, because their files may belong to another project or person.
    """
    found: list[Path] = []
    for start in dict.fromkeys(folder.resolve() for folder in (*folders, Path())):
        found += [candidate for candidate in _candidates(start) if candidate not in found]
    outputs = Layout(Path()).outputs()
    found = [path for path in found if not any(path.resolve().is_relative_to(output) for output in outputs)]
    for number, candidate in enumerate(found):
        try:
            open_encoder(find_tokenizer(candidate))
        except PackError:
            continue
        return candidate, found[number + 1 :][:OTHERS]
    return None, []


def _candidates(start: Path) -> Iterator[Path]:
    """Yield folders and files that may be tokenizers, the nearest first."""
    level, seen = [start], 0
    for _ in range(DEPTH + 1):
        below = []
        for folder in level:
            seen += 1
            if seen > MOST_FOLDERS:
                return
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError:
                continue
            names = {entry.name for entry in entries}
            if names & {"manifest.json", "index.arrow"}:  # a corpus, with its own copy of a tokenizer
                continue
            if names & {"tokenizer.json", "tokenizer.model"}:
                yield folder
            else:
                yield from (
                    Path(entry.path)
                    for entry in entries
                    if entry.name.endswith(".model") and entry.is_file() and 0 < entry.stat().st_size <= LARGEST
                )
            below += [
                Path(entry.path) for entry in entries if entry.is_dir() and not entry.name.startswith((".", "__"))
            ]
        level = below
