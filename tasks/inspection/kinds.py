"""Decide what kind of file a user asks to inspect."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from tasks.core.errors import InputMissing, UsageError
from tasks.inspection import kinds
from tasks.readers.containers import container_of
from tasks.storage.manifest import Shard, load_manifest
from tasks.storage.shards import open_shard


def is_shard(path: Path) -> bool:
    """Whether an Arrow file is one of a corpus, and not a source: its schema says so, or a manifest beside it."""
    if path.suffix != ".arrow" or not path.is_file():
        return False
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
            return b"format_version" in (reader.schema.metadata or {})
    except (pa.ArrowException, OSError):
        return (path.parent / "manifest.json").is_file()


def row_of_shard(path: Path, row: int) -> tuple[Path, str, int]:
    """The manifest beside a shard, its split, and the row of the split that is `row` of the shard. Raises UsageError
    where it has fewer rows, InputMissing where its manifest is gone."""
    manifest, split, before, shard = _shard_of(path)
    if not 0 <= row < shard.rows:
        raise UsageError("not_in_it", f"--row {row}: {path.name} has {shard.rows:,} rows, from 0")
    return manifest, split, before + row


def _shard_of(path: Path) -> tuple[Path, str, int, Shard]:
    """(manifest, split, number of its first row within the split, shard)"""
    beside = path.parent / "manifest.json"
    if not beside.is_file():
        raise InputMissing(
            "manifest_missing", f"{path}: is a shard, and no manifest.json lies beside it; put it back into its folder"
        )
    for name, split in load_manifest(beside).splits.items():
        before = 0
        for shard in split.shards:
            if shard.path == path.name:
                return beside, name, before, shard
            before += shard.rows
    raise UsageError("bad_command_line", f"{path}: is no shard of the corpus that it lies in")


def shard_as_object(path: Path) -> dict[str, Any]:
    """The figures of a shard, counted in its rows."""
    beside, split, before, shard = _shard_of(path)
    manifest = load_manifest(beside)
    facts: dict[str, Any] = {
        "shard": str(path), "manifest": str(beside), "split": split, "first_row": before, "rows": shard.rows,
    }  # fmt: skip
    if manifest.format_version == "2.0":
        return facts
    length, tokens, trained = manifest.sequence_length, 0, 0
    counts = [np.zeros(0, np.int64)]
    with open_shard(manifest, path.parent, shard) as batches:
        for batch in batches:
            mask = batch.column("attention_mask").flatten().to_numpy().reshape(-1, length)
            begins = batch.column("position_ids").flatten().to_numpy().reshape(-1, length) == 0
            counts.append(np.count_nonzero(begins & (mask == 1), 1))
            tokens += int(np.count_nonzero(mask))
            trained += int(np.count_nonzero(batch.column("labels").flatten().to_numpy() >= 0))
    held = np.concatenate(counts)
    return facts | {
        "tokens": tokens, "trained": trained, "fill": 100 * tokens / max(shard.rows * length, 1),
        "conversations": int(held.sum()), "least": int(held.min(initial=length)), "most": int(held.max(initial=0)),
    }  # fmt: skip


def is_source(path: Path) -> bool:
    """By its name, and of a .json by how it begins: not a manifest."""
    if container_of(path.name) is None or not path.is_file():
        return False
    if path.suffix != ".json":
        return True
    if path.name == "manifest.json" or path.parent.name == "manifests":
        return False
    with path.open("rb") as file:
        return b'"format_version"' not in file.read(4096)


Kind = Literal["manifest", "shard", "source", "config"]


def kind_of(path: Path) -> Kind:
    """What a file is, by its name and where that does not tell by how it begins; a manifest where nothing else."""
    if path.suffix.lower() in (".yaml", ".yml"):
        return "config"
    if kinds.is_shard(path):
        return "shard"
    return "source" if kinds.is_source(path) else "manifest"
