"""Facts about all parts of a corpus that every group needs.

    receipts of the token files ─deal_parts─▶ deal.json ─▶ every group, on any machine

They are counts, and how sources are named and read. The file grows with the number of parts, not of conversations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from tasks.config import Config
from tasks.packing.groups.deal import groups_of
from tasks.packing.plan import check_token_file, record_bases, token_files
from tasks.recipe import Recipe
from tasks.sources.model import Part, SourceFile
from tasks.storage.files import read_receipt, write_receipt
from tasks.storage.paths import Layout
from tasks.storage.tokens.token_files import TokenFile
from tasks.tokenization.embedding_sizes import check_embeddings

DEAL = "deal.json"


@dataclass(frozen=True)
class Dealt:
    """Content of deal.json: the parts of a corpus, and how conversations are dealt."""

    recipe: Recipe  # with settings and the names of sources and parts, but without their keys
    groups: int
    shards: dict[str, int]
    edges: np.ndarray  # int64[parts + 1], conversations before each part
    bases: list[int]  # number of the first record of each part within its source
    keys: list[str]  # of the token files

    def files(self) -> list[Path]:
        return [self.recipe.layout.token_file(key) for key in self.keys]


def deal_parts(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Check the token files, count their conversations, and write deal.json.

    Raises StorageError if the checksum of a token file does not match its receipt.
    """
    facts, rows = list[dict[str, Any]](), []
    for receipt, file in zip(token_receipts(recipe), token_files(recipe), strict=True):
        check_token_file(file, receipt)
        facts.append({name: receipt[name] for name in ("records", "embeddings") if name in receipt})
        rows.append(sum(receipt["batches"]) if "batches" in receipt else _rows_of(file))
    numbers = {id(file): number for number, file in enumerate(recipe.files)}
    config, bases = recipe.config, record_bases(recipe.parts, facts)
    check_embeddings(recipe, facts, bases)
    # Weights are whole in a corpus of groups.
    copies = sum(
        count * int(config.sources[part.file.entry].weight) for part, count in zip(recipe.parts, rows, strict=True)
    )
    values = {
        "groups": groups_of(sum(rows), copies, config.plan_group, config.plan_chunk, recipe.most_groups),
        "shards": recipe.shards,
        "config": config.model_dump(mode="json"),
        "files": [[file.name, file.container, file.entry] for file in recipe.files],
        "parts": [
            [numbers[id(part.file)], count, base, recipe.tokens_key(part)]
            for part, count, base in zip(recipe.parts, rows, bases, strict=True)
        ],
    }
    write_receipt(folder / DEAL, values)
    return values


def read_dealt(folder: Path, layout: Layout) -> Dealt:
    """Read deal.json.

    Raises StorageError if it is damaged or missing.
    """
    values = read_receipt(folder / DEAL)
    files = tuple(
        SourceFile(layout.root / name, name, container, "", "", (), 0, "", 0, entry)
        for name, container, entry in values["files"]
    )
    parts = tuple(Part(files[number], 0, 0, "") for number, *_ in values["parts"])
    recipe = Recipe(Config.model_validate(values["config"]), layout.root, layout, files, parts)
    _, rows, bases, keys = zip(*values["parts"], strict=True)
    edges = np.array([0, *accumulate(rows)], np.int64)
    return Dealt(recipe, values["groups"], values["shards"], edges, list(bases), list(keys))


def token_receipts(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield the receipts of the token files.

    Only one is in memory at a time, because each lists all rejects of its part.
    """
    for key in recipe.token_keys:
        yield read_receipt(recipe.layout.token_receipt(key))


def _rows_of(file: Path) -> int:
    with TokenFile(file) as opened:
        return opened.rows
