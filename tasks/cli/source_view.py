"""A raw source, a config and a single shard, as one looks at them before a corpus is made, or beside it.

source   format, container, size, and a record as messages: by its line, or the first that contains a text
config   its sources, one by one, and the corpus that was made from it, if there is one
shard    how full its rows are, and which corpus it belongs to
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tasks.cli.row_view import print_messages
from tasks.cli.token_text import HEADING_STYLE, print_conversation_head, print_hanging, styled
from tasks.config import load_config
from tasks.conversations.model import Conversation
from tasks.conversations.openai import as_row
from tasks.core.error_codes import CODES
from tasks.core.errors import Reject
from tasks.core.printable import counted, in_bytes, printable
from tasks.inspection.kinds import shard_as_object
from tasks.inspection.sources import containing, corpora_of, record_of, records_of, sources_of
from tasks.sources.model import SourceFile
from tasks.sources.source_files import look

_LOOKED_AT = 100  # records from the begin of a source


def show_source(path: Path, line: int | None, text: str | None, limit: int, console: Console) -> None:
    """The file and its first conversation, the record of a line, or the first records that contain a text.

    Raises UsageError, InputMissing, DataError or StorageError, whose message names the file.
    """
    file = look(path)
    if line is not None:
        _print_record(file, line, record_of(file, line), console)
        return
    if text is not None:
        found, shown = containing(file, text), 0
        for number, record in islice(found, limit):
            _print_record(file, number, record, console)
            shown += 1
        more = shown == limit and next(found, None) is not None
        told = f"the first {limit:,}; more with --limit" if more else counted(shown, "conversation")
        console.print(Text(told, "dim"))
        return
    console.print(Text.assemble((printable(file.name), "bold"), ("  " + _facts(file), "dim")), soft_wrap=True)
    records = list(islice(records_of(file), _LOOKED_AT))
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
