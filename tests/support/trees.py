"""Corpora whose samples are trees, and the same samples apart.

pack_trees(folder) ─▶ a corpus of `share: conversation` ┐
pack_trees(folder, share="none") ───────────────────────┴─samples_of─▶ {(record, turn): tokens and labels}
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

from support.row_shapes import read_corpus
from support.small_corpus import WORDS, make_recipe, pack_corpus
from support.templates.modern_templates import STRIPS
from support.tokenizer_kinds import kind_path

IGNORED = -100


class Sample(NamedTuple):
    """A sample as if alone in a row; its piece has the tokens from `shared` on."""

    ids: list[int]
    labels: list[int]
    shared: int


def agent_records(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return conversations of tasks with tools.

    Each has one to three tasks, with up to three answers with reasoning.
    """
    source = random.Random(seed)

    def text() -> str:
        return " ".join(source.choices(WORDS, k=source.randint(1, 9)))

    systems, records = [" ".join([text(), text()]) for _ in range(3)], []
    for _ in range(count):
        messages = [{"role": "system", "content": source.choice(systems)}]
        for _ in range(source.randint(1, 3)):
            messages.append({"role": "user", "content": text()})
            for _ in range(source.randint(1, 3)):
                messages.append({"role": "assistant", "content": text(), "reasoning_content": text()})
                messages.append({"role": "tool", "content": text()})
            messages.pop()
        records.append({"messages": messages})
    return records


def pack_trees(folder: Path, records: list[dict[str, Any]], **settings: Any) -> Path:
    """Pack records with a template that drops the reasoning of earlier tasks.

    So samples of a conversation part before the end of the one before, and within a row trees have siblings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "t.jinja").write_text(STRIPS)
    given: dict[str, Any] = {"template": "t.jinja", "tokenizer": str(kind_path("hf_byte_level"))}
    given |= {"turns": "apart", "share": "conversation", "sequence_length": 512, "max_rejects": 1}
    return pack_corpus(make_recipe(folder, records, **given | settings))


def samples_of(path: Path) -> dict[tuple[int, int], Sample]:
    """Return the samples of a corpus by record and turn, read place by place.

    A piece sees the tokens before it whose `end` it has not reached.
    """
    found = {}
    for rows in read_corpus(path).rows.values():
        for row in rows:
            ids, labels, ends = (row.columns.get(name) for name in ("input_ids", "labels", "end"))
            for entry in row.entries:
                start = entry["start"]
                own = range(start, start + entry["length"])
                before = [place for place in range(start) if ends and ends[place] > start]
                assert len(before) == entry.get("shared", 0)
                found[entry["record"], entry["turn"]] = Sample(
                    [ids[place] for place in (*before, *own)],
                    [IGNORED] * len(before) + [labels[place] for place in own],
                    len(before),
                )
    return found
