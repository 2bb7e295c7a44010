"""Identify the container, the encoding, and the format of a source file."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePath

import orjson

from tasks.conversations.formats import COLUMNS, FORMAT_NAMES, detect, guess_columns
from tasks.core.errors import DataError, Reject
from tasks.core.printable import shown
from tasks.core.suggest import suggest
from tasks.readers.compression import unpacked
from tasks.readers.containers import TEXT_CONTAINERS, container_of
from tasks.readers.json_array import array_elements, read_whole
from tasks.readers.lines import BOM, CHUNK, TOO_LONG, line_blocks
from tasks.readers.record_reader import MAX_RECORD_BYTES, RecordReader
from tasks.readers.tables import parquet_metadata
from tasks.sources.model import SourceFile, SourceSpec

_SAMPLE = 100  # records that are looked at to tell the format


def head(file: SourceFile) -> Iterator[object]:
    """Records from the begin of a file, read as they are asked for; of a JSON array, its first hundreds."""
    return _sample(file.path, file.name, file.container, file.compression, dict(file.columns))


def resolve(path: Path, name: str, spec: SourceSpec, stat: os.stat_result) -> SourceFile:
    """The file with its container and format told, but not hashed yet."""
    known = container_of(name)
    assert known is not None, f"{name} passed _check_extensions"
    container, compression = known
    if not stat.st_size:
        raise DataError("empty_source", f"{name}: is empty")
    if compression and container not in TEXT_CONTAINERS:
        tool = "gunzip" if compression == "gz" else "unzstd"
        raise DataError(
            "packed_twice", f"{name}: {container} files are packed inside already; unpack it with  {tool} {name}"
        )
    columns = dict(spec.columns)
    if container in TEXT_CONTAINERS:
        container = _tell_container(path, name, container, compression, columns)
    format = _tell_format(path, name, container, compression, columns) if spec.format == "auto" else spec.format
    return SourceFile(*(path, name, container, compression, format, spec.columns, stat.st_size, "", stat.st_mtime_ns))


def _tell_container(path: Path, name: str, container: str, compression: str, columns: Mapping[str, str]) -> str:
    """For text files: refuses UTF-16 and UTF-32, and finds out whether a .json is an array or lines."""
    with path.open("rb") as file:
        head = unpacked(file, compression, name)(CHUNK)
    encoding = _wide_encoding(head)
    if encoding:
        raise DataError(
            "wrong_encoding", f"{name}: is {encoding}; convert it with  {_convert(name, compression, encoding)}"
        )
    text = head.removeprefix(BOM).lstrip()
    if not text and len(head) < CHUNK:
        raise DataError("empty_source", f"{name}: holds no records, only blanks")
    if container != "json" or text.startswith(b"["):
        return container
    if not text.startswith(b"{"):
        raise DataError(
            "unknown_json",
            f"{name}: is neither a JSON array nor one JSON object a line; it begins with {shown(excerpt(text))}",
        )
    with path.open("rb") as file:
        blocks = line_blocks(unpacked(file, compression, name), MAX_RECORD_BYTES)
        filled = (line for lines, _ in blocks for line in lines if line == TOO_LONG or line.strip())
        lines = list(islice(filled, 2))
    if len(lines) == 2 and json_object(lines[0]) is not None:
        return "jsonl"
    with path.open("rb") as file:
        value = json_object(read_whole(unpacked(file, compression, name), name))
    lists = [key for key, item in (value or {}).items() if isinstance(item, list)]
    if value is not None and detect(value, columns) is None and lists:
        raise DataError(
            "unknown_json",
            f"{name}: is one JSON object and not a list of records; its lists: {', '.join(map(shown, lists))}; "
            f"write one of them alone, with  jq -c '.{lists[0]}[]' {name} > {PurePath(name).stem}.jsonl",
        )
    if value is not None and len(lines) == 2:
        raise DataError(
            "unknown_json",
            f"{name}: is one JSON object over several lines; put [ and ] around it, or one object a line",
        )
    return "jsonl"


UNPACK = {"": "cat", "gz": "gunzip -c", "zst": "unzstd -c"}


def _convert(name: str, compression: str, encoding: str) -> str:
    plain = Path(name.removesuffix(f".{compression}"))
    made = shlex.quote(f"{plain.with_suffix('')}.utf8{plain.suffix}")
    return f"{UNPACK[compression]} {shlex.quote(name)} | iconv -f {encoding} -t UTF-8 > {made}"


def json_object(text: bytes) -> dict[str, object] | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def excerpt(text: bytes) -> str:
    return text[:20].decode("utf-8", "replace")


def _wide_encoding(head: bytes) -> str:
    """What iconv calls it where the bytes begin like UTF-16 or UTF-32: with a byte order mark, or as wide ASCII."""
    kinds = {
        "UTF-32": rb"\xff\xfe\0\0|\0\0\xfe\xff", "UTF-32LE": rb"[^\0]\0\0\0", "UTF-32BE": rb"\0\0\0[^\0]",
        "UTF-16": rb"\xff\xfe|\xfe\xff", "UTF-16LE": rb"[^\0]\0[^\0]\0", "UTF-16BE": rb"\0[^\0]\0[^\0]",
    }  # fmt: skip
    return next((name for name, begin in kinds.items() if re.match(begin, head, re.DOTALL)), "")


def _tell_format(path: Path, name: str, container: str, compression: str, columns: Mapping[str, str]) -> str:
    """The format of the first record that has one."""
    keys: list[str] = []
    reject: Reject | None = None
    columned: dict[str, str] = {}
    bare: str | None = None
    count = 0
    for record in islice(_sample(path, name, container, compression, columns), _SAMPLE):
        count += 1
        format = detect(record, columns)
        if format is not None:
            return format
        if isinstance(record, dict):
            keys += [key for key in record if key not in keys]
            columned = columned or guess_columns(record)
            bare = bare or detect(record)
        elif isinstance(record, Reject):
            reject = reject or record
    if not count:
        raise DataError("empty_source", f"{name}: holds no records")
    if keys:
        found = f"keys found: {', '.join(shown(key)[1:-1] for key in keys[:20])}{' …' if len(keys) > 20 else ''}"
    else:
        if reject and container in TEXT_CONTAINERS:
            _tell_text(path, name, container, compression, reject)
        found = f"none is an object{f' ({reject})' if reject else ''}"
    if keys and (lacking := [(ours, theirs) for ours, theirs in columns.items() if theirs not in keys]):
        said = "; ".join(
            f"columns: {ours}: no key `{as_yaml(theirs)}`{suggest(theirs, keys)}" for ours, theirs in lacking
        )
        advice = f"; without columns it is read as {bare}: leave columns out" if bare else ""
        raise DataError("unknown_format", f"{name}: {said}; {found}{advice}")
    if columned:
        paste = f"columns: {{{', '.join(f'{ours}: {as_yaml(key)}' for ours, key in columned.items())}}}"
        raise DataError("unknown_format", f"{name}: has other names than a format; {found}; is it  {paste}  ?")
    raise DataError(
        "unknown_format",
        f"{name}: the format cannot be told from its first {f'{count} records' if count > 1 else 'record'}; {found}; "
        f"formats tried: {', '.join(FORMAT_NAMES)}; name one with format:, or say with columns: which key holds what",
    )


def as_yaml(key: str) -> str:
    """A key as YAML has it."""
    return key if re.fullmatch(r"[A-Za-z]\w*", key, re.ASCII) else orjson.dumps(key).decode()


def _tell_text(path: Path, name: str, container: str, compression: str, reject: Reject) -> None:
    """Raises DataError where none of the first records is an object for a reason that the text as a whole shows.

    `reject` is that of the first.
    """
    if reject.reason == "bad_utf8":
        raise DataError(
            "wrong_encoding",
            f"{name}: is not UTF-8 ({reject.message}); where it is of Windows, convert it with  "
            f"{_convert(name, compression, 'WINDOWS-1252')}",
        )
    with path.open("rb") as file:
        head = unpacked(file, compression, name)(CHUNK).removeprefix(BOM).lstrip()
    if container != "jsonl":
        return
    if head.startswith(b"["):
        raise DataError(
            "unknown_json", f"{name}: begins like a JSON array, and not with an object a line; name it .json"
        )
    if head.startswith(b"{"):
        made = shlex.quote(f"{PurePath(name.removesuffix(f'.{compression}')).stem}.lines.jsonl")
        raise DataError(
            "unknown_json",
            f"{name}: holds one object over several lines; put each on a line of its own, with  "
            f"{UNPACK[compression]} {shlex.quote(name)} | jq -c . > {made}",
        )


def _sample(path: Path, name: str, container: str, compression: str, columns: Mapping[str, str]) -> Iterator[object]:
    if container == "json":
        yield from _array_head(path, name, compression)
        return
    stop = path.stat().st_size
    if container == "parquet":
        stop = parquet_metadata(path, name).num_row_groups
    wanted = {*COLUMNS, *columns.values()}
    for _, record in RecordReader(path, name, container, compression, 0, stop, columns=wanted):
        yield record


def _array_head(path: Path, name: str, compression: str) -> Iterator[object]:
    """The first records of an array, without reading more of it than they take (and up to three times as much)."""
    with path.open("rb") as file:
        read, head, whole, count = unpacked(file, compression, name), b"", False, 0
        while count < _SAMPLE and not whole:
            more = read(max(CHUNK, 3 * len(head)))
            head, whole = head + more, not more
            try:
                for element in islice(array_elements(head, name), count, None):
                    count += 1
                    try:
                        yield orjson.loads(element)
                    except orjson.JSONDecodeError as error:
                        yield Reject("bad_json", error.msg)
            except DataError:  # such as where the array goes on beyond what was read
                if whole:
                    raise
