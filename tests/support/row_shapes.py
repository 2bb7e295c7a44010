"""Corpora with rows of any shape, read from their files in plain Python.

read_corpus(manifest) ─▶ Rows, one place after another, with the conversations that index.arrow places in them
                          └─check_corpus─▶ every invariant of a row, and of the ledger
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from support.packed_rows import folder_of

from packcorpus.tasks.storage.manifest import Manifest, load_manifest

IGNORED = -100
COLUMNS = ("input_ids", "labels", "position_ids")


@dataclass(frozen=True)
class Row:
    """A row: its columns, and the index entries of its pieces, ordered by start."""

    columns: dict[str, Any]
    entries: list[dict[str, Any]]


@dataclass(frozen=True)
class Shaped:
    """A corpus: its rows by split, in order."""

    manifest: Manifest
    rows: dict[str, list[Row]]
    index: list[dict[str, Any]]

    def contents(self) -> list[tuple[Any, ...]]:
        """Return every piece of every split, sorted, whatever row it is in.

        A piece is its split, its identity, its IDs, and its labels.
        """
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


def check_row(row: Row, align: int, pad: int, length: int) -> int:
    """Check a row place by place, and return the number of its alignment places.

    These are the places of padding after its pieces, up to multiples of `align`.
    """
    columns, at, aligned = row.columns, 0, 0
    size = len(columns["input_ids"])
    assert {len(columns[name]) for name in COLUMNS} == {size}
    for number, entry in enumerate(row.entries):
        assert entry["start"] == at, "a piece starts where the one before ends, rounded up"
        assert at % align == 0
        end = at + entry["length"]
        assert columns["position_ids"][at:end] == list(range(entry["length"]))
        assert columns["labels"][at] == IGNORED
        assert sum(label != IGNORED for label in columns["labels"][at:end]) == entry["trained"]
        following = -(-end // align) * align
        aligned += following - end
        is_last = number == len(row.entries) - 1
        after = slice(end, size if is_last else following)
        gap = columns["input_ids"][after]
        assert gap == [pad] * len(gap)
        assert columns["labels"][after] == [IGNORED] * len(gap)
        assert columns["position_ids"][after] == list(range(len(gap))), "each gap is a run of its own"
        if "attention_mask" in columns:
            assert columns["attention_mask"][at:end] == [1] * entry["length"]
            assert columns["attention_mask"][after] == [0] * len(gap)
        at = following
    assert at <= length
    if "attention_mask" not in columns:
        assert size == at, "a row without padding ends where its last piece does"
        assert columns["seq_lens"] == [entry["length"] for entry in row.entries]
        assert columns["max_seqlen"] == max(columns["seq_lens"])
    else:
        assert size == length
    return aligned


def check_corpus(found: Shaped) -> None:
    """Check every row of a corpus, and compare its ledger with its rows."""
    manifest = found.manifest
    tokens, rows = manifest.ledger.tokens, [row for own in found.rows.values() for row in own]
    align, pad = manifest.config.get("align", 1), manifest.tokenizer.pad_token_id
    alignment = 0
    for name, own in found.rows.items():
        length = manifest.splits[name].sequence_length or manifest.sequence_length
        alignment += sum(check_row(row, align, pad, length) for row in own)
    packed = sum(entry["length"] for row in rows for entry in row.entries)
    places = sum(len(row.columns["input_ids"]) for row in rows)
    assert tokens.packed == packed
    assert tokens.packed + tokens.padding == places
    assert (tokens.alignment or 0) == alignment
    assert (tokens.alignment is None) == (align == 1)
    if "padding" in manifest.config:
        assert tokens.padding == alignment
    assert manifest.packing_metadata.rows == len(rows) >= manifest.packing_metadata.lower_bound_rows
