"""Identify the container, the encoding, and the format of a source file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from tasks.conversations.formats import detect
from tasks.core.errors import DataError
from tasks.readers.container import RecordReader
from tasks.readers.containers import container_by_extension, container_named
from tasks.readers.lines import BOM, CHUNK
from tasks.sources.explain import explain_unknown_format, explain_wide_encoding, wide_encoding
from tasks.sources.model import Source, SourceFile

_FIRST = 100  # records that are read to find the format


def identify(path: Path, name: str, source: Source, stat: os.stat_result) -> SourceFile:
    """Return the file with its container and format, not hashed yet. Raises DataError if either cannot be found."""
    known = container_by_extension(name)
    assert known is not None, f"the extension of {name} is checked before"
    container, compression = known
    if not stat.st_size:
        raise DataError("empty_source", f"{name}: is empty")
    if compression and not container.is_text:
        tool = "gunzip" if compression == "gz" else "unzstd"
        raise DataError(
            "packed_twice",
            f"{name}: {container.name} files are already compressed internally; decompress it with  {tool} {name}",
        )
    columns = tuple(source.columns.items())
    file = SourceFile(path, name, container.name, compression, "", columns, stat.st_size, "", stat.st_mtime_ns)
    file = replace(file, ignore=tuple(source.ignore))
    if container.is_text:
        file = replace(file, container=_text_container(file))
    if source.format != "auto":
        return replace(file, format=source.format)
    format = _format(file)
    if format is None:
        raise explain_unknown_format(file, first_records(file))
    return replace(file, format=format)


def first_records(file: SourceFile) -> Iterator[object]:
    """Yield up to 100 records from the start of a file, reading only what is asked for."""
    return islice(container_named(file.container).first_records(file), _FIRST)


def _text_container(file: SourceFile) -> str:
    """Return the container that the text is in: a .json may hold an array or lines."""
    container = container_named(file.container)
    with RecordReader(container, file).open_text() as read:
        start = read(CHUNK)
    if encoding := wide_encoding(start):
        raise explain_wide_encoding(file, encoding)
    prefix = start.removeprefix(BOM).lstrip()
    if not prefix and len(start) < CHUNK:
        raise DataError("empty_source", f"{file.name}: contains no records, only whitespace")
    return container.resolve(file, prefix, lambda record: detect(record, dict(file.columns)) is not None)


def _format(file: SourceFile) -> str | None:
    """Return the format of the first record that has one."""
    columns = dict(file.columns)
    return next((format for record in first_records(file) if (format := detect(record, columns))), None)
