"""A raw source, a config and a single shard, as one looks at them before a corpus is made, or beside it.

source   format, container, size, and a record as messages: by its line, or the first that contains a text
config   its sources, one by one, and the corpus that was made from it, if there is one
shard    how full its rows are, and which corpus it belongs to
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.text import Text

from tasks.cli.console import in_bytes
from tasks.cli.row_view import print_messages
from tasks.cli.token_text import HEADING_STYLE, print_conversation_head, print_hanging, styled
from tasks.config import Config, load_config
from tasks.conversations.formats import Conversation, read_record
from tasks.core.error_codes import CODES
from tasks.core.errors import InputMissing, PackError, Reject, UsageError
from tasks.core.printable import counted, printable
from tasks.inspection.lookup import mapped
from tasks.readers.record_reader import RecordReader, container_of
from tasks.sources.locate import locate
from tasks.sources.source_files import SourceFile, SourceSpec, look
from tasks.storage.corpus_folder import reading
from tasks.storage.manifest import Shard, load_manifest
from tasks.tokenization.token_batch import as_row

_BLOCK = 1 << 20
_LOOKED_AT = 100  # records from the begin of a source


# A source


def show_source(path: Path, line: int | None, text: str | None, limit: int, console: Console) -> None:
    """The file and its first conversation, the record of a line, or the first records that contain a text.

    Raises UsageError, InputMissing, DataError or StorageError, whose message names the file.
    """
    file = look(path)
    if line is not None:
        _print_record(file, line, record_of(file, line), console)
        return
    if text is not None:
        found, shown = _containing(file, text), 0
        for number, record in islice(found, limit):
            _print_record(file, number, record, console)
            shown += 1
        more = shown == limit and next(found, None) is not None
        told = f"the first {limit:,}; more with --limit" if more else counted(shown, "conversation")
        console.print(Text(told, "dim"))
        return
    console.print(Text.assemble((printable(file.name), "bold"), ("  " + _facts(file), "dim")), soft_wrap=True)
    records = list(islice(_records(file), _LOOKED_AT))
    rejected = [(number, record) for number, record in records if isinstance(record, Reject)]
    turns = [len(record.messages) for _, record in records if isinstance(record, Conversation)]
    if turns:
        mean = sum(turns) / len(turns)
        console.print(f"of the first {counted(len(records), 'record')}: {mean:.1f} messages on average", end="")
        console.print(f", {len(rejected):,} to be rejected" if rejected else "")
    for number, reject in rejected[:3]:
        _print_record(file, number, reject, console)
    first = next(((number, record) for number, record in records if isinstance(record, Conversation)), None)
    if first:
        _print_record(file, *first, console)


def source_as_object(path: Path, line: int | None, text: str | None, limit: int) -> dict[str, Any]:
    """The same for JSON."""
    file = look(path)
    found: dict[str, Any] = {name: getattr(file, name) for name in ("name", "format", "container", "bytes")}
    if line is not None:
        records = [(line, record_of(file, line))]
    else:
        records = list(islice(_containing(file, text) if text is not None else _records(file), limit))
    return found | {"records": [{"record": number} | _as_object(record) for number, record in records]}


def record_of(file: SourceFile, line: int) -> Conversation | Reject:
    """The record of a line, or with a number where the file has no lines, both from 1. Raises UsageError where it has
    fewer. Of plain JSONL the lines before are counted and not read."""
    if line < 1:
        raise UsageError("bad_command_line", f"--line {line}: lines are counted from 1")
    start, skipped = 0, 0
    if file.container == "jsonl" and not file.compression:
        start, skipped = _line_start(file.path, line), line - 1
    if start < file.bytes:
        for number, record in _records(file, start):
            if number + skipped >= line:
                if number + skipped == line:
                    return record
                raise UsageError("not_in_it", f"{file.name}:{line}: the line is blank")
    raise UsageError("not_in_it", f"{file.name}:{line}: the file ends before")


def _line_start(path: Path, line: int) -> int:
    """Where a line begins, in bytes; the size of the file where there are fewer."""
    left, position = line - 1, 0
    with path.open("rb") as file:
        while left and (block := file.read(_BLOCK)):
            ends = block.count(b"\n")
            if ends >= left:
                at = -1
                for _ in range(left):
                    at = block.index(b"\n", at + 1)
                return position + at + 1
            left -= ends
            position += len(block)
    return position


def _records(file: SourceFile, start: int = 0) -> Iterator[tuple[int, Conversation | Reject]]:
    """(number from 1, what is read of it)"""
    columns = dict(file.columns)
    stop = file.bytes
    if file.container == "parquet":
        import pyarrow.parquet as pq

        stop = pq.read_metadata(file.path).num_row_groups
    reader = RecordReader(file.path, file.name, file.container, file.compression, start, stop)
    for number, value in reader:
        try:
            if isinstance(value, Reject):
                raise value
            yield number + 1, read_record(value, file.format, columns)
        except Reject as reject:
            yield number + 1, reject


def _containing(file: SourceFile, text: str) -> Iterator[tuple[int, Conversation | Reject]]:
    if not text:
        raise UsageError("bad_command_line", "--search: give the text to look for")
    for number, record in _records(file):
        if isinstance(record, Conversation) and any(text in said for said in _strings(record)):
            yield number, record


def _strings(conversation: Conversation) -> Iterator[str]:
    """All that a conversation says."""
    yield from conversation.tools
    for message in conversation.messages:
        yield from (message.context, message.content)
        for call in message.tool_calls:
            yield from (call.name, call.arguments)


def _facts(file: SourceFile) -> str:
    packed = f".{file.compression}" if file.compression else ""
    return f"{file.format}, {file.container}{packed}, {in_bytes(file.bytes)}"


def _print_record(file: SourceFile, number: int, record: Conversation | Reject, console: Console) -> None:
    console.print()
    where = f"{printable(file.name)}:{number}"
    if isinstance(record, Reject):
        print_conversation_head(console, "rejected", where, [f"{CODES[record.reason].code} {record.reason}"])
        print_hanging(console, styled(record.message, ""))
        return
    print_conversation_head(console, "", where, [counted(len(record.messages), "message")])
    tools = f"[{','.join(record.tools)}]" if record.tools else None
    print_messages([as_row(message) for message in record.messages], tools, console)


def _as_object(record: Conversation | Reject) -> dict[str, Any]:
    if isinstance(record, Reject):
        return {"rejected": record.reason, "code": CODES[record.reason].code, "message": record.message}
    return {"messages": [as_row(message) for message in record.messages], "tools": list(record.tools)}


# A config


def show_config(path: Path, manifests: Path, console: Console) -> None:
    """The sources of a config as they lie, and the corpora in `manifests` that were made from these settings."""
    config = load_config(path)
    console.print(Text.assemble((printable(config.name), "bold"), (f"  {path}", "dim")), soft_wrap=True)
    for file in sources_of(config, path.parent):
        line = Text.assemble("  ", (printable(file.name), HEADING_STYLE), (f"  {_facts(file)}", "dim"))
        console.print(line, soft_wrap=True)
    made = corpora_of(config, manifests)
    for manifest in made:
        console.print(Text.assemble("made: ", (printable(str(manifest)), "bold")), soft_wrap=True)
    if not made:
        command = f"luigi --module pipeline PackCorpus --config {path}"
        console.print(
            f"no corpus in {manifests}/ was made with these settings; make it with: {command}", soft_wrap=True
        )


def sources_of(config: Config, folder: Path) -> Iterator[SourceFile]:
    """The files of a config, in their order, not hashed. Raises what `look` raises."""
    for source in config.sources:
        for path, name in locate(source.path, folder):
            yield look(path, name, SourceSpec(source.path, source.format, tuple(source.columns.items())))


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


# A shard


def is_shard(path: Path) -> bool:
    """Whether an Arrow file is one of a corpus, and not a source: its schema says so, or a manifest beside it."""
    if path.suffix != ".arrow" or not path.is_file():
        return False
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
            return b"format_version" in (reader.schema.metadata or {})
    except (pa.ArrowException, OSError):
        return (path.parent / "manifest.json").is_file()


def row_of_shard(path: Path, row: int) -> tuple[Path, str, int]:
    """The manifest beside a shard, its split, and the row of the split that is `row` of the shard. Raises UsageError
    where it has fewer rows, InputMissing where its manifest is gone."""
    manifest, split, before, shard = _shard_of(path)
    if not 0 <= row < shard.rows:
        raise UsageError("not_in_it", f"--row {row}: {path.name} has {shard.rows:,} rows, from 0")
    return manifest, split, before + row


def _shard_of(path: Path) -> tuple[Path, str, int, Shard]:
    """(manifest, split, number of its first row within the split, shard)"""
    beside = path.parent / "manifest.json"
    if not beside.is_file():
        raise InputMissing(
            "manifest_missing", f"{path}: is a shard, and no manifest.json lies beside it; put it back into its folder"
        )
    for name, split in load_manifest(beside).splits.items():
        before = 0
        for shard in split.shards:
            if shard.path == path.name:
                return beside, name, before, shard
            before += shard.rows
    raise UsageError("bad_command_line", f"{path}: is no shard of the corpus that it lies in")


def show_shard(path: Path, console: Console) -> None:
    """What the rows of one shard hold. Raises DataError or InputMissing where it is not as its manifest says."""
    facts = shard_as_object(path)
    head = f"  {counted(facts['rows'], 'row')} of {facts['split']}, from row {facts['first_row']:,}"
    console.print(
        Text.assemble((printable(path.name), "bold"), head, (f"  {facts['manifest']}", "dim")), soft_wrap=True
    )
    if "tokens" in facts:
        mean = facts["conversations"] / max(facts["rows"], 1)
        console.print(
            f"{facts['fill']:.2f} % full: {counted(facts['tokens'], 'token')}, {facts['trained']:,} trained on; "
            f"{counted(facts['conversations'], 'conversation')}, {facts['least']} to {facts['most']} in a row, "
            f"{mean:.2f} on average",
            soft_wrap=True,
        )
    console.print(Text("--row N shows a row of it, from 0", "dim"))


def shard_as_object(path: Path) -> dict[str, Any]:
    """The figures of a shard, counted in its rows."""
    beside, split, before, shard = _shard_of(path)
    manifest = load_manifest(beside)
    facts: dict[str, Any] = {
        "shard": str(path), "manifest": str(beside), "split": split, "first_row": before, "rows": shard.rows,
    }  # fmt: skip
    if manifest.format_version == "2.0":
        return facts
    length, tokens, trained = manifest.sequence_length, 0, 0
    counts = [np.zeros(0, np.int64)]
    with mapped(path.parent, shard.path, shard.bytes) as reader, reading(path):
        for batch in reader:
            mask = batch.column("attention_mask").flatten().to_numpy().reshape(-1, length)
            begins = batch.column("position_ids").flatten().to_numpy().reshape(-1, length) == 0
            counts.append(np.count_nonzero(begins & (mask == 1), 1))
            tokens += int(np.count_nonzero(mask))
            trained += int(np.count_nonzero(batch.column("labels").flatten().to_numpy() >= 0))
    held = np.concatenate(counts)
    return facts | {
        "tokens": tokens, "trained": trained, "fill": 100 * tokens / max(shard.rows * length, 1),
        "conversations": int(held.sum()), "least": int(held.min(initial=length)), "most": int(held.max(initial=0)),
    }  # fmt: skip


def is_source(path: Path) -> bool:
    """By its name, and of a .json by how it begins: not a manifest."""
    if container_of(path.name) is None or not path.is_file():
        return False
    if path.suffix != ".json":
        return True
    if path.name == "manifest.json" or path.parent.name == "manifests":
        return False
    with path.open("rb") as file:
        return b'"format_version"' not in file.read(4096)
