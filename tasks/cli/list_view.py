"""All manifests of a project, a line each: what there is to inspect, to train on and to compare.

manifests/*.json ─find_manifests─▶ Listed(name, length, rows, efficiency, date), or why one cannot be read
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.cli.console import whole
from tasks.core.error_codes import CODES
from tasks.core.errors import PackError
from tasks.core.printable import printable
from tasks.storage.files import read_json
from tasks.storage.manifest import Manifest, corpus_folder, load_manifest


class Listed(NamedTuple):
    """One manifest, or the `problem` with it. `finished`: when its run ended, in UTC; "" where no record says so."""

    path: Path
    manifest: Manifest | None
    finished: str
    problem: PackError | None


def find_manifests(folder: Path) -> list[Listed]:
    """Every manifest in `folder`, by name; one that cannot be read is listed with its problem."""
    return [_read(path) for path in sorted(folder.glob("*.json"))]


def _read(path: Path) -> Listed:
    try:
        manifest = load_manifest(path)
    except PackError as error:
        return Listed(path, None, "", error)
    return Listed(path, manifest, _finished(manifest, path), None)


def _finished(manifest: Manifest, path: Path) -> str:
    try:
        record = read_json(corpus_folder(manifest, path) / "run.json")
    except PackError:
        return ""
    finished = record.get("finished") if isinstance(record, dict) else None
    return finished if isinstance(finished, str) else ""


def show(found: Sequence[Listed], console: Console) -> None:
    """A table of all manifests, the damaged ones with their code."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    # By its name any command finds it; with the folder the table would be wider than many a terminal.
    table.add_column("manifest", no_wrap=True)
    for title in ("length", "rows", "efficiency", "finished"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found:
        name = Text(printable(one.path.name))
        if one.manifest is None:
            assert one.problem is not None
            code = CODES[one.problem.reason]
            table.add_row(Text.assemble(name, "\n", (f"{code.code} {code.meaning}", "yellow")), "", "", "", "")
            continue
        packing = one.manifest.packing_metadata
        full = "-" if packing.packing_efficiency is None else f"{packing.packing_efficiency:.2f} %"
        # To the minute, as people tell times.
        finished = printable(one.finished[:16].replace("T", " ")) or "-"
        table.add_row(name, f"{one.manifest.sequence_length:,}", f"{packing.rows:,}", full, finished)
    whole(console, table)


def as_object(found: Sequence[Listed]) -> dict[str, Any]:
    """The same for JSON."""
    return {"manifests": [_as_object(one) for one in found]}


def _as_object(one: Listed) -> dict[str, Any]:
    if one.manifest is None:
        assert one.problem is not None
        return {"path": str(one.path), "error": {"code": one.problem.code, "message": str(one.problem)}}
    packing = one.manifest.packing_metadata
    return {
        "path": str(one.path),
        "name": one.manifest.name,
        "key": one.manifest.key,
        "sequence_length": one.manifest.sequence_length,
        "rows": packing.rows,
        "packing_efficiency": packing.packing_efficiency,
        "finished": one.finished or None,
    }
