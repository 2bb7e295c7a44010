"""Small projects with three sources.

They test mixtures, limits, filters, and duplicates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from support.small_corpus import conversations, write_project

from packcorpus.tasks.recipe import Recipe, resolve

FEW, MANY = conversations(30, seed=1, longest=6), conversations(90, seed=2, longest=30)
# The first five conversations of FEW, in another format and in reverse order.
FROM = {"user": "human", "assistant": "gpt"}
TWICE = [
    {"conversations": [{"from": FROM[message["role"]], "value": message["content"]} for message in record["messages"]]}
    for record in FEW[4::-1]
]


def project(folder: Path, sources: Sequence[Mapping[str, Any]], **values: Any) -> Recipe:
    """Write few.jsonl, many.jsonl, twice.jsonl, and a config, and resolve it.

    chat.jsonl is not a source.
    """
    config = write_project(folder, [])
    for name, records in (("few", FEW), ("many", MANY), ("twice", TWICE)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    given = {
        "name": "small",
        "tokenizer": "tiny.model",
        "sequence_length": 256,
        "sources": [dict(source) for source in sources],
    }
    config.write_text(yaml.safe_dump(given | values))
    return resolve(config, folder)


EVERYTHING: dict[str, Any] = {
    "weighting": "repeat", "duplicates": "exact", "validation": 0.1, "epochs": 2, "overlong": "split", "max_turns": 3,
    "min_tokens": 12, "sequence_length": 128,
}  # fmt: skip
