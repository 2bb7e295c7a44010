"""Determine the kind of a file, and read the figures of a shard."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from tasks.core.errors import InputMissing, UsageError
from tasks.readers.containers import container_by_extension
from tasks.storage.corpus_folder import check_copies, check_unchanged
from tasks.storage.facts import Shard
from tasks.storage.manifest import load_manifest, lost_hint
from tasks.storage.shards import open_shard, rows_of


@dataclass(frozen=True)
class ShardFigures:
    """The figures of one shard.

    `fill` is the percentage of positions that hold a token. `least` and `most` are conversations per row. In format
    2.0, all fields after `rows` are None.
    """

    shard: Path
    manifest: Path
    split: str
    first_row: int
    rows: int
    tokens: int | None = None
    trained: int | None = None
    fill: float | None = None
    conversations: int | None = None
    least: int | None = None
    most: int | None = None


def is_shard(path: Path) -> bool:
    """Return whether a file is a shard.

    The schema decides or, if it cannot be read, whether there is a manifest.json in the same folder.
    """
    if path.suffix != ".arrow" or not path.is_file():
        return False
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
            return b"format_version" in (reader.schema.metadata or {})
    except (pa.ArrowException, OSError):
        return (path.parent / "manifest.json").is_file()


def row_of_shard(path: Path, row: int) -> tuple[Path, str, int]:
    """Return the manifest of a shard, its split, and the number of a row in the split.

    `row` is the number in the shard. Raises UsageError if the shard has fewer rows, and InputMissing if there is no
    manifest in its folder.
    """
    manifest, split, before, shard = _shard_of(path)
    if not 0 <= row < shard.rows:
        raise UsageError("not_in_it", f"--row {row}: {path.name} has {shard.rows:,} rows, from 0")
    return manifest, split, before + row


def _shard_of(path: Path) -> tuple[Path, str, int, Shard]:
    """Return (manifest, split, number of the shard's first row in the split, shard)."""
    beside = path.parent / "manifest.json"
    if not beside.is_file():
        fix = lost_hint(beside) or "; move it back to its folder"
        raise InputMissing("manifest_missing", f"{path}: is a shard without a manifest.json beside it{fix}")
    check_copies(beside, path.parent)
    for name, split in load_manifest(beside).splits.items():
        before = 0
        for shard in split.shards:
            if shard.path == path.name:
                return beside, name, before, shard
            before += shard.rows
    raise UsageError("bad_command_line", f"{path}: is not a shard of the corpus in its folder")


def shard_figures(path: Path) -> ShardFigures:
    """Count the figures of a shard from its rows.

    Raises DataError or InputMissing if the shard differs from its manifest.
    """
    beside, split, first_row, shard = _shard_of(path)
    manifest = load_manifest(beside)
    if manifest.format_version == "2.0":
        return ShardFigures(path, beside, split, first_row, shard.rows)
    check_unchanged(path.parent, shard)
    length, tokens, trained, counts = manifest.length_of(shard.path), 0, 0, [np.zeros(0, np.int64)]
    with open_shard(manifest, path.parent, shard) as batches:
        for rows in (rows_of(batch, length, manifest.row_layout) for batch in batches):
            counts.append(rows.pieces)
            tokens += int(rows.tokens.sum())
            trained += rows.trained
    held = np.concatenate(counts)
    return ShardFigures(
        path, beside, split, first_row, shard.rows, tokens, trained, 100 * tokens / max(shard.rows * length, 1),
        int(held.sum()), int(held.min(initial=length)), int(held.max(initial=0)),
    )  # fmt: skip


def is_source(path: Path) -> bool:
    """Return whether a file is a source, by its extension.

    A .json file is not a source if its name, its folder, or its first bytes show that it is a manifest.
    """
    if container_by_extension(path.name) is None or not path.is_file():
        return False
    if path.suffix != ".json":
        return True
    if path.name == "manifest.json" or path.parent.name == "manifests":
        return False
    with path.open("rb") as file:
        return b'"format_version"' not in file.read(4096)


Kind = Literal["manifest", "shard", "source", "config"]


def kind_of(path: Path) -> Kind:
    """Return the kind of a file.

    The name decides or, if it is ambiguous, the first bytes. A file of unknown kind is treated as a manifest.
    """
    if path.suffix.lower() in (".yaml", ".yml"):
        return "config"
    if is_shard(path):
        return "shard"
    return "source" if is_source(path) else "manifest"
