"""Small corpora, made in this process without Luigi, and hand-made token files.

conversations(n) ─write_project─▶ folder with config ─resolve─▶ Recipe ─pack_corpus─▶ manifests/NAME-KEY.json
[(values, separator), …] ─token_file─▶ an Arrow file as tokenize_part writes it
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pytest
import yaml
from hypothesis import strategies as st
from support.tokenizer_kinds import kind_path

from packcorpus.tasks import recipe as recipe_module
from packcorpus.tasks.config import KEYS
from packcorpus.tasks.recipe import Recipe, resolve
from packcorpus.tasks.storage import files
from packcorpus.tasks.storage.files import digest_of
from packcorpus.tasks.storage.schemas import TOKENS_SCHEMA
from packcorpus.tasks.tokenization.tokenize_part import NOTICED
from packcorpus.tasks.work import Publish, run_all

EOS, PAD = 2, 0

# -- from records ----------------------------------------------------------------------------------------------------

WORDS = ["the", "train", "leaves", "at", "9", "and", "40", "takes", "85", "minutes", "so", "it", "arrives", "eleven"]


def conversations(count: int, seed: int = 0, longest: int = 12) -> list[dict[str, Any]]:
    """Return records of the format `messages`, each with a different text."""
    source = random.Random(seed)

    def say(role: str) -> dict[str, str]:
        return {"role": role, "content": " ".join(source.choices(WORDS, k=source.randint(1, longest)))}

    return [
        {"messages": [say(role) for _ in range(source.randint(1, 2)) for role in ("user", "assistant")]}
        for _ in range(count)
    ]


def write_project(folder: Path, records: Sequence[Mapping[str, Any]], **settings: Any) -> Path:
    """Write chat.jsonl, a tokenizer, and corpus.yaml, and return the config's path.

    `settings` override the defaults.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    (folder / "chat.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if not (folder / "tiny.model").exists():
        shutil.copy(kind_path("sp_bpe_chatml"), folder / "tiny.model")
    config = {"name": "small", "sources": [{"path": "chat.jsonl"}], "tokenizer": "tiny.model", "sequence_length": 128}
    config |= settings
    advanced = {name: config.pop(name) for name in list(config) if name in KEYS and KEYS[name].advanced}
    (folder / "corpus.yaml").write_text(yaml.safe_dump(config | {"advanced": advanced}), encoding="utf-8")
    return folder / "corpus.yaml"


def make_recipe(folder: Path, records: Sequence[Mapping[str, Any]], **settings: Any) -> Recipe:
    return resolve(write_project(folder, records, **settings), folder)


def one_second() -> dict[str, Any]:
    """Return the record of a run that took one second."""
    return {"seconds": 1.0}


def pack_corpus(recipe: Recipe) -> Path:
    """Do all work as Luigi would, and return the published manifest."""
    run_all(Publish(recipe, one_second), check_content=True)
    return recipe.published


def make_shards_small(patch: pytest.MonkeyPatch, shard: int = 8000) -> None:
    """Give a shard this many bytes of the sources, so that a small corpus has several."""
    patch.setattr(recipe_module, "SOURCE_BYTES_PER_SHARD", shard)


Made = TypeVar("Made")


def once(make: Callable[..., Made]) -> Callable[..., Made]:
    """Return a function that calls `make` only once for equal settings."""
    found: dict[str, Made] = {}

    def made(**settings: Any) -> Made:
        if (name := repr(sorted(settings.items()))) not in found:
            found[name] = make(**settings)
        return found[name]

    return made


# -- from numbers ----------------------------------------------------------------------------------------------------

# Without a template, it is unknown where turns begin.
TRUNCATED = {"overlong": "truncate", "split_at": "tokens"}

Tokens = tuple[list[int], bool]  # IDs, as ~ID if untrained; whether the last ID is an EOS that was added


@st.composite
def tokens_of(draw: st.DrawFn, longest: int = 40) -> Tokens:
    """Draw a conversation of a token file, with at least one trained token.

    The first token is untrained.
    """
    size = draw(st.integers(2, longest))
    # Two draws of bytes take less than half the time of a draw for each token.
    ids = [3 + byte % 97 for byte in draw(st.binary(min_size=size, max_size=size))]
    flags = draw(st.binary(min_size=size, max_size=size))
    separator = draw(st.booleans())
    if separator:
        ids[-1] = EOS
    begin = draw(st.integers(1, size - 1))
    trained = [index == begin or (index > begin and flag % 2 > 0) for index, flag in enumerate(flags)]
    return [token if flag else ~token for token, flag in zip(ids, trained, strict=True)], separator


def token_file(
    path: Path,
    rows: Sequence[Tokens],
    records: Sequence[int] = (),
    digests: Sequence[int] = (),
    turns: Sequence[int] = (),
    turn: Sequence[int] = (),
    batch: int = 3,
) -> dict[str, Any]:
    """Write a token file and return its receipt, which has no rejects.

    Record batches have `batch` rows.
    """
    records, digests, turns = records or range(len(rows)), digests or range(len(rows)), turns or [2] * len(rows)
    turn = turn or [-1] * len(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    alike = [0] * len(rows)
    for number in range(1, len(rows)):
        if records[number] == records[number - 1]:
            alike[number] = shared_with(rows[number - 1][0], rows[number][0])
    with pa.OSFile(str(path), "w") as file, pa.ipc.new_file(file, TOKENS_SCHEMA) as writer:
        for top in range(0, len(rows), batch):
            some = rows[top : top + batch]
            columns = [
                pa.array(records[top : top + batch], pa.int64()),
                pa.array(digests[top : top + batch], pa.uint64()),
                pa.array(digests[top : top + batch], pa.uint64()),  # each has another prompt
                pa.array(turns[top : top + batch], pa.int32()),
                pa.array(turn[top : top + batch], pa.int32()),
                pa.array([sum(value >= 0 for value in values) for values, _ in some], pa.int32()),
                pa.array([separator for _, separator in some], pa.bool_()),
                pa.array(alike[top : top + batch], pa.int32()),
                pa.array([values for values, _ in some], pa.large_list(pa.int32())),
            ]
            writer.write_batch(pa.record_batch(columns, schema=TOKENS_SCHEMA))
    tokens = sum(len(values) - separator for values, separator in rows)
    counts = {"conversations": len(rows), "records": len(rows), "accepted": len(rows), "tokens": tokens}
    return {**counts, "rejects": [], "xxh3": digest_of(path, "xxh3")}


def shared_with(before: Sequence[int], values: Sequence[int]) -> int:
    """Count, token by token, what a tree does not store again."""
    count = 0
    for one, other in zip(ids_of(before), values, strict=False):
        if other >= 0 or one != ~other:
            break
        count += 1
    return max(0, count - 1)


def write_receipt(path: Path, receipt: Mapping[str, Any]) -> None:
    noticed = dict.fromkeys(NOTICED, 0)
    files.write_receipt(path, noticed | dict(receipt))


def ids_of(values: Sequence[int] | np.ndarray) -> list[int]:
    """Return the token IDs of values in a token file."""
    return [int(value) if value >= 0 else ~int(value) for value in values]
