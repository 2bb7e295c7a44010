"""Find the kind of a file, and read source files and the sources of a config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from packcorpus.tasks.config import Config, load_config
from packcorpus.tasks.conversations.formats import guess_columns
from packcorpus.tasks.conversations.model import Conversation, as_openai, as_row, content_digest, whole_text
from packcorpus.tasks.core.error_codes import CODES
from packcorpus.tasks.core.errors import DataError, InputMissing, PackError, Reject, UsageError
from packcorpus.tasks.readers.container import RecordReader
from packcorpus.tasks.readers.containers import container_by_extension, container_named
from packcorpus.tasks.sources.digests import DigestCache
from packcorpus.tasks.sources.locate import find_paths
from packcorpus.tasks.sources.model import Source, SourceFile
from packcorpus.tasks.sources.sample_files import sample_files
from packcorpus.tasks.sources.source_files import find_files, identify_file
from packcorpus.tasks.storage.facts import SourceFacts
from packcorpus.tasks.storage.layout import Layout
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.verification.rebuild import config_for

BUDGET = 1 << 19  # bytes that are read to guess the meaning of keys
SAMPLED = 100  # records at the start of a source that its figures are computed from


Kind = Literal["manifest", "shard", "source", "config"]


def kind_of(path: Path) -> Kind:
    """Return the kind of a file.

    The name decides or, if it is ambiguous, the first bytes. A file of unknown kind is treated as a manifest.
    """
    if path.suffix.lower() in (".yaml", ".yml"):
        return "config"
    if path.suffix == ".arrow" and path.is_file():
        try:
            with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
                is_shard = b"format_version" in (reader.schema.metadata or {})
        except (pa.ArrowException, OSError):
            is_shard = (path.parent / "manifest.json").is_file()
        if is_shard:
            return "shard"
    if container_by_extension(path.name) is None or not path.is_file():
        return "manifest"
    if path.suffix != ".json":
        return "source"
    if path.name == "manifest.json" or path.parent.name == "manifests":
        return "manifest"
    with path.open("rb") as file:
        return "manifest" if b'"format_version"' in file.read(4096) else "source"


@dataclass(frozen=True)
class SourceInfo:
    """Facts about a source file, from its name and its first records."""

    name: str
    format: str
    container: str
    compression: str
    bytes: int
    delimiter: str  # of a CSV or TSV file; "" for a comma or a tab
    encoding: str  # of a CSV or TSV file; "" for UTF-8
    columns: dict[str, str]  # guessed from the names of the keys if they match no format


@dataclass(frozen=True)
class SourceSample:
    """Figures of the first records of a source."""

    records: int
    rejected: int
    messages: float  # mean of the records that are not rejected


@dataclass(frozen=True)
class SourceOverview(SourceInfo):
    """A source file and its first records."""

    # {"record": n, "messages": …} or {"record": n, "rejected": …}; with several answers, "answers" has the place and
    # the first message of each
    records: list[dict[str, Any]]
    sample: SourceSample


@dataclass(frozen=True)
class SourceRecords(SourceInfo):
    """The record of one line, or the first `limit` records with the text `search`."""

    records: list[dict[str, Any]]
    search: str | None = None
    limit: int = 1
    more: bool = False


@dataclass(frozen=True)
class ConfigOverview:
    """A config, its source files, and the manifests that were made from it."""

    config: Path
    settings: dict[str, Any]
    sources: list[SourceInfo]
    made: list[Path]
    manifests: Path  # their folder


def source_overview(path: Path, limit: int) -> SourceOverview:
    """Read the first `limit` records of a source, or raise PackError."""
    file = _identified(path)
    read = list(islice(records_of(file), max(limit, SAMPLED)))
    first = [record for _, record in read[:SAMPLED]]
    turns = [len(record.messages) for record in first if isinstance(record, Conversation)]
    sample = SourceSample(len(first), len(first) - len(turns), sum(turns) / max(len(turns), 1))
    records = [_record_value(number, record) for number, record in read[:limit]]
    return SourceOverview(**_facts(file), records=records, sample=sample)


def source_line(path: Path, line: int) -> SourceRecords:
    """Read the record of a line of a source; see `record_of`."""
    file = _identified(path)
    return SourceRecords(**_facts(file), records=[_record_value(line, record_of(file, line))])


def source_search(path: Path, text: str, limit: int) -> SourceRecords:
    """Read the first `limit` records of a source that contain a text."""
    file = _identified(path)
    if not text:
        raise UsageError("bad_command_line", "--search: the text is empty")
    found = (
        (number, record)
        for number, record in records_of(file)
        if isinstance(record, Conversation) and any(text in string for string in _strings(record))
    )
    records = [_record_value(number, record) for number, record in islice(found, limit)]
    more = next(found, None) is not None
    return SourceRecords(**_facts(file), records=records, search=text, limit=limit, more=more)


def config_overview(path: Path, manifests: Path) -> ConfigOverview:
    """Read a config and find its source files and the manifests made from it.

    Remote sources are fetched to the project of `manifests`, as in a run. Sources are not hashed.
    """
    config, layout = load_config(path), Layout(manifests.parent)
    cache = DigestCache(layout.digests(), only_read=True)
    sources = [
        SourceInfo(**_facts(identify_file(located.path, located.name, source, located.identity, cache)))
        for source in config.sources
        for located in find_paths(source.path, path.parent, layout.remote())
    ]
    return ConfigOverview(path, config.settings(), sources, corpora_of(config, manifests), manifests)


def messages_of_record(manifest: Manifest, folder: Path, place: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a conversation of a corpus, in OpenAI's form.

    Those of several answers follow each other. They are read from its source, whose folder run.json records. `place` is
    an entry of the index. Raises InputMissing if the source is gone, and DataError if its conversation has changed.
    """
    facts = manifest.sources[place["source"]]
    where = f"{facts.path}:{place['record']}"
    config, origin = config_for(manifest, folder, None)
    file = _source_of(facts, config.sources[facts.entry], origin, Layout(folder.parents[2]).remote())
    file = replace(file, pairs=config.pairs)
    record = record_of(file, place["record"])
    if isinstance(record, Reject) or content_digest(whole_text(record).encode()) != place["digest"]:
        raise DataError("origin_changed", f"{where}: is not the conversation that was packed: the source has changed")
    return [as_openai(message) for message in record.messages]


