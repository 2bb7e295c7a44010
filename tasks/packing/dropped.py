"""Write what is cleaned out of a corpus to dropped.jsonl, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import orjson

from packcorpus.tasks.packing.pieces import Accepted
from packcorpus.tasks.readers.containers import container_named
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.files import HashingWriter
from packcorpus.tasks.storage.token_files import TokenColumns

DROPPED = "dropped.jsonl"

# Conversations whose places are looked up at a time.
BLOCK = 1 << 16


def write_dropped(out: HashingWriter, accepted: Accepted, tokens: TokenColumns, recipe: Recipe) -> None:
    """Write one JSON object per near-duplicate, in source order.

    It has the source, the line, the reason, the place of the conversation that stays, and their similarity.
    """
    near = accepted.near
    for top in range(0, 0 if near is None else len(near), BLOCK):
        block: Any = near[top : top + BLOCK] if near is not None else None
        of = (_places(block[name], accepted, tokens, recipe) for name in ("conversation", "kept"))
        for place, kept, similarity in zip(*of, block["similarity"].tolist(), strict=True):
            facts = {"reason": "near_duplicate", "kept": kept, "similarity": round(similarity, 4)}
            out.write(orjson.dumps({**place, **facts}, option=orjson.OPT_APPEND_NEWLINE))


def _places(
    conversations: np.ndarray, accepted: Accepted, tokens: TokenColumns, recipe: Recipe
) -> Iterator[Mapping[str, object]]:
    """Yield the source and the line or record of each conversation."""
    parts, records = accepted.part(conversations), np.empty(len(conversations), np.int64)
    for part in np.unique(parts).tolist():
        inside, (first, last) = parts == part, tokens.edges[part : part + 2]
        records[inside] = tokens.column("record", first, last)[conversations[inside] - first]
    for part, record in zip(parts.tolist(), records.tolist(), strict=True):
        file = recipe.parts[part].file
        yield {"source": file.name, container_named(file.container).numbered_by: record + 1}
