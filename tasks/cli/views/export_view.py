"""Render an export: its contents, the settings of the trainer, and notes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from tasks.core.printable import aligned, counted, in_bytes
from tasks.exports.export import Export
from tasks.exports.model import FOLDER


def export_lines(export: Export) -> list[str]:
    """Return an export as lines of text."""
    record, folder = export.record, str(export.folder)
    files = record["files"]
    state = "already complete, nothing to do" if export.found_done else "written"
    size = in_bytes(sum(file["bytes"] for file in files))
    lines = [f"{folder}: {state}: {counted(len(files), 'file')}, {size}"]
    table = [["split", "rows", "pieces", "tokens", "trained"]]
    table += [[split, *(f"{count:,}" for count in figures.values())] for split, figures in record["splits"].items()]
    lines += [f"  {line}" for line in aligned(table)]
    lines += ["set:", *(f"  {line}" for line in _settings(record["settings"], folder))]
    return [*lines, *(f"note: {note['name']}: {note['text']}" for note in record["notes"])]


def _settings(settings: dict[str, Any], folder: str, prefix: str = "") -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _settings(value, folder, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else orjson.dumps(value).decode()
            yield f"{prefix}{name} = {text.replace(FOLDER, folder)}"
