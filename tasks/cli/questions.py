"""Answer the questions of `packcorpus inspect`.

A path and options become a value, and each type of value has a renderer. The values of each kind of file:

manifest   overview; a row; a conversation by number or by file:line; conversations that contain a text; rejects
shard      figures; a row
source     the file and its first records; the record of a line; records that contain a text
config     its sources and the corpora made from it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from packcorpus.tasks.cli import corpus_view, row_view
from packcorpus.tasks.cli.console import HEADING_STYLE, print_hanging, print_title, say, styled
from packcorpus.tasks.cli.row_view import print_messages
from packcorpus.tasks.core.errors import UsageError
from packcorpus.tasks.core.printable import counted, in_bytes, printable
from packcorpus.tasks.inspection import manifests, rows, search, sources
from packcorpus.tasks.inspection.lookup import pieces_of_number, places_at
from packcorpus.tasks.inspection.rows import ShardFigures
from packcorpus.tasks.inspection.sources import ConfigOverview, Kind, SourceInfo, SourceOverview, SourceRecords, kind_of
from packcorpus.tasks.readers.csv_file import name_of
from packcorpus.tasks.sources.source_files import as_yaml
from packcorpus.tasks.storage.corpus_folder import checked_folder
from packcorpus.tasks.storage.manifest import load_manifest

SHOWN_REJECTS = 3


def show_source(source: SourceOverview, console: Console) -> None:
    """Render a source file."""
    say(console, (printable(source.name), "bold"), ("  " + _facts(source), "dim"))
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
    messages, answers = record["messages"], record.get("answers", [])
    starts = [*(first for _, first in answers), len(messages)]
    print_messages(messages[: starts[0]], tools, console)
    for (place, first), end in zip(answers, starts[1:], strict=True):
        say(console, (printable(place), HEADING_STYLE))
        print_messages(messages[first:end], None, console)


def show_config(config: ConfigOverview, console: Console) -> None:
    """Render the source files of a config and the corpora made from it."""
    say(console, (printable(str(config.settings["name"])), "bold"), (f"  {config.config}", "dim"))
    for source in config.sources:
        line = Text.assemble("  ", (printable(source.name), HEADING_STYLE), (f"  {_facts(source)}", "dim"))
        say(console, line)
    for manifest in config.made:
        say(console, "corpus: ", (printable(str(manifest)), "bold"))
    if not config.made:
        command = f"packcorpus pack {config.config}"
        say(console, f"{config.manifests}/ has no corpus with these settings; make it with: {command}")


def show_shard(shard: ShardFigures, console: Console) -> None:
    """Render the figures of one shard."""
    place = f"  {counted(shard.rows, 'row')} of {shard.split}, from row {shard.first_row:,}"
    say(console, (printable(shard.shard.name), "bold"), place, (f"  {shard.manifest}", "dim"))
    if shard.tokens is not None and shard.conversations is not None:
        mean = shard.conversations / max(shard.rows, 1)
        say(
            console,
            f"{shard.fill:.2f} % full: {counted(shard.tokens, 'token')}, {shard.trained:,} trained; "
            f"{counted(shard.conversations, shard.noun)}, {shard.least} to {shard.most} per row, "
            f"{mean:.2f} on average",
        )
    console.print(Text("--row N shows one of its rows, from 0", "dim"))


# Options of each kind of file that select what to show. None of them is required.
_TAKES: dict[Kind, tuple[str, ...]] = {
    "manifest": ("--row", "--conversation", "--at", "--search", "--rejects"),
    "shard": ("--row",),
    "source": ("--line", "--search"),
    "config": (),
}

_RENDERERS: dict[type, Callable[[Any, Console], None]] = {
    manifests.Overview: corpus_view.show_overview,
    rows.Row: row_view.show_row,
    rows.Conversation: row_view.show_conversation,
    search.SearchResult: row_view.show_search,
    search.Rejects: row_view.show_rejects,
    rows.ShardFigures: show_shard,
    sources.SourceOverview: show_source,
    sources.SourceRecords: show_records,
    sources.ConfigOverview: show_config,
}


@dataclass(frozen=True)
class Question:
    """The options of `inspect`, as the user gave them."""

    row: int | None = None
    split: str | None = None
    conversation: int | None = None
    at: str | None = None
    line: int | None = None
    search: str | None = None
    rejects: bool = False
    limit: int = 20
    ids: bool = False

    def option(self) -> str:
        """Return the option that selects what to show, or "".

        Raises UsageError if options exclude one another.
        """
        given = [
            f"--{name}"
            for name in ("row", "conversation", "at", "line", "search")
            if getattr(self, name) is not None
        ] + ["--rejects"] * self.rejects  # fmt: skip
        if len(given) > 1:
            raise UsageError("bad_command_line", f"{given[0]} and {given[1]} exclude each other")
        only = given[0] if given else ""
        if self.split and only != "--row":
            raise UsageError("bad_command_line", "--split requires --row N")
        if self.ids and only not in ("--row", "--conversation", "--at"):
            raise UsageError("bad_command_line", "--ids requires --row N, --conversation N, or --at FILE:LINE")
        return only


def answer(path: Path, question: Question, root: Path) -> Any:
    """Return the value that answers a question about a file.

    The corpora of a config are searched in the manifests/ of `root`. Raises UsageError if the question does not apply
    to the file, and the errors of the functions of tasks.inspection.
    """
    only, kind = question.option(), kind_of(path)
    if only and only not in _TAKES[kind]:
        takes = ", ".join(_TAKES[kind]) or "none of these options"
        raise UsageError("bad_command_line", f"{path}: is a {kind}; it takes {takes}, not {only}")
    if kind == "config":
        return sources.config_overview(path, manifests.manifests_of(root))
    if kind == "source":
        if question.line is not None:
            return sources.source_line(path, question.line)
        if question.search is not None:
            return sources.source_search(path, question.search, question.limit)
        return sources.source_overview(path, question.limit)
    split, row = question.split or "train", question.row
    if kind == "shard":
        if row is None:
            return rows.shard_figures(path)
        path, split, row = rows.row_of_shard(path, row)
    if row is not None:
        return rows.row_of_split(path, row, split, question.ids)
    if only in ("--conversation", "--at"):
        manifest = load_manifest(path)
        folder = checked_folder(manifest, path)
        if question.conversation is not None:
            places = pieces_of_number(manifest, folder, question.conversation)
        else:
            places = places_at(manifest, folder, str(question.at))
        return rows.conversation(path, places, question.ids)
    if question.search is not None:
        return search.find_conversations(path, question.search, question.limit)
    if question.rejects:
        return search.find_rejects(path, question.limit)
    return manifests.overview(path)


def render(value: Any, console: Console) -> None:
    """Print an answer."""
    _RENDERERS[type(value)](value, console)
