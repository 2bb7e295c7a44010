"""Find the files of a config's sources, and identify the format of each.

If they cannot be found, the error explains why, and how to fix it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import orjson

from packcorpus.tasks.conversations.formats import COLUMNS, FORMAT_NAMES, detect, guess_columns
from packcorpus.tasks.conversations.names import MESSAGE_KEYS
from packcorpus.tasks.conversations.other_data import unread_preference
from packcorpus.tasks.conversations.session import KEYS, SESSION, reader_of
from packcorpus.tasks.core.errors import DataError, Reject, StorageError, UsageError
from packcorpus.tasks.core.messages import noted
from packcorpus.tasks.core.printable import shown, suggest
from packcorpus.tasks.readers.container import Container, RecordReader
from packcorpus.tasks.readers.containers import EXTENSIONS, container_by_extension, container_named
from packcorpus.tasks.readers.csv_file import Csv, decoded_start, find_delimiter, find_encoding, wide_encoding
from packcorpus.tasks.readers.json_files import Jsonl, Session
from packcorpus.tasks.readers.lines import BOM, CHUNK, DECOMPRESS
from packcorpus.tasks.sources.digests import DigestCache
from packcorpus.tasks.sources.locate import Located, find_paths
from packcorpus.tasks.sources.model import Source, SourceFile
from packcorpus.tasks.storage.layout import Layout
from packcorpus.tasks.stores.store import run_all

AT_ONCE = 8  # objects whose starts are read concurrently
_FIRST = 100  # records that are read to find the format
_BEGINNING = 1 << 20  # bytes that show the encoding and the delimiter of a CSV file


def find_files(
    sources: Sequence[Source],
    folder: Path,
    layout: Layout | None = None,
    revisions: Mapping[int, str] | None = None,
    cache: DigestCache | None = None,
    group_key: str = "",
    pairs: str = "chosen",
) -> list[SourceFile]:
    """Return the files of `sources`, identified but not yet hashed.

    The files are in the order of `sources`, and within a glob or folder in the order of their names. A file that
    several entries match is read once. `folder` is the folder of the config. A file that is an output in `layout` is
    refused. Copies of remote files are written to `layout`; without `layout`, only local files are found. `revisions`
    maps the index of an entry to the commit of its dataset on the Hub. Objects that `cache` knows are not read.
    `group_key` is the key of records that `validation_by` names, and `pairs` the setting of the config. Raises
    UsageError, InputMissing, DataError, StorageError, or PartMissing with the name of the file in the message.
    """
    outputs, copies = (layout.outputs(), layout.remote()) if layout else ([], None)
    located: list[list[Located]] = []
    for entry, source in enumerate(sources):
        _check_columns(source)
        with _reading(source.path):
            located.append(find_paths(source.path, folder, copies, (revisions or {}).get(entry, "")))
    objects = _identify_objects(sources, located, cache)
    files: dict[tuple[int, int], SourceFile] = {}
    for entry, source in enumerate(sources):
        with _reading(source.path):
            for path, name, revision, arrived, identity, note in located[entry]:
                if not (arrived or identity) and any(map(path.resolve().is_relative_to, outputs)):
                    raise UsageError(
                        "own_output", f"{name}: is an output of packcorpus, not a source; narrow the path {source.path}"
                    )
                stat = path.stat()
                file = objects.get((entry, name)) or _identify(path, name, source, stat, identity)
                file = replace(file, entry=entry, revision=revision, arrived=arrived, note=note)
                file = replace(file, group_key=group_key, pairs=pairs)
                first = files.setdefault((stat.st_dev, stat.st_ino), file)
                ways = _how(first, sources[first.entry]), _how(file, source)
                if ways[0] != ways[1]:
                    raise UsageError(
                        "source_twice",
                        f"{name} is the same file as {first.name}, but two entries of sources read it differently: as "
                        f"{ways[0]} and as {ways[1]}; remove one of these entries",
                    )
    return list(files.values())


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise StorageError("cannot_read", f"{error.filename or name}: {problem}") from None


def _identify_objects(
    sources: Sequence[Source], located: Sequence[Sequence[Located]], cache: DigestCache | None
) -> dict[tuple[int, str], SourceFile]:
    """Return the objects that are read in blocks, by entry and name.

    An object that cannot be identified is left out: its error is raised when the object is needed, in the order of the
    config.
    """
    objects = [(entry, item) for entry, items in enumerate(located) for item in items if item.identity]
    files = dict[tuple[int, str], SourceFile]()
    if not objects:
        return files

    def find(number: int) -> None:
        entry, item = objects[number]
        with suppress(DataError, UsageError, OSError):
            stat = item.path.stat()
            files[entry, item.name] = _identify(item.path, item.name, sources[entry], stat, item.identity, cache)

    with noted(lambda: f"reading the start of each object: {len(files):,} of {len(objects):,} done"):
        run_all(find, range(len(objects)), AT_ONCE, lambda: None)
    return files


def identify_file(
    path: Path, name: str = "", source: Source | None = None, identity: str = "", cache: DigestCache | None = None
) -> SourceFile:
    """Identify one file, like `find_files`. Raises PackError with its name."""
    name = name or str(path)
    if container_by_extension(name) is None:
        raise UsageError("bad_setting", f"{name}: unknown extension; known are {' '.join(EXTENSIONS)}")
    try:
        return _identify(path, name, source or Source(path=name), path.stat(), identity, cache)
    except OSError as error:
        raise StorageError("cannot_read", f"{name}: cannot be read: {error.strerror or error}") from None


def _check_columns(source: Source) -> None:
    known = (*COLUMNS, *MESSAGE_KEYS)
    for ours, theirs in source.columns.items():
        if ours not in known:
            swapped = f"; packcorpus names go on the left: columns: {{{theirs}: {as_yaml(ours)}}}" * (theirs in known)
            hint = swapped or suggest(ours, known) or f"; known are {', '.join(known)}"
            problem = f"columns: {shown(ours)} is not a column of packcorpus{hint}"
            raise UsageError("bad_setting", f"{source.path}: {problem}")


def _how(file: SourceFile, source: Source) -> str:
    """Describe how an entry of `sources` reads a file."""
    columns = ", ".join(f"{ours}: {theirs}" for ours, theirs in file.columns)
    further = [f"columns {{{columns}}}"] * bool(columns) + [f"weight {source.weight:g}"] * (source.weight != 1)
    further += [f"limit {source.limit}"] * (source.limit is not None)
    further += [f"split {source.split}"] * (source.split is not None)
    if source.roles:
        roles = ", ".join(f"{role}: [{', '.join(names)}]" for role, names in source.roles.items())
        further.append(f"roles {{{roles}}}")
    further += [f"{name} {value}" for name in ("delimiter", "encoding") if (value := getattr(file, name))]
    further += [f"ignore [{', '.join(file.ignore)}]"] * bool(file.ignore)
    return f"{file.format} with {', '.join(further)}" if further else file.format


# -- identification ----------------------------------------------------------------------------------------------------


def _identify(
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
        problem = f"{container.name} files are already compressed internally; decompress it with  {tool} {name}"
        raise DataError("packed_twice", f"{name}: {problem}")
    layout = [key for key in ("delimiter", "encoding") if getattr(source, key) != "auto"]
    if layout and not isinstance(container, Csv):
        raise UsageError(
            "bad_setting",
            f"{name}: `{layout[0]}` applies only to CSV and TSV files; list other files in a separate entry of "
            "`sources`, or remove the setting",
        )
    file = SourceFile(
        path,
        name,
        container.name,
        compression,
        format="",
        columns=tuple(source.columns.items()),
        bytes=stat.st_size,
        sha256="",
        mtime_ns=stat.st_mtime_ns,
        ignore=tuple(source.ignore),
        drop_roles=tuple(source.drop_roles),
        roles=tuple(source.role_names.items()),
        tokenizer_sha256=source.tokenizer_sha256,
        identity=identity,
    )
    if cache and identity:
        return cache.identified(file, source, lambda: _identified(file, container, source))
    return _identified(file, container, source)


def _identified(file: SourceFile, container: Container, source: Source) -> SourceFile:
    """Return the file with the settings of its source, or else of its content."""
    if isinstance(container, Csv):
        file = _csv_file(file, container, source)
    elif container.is_text:
        file = replace(file, container=_text_container(file, container, source.format))
    if source.format != "auto":
        return replace(file, format=source.format)
    if file.container == Session.name:
        return replace(file, format=SESSION.name)  # even if a line is damaged
    for record in _first_records(file):
        if format := detect(record, source.columns):
            return replace(file, format=format)
    raise _explain_unknown_format(file, _first_records(file))


def _first_records(file: SourceFile) -> Iterator[object]:
    """Yield up to 100 records, reading only as much of the file as they take."""
    return islice(container_named(file.container).first_records(file), _FIRST)


def _text_container(file: SourceFile, container: Container, format: str) -> str:
    """Return the name of the container that the text is in.

    A .json file may hold an array or lines, and lines may be the records of a session. `format` is the setting.
    """
    with RecordReader(container, file).open_text() as read:
        start = read(CHUNK)
    if encoding := wide_encoding(start):
        command = _convert(file, encoding)
        raise DataError("wrong_encoding", f"{file.name}: is {encoding}; convert it with  {command}")
    prefix = start.removeprefix(BOM).lstrip()
    if not prefix and len(start) < CHUNK:
        raise DataError("empty_source", f"{file.name}: contains no records, only whitespace")
    name = container.resolve(file, prefix, lambda record: detect(record, dict(file.columns)) is not None)
    if name != Jsonl.name or format not in ("auto", SESSION.name):
        return name
    records = []
    for line in prefix.split(b"\n")[:_FIRST]:
        with suppress(orjson.JSONDecodeError):  # the last line may be cut
            records.append(orjson.loads(line))
    first = next((record for record in records if isinstance(record, dict)), {})
    if format == SESSION.name:
        holds_session = not any(first.get(key) for key in KEYS)  # else each line is a row with a session
    else:
        holds_session = reader_of(records) is not None and detect(first) is None
    return Session.name if holds_session else name


def _csv_file(file: SourceFile, container: Csv, source: Source) -> SourceFile:
    """Return the file with the encoding and delimiter of its source or its start."""
    with RecordReader(container, file).open_text() as read:
        start = read(_BEGINNING)
    encoding = find_encoding(start) if source.encoding == "auto" else source.encoding.replace("utf-8", "")
    if encoding is None:
        advice = "its encoding is not clear; set encoding, such as encoding: windows-1252"
        raise DataError("wrong_encoding", f"{file.name}: is not UTF-8, and {advice}")
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


# -- errors ------------------------------------------------------------------------------------------------------------


def _explain_unknown_format(file: SourceFile, records: Iterable[object]) -> DataError:
    """Return the error for a file whose first records have no known format."""
    name, records = file.name, list(records)
    objects = [record for record in records if isinstance(record, dict)]
    rejects = [record for record in records if isinstance(record, Reject)]
    if not records:
        return DataError("empty_source", f"{name}: contains no records")
    count, reject = len(records), rejects[0] if rejects else None
    if not objects and reject and (error := _explain_unreadable(file, reject)):
        return error
    if reject and len(rejects) == count:
        advice = "fix it, or set `format` if other records are valid"
        what = f"none of its first {count:,} records can be read; the first problem" if count > 1 else "its only record"
        return DataError(reject.reason, f"{name}: {what}: {reject}; {advice}")
    keys = dict.fromkeys(key for record in objects for key in record)
    what = f"no record is an object{f' ({reject})' if reject else ''}"
    if keys:
        where = "columns in the first row" if isinstance(container_named(file.container), Csv) else "keys found"
        what = f"{where}: {', '.join(shown(key)[1:-1] for key in [*keys][:20])}{' …' if len(keys) > 20 else ''}"
    missing = [(ours, key) for ours, key in file.columns if key not in keys and ours not in MESSAGE_KEYS]
    if keys and missing:
        problems = "; ".join(f"columns: {ours}: no key `{as_yaml(key)}`{suggest(key, keys)}" for ours, key in missing)
        format = next(filter(None, map(detect, objects)), None)
        advice = f"; without columns it is read as {format}: remove columns" if format else ""
        return DataError("unknown_format", f"{name}: {problems}; {what}{advice}")
    if guessed := next(filter(None, map(guess_columns, objects)), None):
        paste = f"columns: {{{', '.join(f'{ours}: {as_yaml(key)}' for ours, key in guessed.items())}}}"
        return DataError("unknown_format", f"{name}: its keys match no format; {what}; did you mean  {paste}  ?")
    if other := unread_preference(objects, name):
        return other
    return DataError(
        "unknown_format",
        f"{name}: no known format in its first {f'{count} records' if count > 1 else 'record'}; {what}; formats "
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
        command = _convert(file, "WINDOWS-1252")
        advice = f"if it comes from Windows, convert it with  {command}"
        return DataError("wrong_encoding", f"{file.name}: is not UTF-8 ({reject.message}); {advice}")
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
