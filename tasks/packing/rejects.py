"""Write rejected conversations to rejects.jsonl; too many of them fail the run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from packcorpus.tasks.core.error_codes import CODES
from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.readers.containers import container_named
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.files import HashingWriter
from packcorpus.tasks.tokenization.checks import FIRST, are_alike, failure_of

REPORTED = 20  # rejects included in an error that is printed as JSON


class Rejected(NamedTuple):
    """A rejected conversation; `record` is its number within the source, from 0."""

    part: int
    record: int
    reason: str
    message: str


def write_rejects(out: HashingWriter, rejects: Iterable[Rejected], recipe: Recipe) -> None:
    """Write one JSON object per line: source, line, code, reason, and message.

    Files that are not numbered by lines have `record` instead of `line`.
    """
    for reject in rejects:
        file = recipe.parts[reject.part].file
        unit = container_named(file.container).numbered_by
        explanation = {"code": CODES[reject.reason].code, "reason": reject.reason, "message": reject.message}
        line = {"source": file.name, unit: reject.record + 1, **explanation}
        out.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def check_rejects(counts: dict[str, int], cut_off: int, read: int, recipe: Recipe, path: Path) -> None:
    """Raise DataError if more conversations were rejected than max_rejects allows.

    `counts` has the number of rejects by reason; the error shows the first reject of each reason. `cut_off` of the
    rejects have no trained token left within a row. `path` is the finished rejects.jsonl.
    """
    limit, rejected = recipe.config.max_rejects, sum(counts.values())
    # Compare the quotient: 0.29 * 100 is less than 29 in floating point.
    if not rejected or rejected / read <= limit:
        return
    with path.open("rb") as lines:
        first = [orjson.loads(line) for line in islice(lines, REPORTED)]
    # Messages of rejects do not name the template, because they are the same for any name.
    refused = any(reason.startswith("template_") for reason in counts)
    template = f"; the template is {recipe.config.template}" if refused else ""
    raise DataError(
        "too_many_rejects",
        [
            f"{rejected:,} of {read:,} conversations were rejected ({100 * rejected / read:.2f} %), max_rejects "
            f"allows {100 * limit:.2f} %{template}",
            *first_of_each(path, counts),
            f"all are listed in {path}",
            *suggest_settings(counts, cut_off, read),
        ],
        rejects=[
            {"place": _place(reject)} | {name: reject[name] for name in ("code", "reason", "message")}
            for reject in first
        ],
        all_rejects=str(path),
    )


def check_first(early: Sequence[Rejected], accepted: tuple[int, int] | None, recipe: Recipe) -> None:
    """Raise DataError if the first conversations were all rejected alike.

    Then it is the template (see tokenization/checks.py). `early` are the conversations that tokenization
    rejected, in source order. `accepted` is the part and the record of the first one that it accepted.
    """
    first = [reject for reject in early[:FIRST] if accepted is None or reject[:2] < accepted]
    if recipe.config.max_rejects == 1 or (accepted and len(first) < FIRST) or not first:
        return
    if are_alike([reject.reason for reject in first]):
        part, record, reason, message = first[0]
        raise failure_of(len(first), f"{recipe.parts[part].file.name}:{record + 1}", reason, message)


def suggest_settings(counts: Mapping[str, float], cut_off: float, read: float) -> list[str]:
    """Suggest fixes of too many rejects of `read` conversations.

    `counts` has the number of rejects by reason. `cut_off` of the rejects have no trained token left because the row is
    too short.
    """
    rejected = sum(counts.values())
    enough = min(1.0, math.ceil(10_000 * rejected / read) / 10_000)
    tolerate = [f"set max_rejects: {enough:g} to accept this"] * (rejected < read)  # something must be left to pack
    if 2 * cut_off <= rejected:
        reason = max(sorted(counts), key=counts.__getitem__)
        fix = f"; fix: {CODES[reason].fix}" if CODES[reason].fix else ""
        return [f"the most frequent reason is {reason}{fix}", *tolerate]
    most, drop = "most" if cut_off < rejected else "all", "leave out all conversations longer than a row"
    *ways, last = "increase sequence_length to keep them", f"set overlong: drop to {drop}", *tolerate
    return [f"{most} of them have no trained token left in a row: {', '.join(ways)}, or {last}"]


def _place(reject: dict[str, Any]) -> str:
    return f"{reject['source']}:{reject.get('line', reject.get('record'))}"


def first_of_each(path: Path, counts: dict[str, int]) -> list[str]:
    """Format one line per reason: code, count, and the first such reject in `path`.

    `path` is a rejects.jsonl.
    """
    firsts: dict[str, str] = {}
    with path.open("rb") as lines:
        for line in lines:
            reject = orjson.loads(line)
            if reject["reason"] not in firsts:
                firsts[reject["reason"]] = f"{_place(reject)} {reject['message']}"
            if len(firsts) == len(counts):
                break
    return [f"  {CODES[reason].code} {reason}, {counts[reason]:,}: {first}" for reason, first in sorted(firsts.items())]
