"""Compare two manifests and the conversations of their corpora.

    manifest A ┐
               ├─ compare ─▶ Difference: sources, settings, figures, added and removed conversations
    manifest B ┘

The digest of its content in index.arrow identifies a conversation. So a conversation stays the same if it is on another
line, or if the tokenizer, the template, or the length of rows differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packcorpus.tasks.core.errors import InputMissing
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.encoders.tokenizer_files import open_tokenizer
from packcorpus.tasks.inspection.rows import read_row
from packcorpus.tasks.storage.corpus_folder import checked_folder
from packcorpus.tasks.storage.facts import SourceFacts
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.storage.shards import open_index
from packcorpus.tasks.verification.partitions import Partitions

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
    """A conversation that is packed on one side only."""

    source: str
    record: int
    text: str  # its start
    why: str  # why the other side dropped it; "" if the other side does not have it


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
    """The conversations that only one side has packed."""

    compared: bool  # both corpus folders exist
    removed: dict[str, int]  # by the path of their source
    added: dict[str, int]
    went: list[Moved]  # the first removed ones
    came: list[Moved]  # the first added ones


@dataclass(frozen=True)
class Difference:
    """The differences between two manifests."""

    before: Path
    after: Path
    same: bool  # the figures are ignored, because they follow from the rest
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
    sources = SourceChanges(
        added=[source for name, source in theirs.items() if name not in mine],
        removed=[source for name, source in mine.items() if name not in theirs],
        changed=[
            ChangedSource(source, theirs[name])
            for name, source in mine.items()
            if name in theirs and source.content != theirs[name].content
        ],
    )
    settings = list(_settings(one, other))
    figures = _changes(dict(_numbers("", _counted(one))), dict(_numbers("", _counted(other))))
    try:
        sides = [_Side(manifest, checked_folder(manifest, path)) for manifest, path in ((one, before), (other, after))]
        moved = _compare_conversations(sides, limit)
    except InputMissing as error:
        if error.reason != "corpus_missing":  # a manifest may be all that is left of a corpus
            raise
        moved = ConversationChanges(False, {}, {}, [], [])
    changes = (sources.added, sources.removed, sources.changed, settings, moved.went, moved.came)
    return Difference(before, after, not any(changes), sources, settings, figures, moved)


# -- settings and figures --------------------------------------------------------------------------------------------


def _changes(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> list[Change]:
    values = ((f"{prefix}{name}", before.get(name), after.get(name)) for name in before | after)
    return [Change(name, old, new) for name, old, new in values if old != new]


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
    sides: list[dict[tuple[str, int], dict[str, Any]]] = [{}, {}]  # by path and number among the entries with that path
    for side, entries in zip(sides, (before, after), strict=True):
        seen: Counter[str] = Counter()
        for entry in entries:
            path = str(entry.get("path"))
            side[path, seen[path]] = entry
            seen[path] += 1
    if sides[0] == sides[1] and before != after:
        yield Change("order of sources", *([entry.get("path") for entry in entries] for entries in (before, after)))
    for path, number in sides[0] | sides[1]:
        mine, theirs = (side.get((path, number)) for side in sides)
        if mine is not None and theirs is not None:
            yield from _changes(mine, theirs, f"{path} ")
        else:
            states = ("in the config" if side else "not in the config" for side in (mine, theirs))
            yield Change(f"source {path}", *states)


def _counted(manifest: Manifest) -> dict[str, Any]:
    return {
        "ledger": manifest.ledger.model_dump(),
        "packing": manifest.packing_metadata.model_dump(),
        "rows": {name: split.rows for name, split in manifest.splits.items()},
        "shards": {name: len(split.shards) for name, split in manifest.splits.items()},
        "bytes": sum(file.bytes for file in manifest.listed()),
        "held_out": manifest.held_out.model_dump() if manifest.held_out else {},
        "noticed": manifest.noticed_counts,
        "content": {
            f"{token} {role}": n for token, roles in manifest.content_tokens.items() for role, n in roles.items()
        },
        "markers": {marker: of["conversations"] for marker, of in manifest.unknown_markers.items()},
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
    """The packed conversations of one corpus; its index may be in any order."""

    manifest: Manifest
    folder: Path

    def digests(self, ranges: int) -> Partitions:
        """Return the places of all packed conversations by range of digests."""
        found = Partitions(ranges, _PLACE)
        for batch in self._batches():
            placed = batch.filter(batch.column("row").is_valid())
            rows = np.empty(placed.num_rows, _PLACE)
            for name in _PLACE.names or ():
                rows[name] = placed.column(name).to_numpy()
            rows = rows[np.append(True, rows[1:] != rows[:-1])[: len(rows)]]  # pieces of a conversation are neighbors
            found.add_by_hash(rows["digest"], rows)
        return found

    def moved(self, wanted: np.ndarray, other: _Side) -> list[Moved]:
        """Describe conversations that only this side has packed, given by their places."""
        found: dict[tuple[int, int], dict[str, Any]] = {}
        keys = set(zip(wanted["source"].tolist(), wanted["record"].tolist(), strict=True))
        records = pa.array(np.unique(wanted["record"]))
        for batch in self._batches() if keys else ():
            chosen = pc.and_(batch.column("row").is_valid(), pc.is_in(batch.column("record"), records))
            for row in batch.filter(chosen).to_pylist():
                if (key := (row["source"], row["record"])) in keys:
                    found.setdefault(key, row)
        rows = [found[key] for key in sorted(found)]
        reasons: dict[int, str] = {}  # why the other side dropped them, by digest
        digests = pa.array({row["digest"] for row in rows}, pa.uint64())
        for batch in other._batches() if rows else ():
            dropped = batch.filter(pc.and_(batch.column("row").is_null(), pc.is_in(batch.column("digest"), digests)))
            reasons |= zip(dropped.column("digest").to_pylist(), dropped.column("dropped").to_pylist(), strict=True)
        texts = [""] * len(rows)
        if self.manifest.packing_metadata.enabled:
            texts = [self._text(row) for row in rows[:EXCERPTS]] + texts[EXCERPTS:]
        return [
            Moved(self.manifest.sources[row["source"]].path, row["record"], text, reasons.get(row["digest"], ""))
            for row, text in zip(rows, texts, strict=True)
        ]

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


def _compare_conversations(sides: Sequence[_Side], limit: int) -> ConversationChanges:
    one, other = sides
    most = max(side.manifest.ledger.pieces.packed for side in sides)
    ranges = max(1, -(-most // _RANGE))
    counts = Counter[str](), Counter[str]()
    firsts = [np.empty(0, _PLACE), np.empty(0, _PLACE)]
    with one.digests(ranges) as mine, other.digests(ranges) as theirs:
        for pair in zip(map(_once, mine), map(_once, theirs), strict=True):
            for number, (rows, others) in enumerate((pair, pair[::-1])):
                missing = _without(rows, others["digest"])
                sources = [source.path for source in sides[number].manifest.sources]
                for path, count in zip(sources, np.bincount(missing["source"], minlength=len(sources)), strict=True):
                    counts[number][path] += int(count)
                places = np.concatenate([firsts[number], missing])
                firsts[number] = places[np.lexsort((places["record"], places["source"]))[:limit]]
    removed, added = (dict(+count) for count in counts)
    return ConversationChanges(True, removed, added, one.moved(firsts[0], other), other.moved(firsts[1], one))


def _once(rows: np.ndarray) -> np.ndarray:
    """Return each place once, by digest and then in source order."""
    rows = rows[np.lexsort((rows["record"], rows["source"], rows["digest"]))]
    return rows[np.append(True, rows[1:] != rows[:-1])[: len(rows)]]


def _without(rows: np.ndarray, digests: np.ndarray) -> np.ndarray:
    """Return the rows whose digests are not among `digests`; both are sorted.

    If a digest occurs in more rows than in `digests`, its last rows are returned.
    """
    own = rows["digest"]
    nth = np.arange(len(own)) - np.searchsorted(own, own)  # the number of each digest among its equals
    available = np.searchsorted(digests, own, side="right") - np.searchsorted(digests, own)
    return rows[nth >= available]
