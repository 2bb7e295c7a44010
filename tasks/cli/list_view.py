"""All manifests of a project, a line each: what there is to inspect, to train on and to compare.

manifests/*.json ─find_manifests─▶ Listed(name, length, rows, efficiency, date), or why one cannot be read
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.cli.console import whole
from tasks.core.error_codes import CODES
from tasks.core.printable import printable
from tasks.inspection.manifests import Listed


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
