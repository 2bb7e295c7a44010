"""Rejected conversations: a line each in rejects.jsonl, and the end of the run where they are too many."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import orjson

from tasks.core.error_codes import CODES
from tasks.core.errors import DataError
from tasks.readers.containers import container_named
from tasks.recipe import Recipe
from tasks.storage.files import write_bytes

TOLD = 20  # rejects that a machine is told


class Rejected(NamedTuple):
    """A conversation that is set aside; `record` is its number within the source, from 0."""

    part: int
    record: int
    reason: str
    message: str


def write_rejects(path: Path, rejects: list[Rejected], recipe: Recipe) -> None:
    """One JSON object a line: source, line (or record, where the file has no lines), code, reason and message."""
    lines = []
    for reject in rejects:
        file = recipe.parts[reject.part].file
        unit = container_named(file.container).numbered_by
        line = {"source": file.name, unit: reject.record + 1, **_told(reject)}
        lines.append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    write_bytes(path, b"".join(lines))


def check_rejects(rejects: list[Rejected], cut_off: int, read: int, recipe: Recipe, path: Path) -> None:
    """Raises DataError, showing the first of each reason, where more were rejected than max_rejects allows.

    Of `cut_off` no trained token is left within a row. `path` is that of rejects.jsonl, which is written.
    """
    limit = recipe.config.max_rejects
    # The quotient, since 0.29 * 100 is less than 29.
    if not rejects or len(rejects) / read <= limit:
        return
    first = [{"place": _place(reject, recipe), **_told(reject)} for reject in rejects[:TOLD]]
    shown = first_of_each(path, Counter(reject.reason for reject in rejects))
    raise DataError(
        "too_many_rejects",
        f"{len(rejects):,} of {read:,} conversations were rejected ({100 * len(rejects) / read:.2f} %), max_rejects "
        f"allows {100 * limit:.2f} %{_template(rejects, recipe)}\n"
        + "\n".join(shown)
        + f"\nthey are listed in {path}\n{advice(len(rejects), cut_off, read)}",
        rejects=first,
        all_rejects=str(path),
    )


def advice(rejected: float, cut_off: float, read: float) -> str:
    """What helps where `rejected` of `read` conversations are too many; `cut_off` of them a row is too short for."""
    enough = min(1.0, math.ceil(10_000 * rejected / read) / 10_000)
    told = f"max_rejects: {enough:g} would let them pass"
    if 2 * cut_off <= rejected:
        return told
    most = "most" if cut_off < rejected else "all"
    return (
        f"{most} of them have no trained token left in a row: a larger sequence_length keeps them, overlong: drop "
        f"leaves them out with all that are longer than a row; {told}"
    )


def _told(reject: Rejected) -> dict[str, str]:
    return {"code": CODES[reject.reason].code, "reason": reject.reason, "message": reject.message}


def _place(reject: Rejected, recipe: Recipe) -> str:
    return f"{recipe.parts[reject.part].file.name}:{reject.record + 1}"


def first_of_each(path: Path, counts: dict[str, int]) -> list[str]:
    """A line for each reason: its code, how many there are, and the first of them in rejects.jsonl at `path`."""
    firsts: dict[str, str] = {}
    with path.open("rb") as lines:
        for line in lines:
            reject = orjson.loads(line)
            if reject["reason"] not in firsts:
                place = f"{reject['source']}:{reject.get('line', reject.get('record'))}"
                firsts[reject["reason"]] = f"{place} {reject['message']}"
            if len(firsts) == len(counts):
                break
    return [f"  {CODES[reason].code} {reason}, {counts[reason]:,}: {first}" for reason, first in sorted(firsts.items())]


def _template(rejects: list[Rejected], recipe: Recipe) -> str:
    """Its name, where it was the template that refused one: what it did so by is the same under any name."""
    refused = any(reject.reason.startswith("template_") for reject in rejects)
    return f"; the template is {recipe.config.template}" if refused else ""
