"""Identify the container, the encoding, and the format of a source file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import orjson

from tasks.conversations.formats import detect
from tasks.conversations.traces.session import KEYS, SESSION, is_session
from tasks.core.errors import DataError, UsageError
from tasks.readers.container import Container, RecordReader
from tasks.readers.containers import container_by_extension, container_named
from tasks.readers.csv_files.delimiter import find_delimiter
from tasks.readers.csv_files.encoding import decoded_start, find_encoding, wide_encoding
from tasks.readers.csv_files.rows import Csv
from tasks.readers.jsonl import Jsonl, Session
from tasks.readers.lines import BOM, CHUNK
from tasks.sources.digests.digest_cache import DigestCache
from tasks.sources.explain import explain_unknown_format, explain_wide_encoding
from tasks.sources.model import Source, SourceFile

_FIRST = 100  # records that are read to find the format

_BEGINNING = 1 << 20  # bytes that show the encoding and the delimiter of a CSV file


def identify(
    path: Path, name: str, source: Source, stat: os.stat_result, identity: str = "", cache: DigestCache | None = None
) -> SourceFile:
    """Return a source file with its container and format, not yet hashed.

    An object that `cache` knows is not read. Raises DataError if the container or the format cannot be found, and
    UsageError if a setting for CSV and TSV files is set for another file.
    """
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
    columns, roles = tuple(source.columns.items()), tuple(source.role_names.items())
    file = SourceFile(path, name, container.name, compression, "", columns, stat.st_size, "", stat.st_mtime_ns)
    file = replace(file, roles=roles, ignore=tuple(source.ignore), identity=identity)
    file = replace(file, tokenizer_sha256=source.tokenizer_sha256)
    file = replace(file, drop_roles=tuple(source.drop_roles))
    layout = [key for key in ("delimiter", "encoding") if getattr(source, key) != "auto"]
    if layout and not isinstance(container, Csv):
        raise UsageError(
            "bad_setting",
            f"{name}: `{layout[0]}` applies only to CSV and TSV files; list other files in a separate entry of "
            "`sources`, or remove the setting",
        )
    if not (cache and identity):
        return _identified(file, container, source)
    found = cache.find_format(file, source)
    if not found:
        cache.keep_format(file, source, found := _identified(file, container, source))
    return found


def _identified(file: SourceFile, container: Container, source: Source) -> SourceFile:
    """Return the file with the settings of its source, or else of its content."""
    if isinstance(container, Csv):
        file = _csv_file(file, container, source)
    elif container.is_text:
        file = replace(file, container=_text_container(file, source.format))
    if source.format != "auto":
        return replace(file, format=source.format)
    if file.container == Session.name:
        return replace(file, format=SESSION.name)  # even if a line is damaged
    for record in first_records(file):
        if format := detect(record, source.columns):
            return replace(file, format=format)
    raise explain_unknown_format(file, first_records(file))


def first_records(file: SourceFile) -> Iterator[object]:
    """Yield up to 100 records from the start of a file.

    Only as much of the file is read as the requested records take.
    """
    return islice(container_named(file.container).first_records(file), _FIRST)


def _text_container(file: SourceFile, format: str) -> str:
    """Return the name of the container that the text is in.

    A .json file may hold an array or lines, and lines may be the records of a session. `format` is the setting.
    """
    container = container_named(file.container)
    with RecordReader(container, file).open_text() as read:
        start = read(CHUNK)
    if encoding := wide_encoding(start):
        raise explain_wide_encoding(file, encoding)
    prefix = start.removeprefix(BOM).lstrip()
    if not prefix and len(start) < CHUNK:
        raise DataError("empty_source", f"{file.name}: contains no records, only whitespace")
    found = container.resolve(file, prefix, lambda record: detect(record, dict(file.columns)) is not None)
    return Session.name if found == Jsonl.name and _holds_session(prefix, format) else found


def _holds_session(prefix: bytes, format: str) -> bool:
    """Return whether the lines at the start of a file are the records of one session."""
    if format not in ("auto", SESSION.name):
        return False
    records = []
    for line in prefix.split(b"\n")[:_FIRST]:
        with suppress(orjson.JSONDecodeError):  # the last line may be cut
            records.append(orjson.loads(line))
    first = next((record for record in records if isinstance(record, dict)), {})
    if format == SESSION.name:
        return not any(first.get(key) for key in KEYS)  # else each line is a row with a session
    return is_session(records) and detect(first) is None


def _csv_file(file: SourceFile, container: Csv, source: Source) -> SourceFile:
    """Return the file with its encoding and delimiter.

    They come from the source if it sets them, or else from the start of the file.
    """
    with RecordReader(container, file).open_text() as read:
        start = read(_BEGINNING)
    encoding = find_encoding(start) if source.encoding == "auto" else source.encoding.replace("utf-8", "")
    if encoding is None:
        raise DataError(
            "wrong_encoding",
            f"{file.name}: is not UTF-8, and its encoding is not clear; set encoding, such as encoding: windows-1252",
        )
    text = decoded_start(start, encoding, file.name)
    if not text.strip() and len(start) < _BEGINNING:
        raise DataError("empty_source", f"{file.name}: contains no records, only whitespace")
    delimiter, format = source.delimiter, "" if source.format == "auto" else source.format
    if delimiter == "auto":

        def is_header(cells: list[str]) -> bool:
            return detect(dict.fromkeys(cells, ""), source.columns, format) is not None

        try:
            delimiter = find_delimiter(text, container.delimiter, is_header)
        except ValueError as error:
            message = f"{file.name}: {error}; set delimiter, such as delimiter: ';' or delimiter: tab"
            raise DataError("bad_csv_file", message) from None
    return replace(file, encoding=encoding, delimiter="" if delimiter == container.delimiter else delimiter)
