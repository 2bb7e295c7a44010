"""Explain why a file could not be identified, and how to fix it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import orjson

from tasks.conversations.formats import FORMAT_NAMES, detect, guess_columns
from tasks.conversations.keys.other_data import unread_preference
from tasks.conversations.keys.renaming import MESSAGE_KEYS
from tasks.core.errors import DataError, Reject
from tasks.core.printable import shown, suggest
from tasks.readers.compression import DECOMPRESS
from tasks.readers.container import RecordReader
from tasks.readers.containers import container_named
from tasks.readers.csv_files.rows import Csv
from tasks.readers.lines import BOM, CHUNK
from tasks.sources.model import SourceFile


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
