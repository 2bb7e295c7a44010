"""Render what `packcorpus clean` finds, and ask whether to delete it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from packcorpus.tasks.cli.console import plain_table, say, whole
from packcorpus.tasks.core.printable import counted, from_here, in_bytes, printable
from packcorpus.tasks.inspection.unused import Files, Usage

SHOWN = 20  # manifests or folders named in one list


def show_usage(usage: Usage, console: Console) -> None:
    """Render the files of a root by kind, and what of them nothing uses."""
    table = plain_table("data/", "used", "unused", "files", "")
    table.columns[-1].justify = "left"
    for kind in usage.kinds:
        unused, count = (in_bytes(kind.unused.bytes), f"{kind.unused.files:,}") if kind.unused.files else ("-", "")
        used = in_bytes(kind.used.bytes) if kind.used.files else "-"
        table.add_row(printable(kind.name), used, unused, count, kind.what)
    whole(console, table)
    for title, paths in (
        ("the corpus folder is gone; to forget the corpus, delete the manifest, then run again", usage.gone),
        (
            "without a published manifest, kept; if you do not need it, delete the folder, then run again",
            usage.unlinked,
        ),
        ("cannot be read, so what it may use is kept", usage.unreadable),
    ):
        _print_paths(title, paths, console)


def _print_paths(title: str, paths: Sequence[Path], console: Console) -> None:
    for path in paths[:SHOWN]:
        say(console, (printable(f"{from_here(str(path))}: {title}"), "yellow"))
    if len(paths) > SHOWN:
        say(console, (f"… and {len(paths) - SHOWN:,} more", "dim"))


def in_words(files: Files) -> str:
    """Return the count and the size of files."""
    return f"{counted(files.files, 'file')}, {in_bytes(files.bytes)}"


def may_delete(files: Files) -> bool:
    """Ask on a terminal whether to delete files; without a terminal, return False."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(f"delete {in_words(files)}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