def records_with_id(
    manifest: Manifest, folder: Path, own_id: str, sources: Sequence[int] = ()
) -> Iterator[tuple[int, int]]:
    """Yield each source of a corpus and number of a record whose own `id` is `own_id`.

    `sources` are indices into those of the manifest; without them, all are read, in bounded memory. Raises InputMissing
    if a source is gone, and DataError if it has changed.
    """
    config, origin = config_for(manifest, folder, None)
    copies = Layout(folder.parents[2]).remote()
    for number in sources or range(len(manifest.sources)):
        facts = manifest.sources[number]
        file = _source_of(facts, config.sources[facts.entry], origin, copies)
        if file.bytes != facts.bytes:
            raise DataError("origin_changed", f"{facts.path}: has changed since it was packed")
        for index, value in RecordReader(container_named(file.container), file):
            if isinstance(value, dict) and str(value.get("id")) == own_id and value["id"] is not None:
                yield number, index + 1


def _source_of(facts: SourceFacts, entry: Source, origin: Path, copies: Path) -> SourceFile:
    """Return a source of a corpus. Raises InputMissing if it is gone."""
    located = find_paths(entry.path, origin, copies, facts.revision)
    found = next((file for file in located if file.name == facts.path), None)
    if found is None:
        raise InputMissing("source_missing", f"{facts.path}: the source does not exist anymore")
    return identify_file(found.path, found.name, entry, found.identity)


def _identified(path: Path) -> SourceFile:
    """Identify a source file; guess unknown keys, as in `packcorpus init`."""
    try:
        return identify_file(path)
    except DataError as error:
        columns = guess_columns_of(path) if error.reason == "unknown_format" else {}
        if not columns:
            raise
        return identify_file(path, source=Source(path=str(path), columns=columns))


def guess_columns_of(path: Path | str, layout: Layout | None = None) -> dict[str, str]:
    """Return `guess_columns` of the first record of a file, or {} if it is unreadable.

    With `layout`, the path may be remote, and its first file is read.
    """
    known = Source(path=str(path), format="text")
    try:
        [sample] = sample_files(find_files([known], Path(), layout)[:1], BUDGET, 1 << 24)
    except PackError:
        return {}
    record = next((value for _, value in sample.records if isinstance(value, dict)), {})
    return guess_columns(record)


def _facts(file: SourceFile) -> dict[str, Any]:
    facts = {field.name: getattr(file, field.name) for field in fields(SourceInfo)}
    return facts | {"columns": dict(file.columns)}


def _record_value(number: int, record: Conversation | Reject) -> dict[str, Any]:
    if isinstance(record, Reject):
        code = CODES[record.reason].code
        return {"record": number, "rejected": record.reason, "code": code, "message": record.message}
    messages = [as_row(message) for message in record.messages]
    if record.recorded:
        ids, trained, _ = record.recorded
        messages[0]["content"] = f"{len(ids):,} recorded token ids, {sum(trained):,} of them trained on"
    value = {"record": number, "messages": messages, "tools": list(record.tools)}
    return value | ({"answers": [*map(list, record.answers)]} if record.has_several_answers else {})


def record_of(file: SourceFile, line: int) -> Conversation | Reject:
    """Read the record of a line, or of a number from 1 if the container has no lines.

    In plain JSONL, the lines before it are counted, not parsed. Raises UsageError if there is no such line.
    """
    if line < 1:
        raise UsageError("bad_command_line", f"--line {line}: lines are numbered from 1")
    start, skipped = container_named(file.container).seek(file, line - 1)
    for number, record in records_of(file, start):
        if number + skipped >= line:
            if number + skipped == line:
                return record
            raise UsageError("not_in_it", f"{file.name}:{line}: the line is blank")
    raise UsageError("not_in_it", f"{file.name}:{line}: the file has fewer lines")


def records_of(file: SourceFile, start: int = 0) -> Iterator[tuple[int, Conversation | Reject]]:
    """Yield each record as a number, from 1 at `start`, and a conversation or reject."""
    for number, value in RecordReader(container_named(file.container), file, start):
        try:
            yield number + 1, file.conversation(value)
        except Reject as reject:
            yield number + 1, reject


def _strings(conversation: Conversation) -> Iterator[str]:
    yield from conversation.tools
    for message in conversation.messages:
        yield from (message.context, message.content, message.reasoning)
        for call in message.tool_calls:
            yield from (call.name, call.arguments)


def corpora_of(config: Config, manifests: Path) -> list[Path]:
    """Return the manifests with the name and settings of a config, the newest last."""
    settings, found = config.settings(), []
    for path in sorted(manifests.glob("*.json"), key=lambda file: file.stat().st_mtime_ns):
        with suppress(PackError):
            made = load_manifest(path).config
            if made["name"] == config.name and all(settings.get(name) == value for name, value in made.items()):
                found.append(path)
    return found
