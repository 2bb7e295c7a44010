"""Write rejected conversations to rejects.jsonl; too many of them fail the run."""

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

REPORTED = 20  # rejects included in an error that is printed as JSON


class Rejected(NamedTuple):
    """A rejected conversation; `record` is its number within the source, from 0."""

    part: int
    record: int
    reason: str
    message: str


def write_rejects(path: Path, rejects: list[Rejected], recipe: Recipe) -> None:
    """Write one JSON object per line: source, line, code, reason, and message.

    Files that are not numbered by lines have `record` in place of `line`.
    """
    lines = []
    for reject in rejects:
        file = recipe.parts[reject.part].file
        unit = container_named(file.container).numbered_by
        line = {"source": file.name, unit: reject.record + 1, **_explanation(reject)}
        lines.append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    write_bytes(path, b"".join(lines))


def check_rejects(rejects: list[Rejected], cut_off: int, read: int, recipe: Recipe, path: Path) -> None:
    """Raise DataError if more conversations were rejected than max_rejects allows.

    The error shows the first reject of each reason. `cut_off` of the rejects have no trained token left within a row.
    `path` is the rejects.jsonl written before.
    """
    limit = recipe.config.max_rejects
    # Compare the quotient: 0.29 * 100 is less than 29 in floating point.
    if not rejects or len(rejects) / read <= limit:
        return
    first = [{"place": _place(reject, recipe), **_explanation(reject)} for reject in rejects[:REPORTED]]
    shown = first_of_each(path, Counter(reject.reason for reject in rejects))
    raise DataError(
        "too_many_rejects",
        f"{len(rejects):,} of {read:,} conversations were rejected ({100 * len(rejects) / read:.2f} %), max_rejects "
        f"allows {100 * limit:.2f} %{_template(rejects, recipe)}\n"
        + "\n".join(shown)
        + f"\nall are listed in {path}\n{suggest_settings(len(rejects), cut_off, read)}",
        rejects=first,
        all_rejects=str(path),
    )


def suggest_settings(rejected: float, cut_off: float, read: float) -> str:
    """Suggest settings that fix too many rejects: `rejected` of `read` conversations.

    `cut_off` of the rejects have no trained token left because the row is too short.
    """
    enough = min(1.0, math.ceil(10_000 * rejected / read) / 10_000)
    tolerate = f"set max_rejects: {enough:g} to accept this"
    if 2 * cut_off <= rejected:
        return tolerate
    most = "most" if cut_off < rejected else "all"
    return (
        f"{most} of them have no trained token left in a row: increase sequence_length to keep them, set "
        f"overlong: drop to leave out all conversations longer than a row, or {tolerate}"
    )


def _explanation(reject: Rejected) -> dict[str, str]:
    return {"code": CODES[reject.reason].code, "reason": reject.reason, "message": reject.message}


def _place(reject: Rejected, recipe: Recipe) -> str:
    return f"{recipe.parts[reject.part].file.name}:{reject.record + 1}"


def first_of_each(path: Path, counts: dict[str, int]) -> list[str]:
    """Format one line per reason: code, count, and the first such reject in `path`.

    `path` is a rejects.jsonl.
    """
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
    """Name the template if it refused a conversation.

    Messages of rejects do not name the template, because they are the same for any name.
    """
    refused = any(reject.reason.startswith("template_") for reject in rejects)
    return f"; the template is {recipe.config.template}" if refused else ""
