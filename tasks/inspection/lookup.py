"""Find the rows of a conversation and the conversations of a row in index.arrow.

    number in the index      ─┐                              ┌─▶ source, record, number
    source and line (record) ─┼─▶ Place(s) ◀── split, row ◀──┤
    text in a row (search)   ─┘                              └─▶ split, shard, row, start, length

The index is read in batches, and only the columns in question are compared. Only entries that match become Python
objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from packcorpus.tasks.core.errors import DataError, InputMissing, UsageError
from packcorpus.tasks.core.printable import digits_of, printable, suggest
from packcorpus.tasks.readers.containers import container_named
from packcorpus.tasks.storage.corpus_folder import check_unchanged, listed_file, reading
from packcorpus.tasks.storage.facts import Shard
from packcorpus.tasks.storage.layout import kind_of
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.shards import open_index, to_dicts

MOST_RECORDS = (1 << 63) - 1  # the largest number in the index

# The most records with one id that an error lists.
MOST_WITH_ID = 5

Place = dict[str, Any]
"""An entry of the index (schemas.INDEX_SCHEMA) with its `number`, from 0.

If conversations of the corpus were split, it also has `pieces`, the number of pieces, and `piece`, its number from 1.
"""


def find_row(manifest: Manifest, number: int, split: str) -> tuple[int, Shard, int]:
    """Return (number of the shard in the split, shard, row in the shard) of a row.

    `number` is the row in the split. Raises UsageError if there is no such row.
    """
    chosen = manifest.splits.get(split)
    if chosen is None:
        with_rows = [name for name, facts in manifest.splits.items() if facts.rows]
        splits = ", ".join(map(printable, with_rows))
        problem = f"--split {printable(split)}: is not a split of this corpus; choose one of {splits}"
        if of_kind := [printable(name) for name in with_rows if kind_of(name) == split]:
            others = f", or {', '.join(of_kind[1:])}" * (len(of_kind) > 1)
            problem = (
                f"--row {number}: rows of {split} have several lengths here, each in its own split; use --split "
                f"{of_kind[0]}{others}"
            )
        raise UsageError("not_in_it", problem)
    if chosen.rows == 0:
        raise UsageError("not_in_it", f"--split {split}: this corpus has no {split} rows")
    if not 0 <= number < chosen.rows:
        raise UsageError("not_in_it", f"--row {number}: {split} has {chosen.rows:,} rows, 0 to {chosen.rows - 1:,}")
    at = number
    for place, shard in enumerate(chosen.shards):
        if at < shard.rows:
            return place, shard, at
        at -= shard.rows
    raise DataError("wrong_count", f"the shards of {split} hold fewer rows than the manifest records ({chosen.rows:,})")


def row_number(manifest: Manifest, place: Place) -> int | None:
    """Return the number of a place's row in its split, or None if it was dropped."""
    if place["row"] is None:
        return None
    before = manifest.splits[place["split"]].shards[: place["shard"]]
    return sum(shard.rows for shard in before) + int(place["row"])


def pieces_in_row(manifest: Manifest, folder: Path, split: str, shard: int, row: int) -> list[Place]:
    """Return the places of the pieces of a row, in their order in the row."""
    found = _search(manifest, folder, {"shard": shard, "row": row})
    return sorted((place for place in found if place["split"] == split), key=lambda place: place["start"])


def pieces_of_record(manifest: Manifest, folder: Path, source: int, record: int) -> list[Place]:
    """Return all places of a record in the index.

    There is one place for each of its pieces, each copy of a piece, and each epoch. A dropped record has one place
    without a row. `source` is an index into the manifest's sources. Raises UsageError if the index lacks the record.
    """
    found = _search(manifest, folder, {"source": source, "record": record})
    if found:
        return found
    facts = manifest.sources[source]
    where = f"{facts.path}:{record}"
    for reject in read_rejects(manifest, folder):
        if reject.get("source") == facts.path and reject.get("line", reject.get("record")) == record:
            raise UsageError("not_in_it", f"{where}: was rejected with {reject['code']}: {reject['message']}")
    # The source is shorter, or the line is blank.
    unit = "lines with a conversation" if container_named(facts.container).numbered_by == "line" else "records"
    had = f"the source had {facts.conversations:,} {unit}, and the first has number 1"
    raise UsageError("not_in_it", f"{where}: is not in this corpus; {had}")


