"""Check that dropped.jsonl and the index name the same conversations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.storage.corpus_folder import reading
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.schemas import ALL_DROP_REASONS

LISTED = ("near_duplicate", "contaminated")
# Conversations that are not packed because of another one, so no other one is left out because of them.
GONE = [ALL_DROP_REASONS.index(name) for name in ("duplicate", *LISTED)]
# The least share of common runs of near-duplicates.
SIMILAR = 0.7
BLOCK = 1 << 16  # lines at a time


class DroppedCheck:
    """Compare the conversations that the index and dropped.jsonl have for each reason.

    They are compared by their number and the sum of their hashes, so only those that stay are held in memory, 9 bytes
    each.
    """

    def __init__(self, manifest: Manifest, folder: Path):
        self._path, self._manifest = folder / "dropped.jsonl", manifest
        self._sums = {name: [0, 0] for name in LISTED}  # of the list minus the index: number, and sum of hashes
        self._kept = np.empty(0, np.uint64)
        if any(file.path == self._path.name for file in manifest.files):
            with reading(self._path, folder):
                for lines in self._blocks():
                    self._add_lines(lines)
        self._gone = np.zeros(len(self._kept), np.bool_)

    def _blocks(self) -> Iterator[list[dict[str, Any]]]:
        block = []
        with self._path.open("rb") as lines:
            for line in lines:
                block.append(orjson.loads(line))
                if len(block) == BLOCK:
                    yield block
                    block = []
        yield block

    def _add_lines(self, lines: list[dict[str, Any]]) -> None:
        numbers = {source.path: number for number, source in enumerate(self._manifest.sources)}

        def place_of(record: dict[str, Any]) -> tuple[int, int]:
            return numbers[record["source"]], int(record.get("line") or record["record"])

        for name in LISTED:
            own = [line for line in lines if line["reason"] == name]
            places = np.array([place_of(line) for line in own], np.int64).reshape(-1, 2)
            self._count(name, _keys(*places.T), 1)
            for line in own if name == "near_duplicate" else ():
                if place_of(line["kept"]) >= place_of(line) or not SIMILAR <= line["similarity"] <= 1:
                    raise self._wrong(f"{line['source']}:{place_of(line)[1]} names no earlier conversation like it")
        kept = [place_of(line["kept"]) for line in lines if line["reason"] == "near_duplicate"]
        keys = _keys(*np.array(kept, np.int64).reshape(-1, 2).T)
        self._kept = np.unique(np.concatenate([self._kept, keys]))
        unknown = next((line for line in lines if line["reason"] not in LISTED), None)
        if unknown:
            raise self._wrong(f"unknown reason {unknown['reason']!r}")

    def _count(self, name: str, keys: np.ndarray, sign: int) -> None:
        sums = self._sums[name]
        sums[0] += sign * len(keys)
        sums[1] += sign * int(keys.sum(dtype=np.uint64))

    def _wrong(self, problem: str) -> DataError:
        return DataError("bad_index", f"{self._path}: {problem}")

    def add(self, source: np.ndarray, record: np.ndarray, reason: np.ndarray) -> None:
        """Add conversations of the index: int[n].

        A reason is an index into ALL_DROP_REASONS, or -1.
        """
        keys = _keys(source.astype(np.int64), record.astype(np.int64))
        for name in LISTED:
            self._count(name, keys[reason == ALL_DROP_REASONS.index(name)], -1)
        self._gone |= np.isin(self._kept, keys[np.isin(reason, GONE)])

    def check(self) -> None:
        """Raise DataError if the list and the index differ."""
        for name, (number, rest) in self._sums.items():
            if number or rest % 2**64:
                raise self._wrong(f"does not list the conversations that the index has as {name}")
        if self._gone.any():
            raise self._wrong("names a conversation that does not stay")


def _keys(source: np.ndarray, record: np.ndarray) -> np.ndarray:
    """Return a hash of each place, uint64, so that sums of different places differ."""
    keys = record.astype(np.uint64) ^ (source.astype(np.uint64) << np.uint64(48))
    for shift in (31, 29, 32):
        keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(0xD6E8FEB86659FD93)
    return keys
