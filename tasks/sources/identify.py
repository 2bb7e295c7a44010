"""Identify the container, the encoding, and the format of a source file.

If they cannot be found, the error explains why, and how to fix it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import orjson

from tasks.conversations.formats import FORMAT_NAMES, detect, guess_columns
from tasks.conversations.names import MESSAGE_KEYS
from tasks.conversations.other_data import unread_preference
from tasks.conversations.session import KEYS, SESSION, reader_of
from tasks.core.errors import DataError, Reject, UsageError
from tasks.core.printable import shown, suggest
from tasks.readers.compression import DECOMPRESS
from tasks.readers.container import Container, RecordReader
from tasks.readers.containers import container_by_extension, container_named
from tasks.readers.csv_file import Csv, decoded_start, find_delimiter, find_encoding, wide_encoding
from tasks.readers.jsonl import Jsonl, Session
from tasks.readers.lines import BOM, CHUNK
from tasks.sources.digests import DigestCache
from tasks.sources.model import Source, SourceFile


def explain_wide_encoding(file: SourceFile, encoding: str) -> DataError:
    return DataError("wrong_encoding", f"{file.name}: is {encoding}; convert it with  {_convert(file, encoding)}")


def explain_unknown_format(file: SourceFile, records: Iterable[object]) -> DataError:
    """Return the error for a file whose first records have no known format."""
    name, columns = file.name, dict(file.columns)
    keys: dict[str, None] = {}
    objects: list[dict[str, object]] = []
    reject: Reject | None = None
    guessed: dict[str, str] = {}
    without_columns: str | None = None
    count = rejected = 0
    for record in records:
        count += 1
        if isinstance(record, dict):
            keys |= dict.fromkeys(record)
            objects.append(record)
            guessed = guessed or guess_columns(record)
            without_columns = without_columns or detect(record)
        elif isinstance(record, Reject):
            reject = reject or record
            rejected += 1
    if not count:
        return DataError("empty_source", f"{name}: contains no records")
    if not objects and reject and (error := _explain_unreadable(file, reject)):
        return error
    if not objects and rejected == count and reject:
        advice = "fix it, or set `format` if other records are valid"
        what = f"none of its first {count:,} records can be read; the first problem" if count > 1 else "its only record"
        return DataError(reject.reason, f"{name}: {what}: {reject}; {advice}")
    header = isinstance(container_named(file.container), Csv)
    found = f"no record is an object{f' ({reject})' if reject else ''}"
    if keys:
        where = "columns in the first row" if header else "keys found"
        found = f"{where}: {', '.join(shown(key)[1:-1] for key in [*keys][:20])}{' …' if len(keys) > 20 else ''}"
    missing = [(ours, key) for ours, key in columns.items() if key not in keys and ours not in MESSAGE_KEYS]
    if keys and missing:
        problems = "; ".join(
            f"columns: {ours}: no key `{as_yaml(theirs)}`{suggest(theirs, keys)}" for ours, theirs in missing
        )
        advice = f"; without columns it is read as {without_columns}: remove columns" if without_columns else ""
        return DataError("unknown_format", f"{name}: {problems}; {found}{advice}")
    if guessed:
        paste = f"columns: {{{', '.join(f'{ours}: {as_yaml(key)}' for ours, key in guessed.items())}}}"
        return DataError("unknown_format", f"{name}: its keys match no format; {found}; did you mean  {paste}  ?")
    if other := unread_preference(objects, name):
        return other
    return DataError(
        "unknown_format",
        f"{name}: no known format in its first {f'{count} records' if count > 1 else 'record'}; {found}; formats "
        f"tried: {', '.join(FORMAT_NAMES)}; set `format` to one of them, or map your keys with `columns`, such as "
        "columns: {instruction: question, output: answer}",
    )


def _explain_unreadable(file: SourceFile, reject: Reject) -> DataError | None:
    """Return an error if the start of a file shows why it has no readable records.

    `reject` is the first Reject among its first records, of which none is an object.
    """
    container = container_named(file.container)
    if not container.is_text or isinstance(container, Csv):
        return None
    if reject.reason == "bad_utf8":
        return DataError(
            "wrong_encoding",
            f"{file.name}: is not UTF-8 ({reject.message}); if it comes from Windows, convert it with  "
            f"{_convert(file, 'WINDOWS-1252')}",
        )
    if reject.reason != "bad_json":  # for example a duplicate key, so the record is complete
        return None
    with RecordReader(container, file).open_text() as read:
        prefix = read(CHUNK).removeprefix(BOM).lstrip()
    explained = container.explain_unreadable(file, prefix)
    return DataError("unknown_json", f"{file.name}: {explained}") if explained else None


def _convert(file: SourceFile, encoding: str) -> str:
    plain = Path(file.name.removesuffix(f".{file.compression}"))
    made = shlex.quote(f"{plain.with_suffix('')}.utf8{plain.suffix}")
    return f"{DECOMPRESS[file.compression]} {shlex.quote(file.name)} | iconv -f {encoding} -t UTF-8 > {made}"


def as_yaml(key: str) -> str:
    """Return a key as it is written in YAML."""
    return key if re.fullmatch(r"[A-Za-z]\w*", key, re.ASCII) else orjson.dumps(key).decode()


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
    return reader_of(records) is not None and detect(first) is None


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
