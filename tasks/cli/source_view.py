"""Render a source file, a config, and a single shard.

source   format, container, size; first records, the record of a line, or records that contain a text, as messages
config   source files, and the corpora made from the config
shard    the fill of its rows, and its corpus
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from tasks.cli.console import HEADING_STYLE, print_hanging, print_title, styled
from tasks.cli.row_view import print_messages
from tasks.core.printable import counted, in_bytes, printable
from tasks.inspection.rows import ShardFigures
from tasks.inspection.sources import ConfigOverview, SourceInfo, SourceOverview, SourceRecords
from tasks.readers.csv_file import name_of
from tasks.sources.source_files import as_yaml

SHOWN_REJECTS = 3


def show_source(source: SourceOverview, console: Console) -> None:
    """Render a source file.

    Shows the figures of its first records, the first rejects among these, and the first conversation.
    """
    console.print(Text.assemble((printable(source.name), "bold"), ("  " + _facts(source), "dim")), soft_wrap=True)
    sample = source.sample
    if sample.records > sample.rejected:
        rejected = f", {sample.rejected:,} to be rejected" if sample.rejected else ""
        console.print(f"first {counted(sample.records, 'record')}: {sample.messages:.1f} messages on average{rejected}")
    rejects = [record for record in source.records if "rejected" in record]
    conversations = [record for record in source.records if "rejected" not in record]
    for record in rejects[:SHOWN_REJECTS] + conversations[:1]:
        _print_record(source, record, console)


def show_records(source: SourceRecords, console: Console) -> None:
    """Render records of a file."""
    for record in source.records:
        _print_record(source, record, console)
    if source.search is not None:
        count = counted(len(source.records), "conversation")
        console.print(Text(f"the first {source.limit:,}; use --limit for more" if source.more else count, "dim"))


def _facts(source: SourceInfo) -> str:
    compression = f".{source.compression}" if source.compression else ""
    found = f", delimiter {name_of(source.delimiter)}" if source.delimiter else ""
    found += f", {source.encoding}" if source.encoding else ""
    mapped = ", ".join(f"{ours}: {as_yaml(theirs)}" for ours, theirs in source.columns.items())
    columns = f", columns {{{printable(mapped)}}}" if mapped else ""
    return f"{source.format}, {source.container}{compression}{found}{columns}, {in_bytes(source.bytes)}"


def _print_record(source: SourceInfo, record: dict[str, Any], console: Console) -> None:
    console.print()
    where = f"{printable(source.name)}:{record['record']}"
    if "rejected" in record:
        print_title(console, "rejected", where, [f"{record['code']} {record['rejected']}"])
        print_hanging(console, styled(record["message"], ""))
        return
    print_title(console, "", where, [counted(len(record["messages"]), "message")])
    tools = f"[{','.join(record['tools'])}]" if record["tools"] else None
    print_messages(record["messages"], tools, console)


def show_config(config: ConfigOverview, console: Console) -> None:
    """Render the source files of a config and the corpora made from it."""
    console.print(
        Text.assemble((printable(str(config.settings["name"])), "bold"), (f"  {config.config}", "dim")), soft_wrap=True
    )
    for source in config.sources:
        line = Text.assemble("  ", (printable(source.name), HEADING_STYLE), (f"  {_facts(source)}", "dim"))
        console.print(line, soft_wrap=True)
    for manifest in config.made:
        console.print(Text.assemble("corpus: ", (printable(str(manifest)), "bold")), soft_wrap=True)
    if not config.made:
        command = f"packcorpus pack {config.config}"
        console.print(f"{config.manifests}/ has no corpus with these settings; make it with: {command}", soft_wrap=True)


def show_shard(shard: ShardFigures, console: Console) -> None:
    """Render the figures of one shard."""
    place = f"  {counted(shard.rows, 'row')} of {shard.split}, from row {shard.first_row:,}"
    console.print(
        Text.assemble((printable(shard.shard.name), "bold"), place, (f"  {shard.manifest}", "dim")), soft_wrap=True
    )
    if shard.tokens is not None and shard.conversations is not None:
        mean = shard.conversations / max(shard.rows, 1)
        console.print(
            f"{shard.fill:.2f} % full: {counted(shard.tokens, 'token')}, {shard.trained:,} trained; "
            f"{counted(shard.conversations, 'conversation')}, {shard.least} to {shard.most} per row, "
            f"{mean:.2f} on average",
            soft_wrap=True,
        )
    console.print(Text("--row N shows one of its rows, from 0", "dim"))
