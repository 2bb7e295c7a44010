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

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path, PurePath
from threading import Event

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.conversations.column_guesses import guess_columns
from tasks.conversations.fields import shown
from tasks.conversations.formats import COLUMNS, FORMATS, detect
from tasks.core.errors import DataError, Reject, StorageError, UsageError
from tasks.readers.compression import BOM, CHUNK, TOO_LONG, line_blocks, unpacked
from tasks.readers.record_reader import (
    MAX_RECORD_BYTES,
    TEXT_CONTAINERS,
    Block,
    RecordReader,
    array_elements,
    container_of,
    first_line,
    read_whole,
)
from tasks.sources.locate import locate

# Luigi's cost per task grows with their number (13 ms at 500, 31 ms at 2,000).
MOST_PARTS = 512

_HASH_CHUNK = 1 << 20
HASH_THREADS = 4  # as fast as most disks read
_SAMPLE = 100  # records that are looked at to tell the format


@dataclass(frozen=True)
class SourceSpec:
    """One entry of the config: a file, glob or folder, relative to the config's folder or absolute."""

    path: str
    format: str = "auto"
    columns: tuple[tuple[str, str], ...] = ()
    weight: float = 1.0
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that is read. `path` is absolute; `name` is the path as the config has it, with /.

    `container` and `format` are resolved: what the file is, and no longer what was asked for. `bytes` and `mtime_ns`
    are those at the time when `sha256` was taken. `entry` is the first spec that reaches it.
    """

    path: Path
    name: str
    container: str
    compression: str
    format: str
    columns: tuple[tuple[str, str], ...]
    bytes: int
    sha256: str
    mtime_ns: int
    entry: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """What one task reads: bytes [start, stop) of the file, or row groups [start, stop) of a Parquet file.

    `sha256` is the digest of the bytes; for row groups, of the file's digest, start and stop. It says nothing of
    container, compression, format and columns.
    """

    file: SourceFile
    start: int
    stop: int
    sha256: str


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
                source = replace(_resolve(path, name, spec, stat), entry=entry)
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


def find_parts(
    specs: Sequence[SourceSpec], folder: Path, part_size: int, outputs: Sequence[Path] = ()
) -> list[tuple[SourceFile, list[Part]]]:
    """The files of `specs` as `find_files` has them, read once for their digests; each with its parts.

    `part_size` is in bytes; it is doubled until MOST_PARTS of them hold all (each file is one part at least).
    Raises what `find_files` raises.
    """
    if part_size < 1:
        raise UsageError("bad_setting", f"part_size is {part_size}; expected 1 or more bytes")
    files = find_files(specs, folder, outputs)
    # By doubling, so that a corpus that grows keeps its parts until it is twice as large.
    while sum(source.bytes for source in files) > part_size * MOST_PARTS:
        part_size *= 2
    # Threads, for digests are taken without Python's lock; they have ended before a worker is forked.
    stop = Event()
    with ThreadPoolExecutor(min(HASH_THREADS, os.cpu_count() or 1)) as threads:
        try:
            return list(threads.map(partial(_hash_and_cut, part_size=part_size, stop=stop), files))
        finally:
            stop.set()  # nobody who interrupts waits for the files that are left


class PartReader(RecordReader):
    """Iterates over (number, record) of a part. For jsonl the number is the line within the part, blank lines
    counted; for all else the record within the part. Both from 0. A record that cannot be parsed is a Reject.

    `records` is how many lines or records the part spans, once the iteration has ended. Raises DataError when the
    file cannot be read on, or is not the one that was hashed.
    """

    def __init__(self, part: Part, max_record_bytes: int = MAX_RECORD_BYTES):
        file = part.file
        wanted = {*COLUMNS, *(theirs for _, theirs in file.columns)}
        super().__init__(
            *(file.path, file.name, file.container, file.compression, part.start, part.stop, max_record_bytes, wanted)
        )
        self.file = file

    def blocks(self) -> Iterator[Block]:
        _check_unchanged(self.file)
        try:
            yield from super().blocks()
        except OSError as error:
            _check_unchanged(self.file)
            raise StorageError("cannot_read", f"{self.file.name}: cannot be read: {error.strerror or error}") from None
        except DataError:
            _check_unchanged(self.file)
            raise
        _check_unchanged(self.file)


def read_part(part: Part, max_record_bytes: int = MAX_RECORD_BYTES) -> PartReader:
    """The records of `part`, to be iterated over; a jsonl line of more than `max_record_bytes` is a Reject."""
    return PartReader(part, max_record_bytes)


def look(path: Path, name: str = "", spec: SourceSpec | None = None) -> SourceFile:
    """One file with its container and format told, as `find_parts` does, but not hashed: its `sha256` is "".

    Raises UsageError, InputMissing, DataError or StorageError, whose message names the file.
    """
    name = name or str(path)
    if container_of(name) is None:
        raise UsageError("bad_setting", f"{name}: its extension says nothing of what it holds")
    try:
        return _resolve(path, name, spec or SourceSpec(name), path.stat())
    except OSError as error:
        raise StorageError("cannot_read", f"{name}: cannot be read: {error.strerror or error}") from None


def head(file: SourceFile) -> Iterator[object]:
    """Records from the begin of a file, read as they are asked for; of a JSON array, its first hundreds."""
    return _sample(file.path, file.name, file.container, file.compression, dict(file.columns))


def _check_unchanged(file: SourceFile) -> None:
    try:
        stat = file.path.stat()
    except OSError:
        raise DataError("input_changed", f"{file.name}: vanished while it was read; run again") from None
    if (stat.st_size, stat.st_mtime_ns) != (file.bytes, file.mtime_ns):
        raise DataError("input_changed", f"{file.name}: changed while it was read; run again")


# -- what is asked for -----------------------------------------------------------------------------------------------


def _check_spec(spec: SourceSpec) -> None:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", spec.path):
        raise UsageError("bad_setting", f"{spec.path}: only local files can be read; download it and name the file")
    if spec.format != "auto" and spec.format not in FORMATS:
        raise UsageError(
            "bad_setting", f"{spec.path}: format {shown(spec.format)} is not known{_nearest(spec.format, FORMATS)}"
        )
    for ours, theirs in spec.columns:
        if ours not in COLUMNS:
            turned = f"; ours stands on the left: columns: {{{theirs}: {_plain(ours)}}}" if theirs in COLUMNS else ""
            raise UsageError(
                "bad_setting",
                f"{spec.path}: columns: {shown(ours)} is not a name of ours{turned or _nearest(ours, COLUMNS)}",
            )


def _nearest(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"


# -- telling what a file is -----------------------------------------------------------------------------------------


def _resolve(path: Path, name: str, spec: SourceSpec, stat: os.stat_result) -> SourceFile:
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
            f"{name}: is neither a JSON array nor one JSON object a line; it begins with {shown(_some(text))}",
        )
    with path.open("rb") as file:
        blocks = line_blocks(unpacked(file, compression, name), MAX_RECORD_BYTES)
        filled = (line for lines, _ in blocks for line in lines if line == TOO_LONG or line.strip())
        lines = list(islice(filled, 2))
    if len(lines) == 2 and _object(lines[0]) is not None:
        return "jsonl"
    with path.open("rb") as file:
        value = _object(read_whole(unpacked(file, compression, name), name))
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


def _object(text: bytes) -> dict[str, object] | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _some(text: bytes) -> str:
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
            f"columns: {ours}: no key `{_plain(theirs)}`{_near_key(theirs, keys)}" for ours, theirs in lacking
        )
        advice = f"; without columns it is read as {bare}: leave columns out" if bare else ""
        raise DataError("unknown_format", f"{name}: {said}; {found}{advice}")
    if columned:
        paste = f"columns: {{{', '.join(f'{ours}: {_plain(key)}' for ours, key in columned.items())}}}"
        raise DataError("unknown_format", f"{name}: has other names than a format; {found}; is it  {paste}  ?")
    raise DataError(
        "unknown_format",
        f"{name}: the format cannot be told from its first {f'{count} records' if count > 1 else 'record'}; {found}; "
        f"formats tried: {', '.join(FORMATS)}; name one with format:, or say with columns: which key holds what",
    )


def _near_key(name: str, keys: Sequence[str]) -> str:
    near = get_close_matches(name, keys, n=1)
    return f"; did you mean `{_plain(near[0])}`?" if near else ""


def _plain(key: str) -> str:
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
        stop = _parquet_metadata(path, name).num_row_groups
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


def place_of(part: Part, record: int) -> str:
    """FILE:LINE of a record that is number `record` of its part, from 0; FILE:RECORD where the file has no lines.

    For messages: the lines before the part are counted anew.
    """
    before = 0
    if part.start and part.file.container == "parquet":
        metadata = _parquet_metadata(part.file.path, part.file.name)
        before = sum(metadata.row_group(group).num_rows for group in range(part.start))
    elif part.start:
        with part.file.path.open("rb") as file:
            while (left := part.start - file.tell()) > 0 and (chunk := file.read(min(_HASH_CHUNK, left))):
                before += chunk.count(b"\n")
    return f"{part.file.name}:{before + record + 1}"


# -- hashing and cutting --------------------------------------------------------------------------------------------


def _hash_and_cut(source: SourceFile, part_size: int, stop: Event) -> tuple[SourceFile, list[Part]]:
    """Raises CancelledError where `stop` was set."""
    try:
        return _hashed_and_cut(source, part_size, stop)
    except OSError as error:
        raise StorageError("cannot_read", f"{source.name}: cannot be read: {error.strerror or error}") from None


def _hashed_and_cut(source: SourceFile, part_size: int, stop: Event) -> tuple[SourceFile, list[Part]]:
    cuts: list[tuple[int, int, str]]
    if source.container == "jsonl" and not source.compression:
        digest, cuts = _hash_lines(source.path, part_size, stop)
    else:
        digest, _ = _hash_lines(source.path, source.bytes + 1, stop)
        cuts = [(0, source.bytes, digest)]
        if source.container == "parquet":
            groups = _group(_parquet_metadata(source.path, source.name), part_size)
            cuts = [(*group, sha256(f"{digest} {group[0]} {group[1]}".encode()).hexdigest()) for group in groups]
    source = replace(source, sha256=digest)
    _check_unchanged(source)
    return source, [Part(source, *cut) for cut in cuts]


def _hash_lines(path: Path, part_size: int, stop: Event) -> tuple[str, list[tuple[int, int, str]]]:
    """(sha256 of the file, [(start, stop, sha256), …]) in one pass.

    A part ends with the first line that ends at or after k times part_size, for k = 1, 2, …: what follows has no say in
    where it ends. The first part costs no hashing of its own, for until it ends it is all of the file.
    """
    whole, piece = sha256(), None
    cuts: list[tuple[int, int, str]] = []
    start, position, target = 0, 0, part_size
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            if stop.is_set():
                raise CancelledError
            view, at = memoryview(chunk), 0
            while position + len(chunk) >= target:
                end = chunk.find(b"\n", max(target - 1 - position, 0)) + 1
                if not end:
                    break
                whole.update(view[at:end])
                if piece is None:
                    cuts.append((start, position + end, whole.hexdigest()))
                else:
                    piece.update(view[at:end])
                    cuts.append((start, position + end, piece.hexdigest()))
                start, at, piece = position + end, end, sha256()
                target = (start // part_size + 1) * part_size
            whole.update(view[at:])
            if piece is not None:
                piece.update(view[at:])
            position += len(chunk)
    if position > start or not cuts:
        cuts.append((start, position, (whole if piece is None else piece).hexdigest()))
    return whole.hexdigest(), cuts


def _parquet_metadata(path: Path, name: str) -> pq.FileMetaData:
    try:
        metadata = pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError("unreadable_source", f"{name}: cannot be read as parquet: {first_line(error)}") from None
    if not metadata.num_rows:
        raise DataError("empty_source", f"{name}: holds no records")
    return metadata


def _group(metadata: pq.FileMetaData, part_size: int) -> list[tuple[int, int]]:
    """Row groups [start, stop), as few as reach `part_size` bytes (unpacked)."""
    groups, start, size = [], 0, 0
    for index in range(metadata.num_row_groups):
        size += metadata.row_group(index).total_byte_size
        if size >= part_size or index == metadata.num_row_groups - 1:
            groups.append((start, index + 1))
            start, size = index + 1, 0
    return groups


def _how(file: SourceFile, spec: SourceSpec) -> str:
    columns = ", ".join(f"{ours}: {theirs}" for ours, theirs in file.columns)
    further = [f"columns {{{columns}}}"] * bool(columns) + [f"weight {spec.weight:g}"] * (spec.weight != 1)
    further += [f"limit {spec.limit}"] * (spec.limit is not None)
    return f"{file.format} with {', '.join(further)}" if further else file.format