def read_rejects(manifest: Manifest, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of rejects.jsonl. Raises DataError or InputMissing."""
    yield from _read_list(manifest, folder, "rejects.jsonl")


def _read_list(manifest: Manifest, folder: Path, name: str) -> Iterator[dict[str, Any]]:
    facts = listed_file(manifest, folder, name)
    check_unchanged(folder, facts)
    where = folder / facts.path
    with where.open("rb") as lines:
        for line in lines:
            with reading(where, folder):
                record = orjson.loads(line)
            yield record


def pieces_of_number(manifest: Manifest, folder: Path, number: int) -> list[Place]:
    """Return all places of the conversation with a number in the index."""
    seen = 0
    with open_index(manifest, folder) as reader:
        for batch in reader:
            if 0 <= number - seen < batch.num_rows:
                [place] = to_dicts(batch.slice(number - seen, 1))
                return pieces_of_record(manifest, folder, place["source"], place["record"])
            seen += batch.num_rows
    has = f"the index of this corpus has the numbers 0 to {seen - 1:,}"
    raise UsageError("not_in_it", f"--conversation {number}: {has}")


def kept_in_place_of(manifest: Manifest, folder: Path, duplicate: Place) -> Place | None:
    """Return the conversation kept instead of a duplicate; None if it was rejected."""
    places = _search(manifest, folder, {"digest": duplicate["digest"]})
    return next((place for place in places if place["dropped"] != "duplicate"), None)


def listed_drop(manifest: Manifest, folder: Path, place: Place) -> dict[str, Any]:
    """Return the record of dropped.jsonl about a conversation. Raises DataError."""
    source = manifest.sources[place["source"]].path
    for drop in _read_list(manifest, folder, "dropped.jsonl"):
        if drop["source"] == source and drop.get("line", drop.get("record")) == place["record"]:
            return drop
    raise DataError("bad_index", f"{folder / 'dropped.jsonl'}: {source}:{place['record']} is missing")


def sources_taken_whole(manifest: Manifest, folder: Path) -> list[str]:
    """Return the paths of the `sources` entries that the mixture took completely."""
    left_out: set[int] = set()
    with open_index(manifest, folder) as reader:
        for batch in reader:
            by_weight = pc.equal(batch.column("dropped").cast(pa.string()), "weight")
            left_out.update(pc.unique(batch.column("source").filter(by_weight)).to_pylist())
    less = {manifest.sources[source].entry for source in left_out}
    return [m.path for entry, m in enumerate(manifest.mixture) if entry not in less and m.conversations]


def places_at(manifest: Manifest, folder: Path, text: str) -> list[Place]:
    """Return all places of the conversation or sample that `text` names.

    `text` is FILE:LINE for a conversation, ID or FILE:ID for the `id` of its record, or #N for its number in the index.
    " turn N" after it is for one of its samples. Raises UsageError if the corpus has no such conversation or sample.
    """
    place, between, turn = text.rpartition(" turn ")
    turn = digits_of(turn)
    if not between or not turn.isdecimal():
        return _places_of(manifest, folder, text)
    found = _places_of(manifest, folder, place)
    chosen = [piece for piece in found if str(piece.get("turn")) == turn]
    if not chosen:
        turns = ", ".join(str(number) for number in sorted({piece.get("turn", -1) for piece in found} - {-1}))
        has = f"has samples of the turns {turns}" if turns else "is one sample; omit the turn"
        raise UsageError("not_in_it", f"--at {text}: this conversation {has}")
    return chosen


def _places_of(manifest: Manifest, folder: Path, text: str) -> list[Place]:
    """Return all places of the conversation that `text` names without a turn."""
    number = digits_of(text)
    if text.startswith("#") and number.isdecimal():
        return pieces_of_number(manifest, folder, int(number))
    name, _, line = text.rpartition(":")
    if not name or not digits_of(line).isdecimal():
        return _places_of_id(manifest, folder, text, is_required=True)
    # An id may contain a colon and end with a number.
    places: list[Place] = []
    if not _sources_named(manifest, name):
        with suppress(DataError, InputMissing):
            places = _places_of_id(manifest, folder, text)
    return places or pieces_of_record(manifest, folder, *parse_place(manifest, text))


def _places_of_id(manifest: Manifest, folder: Path, text: str, is_required: bool = False) -> list[Place]:
    """Return the places of the record whose own `id` is ID, for ID or FILE:ID.

    The sources are read, because the index has no ids. Raises UsageError if several records have this id.
    """
    from packcorpus.tasks.inspection.sources import records_with_id

    name, _, own_id = text.partition(":")
    chosen = _sources_named(manifest, name) if own_id else []
    found = list(islice(records_with_id(manifest, folder, own_id if chosen else text, chosen), MOST_WITH_ID + 1))
    if not found and is_required:
        looked = f"no record of {' or '.join(manifest.sources[n].path for n in chosen) or 'its sources'} has this id"
        raise UsageError("not_in_it", f"--at {text}: {looked}; expected FILE:LINE, such as chats.jsonl:12, or an id")
    if len(found) > 1:
        places = [f"{printable(manifest.sources[source].path)}:{record}" for source, record in found[:MOST_WITH_ID]]
        more = ", …" * (len(found) > MOST_WITH_ID)
        raise UsageError(
            "not_in_it", f"--at {text}: several records have this id: {', '.join(places)}{more}; name one of them"
        )
    return pieces_of_record(manifest, folder, *found[0]) if found else []


def _sources_named(manifest: Manifest, name: str) -> list[int]:
    """Return the indices of the sources with a path, or with these last components.

    The path may be relative to another folder than the config, so it is compared without what leads out of a folder.
    """
    paths = [source.path for source in manifest.sources]
    wanted = tuple(part for part in PurePosixPath(name).parts if part != "..")
    found = [n for n, path in enumerate(paths) if path == name]
    return found or [
        n for n, path in enumerate(paths) if wanted and PurePosixPath(path).parts[-len(wanted) :] == wanted
    ]


def parse_place(manifest: Manifest, text: str) -> tuple[int, int]:
    """Parse FILE:LINE into an index into the manifest's sources and a record number.

    FILE may be the last components of a path. Raises UsageError if FILE matches no source or several sources.
    """
    name, _, line = text.rpartition(":")
    line = digits_of(line)
    if not name or not line.isdecimal():
        raise UsageError("bad_command_line", f"--at {text}: expected FILE:LINE, such as chats.jsonl:12")
    paths, found = [source.path for source in manifest.sources], _sources_named(manifest, name)
    if len(found) == 1:
        return found[0], int(line) if len(line) < 19 else MOST_RECORDS
    if found:
        raise UsageError("not_in_it", f"--at {text}: matches {len(found)} sources; use a longer path")
    known = [*paths, *(PurePosixPath(path).name for path in paths)]
    hint = suggest(name, known) or f"; its sources: {', '.join(paths[:5])}{' …' * (len(paths) > 5)}"
    raise UsageError("not_in_it", f"--at {text}: is not a source of this corpus{hint}")


def origin(manifest: Manifest, place: Place | None) -> str:
    """Return FILE:LINE of a place, or a note if the index lacks it."""
    if place is None or not 0 <= place["source"] < len(manifest.sources):
        return "not in index.arrow (run packcorpus verify)"
    return f"{printable(manifest.sources[place['source']].path)}:{place['record']}"


def turn_of(place: Place) -> str:
    """Return " turn N", the index of its message, for a sample of one turn, or ""."""
    return f" turn {place['turn']:,}" if place.get("turn", -1) >= 0 else ""


def _search(manifest: Manifest, folder: Path, wanted: dict[str, int]) -> list[Place]:
    """Return all entries of the index with the given values."""
    found: list[Place] = []
    seen = 0
    with open_index(manifest, folder) as reader:
        for batch in reader:
            here = batch.column(0).is_valid()
            for name, value in wanted.items():
                column = batch.column(name)
                here = pc.and_(here, pc.equal(column, pa.scalar(value, column.type)))
            if here.true_count:
                numbers = pc.indices_nonzero(here).to_pylist()
                for number, place in zip(numbers, to_dicts(batch.filter(here)), strict=True):
                    _check(manifest, place)
                    found.append(place | {"number": seen + number})
            seen += batch.num_rows
    if manifest.ledger.samples:
        found.sort(key=lambda place: place["turn"])
    if manifest.ledger.conversations.split:
        with open_index(manifest, folder) as reader:
            _number_pieces(reader, found)
    return found


def _check(manifest: Manifest, place: Place) -> None:
    """Raise ValueError if a place contradicts the manifest: the index is damaged."""
    if not 0 <= place["source"] < len(manifest.sources):
        raise ValueError(f"it refers to source {place['source']}")
    if place.get("turn", -1) is None:
        raise ValueError("a place lacks its turn")
    if place["row"] is not None:
        if None in (place[name] for name in ("shard", "start", "length", "first", "trained")):
            raise ValueError("a place lacks a number")
        split = manifest.splits.get(place["split"])
        shards = split.shards if split else []
        if not 0 <= place["shard"] < len(shards) or not 0 <= place["row"] < shards[place["shard"]].rows:
            raise ValueError("it refers to rows that the manifest does not have")


def _number_pieces(reader: pa.RecordBatchReader, found: list[Place]) -> None:
    """Add `pieces`, their number in the sample, and `piece`, the number among them."""
    keys = [name for name in ("source", "record", "turn") if name in reader.schema.names]
    firsts: dict[tuple[int, ...], list[int]] = {tuple(place[key] for key in keys): [] for place in found}
    records = pa.array({record for _, record, *_ in firsts}, pa.int64())
    for batch in reader:
        near = batch.filter(pc.is_in(batch.column("record"), records))
        for *key, first in zip(*(near.column(name).to_pylist() for name in (*keys, "first")), strict=True):
            if tuple(key) in firsts:
                firsts[tuple(key)].append(first)
    for place in found:
        pieces = sorted({*firsts[tuple(place[key] for key in keys)]})
        place["pieces"] = len(pieces)
        place["piece"] = pieces.index(place["first"]) + 1
