"""Compare two manifests and the conversations of their corpora.

    manifest A ┐
               ├─ compare ─▶ Difference: sources, settings, figures, added and removed conversations
    manifest B ┘

The digest of its content in index.arrow identifies a conversation. So a conversation stays the same if it is on another
line, or if the tokenizer, the template, or the length of rows differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.core.errors import InputMissing
from tasks.encoders.encoder import Encoder
from tasks.encoders.tokenizer_files import open_tokenizer
from tasks.inspection.rows import read_row
from tasks.storage.corpus_folder import checked_folder
from tasks.storage.facts import SourceFacts
from tasks.storage.manifest import Manifest, load_manifest
from tasks.storage.shards import open_index
from tasks.verification.partitions import Partitions

# Show an excerpt of up to this many conversations per side, and this many tokens of each.
EXCERPTS, EXCERPT = 100, 48

# Conversations to list per side by default, because all may differ and there may be a billion.
LISTED = 10_000


@dataclass(frozen=True)
class Change:
    """A setting or figure, before and after."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Moved:
    """A conversation that is packed on one side only.

    `source` and `record` are its place there, and `text` is the start of its text. `why` is the reason why the other
    side dropped it, or "" if the other side does not have it.
    """

    source: str
    record: int
    text: str
    why: str


@dataclass(frozen=True)
class ChangedSource:
    """A source whose content, or the way it is read, differs."""

    before: SourceFacts
    after: SourceFacts


@dataclass(frozen=True)
class SourceChanges:
    """The sources that differ."""

    added: list[SourceFacts]
    removed: list[SourceFacts]
    changed: list[ChangedSource]


@dataclass(frozen=True)
class ConversationChanges:
    """The conversations that only one side has packed.

    They are `compared` if both corpus folders exist. `removed` and `added` count them by the path of their source.
    `went` lists the first removed conversations, and `came` lists the first added conversations.
    """

    compared: bool
    removed: dict[str, int]
    added: dict[str, int]
    went: list[Moved]
    came: list[Moved]


@dataclass(frozen=True)
class Difference:
    """The differences between two manifests.

    `same` ignores the figures, because they follow from the rest.
    """

    before: Path
    after: Path
    same: bool
    sources: SourceChanges
    settings: list[Change]
    figures: list[Change]
    conversations: ConversationChanges


def compare(before: Path, after: Path, limit: int = LISTED) -> Difference:
    """Compare two manifests and list up to `limit` conversations of each side.

    Raises DataError or InputMissing if a manifest or its corpus cannot be read.
    """
    one, other = load_manifest(before), load_manifest(after)
    mine, theirs = ({source.path: source for source in manifest.sources} for manifest in (one, other))
    both = [(mine[name], theirs[name]) for name in mine if name in theirs]
    sources = SourceChanges(
        added=[source for name, source in theirs.items() if name not in mine],
        removed=[source for name, source in mine.items() if name not in theirs],
        changed=[ChangedSource(*pair) for pair in both if _content_of(pair[0]) != _content_of(pair[1])],
    )
    settings = list(_settings(one, other))
    moved = _compare_conversations((one, before), (other, after), limit)
    changes = (sources.added, sources.removed, sources.changed, settings, moved.went, moved.came)
    return Difference(before, after, not any(changes), sources, settings, list(_figures(one, other)), moved)


def _compare_conversations(
    before: tuple[Manifest, Path], after: tuple[Manifest, Path], limit: int
) -> ConversationChanges:
    try:
        sides = [_Side(manifest, checked_folder(manifest, path)) for manifest, path in (before, after)]
    except InputMissing as error:
        if error.reason != "corpus_missing":  # a manifest may be all that is left of a corpus
            raise
        return ConversationChanges(False, {}, {}, [], [])
    one, other = sides
    went, came = _missing(one, other, limit)
    return ConversationChanges(
        True,
        removed=went.by_path(one.manifest),
        added=came.by_path(other.manifest),
        went=one.moved(went.first, other),
        came=other.moved(came.first, one),
    )


