"""Small packed corpora in several shards and batches, and hand-made shards.

pack_small(folder) ─▶ manifests/small-KEY.json
random_rows(3, 64) ─write_rows(path, rows, metadata)─▶ an Arrow stream, as another tool would write it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.small_corpus import conversations, make_recipe, pack_corpus

from packcorpus.tasks import recipe as recipe_module
from packcorpus.tasks.corpus import shards
from packcorpus.tasks.storage.corpus_folder import corpus_folder
from packcorpus.tasks.storage.files import sha256_of, to_json
from packcorpus.tasks.storage.manifest import Manifest, load_manifest, manifest_digest

LENGTH = 64
COLUMNS = ("input_ids", "attention_mask", "labels", "position_ids")
PACKED = {"format_version": "3.0", "sequence_length": str(LENGTH)}


def pack_small(folder: Path, **settings: Any) -> Path:
    """Pack a corpus and return its published manifest.

    It has two or more shards, each with several batches.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BATCH_TOKENS", 5 * LENGTH)
        patch.setattr(recipe_module, "SOURCE_BYTES_PER_SHARD", 10_000)
        given = {"sequence_length": LENGTH, "validation": 0.2} | settings
        return pack_corpus(make_recipe(folder, conversations(120), **given))


def folder_of(path: Path) -> Path:
    return corpus_folder(load_manifest(path), path)


def shards_of(path: Path, split: str = "train") -> list[Path]:
    return [folder_of(path) / shard.path for shard in load_manifest(path).splits[split].shards]


def sign(path: Path, change: Callable[[dict[str, Any]], None] = lambda values: None) -> None:
    """Apply `change` to a manifest, and write it with correct sizes and digests.

    It records the present size and digest of every file, and its own digest is valid.
    """
    folder, values = folder_of(path), Manifest.model_validate_json(path.read_bytes()).model_dump()
    change(values)
    for entry in (*(shard for split in values["splits"].values() for shard in split["shards"]), *values["files"]):
        entry |= {"bytes": (folder / entry["path"]).stat().st_size, "sha256": sha256_of(folder / entry["path"])}
    values["digest"] = manifest_digest(values)
    for copy in (path, folder / "manifest.json"):
        copy.write_bytes(to_json(values))


def random_rows(count: int, length: int = LENGTH, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random rows of format 3.0, each with two conversations and padding.

    All tokens of a conversation but the first are trained on.
    """
    source = np.random.default_rng(seed)
    rows = {name: np.zeros((count, length), np.int32) for name in COLUMNS}
    for row in range(count):
        second, end = source.integers(2, length // 2), source.integers(length // 2 + 2, length + 1)
        for first, last in ((0, second), (second, end), (end, length)):
            rows["position_ids"][row, first:last] = np.arange(last - first)
        rows["attention_mask"][row, :end] = 1
        rows["input_ids"][row, :end] = source.integers(3, 99, end)
        rows["labels"][row] = np.where(rows["attention_mask"][row] == 1, rows["input_ids"][row], -100)
        rows["labels"][row, [0, second]] = -100
    return rows


def write_rows(
    path: Path,
    rows: Mapping[str, Any],
    metadata: Mapping[str, str] = PACKED,
    kind: pa.DataType | None = None,
    batch: int = 2,
) -> None:
    """Write columns of lists as an Arrow stream.

    `kind` is the type of all columns. Without it, Arrow chooses the types.
    """
    columns = {name: pa.array([list(row) for row in values], kind) for name, values in rows.items()}
    table = pa.table(columns).replace_schema_metadata(dict(metadata))
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "w") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
