"""Read records of a source file for inspection."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tasks.config import Config, load_config
from tasks.conversations.model import Conversation
from tasks.conversations.openai import as_row
from tasks.core.error_codes import CODES
from tasks.core.errors import PackError, Reject, UsageError
from tasks.readers.container import RecordReader
from tasks.readers.containers import container_named
from tasks.sources.locate import locate
from tasks.sources.model import SourceFile
from tasks.sources.source_files import look
from tasks.storage.manifest import load_manifest


def source_as_object(path: Path, line: int | None, text: str | None, limit: int) -> dict[str, Any]:
    """The same for JSON."""
    file = look(path)
    found: dict[str, Any] = {name: getattr(file, name) for name in ("name", "format", "container", "bytes")}
    if line is not None:
        records = [(line, record_of(file, line))]
    else:
        records = list(islice(containing(file, text) if text is not None else records_of(file), limit))
    return found | {"records": [{"record": number} | record_as_object(record) for number, record in records]}


def record_of(file: SourceFile, line: int) -> Conversation | Reject:
    """The record of a line, or with a number where the file has no lines, both from 1. Raises UsageError where it has
    fewer. Of plain JSONL the lines before are counted and not read."""
    if line < 1:
        raise UsageError("bad_command_line", f"--line {line}: lines are counted from 1")
    start, skipped = container_named(file.container).seek(file, line - 1)
    for number, record in records_of(file, start):
        if number + skipped >= line:
            if number + skipped == line:
                return record
            raise UsageError("not_in_it", f"{file.name}:{line}: the line is blank")
    raise UsageError("not_in_it", f"{file.name}:{line}: the file ends before")


def records_of(file: SourceFile, start: int = 0) -> Iterator[tuple[int, Conversation | Reject]]:
    """Yield (number from 1 at `start`, conversation or Reject)."""
    for number, value in RecordReader(container_named(file.container), file, start):
        try:
            yield number + 1, file.conversation(value)
        except Reject as reject:
            yield number + 1, reject


def containing(file: SourceFile, text: str) -> Iterator[tuple[int, Conversation | Reject]]:
    if not text:
        raise UsageError("bad_command_line", "--search: give the text to look for")
    for number, record in records_of(file):
        if isinstance(record, Conversation) and any(text in said for said in _strings(record)):
            yield number, record


def _strings(conversation: Conversation) -> Iterator[str]:
    """All that a conversation says."""
    yield from conversation.tools
    for message in conversation.messages:
        yield from (message.context, message.content)
        for call in message.tool_calls:
            yield from (call.name, call.arguments)


def record_as_object(record: Conversation | Reject) -> dict[str, Any]:
    if isinstance(record, Reject):
        return {"rejected": record.reason, "code": CODES[record.reason].code, "message": record.message}
    return {"messages": [as_row(message) for message in record.messages], "tools": list(record.tools)}


def sources_of(config: Config, folder: Path) -> Iterator[SourceFile]:
    """The files of a config, in their order, not hashed. Raises what `look` raises."""
    for source in config.sources:
        for path, name in locate(source.path, folder):
            yield look(path, name, source)


def corpora_of(config: Config, manifests: Path) -> list[Path]:
    """The manifests of this name that have these settings, the newest last. The sources may have changed since."""
    settings, found = config.settings(), []
    for path in sorted(manifests.glob("*.json"), key=lambda file: file.stat().st_mtime_ns):
        try:
            made = load_manifest(path).config
        except PackError:
            continue
        if made["name"] == config.name and all(settings.get(name) == value for name, value in made.items()):
            found.append(path)
    return found


def config_as_object(path: Path, manifests: Path) -> dict[str, Any]:
    """The same for JSON."""
    config = load_config(path)
    names = ("name", "format", "container", "compression", "bytes")
    sources = [{name: getattr(file, name) for name in names} for file in sources_of(config, path.parent)]
    return {
        "config": str(path),
        "settings": config.settings(),
        "sources": sources,
        "made": corpora_of(config, manifests),
    }
