"""Two manifests → what is another: sources, settings, figures, and the conversations that came or went.

    manifest A ┐
               ├─ compare ─▶ Difference
    manifest B ┘   index.arrow: a conversation is the digest of what it says, wherever and however it is packed

So neither an added line, which moves all behind it, nor another tokenizer, template or length lets one come or go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.core.errors import InputMissing, PackError
from tasks.encoders.corpus_tokenizer import open_tokenizer
from tasks.encoders.encoder import Encoder
from tasks.inspection.rows import read_row
from tasks.storage.corpus_folder import corpus_folder
from tasks.storage.manifest import Manifest, SourceFacts, load_manifest
from tasks.storage.shards import open_index

# Of so many conversations on each side the first tokens are told.
EXCERPTS, EXCERPT = 100, 48


class Change(NamedTuple):
    """A setting or figure, before and after."""

    name: str
    before: Any
    after: Any


class Moved(NamedTuple):
    """A conversation that is packed on one side alone: its place there, and the begin of what it says.

    `why` is the reason for which the other side dropped it, where it did.
    """

    source: str
    record: int
    text: str
    why: str


@dataclass(slots=True)
class Difference:
    """Conversations are `compared` where both corpus folders are there."""

    added: list[SourceFacts]
    removed: list[SourceFacts]
    changed: list[tuple[SourceFacts, SourceFacts]]
    settings: list[Change]
    figures: list[Change]
    compared: bool
    came: list[Moved]
    went: list[Moved]

    @property
    def same(self) -> bool:
        """Whether nothing is another."""
        return not (self.added or self.removed or self.changed or self.settings or self.came or self.went)


def compare(before: Path, after: Path) -> Difference:
    """What is another in the manifest `after`. Raises DataError or InputMissing where one cannot be read."""
    one, other = load_manifest(before), load_manifest(after)
    mine, theirs = ({source.path: source for source in manifest.sources} for manifest in (one, other))
    both = [(mine[name], theirs[name]) for name in mine if name in theirs]
    found = Difference(
        added=[source for name, source in theirs.items() if name not in mine],
        removed=[source for name, source in mine.items() if name not in theirs],
        changed=[pair for pair in both if _read(pair[0]) != _read(pair[1])],
        settings=list(_settings(one, other)),
        figures=list(_figures(one, other)),
        compared=False,
        came=[],
        went=[],
    )
    try:
        folders = [corpus_folder(manifest, path) for manifest, path in ((one, before), (other, after))]
    except InputMissing:  # a manifest may be all that is left of a corpus
        return found
    before_side, after_side = (_Side(*side) for side in zip((one, other), folders, strict=True))
    found.compared = True
    found.went = before_side.moved(_without(before_side.digest, after_side.digest), after_side)
    found.came = after_side.moved(_without(after_side.digest, before_side.digest), before_side)
    return found


def _read(source: SourceFacts) -> tuple[object, ...]:
    """What of a source decides about its conversations."""
    return source.sha256, source.container, source.compression, source.format, tuple(source.columns.items())


# -- settings and figures --------------------------------------------------------------------------------------------


def _settings(one: Manifest, other: Manifest) -> Iterator[Change]:
    for name in one.config | other.config:
        before, after = one.config.get(name), other.config.get(name)
        if name == "sources":
            yield from _entries(before or [], after or [])
        elif before != after:
            yield Change(name, before, after)
    for name, before, after in (
        ("tokenizer's content", one.tokenizer.digest, other.tokenizer.digest),
        ("template's content", one.template.sha256, other.template.sha256),
        ("format_version", one.format_version, other.format_version),
    ):
        if before != after:
            yield Change(name, before, after)


def _entries(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Iterator[Change]:
    """What is another in entries of one path, key by key, and entries that are on one side alone."""
    sides = [_by_path(before), _by_path(after)]
    if sides[0] == sides[1] and before != after:
        yield Change("order of sources", *([entry.get("path") for entry in entries] for entries in (before, after)))
    for path, number in sides[0] | sides[1]:
        mine, theirs = (side.get((path, number)) for side in sides)
        if mine is None or theirs is None:
            yield Change(f"sources: {path}", mine and "listed", theirs and "listed")
            continue
        for name in mine | theirs:
            if mine.get(name) != theirs.get(name):
                yield Change(f"{path} {name}", mine.get(name), theirs.get(name))


def _by_path(entries: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """Entries by their path, and by their number among those of one path."""
    seen: Counter[str] = Counter()
    found = {}
    for entry in entries:
        path = str(entry.get("path"))
        found[path, seen[path]] = entry
        seen[path] += 1
    return found


def _figures(one: Manifest, other: Manifest) -> Iterator[Change]:
    """All figures of ledger, packing and splits that differ."""
    before, after = (dict(_numbers("", _counted(manifest))) for manifest in (one, other))
    for name in before | after:
        if before.get(name) != after.get(name):
            yield Change(name, before.get(name), after.get(name))


def _counted(manifest: Manifest) -> dict[str, Any]:
    return {
        "ledger": manifest.ledger.model_dump(),
        "packing": manifest.packing_metadata.model_dump(),
        "rows": {name: split.rows for name, split in manifest.splits.items()},
        "shards": {name: len(split.shards) for name, split in manifest.splits.items()},
        "bytes": sum(file.bytes for file in manifest.listed()),
        "noticed": manifest.noticed,
    }


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(f"{name}.{key}".lstrip("."), item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


# -- conversations ---------------------------------------------------------------------------------------------------


class _Side:
    """The packed conversations of one corpus, in source order: of each its digest, source, record, and where its first
    piece stands."""

    def __init__(self, manifest: Manifest, folder: Path):
        self.manifest = manifest
        self.folder = folder
        with open_index(manifest, folder) as reader:
            table = reader.read_all()
            table.validate(full=True)
        placed = table.column("row").is_valid()
        self.dropped = table.select(["digest", "dropped"]).filter(pc.invert(placed))
        table = table.filter(placed)  # what was dropped stands nowhere
        keys = ("first", "record", "source")
        order = np.lexsort([table.column(name).to_numpy() for name in keys])
        pairs = np.stack([table.column(name).to_numpy()[order] for name in keys[1:]])
        # Of one that stands in several places, the first.
        heads = np.append(True, (np.diff(pairs) != 0).any(axis=0))[: len(order)]
        self.table = table.take(pa.array(order[heads]))
        self.digest = self.table.column("digest").to_numpy()

    def moved(self, numbers: np.ndarray, other: _Side) -> list[Moved]:
        """As they are told."""
        reasons = other.reasons(self.digest[numbers])
        texts = [""] * len(numbers)
        rows = self.table.take(pa.array(numbers)).to_pylist()
        if self.manifest.format_version == "3.0":
            with suppress(PackError):  # a shard that is gone is not what was asked about
                texts = [self._text(row) for row in rows[:EXCERPTS]] + texts[EXCERPTS:]
        return [
            Moved(self.manifest.sources[row["source"]].path, row["record"], text, reasons.get(row["digest"], ""))
            for row, text in zip(rows, texts, strict=True)
        ]

    def reasons(self, digests: np.ndarray) -> dict[int, str]:
        """Why conversations were dropped here, by their digests; those that were not are left out."""
        asked = pc.is_in(self.dropped.column("digest"), pa.array(digests, self.dropped.schema.field("digest").type))
        found = self.dropped.filter(asked)
        return dict(zip(found.column("digest").to_pylist(), found.column("dropped").to_pylist(), strict=True))

    def _text(self, place: dict[str, Any]) -> str:
        """How a conversation begins."""
        shard = self.manifest.splits[place["split"]].shards[place["shard"]]
        row = read_row(self.manifest, self.folder, shard, place["row"])
        begin = place["start"]
        ids = row["input_ids"][begin : begin + min(place["length"], EXCERPT)].tolist()
        return self._encoder.decode(id for id in ids if id not in self._encoder.control_strings).strip()

    @cached_property
    def _encoder(self) -> Encoder:
        return open_tokenizer(self.manifest, self.folder)


def _without(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Places in `mine` (digests) of those that are not among `theirs`; of equal ones as many as there are more, the
    last."""
    order = np.argsort(mine, kind="stable")
    own = mine[order]
    # How manyth of its equals each is.
    begins = np.flatnonzero(np.append(True, own[1:] != own[:-1])[: len(own)])
    nth = np.arange(len(own)) - np.repeat(begins, np.diff(begins, append=len(own)))
    theirs = np.sort(theirs)
    there = np.searchsorted(theirs, own, side="right") - np.searchsorted(theirs, own, side="left")
    return np.sort(order[nth >= there])
