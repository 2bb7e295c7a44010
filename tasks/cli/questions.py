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

from tasks.cli import corpus_view, row_view, source_view
from tasks.core.errors import UsageError
from tasks.inspection import manifests, rows, search, sources
from tasks.inspection.lookup import pieces_of_number, places_at
from tasks.inspection.sources import Kind, kind_of
from tasks.storage.corpus_folder import checked_folder
from tasks.storage.manifest import load_manifest

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
    rows.ShardFigures: source_view.show_shard,
    sources.SourceOverview: source_view.show_source,
    sources.SourceRecords: source_view.show_records,
    sources.ConfigOverview: source_view.show_config,
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