def _content_of(source: SourceFacts) -> tuple[object, ...]:
    """Return the facts that determine the conversations of a source."""
    return (
        source.sha256,
        source.container,
        source.compression,
        source.format,
        tuple(source.columns.items()),
        str(source.reading),
    )


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
    """Yield the differences between the entries of `sources`.

    Entries with the same path are compared key by key. An entry of one side only is a difference, and so is the order.
    """
    sides = [_by_path(before), _by_path(after)]
    if sides[0] == sides[1] and before != after:
        yield Change("order of sources", *([entry.get("path") for entry in entries] for entries in (before, after)))
    for path, number in sides[0] | sides[1]:
        mine, theirs = (side.get((path, number)) for side in sides)
        if mine is None or theirs is None:
            yield Change(
                f"source {path}", *("in the config" if side else "not in the config" for side in (mine, theirs))
            )
            continue
        for name in mine | theirs:
            if mine.get(name) != theirs.get(name):
                yield Change(f"{path} {name}", mine.get(name), theirs.get(name))


def _by_path(entries: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return entries by path and by number among the entries with that path."""
    seen: Counter[str] = Counter()
    found = {}
    for entry in entries:
        path = str(entry.get("path"))
        found[path, seen[path]] = entry
        seen[path] += 1
    return found


def _figures(one: Manifest, other: Manifest) -> Iterator[Change]:
    """Yield the recorded figures that differ."""
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
        "noticed": manifest.noticed_counts,
        "content": {
            f"{token} {role}": n for token, roles in manifest.content_tokens.items() for role, n in roles.items()
        },
        "unused": {f"{source} {key}": n for source, keys in manifest.unused_keys.items() for key, n in keys.items()},
    }


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(f"{name}.{key}".lstrip("."), item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


# -- conversations ---------------------------------------------------------------------------------------------------


_PLACE = np.dtype([("digest", "u8"), ("source", "i4"), ("record", "i8")])

_RANGE = 1 << 20  # approximate number of places in a range of digests


@dataclass
class _Side:
    """The packed conversations of one corpus, by source and record.

    The index is read in batches. It may be in any order.
    """

    manifest: Manifest
    folder: Path

    def digests(self, ranges: int) -> Partitions:
        """Return the places of all packed conversations by range of digests.

        Copies of a conversation are in the same range.
        """
        found = Partitions(ranges, _PLACE)
        for batch in self._batches():
            placed = batch.filter(batch.column("row").is_valid())
            rows = np.empty(placed.num_rows, _PLACE)
            for name in _PLACE.names or ():
                rows[name] = placed.column(name).to_numpy()
            rows = rows[np.append(True, rows[1:] != rows[:-1])[: len(rows)]]  # pieces of a conversation are neighbors
            found.add((rows["digest"] >> np.uint64(32)).astype(np.int64) * ranges >> 32, rows)
        return found

    def moved(self, wanted: np.ndarray, other: _Side) -> list[Moved]:
        """Describe conversations of this side, given by their places.

        The other side has not packed them; it may have the reason why it dropped them.
        """
        found: dict[tuple[int, int], dict[str, Any]] = {}
        keys = set(zip(wanted["source"].tolist(), wanted["record"].tolist(), strict=True))
        records = pa.array(np.unique(wanted["record"]))
        for batch in self._batches() if keys else ():
            chosen = pc.and_(batch.column("row").is_valid(), pc.is_in(batch.column("record"), records))
            for row in batch.filter(chosen).to_pylist():
                if (key := (row["source"], row["record"])) in keys:
                    found.setdefault(key, row)
        rows = [found[key] for key in sorted(found)]
        reasons = other.reasons({row["digest"] for row in rows})
        texts = [""] * len(rows)
        if self.manifest.packing_metadata.enabled:
            texts = [self._text(row) for row in rows[:EXCERPTS]] + texts[EXCERPTS:]
        return [
            Moved(self.manifest.sources[row["source"]].path, row["record"], text, reasons.get(row["digest"], ""))
            for row, text in zip(rows, texts, strict=True)
        ]

    def reasons(self, digests: set[int]) -> dict[int, str]:
        """Return the reasons why conversations were dropped on this side, by digest.

        Conversations that were not dropped are left out.
        """
        found: dict[int, str] = {}
        wanted = pa.array(digests, pa.uint64())
        for batch in self._batches() if digests else ():
            chosen = pc.and_(batch.column("row").is_null(), pc.is_in(batch.column("digest"), wanted))
            own = batch.filter(chosen)
            found |= zip(own.column("digest").to_pylist(), own.column("dropped").to_pylist(), strict=True)
        return found

    def _batches(self) -> Iterator[pa.RecordBatch]:
        sources = len(self.manifest.sources)
        with open_index(self.manifest, self.folder) as reader:
            for batch in reader:
                batch.validate(full=True)
                if any(batch.column(name).null_count for name in ("source", "record", "digest")):
                    raise ValueError("a place lacks a number")
                if batch.num_rows:
                    if not 0 <= pc.min(batch["source"]).as_py() <= pc.max(batch["source"]).as_py() < sources:
                        raise ValueError("it refers to sources that the manifest does not have")
                    yield batch

    def _text(self, place: dict[str, Any]) -> str:
        """Return the start of a conversation, without control tokens."""
        shard = self.manifest.splits[place["split"]].shards[place["shard"]]
        row = read_row(self.manifest, self.folder, shard, place["row"])
        start = place["start"]
        ids = row["input_ids"][start : start + min(place["length"], EXCERPT)].tolist()
        return self._encoder.decode(id for id in ids if id not in self._encoder.control_strings).strip()

    @cached_property
    def _encoder(self) -> Encoder:
        return open_tokenizer(self.manifest, self.folder)


class _Moves:
    """Counts of moved conversations by source, and the places of the first of them.

    The places are in source order.
    """

    def __init__(self, sources: int, limit: int):
        self.first, self._limit = np.empty(0, _PLACE), limit
        self._counts = np.zeros(sources, np.int64)

    def add(self, places: np.ndarray) -> None:
        self._counts += np.bincount(places["source"], minlength=len(self._counts))
        found = np.concatenate([self.first, places])
        self.first = found[np.lexsort((found["record"], found["source"]))[: self._limit]]

    def by_path(self, manifest: Manifest) -> dict[str, int]:
        found = Counter[str]()
        for source, count in zip(manifest.sources, self._counts.tolist(), strict=True):
            found[source.path] += count
        return dict(+found)


def _missing(one: _Side, other: _Side, limit: int) -> tuple[_Moves, _Moves]:
    """Return the conversations of each side that the other side lacks."""
    most = max(side.manifest.ledger.pieces.packed for side in (one, other))
    ranges = max(1, -(-most // _RANGE))
    went, came = (_Moves(len(side.manifest.sources), limit) for side in (one, other))
    with one.digests(ranges) as first, other.digests(ranges) as second:
        for mine, theirs in zip(map(_once, first), map(_once, second), strict=True):
            went.add(mine[_without(mine["digest"], theirs["digest"])])
            came.add(theirs[_without(theirs["digest"], mine["digest"])])
    return went, came


def _once(rows: np.ndarray) -> np.ndarray:
    """Return each place once, in source order."""
    rows = rows[np.lexsort((rows["record"], rows["source"]))]
    return rows[np.append(True, rows[1:] != rows[:-1])[: len(rows)]]


def _without(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the positions of the digests in `mine` that `theirs` lacks.

    If a digest occurs more often in `mine` than in `theirs`, the positions of its last occurrences are returned.
    """
    order = np.argsort(mine, kind="stable")
    own = mine[order]
    # The number of each digest among its equals.
    starts = np.flatnonzero(np.append(True, own[1:] != own[:-1])[: len(own)])
    nth = np.arange(len(own)) - np.repeat(starts, np.diff(starts, append=len(own)))
    theirs = np.sort(theirs)
    available = np.searchsorted(theirs, own, side="right") - np.searchsorted(theirs, own, side="left")
    return np.sort(order[nth >= available])
