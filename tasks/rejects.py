"""Rejected conversations: a line each in rejects.jsonl, and the end of the run where they are too many."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import orjson

from tasks.errors import DataError
from tasks.files import write_bytes
from tasks.recipe import Recipe

SHOWN = 20


class Rejected(NamedTuple):
    """A conversation that is set aside; `record` is its number within the source, from 0."""

    part: int
    record: int
    code: str
    message: str


def write_rejects(path: Path, rejects: list[Rejected], recipe: Recipe) -> None:
    """One JSON object a line: source, line (or record, where the file has no lines), reason and message."""
    lines = []
    for reject in rejects:
        file = recipe.parts[reject.part].file
        unit = "line" if file.container == "jsonl" else "record"
        line = {"source": file.name, unit: reject.record + 1, "reason": reject.code, "message": reject.message}
        lines.append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    write_bytes(path, b"".join(lines))


def check_rejects(rejects: list[Rejected], read: int, recipe: Recipe, path: Path) -> None:
    """Raises DataError, showing the first of them, where more were rejected than max_rejects allows."""
    limit = recipe.config.max_rejects
    # The quotient, since 0.29 * 100 is less than 29.
    if not rejects or len(rejects) / read <= limit:
        return
    shown = [
        f"  {recipe.parts[reject.part].file.name}:{reject.record + 1}: {reject.message} [{reject.code}]"
        for reject in rejects[:SHOWN]
    ]
    if len(rejects) > len(shown):
        shown.append(f"  … and {len(rejects) - len(shown):,} more")
    raise DataError(
        f"{len(rejects):,} of {read:,} conversations were rejected ({len(rejects) / read:.2%}), max_rejects allows "
        f"{limit:.2%}{_template(rejects, recipe)}\n" + "\n".join(shown) + f"\nall of them are in {path}\n"
        "mend the data, or raise max_rejects in the config to go on without them"
    )


def _template(rejects: list[Rejected], recipe: Recipe) -> str:
    """Its name, where it was the template that refused one: what it did so by is the same under any name."""
    refused = any(reject.code.startswith("template_") for reject in rejects)
    return f"; the template is {recipe.config.template}" if refused else ""
