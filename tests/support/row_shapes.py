"""Corpora of any shape of rows, read in plain Python from their files.

read_corpus(manifest) ─▶ Rows, one place after another; conversations, as index.arrow has their places
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from support.packed_rows import folder_of

from tasks.storage.manifest import Manifest, load_manifest

IGNORED = -100


@dataclass(frozen=True)
class Row:
    """A row: its columns, and the entries of the index that are in it, by start."""

    columns: dict[str, Any]
    entries: list[dict[str, Any]]


@dataclass(frozen=True)
class Shaped:
    """A corpus. `rows` are by split, in order."""

    manifest: Manifest
    rows: dict[str, list[Row]]
    index: list[dict[str, Any]]

    def contents(self) -> list[tuple[Any, ...]]:
        """Return every piece of every packing, whatever its row: what identifies it, its ids, and its labels."""
        found = []
        for split, rows in self.rows.items():
            for row in rows:
                for entry in row.entries:
                    place = slice(entry["start"], entry["start"] + entry["length"])
                    ids, labels = (tuple(row.columns[name][place]) for name in ("input_ids", "labels"))
                    found.append((split, entry["source"], entry["record"], entry["first"], ids, labels))
        return sorted(found)


def read_corpus(path: Path) -> Shaped:
    manifest, folder = load_manifest(path), folder_of(path)
    index = list(_records(folder / "index.arrow"))
    rows = {}
    for name, split in manifest.splits.items():
        rows[name] = []
        for number, shard in enumerate(split.shards):
            entries: dict[int, list[dict[str, Any]]] = {}
            for entry in sorted(index, key=lambda each: each["start"] or 0):
                if (entry["split"], entry["shard"]) == (name, number):
                    entries.setdefault(entry["row"], []).append(entry)
            columns = list(_records(folder / shard.path))
            assert sorted(entries) == list(range(len(columns))), "every row has pieces"
            rows[name] += [Row(row, entries[at]) for at, row in enumerate(columns)]
    return Shaped(manifest, rows, index)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with pa.OSFile(str(path)) as file:
        yield from pa.ipc.open_stream(file).read_all().to_pylist()
