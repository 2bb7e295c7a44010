"""What `packcorpus inspect` shows: a path and what is asked of it → a view, for a person or as an object for JSON.

manifest   figures; a row; a conversation by number or by file:line; text found; rejects
shard      figures; a row of it
source     the file and its first record; a record by its line; text found
config     its sources and the corpora made from it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from tasks.cli import corpus_view, row_view, search_view, source_view
from tasks.core.errors import UsageError
from tasks.inspection import kinds, rows, search, sources
from tasks.inspection.kinds import Kind, kind_of
from tasks.inspection.lookup import Place, parse_place, pieces_of_number, pieces_of_record
from tasks.storage.corpus_folder import corpus_folder
from tasks.storage.manifest import load_manifest

# What can be asked of each; of every one nothing, too.
_TAKES: dict[Kind, tuple[str, ...]] = {
    "manifest": ("--row", "--conversation", "--at", "--search", "--rejects"),
    "shard": ("--row",),
    "source": ("--line", "--search"),
    "config": (),
}


@dataclass(frozen=True)
class Asked:
    """The options as they were given."""

    row: int | None = None
    split: str | None = None
    conversation: int | None = None
    at: str | None = None
    line: int | None = None
    search: str | None = None
    rejects: bool = False
    limit: int = 20
    ids: bool = False

    def one(self) -> str:
        """The option that says what to show; "" for none. Raises UsageError where options do not go together."""
        given = [
            f"--{name}"
            for name in ("row", "conversation", "at", "line", "search")
            if getattr(self, name) is not None
        ] + ["--rejects"] * self.rejects  # fmt: skip
        if len(given) > 1:
            raise UsageError("bad_command_line", f"{given[0]} and {given[1]} do not go together")
        only = given[0] if given else ""
        if self.split and only != "--row":
            raise UsageError("bad_command_line", "--split goes with --row N")
        if self.ids and only not in ("--row", "--conversation", "--at"):
            raise UsageError("bad_command_line", "--ids goes with --row N, --conversation N or --at FILE:LINE")
        return only


@dataclass(frozen=True)
class View:
    """Something to look at, made when it is asked for."""

    show: Callable[[Console], None]
    as_object: Callable[[], dict[str, Any]]


def view(path: Path, asked: Asked, manifests: Path) -> View:
    """Raises UsageError where this cannot be asked of what lies at `path`; the view raises what its functions do."""
    only, kind = asked.one(), kind_of(path)
    if only and only not in _TAKES[kind]:
        takes = ", ".join(_TAKES[kind]) or "no such option"
        raise UsageError("bad_command_line", f"{path}: is a {kind}, which takes {takes}, and not {only}")
    if kind == "config":
        return _view(source_view.show_config, sources.config_as_object, path, manifests)
    if kind == "source":
        return _view(source_view.show_source, sources.source_as_object, path, asked.line, asked.search, asked.limit)
    split, row = asked.split or "train", asked.row
    if kind == "shard":
        if row is None:
            return _view(source_view.show_shard, kinds.shard_as_object, path)
        path, split, row = kinds.row_of_shard(path, row)
    if row is not None:
        return View(partial(row_view.show_row, path, row, split, asked.ids), partial(rows.as_object, path, row, split))
    if only in ("--conversation", "--at"):
        places = _find_conversation(path, asked)
        return View(
            partial(row_view.show_conversation, path, places, asked.ids),
            partial(rows.conversation_as_object, path, places),
        )
    if asked.search is not None:
        return _view(search_view.show_found, search.found_as_object, path, asked.search, asked.limit)
    if asked.rejects:
        return View(
            partial(search_view.show_rejects, path, asked.limit),
            lambda: {"manifest": str(path), "rejects": list(islice(search.rejects(path), asked.limit))},
        )
    return View(partial(corpus_view.inspect, path), lambda: rows.as_object(path, None, split))


def _view(shown: Callable[..., None], as_object: Callable[..., dict[str, Any]], *given: Any) -> View:
    return View(partial(shown, *given), partial(as_object, *given))


def _find_conversation(path: Path, asked: Asked) -> Sequence[Place]:
    manifest = load_manifest(path)
    folder = corpus_folder(manifest, path)
    if asked.conversation is not None:
        return pieces_of_number(manifest, folder, asked.conversation)
    return pieces_of_record(manifest, folder, *parse_place(manifest, str(asked.at)))
