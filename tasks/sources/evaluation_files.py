"""Find the files of evaluation sets (`decontaminate`), and read their items.

An item is a record of any format that packcorpus reads, a record with other keys, or a line of a .txt file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from packcorpus.tasks.conversations.formats import detect, read_record
from packcorpus.tasks.core.errors import DataError, InputMissing, Reject
from packcorpus.tasks.readers.container import RecordReader
from packcorpus.tasks.readers.containers import container_named
from packcorpus.tasks.sources.digests import hash_file
from packcorpus.tasks.sources.locate import with_copy
from packcorpus.tasks.sources.model import Part, Source, SourceFile
from packcorpus.tasks.sources.source_files import find_files
from packcorpus.tasks.storage.files import sha256_of
from packcorpus.tasks.storage.layout import Layout
from packcorpus.tasks.stores.urls import is_url

LINES = "lines"  # the container of a .txt file
PART_SIZE = 4 << 20
# Formats whose records are read like those with other keys: all of their strings count.
ALL_STRINGS = ("completions", "preference")
# Names of keys whose short texts are questions, in records of other formats.
QUESTIONS = ("question", "prompt", "problem", "instruction", "input", "query", "goal")


class Item(NamedTuple):
    """An item of an evaluation set: all its texts, and the ones that ask."""

    line: int
    texts: tuple[str, ...]
    questions: tuple[str, ...]


def find_evaluation_files(paths: Sequence[str], folder: Path, layout: Layout) -> tuple[SourceFile, ...]:
    """Return the files of evaluation sets, with their digests.

    Raises the errors of `find_files`, whose message names the file.
    """
    files: list[SourceFile] = []
    for path in paths:
        if path.lower().endswith(".txt") and not is_url(path):
            files.append(_text_file(path, folder))
            continue
        try:
            found = find_files([Source(path=path)], folder, layout)
        except DataError as error:
            if error.reason not in ("unknown_format", "preference_data"):
                raise
            found = find_files([Source(path=path, format="text")], folder, layout)  # its records have other keys
        for file in found:
            if file.format in ALL_STRINGS:
                file = replace(file, format="text")
            hashed = hash_file(file, PART_SIZE)
            files.append(replace(file, sha256=hashed.sha256, blocks=hashed.blocks))
    return tuple(files)


def _text_file(name: str, folder: Path) -> SourceFile:
    path = folder / os.path.expanduser(name)
    if not os.path.isfile(path):
        raise InputMissing("source_missing", f"decontaminate: {name}: no such file ({path})")
    stat = path.stat()
    return SourceFile(path, name, LINES, "", "text", (), stat.st_size, sha256_of(path), stat.st_mtime_ns)


def numbered_by(file: SourceFile) -> str:
    """Return "line" or "record"."""
    return "line" if file.container == LINES else container_named(file.container).numbered_by


def read_items(file: SourceFile, copies: Path) -> Iterator[Item]:
    """Yield the items of a file; records that cannot be read are skipped.

    Raises DataError if the file has changed, and StorageError if it cannot be read.
    """
    file = with_copy(Part(file, 0, 0, ""), copies).file
    file.check_unchanged()
    try:
        if file.container == LINES:
            with file.path.open(encoding="utf-8", errors="replace") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield Item(number, (line,), (line,))
            return
        for number, record in RecordReader(container_named(file.container), file):
            if not isinstance(record, Reject) and (item := _item_of(record, number + 1, file)):
                yield item
    except OSError as error:
        raise file.cannot_read(error) from None


def _item_of(record: object, line: int, file: SourceFile) -> Item | None:
    """Return the item of a record: its messages but system messages, or all texts."""
    format = file.format if file.format in ("session", "tokens") else detect(record)
    if format == "tokens":
        return None
    try:
        messages = read_record(record, format).messages if format and format not in ALL_STRINGS else ()
    except Reject:
        messages = ()
    if messages:
        said = [(message.role, f"{message.content}\n{message.context}") for message in messages]
        texts = [(role, text) for role, text in said if role != "system"]
        return Item(line, tuple(text for _, text in texts), tuple(text for role, text in texts if role != "assistant"))
    found = [*_strings(record)]
    return Item(line, tuple(text for _, text in found), tuple(text for key, text in found if key in QUESTIONS))


def _strings(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield all texts in a JSON value, each with the nearest key in lower case."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _strings(inner, str(name).lower())
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for inner in value:
            yield from _strings(inner, key)
