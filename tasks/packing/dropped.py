"""Write what is cleaned out of a corpus to dropped.jsonl, each with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from typing import Any, NamedTuple

import numpy as np
import orjson

from packcorpus.tasks.packing.pieces import Accepted
from packcorpus.tasks.readers.containers import container_named
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.sources.evaluation_files import numbered_by
from packcorpus.tasks.storage.files import HashingWriter
from packcorpus.tasks.storage.token_files import TokenColumns
from packcorpus.tasks.tokenization.decontamination import Overlap
from packcorpus.tasks.tokenization.tokenize_part import CONTAMINATED

DROPPED = "dropped.jsonl"

# Conversations whose places are looked up at a time.
BLOCK = 1 << 16


class Dropped(NamedTuple):
    """A conversation that is cleaned away, by part and record within its source."""

    part: int
    record: int
    facts: Mapping[str, object]


Overlaps = list[list[tuple[int, Overlap]]]
"""The records of each part that overlap with an evaluation set."""


def overlaps_of(receipts: Sequence[Mapping[str, Any]]) -> Overlaps | None:
    """Return the overlaps in the receipts of all parts; None if there is no check."""
    if not any(CONTAMINATED in receipt for receipt in receipts):
        return None
    return [[(record, Overlap(*rest)) for record, *rest in receipt[CONTAMINATED]] for receipt in receipts]


def contaminated_rows(overlaps: Overlaps | None, tokens: TokenColumns, bases: Sequence[int]) -> np.ndarray | None:
    """Return the samples of conversations that overlap: bool[samples], or None.

    `bases` has the first record of each part in its source.
    """
    if overlaps is None:
        return None
    rows = np.zeros(tokens.edges[-1], np.bool_)
    for part, found in enumerate(overlaps):
        if found:
            first, last = tokens.edges[part : part + 2]
            records = np.array([record for record, _ in found]) + bases[part]
            rows[first:last] = np.isin(tokens.column("record", first, last), records)
    return rows


def evaluation_facts(
    recipe: Recipe, receipts: Sequence[Mapping[str, Any]], overlaps: Overlaps
) -> list[dict[str, object]]:
    """Return what the manifest says about each file of evaluation sets."""
    counts = Counter(overlap.file for found in overlaps for _, overlap in found)
    return [
        {"path": file.name, "container": file.container, "compression": file.compression, "format": file.format}
        | {"bytes": file.bytes, "sha256": file.sha256, "items": items, "unmatched": unmatched}
        | {"conversations": counts[number]}
        for number, (file, (items, unmatched)) in enumerate(
            zip(recipe.evaluation, receipts[0]["evaluation"], strict=True)
        )
    ]


def write_dropped(
    out: HashingWriter,
    overlaps: Overlaps | None,
    bases: Sequence[int],
    accepted: Accepted,
    tokens: TokenColumns,
    recipe: Recipe,
) -> None:
    """Write one JSON object per line, in source order.

    It has the source, the line, and the reason. Of a near-duplicate, it has the place of the conversation that stays,
    and their similarity; of a contaminated one, the place of the item, and how the overlap begins.
    """
    evaluation = recipe.evaluation

    def contaminated() -> Iterator[Dropped]:
        for part, found in enumerate(overlaps or ()):
            for record, overlap in found:
                file = evaluation[overlap.file]
                item = {"source": file.name, numbered_by(file): overlap.line}
                facts = {"reason": CONTAMINATED, "item": item, "text": overlap.text}
                yield Dropped(part, bases[part] + record, facts)

    for dropped in merge(contaminated(), _near(accepted, tokens, recipe), key=lambda dropped: dropped[:2]):
        line = {**_place(dropped.part, dropped.record, recipe), **dropped.facts}
        out.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def _near(accepted: Accepted, tokens: TokenColumns, recipe: Recipe) -> Iterator[Dropped]:
    near = accepted.near
    for top in range(0, 0 if near is None else len(near), BLOCK):
        block: Any = near[top : top + BLOCK] if near is not None else None
        of = (_places(block[name], accepted, tokens) for name in ("conversation", "kept"))
        for place, kept, similarity in zip(*of, block["similarity"].tolist(), strict=True):
            facts = {"kept": _place(kept[0], kept[1], recipe), "similarity": round(similarity, 4)}
            yield Dropped(place[0], place[1], {"reason": "near_duplicate", **facts})


def _places(conversations: np.ndarray, accepted: Accepted, tokens: TokenColumns) -> list[tuple[int, int]]:
    """Return the part and the record of each conversation."""
    parts, records = accepted.part(conversations), np.empty(len(conversations), np.int64)
    for part in np.unique(parts).tolist():
        inside, (first, last) = parts == part, tokens.edges[part : part + 2]
        records[inside] = tokens.column("record", first, last)[conversations[inside] - first]
    return list(zip(parts.tolist(), records.tolist(), strict=True))


def _place(part: int, record: int, recipe: Recipe) -> dict[str, object]:
    """Return the source and the line or record of a conversation."""
    file = recipe.parts[part].file
    return {"source": file.name, container_named(file.container).numbered_by: record + 1}
