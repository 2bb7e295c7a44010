"""Two manifests → what is another: sources, settings, figures, and the conversations that came or went.

    manifest A ┐                                       same source, by digest: a conversation is its place
               ├─ compare ─▶ Difference
    manifest B ┘   index.arrow, rows of the shards     another source: it is its tokens, where both have the same
                                                       tokenizer and template; else its place

Of sources that are the same on both sides nothing but the index is read. Of others the rows are, since a line that is
added moves all lines behind it, and none of these came or went. A conversation that was cut in one of the two is known
by its begin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from tasks.corpus_files import find_listed, open_tokenizer, reading
from tasks.encoders import Encoder
from tasks.errors import DataError, PackError
from tasks.index import INDEX_SCHEMA
from tasks.manifest import Manifest, SourceFacts, corpus_folder, load_manifest

EXCERPT = 48  # tokens of a conversation that are told of it


class Change(NamedTuple):
    """A setting or figure, before and after."""

    name: str
    before: Any
    after: Any


class Moved(NamedTuple):
    """A conversation that is packed on one side alone: its place there, and the begin of what it says."""

    source: str
    record: int
    text: str


@dataclass(slots=True)
class Difference:
    """`by` is how conversations were told apart: content, place, or nothing where a corpus folder is gone."""

    added: list[SourceFacts]
    removed: list[SourceFacts]
    changed: list[tuple[SourceFacts, SourceFacts]]
    settings: list[Change]
    figures: list[Change]
    by: str
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
        by="",
        came=[],
        went=[],
    )
    with suppress(PackError):  # a manifest may be all that is left of a corpus
        folders = [corpus_folder(manifest, path) for manifest, path in ((one, before), (other, after))]
        sides = [_Side(manifest, folder) for manifest, folder in zip((one, other), folders, strict=True)]
        found.by, found.went, found.came = _conversations(*sides)
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
    """The packed conversations of one corpus: of each its source, record, and where its first piece stands."""

    def __init__(self, manifest: Manifest, folder: Path):
        self.manifest = manifest
        self.folder = folder
        facts = next((file for file in manifest.files if file.path == "index.arrow"), None)
        if facts is None:
            raise DataError("bad_index", f"{folder}: its manifest names no index.arrow; make the corpus again")
        path = find_listed(folder, facts.path, facts.bytes)
        with reading(path), pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
            if not reader.schema.equals(INDEX_SCHEMA):
                raise DataError("bad_index", f"{path}: has other columns than an index; make the corpus again")
            table = reader.read_all()
        table = table.filter(table.column("row").is_valid())  # what was dropped stands nowhere
        table = table.filter(pa.array(table.column("first").to_numpy() == 0))
        # Of one that stands in several rows, its first place.
        pairs = np.stack([table.column(name).to_numpy() for name in ("source", "record")])
        table = table.take(pa.array(np.sort(np.unique(pairs, axis=1, return_index=True)[1])))
        self.source = table.column("source").to_numpy()
        self.record = table.column("record").to_numpy()
        self.split = np.array(table.column("split").combine_chunks().dictionary_decode().to_pylist(), object)
        self.shard, self.row, self.start, self.length = (
            table.column(name).to_numpy() for name in ("shard", "row", "start", "length")
        )
        self.closed = table.column("closed").to_numpy(False)
        self._encoder: Encoder | None = None

    def of_sources(self, wanted: set[int]) -> np.ndarray:
        """Numbers of the conversations of some sources."""
        return np.flatnonzero(np.isin(self.source, list(wanted)))

    def tokens(self, chosen: np.ndarray, most: int) -> Iterator[tuple[int, np.ndarray]]:
        """(number, up to `most` ids) of conversations, shard by shard; each shard is mapped once."""
        packed = self.manifest.format_version == "3.0"
        order = chosen[np.lexsort((self.row[chosen], self.shard[chosen], self.split[chosen].astype(str)))]
        edges = np.flatnonzero((np.diff(self.shard[order]) != 0) | (self.split[order][1:] != self.split[order][:-1]))
        for top, bottom in pairwise([0, *(edges + 1).tolist(), len(order)]):
            if top == bottom:
                continue
            some = order[top:bottom]
            shard = self.manifest.splits[self.split[some[0]]].shards[self.shard[some[0]]]
            path = find_listed(self.folder, shard.path, shard.bytes)
            with reading(path), pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
                table = reader.read_all()
                column = table.column("input_ids" if packed else "messages")
                firsts = np.cumsum([0, *map(len, column.chunks)])
                flat = [chunk.flatten().to_numpy() for chunk in column.chunks] if packed else []
                for number in some.tolist():
                    row = int(self.row[number])
                    if not packed:
                        # Format 2.0 holds what was said, and no ids.
                        said = orjson.dumps(column[row].as_py())
                        yield number, np.frombuffer(said, np.uint8)
                        continue
                    chunk = int(np.searchsorted(firsts, row, side="right")) - 1
                    begin = (row - int(firsts[chunk])) * self.manifest.sequence_length + int(self.start[number])
                    length = int(self.length[number]) - bool(self.closed[number])
                    yield number, flat[chunk][begin : begin + min(length, most)]

    def places(self, chosen: np.ndarray) -> dict[int, Any]:
        """Of each conversation its source and record."""
        return {n: (self.manifest.sources[self.source[n]].path, int(self.record[n])) for n in chosen.tolist()}

    def moved(self, numbers: list[int]) -> list[Moved]:
        """As they are told, in source order."""
        texts: dict[int, str] = {}
        if self.manifest.format_version == "3.0":
            with suppress(PackError):
                self._encoder = self._encoder or open_tokenizer(self.manifest, self.folder)
                for number, ids in self.tokens(np.array(numbers, np.int64), EXCERPT):
                    said = [token for token in ids.tolist() if token not in self._encoder.control_strings]
                    texts[number] = self._encoder.decode(said).strip()
        return [
            Moved(self.manifest.sources[self.source[number]].path, int(self.record[number]), texts.get(number, ""))
            for number in sorted(numbers, key=lambda number: (self.source[number], self.record[number]))
        ]


def _conversations(one: _Side, other: _Side) -> tuple[str, list[Moved], list[Moved]]:
    """How they were told apart, those that went and those that came."""
    mine = {_read(source): number for number, source in enumerate(one.manifest.sources)}
    theirs = {_read(source): number for number, source in enumerate(other.manifest.sources)}
    went, came = list[int](), list[int]()
    for key in mine.keys() & theirs.keys():
        before, after = one.of_sources({mine[key]}), other.of_sources({theirs[key]})
        went += before[~np.isin(one.record[before], other.record[after])].tolist()
        came += after[~np.isin(other.record[after], one.record[before])].tolist()
    rest = (
        one.of_sources({number for key, number in mine.items() if key not in theirs}),
        other.of_sources({number for key, number in theirs.items() if key not in mine}),
    )
    by_content = _comparable(one.manifest, other.manifest)
    most = min(one.manifest.sequence_length, other.manifest.sequence_length) - 1
    names = [
        {number: _name(ids) for number, ids in side.tokens(own, most)} if by_content else side.places(own)
        for side, own in zip((one, other), rest, strict=True)
    ]
    went += _without(names[0], names[1])
    came += _without(names[1], names[0])
    by = "content" if by_content or not (len(rest[0]) or len(rest[1])) else "place"
    return by, one.moved(went), other.moved(came)


def _comparable(one: Manifest, other: Manifest) -> bool:
    """Whether equal conversations have equal tokens in both."""
    return (one.format_version, one.tokenizer.sha256, one.template.sha256) == (
        other.format_version,
        other.tokenizer.sha256,
        other.template.sha256,
    ) and one.config.get("template_date") == other.config.get("template_date")


def _name(ids: np.ndarray) -> Any:
    return blake2b(ids.tobytes(), digest_size=16).digest()


def _without(mine: dict[int, Any], theirs: dict[int, Any]) -> list[int]:
    """Those of mine that are not among theirs; of equal ones as many as there are more, the last."""
    left = Counter(theirs.values())
    found = []
    for number in sorted(mine):
        if left[mine[number]]:
            left[mine[number]] -= 1
        else:
            found.append(number)
    return found
